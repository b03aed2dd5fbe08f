"""The local tier: a journal exists only while its slot holds the image; what is not fit for slots is refused."""

from __future__ import annotations

import multiprocessing
import os

import pytest

from objckpt import spool as spools
from objckpt.errors import CorruptCheckpointError, SpoolError
from objckpt.manifest import Attempt, Rank, RankRecord, Save, Step, data_key
from objckpt.spool import Spool, clear_unused, hashed, places, root, scan, slot_name, unhashed
from objckpt.transfer import block_checksums

RUN = "0123456789abcdef"
BLOCK = 1024


def record(step: int, image: bytes, *, attempt: int = 1, rank: int = 0) -> RankRecord:
    save = Save(Attempt(attempt), Step(step))
    obj = unhashed(data_key(save, Rank(rank)), len(image), BLOCK)
    return RankRecord(RUN, save, Rank(rank), 1, 1.5, {"note": "é"}, (), (obj,), (), {"a": 1}, None)


@pytest.fixture
def where(tmp_path):
    return root(tmp_path, RUN)


def test_a_journal_is_read_back_as_it_was_written(where):
    spool = Spool.create(where)
    image = os.urandom(3 * BLOCK + 7)
    slot = spool.make_slots(2, 1 << 16)[1]
    slot.view[: len(image)] = image
    spool.write_journal(1, record(10, image))
    (journal,) = spool.journals()
    assert (journal.slot, journal.record) == (1, record(10, image))
    with spool.image(journal) as mapped:
        assert bytes(mapped) == image
    crcs = block_checksums(memoryview(image), BLOCK)
    assert spool.checksums(journal.save) is None
    spool.write_checksums(journal.save, crcs)
    assert hashed(journal, spool.checksums(journal.save)).objects[0].crc64 == crcs


def test_forgetting_removes_all_that_names_the_save_and_nothing_else(where):
    spool = Spool.create(where)
    for step in (10, 20):
        spool.write_journal(0, record(step, b"x"))
        spool.write_checksums(record(step, b"x").save, (1,))
        spool.mark_durable(record(step, b"x").save)
    spool.forget(record(10, b"x").save)
    assert [j.save.step for j in spool.journals()] == [20]
    assert not any("000000000010" in name for name in os.listdir(spool.path))
    assert spool.durable(record(20, b"x").save)


def test_pending_means_bytes_left_to_send(where):
    spool = Spool.create(where)
    assert not spool.pending()
    spool.write_journal(0, record(10, b"x"))
    assert spool.pending()
    spool.mark_durable(record(10, b"x").save)
    assert not spool.pending()


def test_a_scan_finds_published_spools_only_whatever_rank_made_them(where):
    hidden = Spool.create(where)
    published = Spool.create(where)
    assert published.lock()
    published.publish(Attempt(3), Rank(5))
    assert [s.path for s in scan(where)] == [published.path]
    assert published.path.name.startswith("a000003-r00005-")
    published.write_journal(0, record(1, b"x"))  # the descriptor survives the rename
    assert (published.path / f"save-{record(1, b'x').save}.json").exists()
    assert hidden.path.exists()


def _hold(path, locked, release):
    spool = Spool(path)
    assert spool.lock()
    locked.set()
    release.wait()


def test_one_process_holds_a_spool_and_its_death_frees_it(where):
    spool = Spool.create(where)
    context = multiprocessing.get_context("spawn")
    locked, release = context.Event(), context.Event()
    holder = context.Process(target=_hold, args=(spool.path, locked, release), daemon=True)
    holder.start()
    assert locked.wait(60)
    assert not spool.lock()
    holder.kill()
    holder.join()
    assert spool.lock()


def test_a_damaged_journal_is_passed_over_loudly(where, caplog):
    spool = Spool.create(where)
    spool.write_journal(0, record(10, b"x"))
    spool.write_journal(1, record(20, b"x"))
    path = spool.path / f"save-{record(10, b'x').save}.json"
    path.write_bytes(path.read_bytes()[:-20])
    assert [j.save.step for j in spool.journals()] == [20]
    assert "passed over" in caplog.text


def test_a_journal_with_any_bit_flipped_cut_anywhere_or_of_another_save_is_refused(where):
    spool = Spool.create(where)
    save = record(10, b"x").save
    spool.write_journal(1, record(10, b"x"))
    path = spool.path / f"save-{save}.json"
    honest = path.read_bytes()
    damaged = [honest[:size] for size in range(len(honest))]
    for bit in range(8 * len(honest)):
        flipped = bytearray(honest)
        flipped[bit // 8] ^= 1 << bit % 8
        damaged.append(bytes(flipped))
    for data in damaged:
        path.write_bytes(data)
        with pytest.raises(CorruptCheckpointError):
            spool.journal(save)
    path.write_bytes(honest)
    assert spool.journal(save).slot == 1
    other = record(20, b"x").save
    path.rename(spool.path / f"save-{other}.json")
    with pytest.raises(CorruptCheckpointError, match=f"is the journal of save {save}"):
        spool.journal(other)


def test_a_slot_cut_short_is_refused_before_it_is_touched(where):
    spool = Spool.create(where)
    (slot,) = spool.make_slots(1, 1 << 16)
    slot.check()
    os.truncate(spool.path / slot_name(0), 100)
    with pytest.raises(SpoolError, match="cut from 65536 to 100"):
        slot.check()
    spool.write_journal(0, record(10, b"y" * 5000))
    with pytest.raises(CorruptCheckpointError, match="cut short"):
        spool.image(spool.journals()[0])


def test_slots_are_allocated_when_they_are_made(where):
    spool = Spool.create(where)
    spool.make_slots(1, 1 << 20)
    info = (spool.path / slot_name(0)).stat()
    assert info.st_blocks * 512 >= 1 << 20, "a sparse file would end in SIGBUS on a full disk"


def test_a_place_without_room_is_refused_with_figures(where, monkeypatch):
    spool = Spool.create(where)
    real = os.statvfs(where)

    class Small:
        f_bavail, f_frsize = 1000, 1000

    assert real.f_bavail
    monkeypatch.setattr(places.os, "statvfs", lambda _: Small)
    with pytest.raises(SpoolError, match=r"need 0\.00 GB.*free space is 0\.00 GB"):
        spool.make_slots(1, 960_000)
    spool.make_slots(1, 950_000)


def test_memory_file_systems_give_a_quarter_of_what_is_left(where, monkeypatch):
    spool = Spool.create(where)
    monkeypatch.setattr(places, "file_system", lambda _: "tmpfs")
    monkeypatch.setattr(places, "_memory_left", lambda: 4_000_000)
    with pytest.raises(SpoolError, match="a quarter of the memory"):
        spool.make_slots(1, 1_000_000)
    spool.make_slots(1, 900_000)


@pytest.mark.parametrize("kind", ["nfs4", "fuse.gcsfuse", "fuse.sshfs", "cifs", "lustre", "9p"])
def test_network_file_systems_are_refused_with_the_reason(tmp_path, monkeypatch, kind):
    monkeypatch.setattr(places, "file_system", lambda _: kind)
    with pytest.raises(SpoolError, match=f"{kind} file system"):
        root(tmp_path, RUN)


def test_the_file_system_of_a_path_is_told(tmp_path):
    assert places.file_system(tmp_path) not in ("", "proc")
    assert places.file_system(places.Path("/proc")) == "proc"


def test_a_directory_that_others_may_enter_is_refused(tmp_path):
    path = tmp_path / f"objckpt-{os.getuid()}"
    path.mkdir()
    path.chmod(0o755)
    with pytest.raises(SpoolError, match="0700"):
        root(tmp_path, RUN)


def test_a_symbolic_link_in_the_path_is_refused(tmp_path):
    target = tmp_path / "elsewhere"
    target.mkdir(mode=0o700)
    (tmp_path / f"objckpt-{os.getuid()}").symlink_to(target)
    with pytest.raises(SpoolError, match="symbolic link"):
        root(tmp_path, RUN)
    assert not list(target.iterdir())


def test_a_journal_behind_a_symbolic_link_is_not_followed(where, tmp_path):
    spool = Spool.create(where)
    spool.write_journal(0, record(10, b"x"))
    name = f"save-{record(10, b'x').save}.json"
    (spool.path / name).rename(tmp_path / "moved")
    (spool.path / name).symlink_to(tmp_path / "moved")
    with pytest.raises(OSError, match="symbolic links"):
        spool.journals()


def test_a_spool_of_another_boot_is_not_looked_at(tmp_path, monkeypatch):
    before = root(tmp_path, RUN)
    monkeypatch.setattr(places, "_boot_id", lambda: "feedbeef")
    assert root(tmp_path, RUN) != before


def test_everything_is_private(where):
    spool = Spool.create(where)
    spool.make_slots(1, 1 << 16)
    spool.write_journal(0, record(10, b"x"))
    assert spool.lock()
    for path in (where, where.parent, where.parent.parent, spool.path):
        assert path.stat().st_mode & 0o777 == 0o700
    for path in spool.path.iterdir():
        assert path.stat().st_mode & 0o777 == 0o600


def test_removal_takes_the_empty_directories_along(where, tmp_path):
    first, second = Spool.create(where), Spool.create(where)
    first.remove()
    assert where.exists()
    second.remove()
    assert not where.parent.exists()
    assert tmp_path.exists()


def test_what_a_process_left_that_died_before_its_uploader_took_it_is_cleared_and_a_living_one_s_is_not(
    where,
):
    alive, dead = Spool.create(where), Spool.create(where)
    dead.close()
    clear_unused(where)
    assert list(where.iterdir()) == [alive.path]
    assert alive.lock()
    alive.publish(Attempt(1), Rank(0))
    alive.close()
    clear_unused(where)
    assert [spool.path for spool in scan(where)] == [alive.path], "a published one is adopted"


def test_a_new_spool_that_was_cleared_before_its_maker_held_it_is_made_again(where, monkeypatch):
    flock, cleared = spools.fcntl.flock, []

    def late(fd, how):
        if how == spools.fcntl.LOCK_SH and not cleared:
            cleared.append(next(iter(where.iterdir())))
            clear_unused(where)
        flock(fd, how)

    monkeypatch.setattr(spools.fcntl, "flock", late)
    spool = Spool.create(where)
    assert spool.path.exists()
    assert not cleared[0].exists()
