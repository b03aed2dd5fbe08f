"""Faults that an attack on the running code found, each by the guarantee that it broke."""

from __future__ import annotations

import os
import shutil
import signal
import threading
import time
from concurrent.futures import wait
from pathlib import Path

import pytest
import torch
from test_uploader import Trainer, committed, start

import objckpt
from objckpt import agreement, errors, saves
from objckpt.commit import Run
from objckpt.manifest import Rank, Save, Step
from objckpt.preemption import Notices
from objckpt.retention import retain
from objckpt.spool import Spool, clear_earlier_boots, root
from objckpt.store import open_store
from objckpt.uploader import loop
from objckpt.world import Alone


@pytest.fixture
def opened(tmp_path):
    made = []

    def make(**keywords):
        made.append(objckpt.Checkpointer(f"file://{tmp_path}/run", cache=tmp_path / "cache", **keywords))
        return made[-1]

    yield make
    for checkpointer in made:
        checkpointer.close()


@pytest.fixture
def store(tmp_path):
    return open_store(f"memory://{tmp_path.name}")


@pytest.fixture
def run(store):
    return Run(store, retain=retain)


STATE = {"x": torch.arange(1000.0)}


# ------------------------------------------------------------------ nothing corrupt is committed


def test_a_slot_given_away_while_it_is_hashed_is_never_taken_for_its_old_save(
    store, run, tmp_path, monkeypatch
):
    """The trainer gives a save up (a peer failed, a deadline) while its own uploader is stopped before the first pass."""
    version = start(run)
    trainer = Trainer(store, root(tmp_path, version.run), version).begin()
    real = loop.block_checksums

    def late(data, size):
        monkeypatch.setattr(loop, "block_checksums", real)
        trainer.spool.forget(Save(version.attempt, Step(10)))
        trainer.slots[0].view[:3000] = b"n" * 3000
        return real(data, size)

    monkeypatch.setattr(loop, "block_checksums", late)
    trainer.save(10)
    assert trainer.event("failed", "durable", "committed")["op"] == "failed"
    trainer.die()
    assert committed(run) == []
    assert list(store.list("data/")) == []


def test_a_journal_with_a_flipped_digit_is_not_taken_for_a_save(store, run, tmp_path):
    version = start(run)
    trainer = Trainer(store, root(tmp_path, version.run), version)
    save = trainer.fill(10, bytes(3000))
    path = trainer.spool.path / f"save-{save}.json"
    path.write_bytes(path.read_bytes().replace(b'"created_at":1.5', b'"created_at":1.4'))
    trainer.begin()
    trainer.die()
    assert committed(run) == []


# ------------------------------------------------------------------ nothing is lost


def test_what_was_journalled_is_committed_though_the_trainer_died_before_it_could_tell(store, run, tmp_path):
    version = start(run)
    trainer = Trainer(store, root(tmp_path, version.run), version).begin()
    save = trainer.fill(10, os.urandom(3000))
    trainer.die()
    assert committed(run) == [save]


def test_in_a_hurry_a_new_save_goes_before_the_older_ones(store, run, tmp_path, monkeypatch):
    version = start(run)
    begun, gate = threading.Event(), threading.Event()
    real = loop.block_checksums

    def slowly(*a):
        begun.set()
        gate.wait(20)
        return real(*a)

    monkeypatch.setattr(loop, "block_checksums", slowly)
    trainer = Trainer(store, root(tmp_path, version.run), version).begin()
    trainer.slots = trainer.spool.make_slots(3, 1 << 16)
    trainer.save(10, slot=0)
    assert begun.wait(20)
    trainer.save(20, slot=1)
    trainer.channel.send({"op": "hurry"})
    trainer.save(30, slot=2)
    gate.set()
    assert [trainer.event("durable")["save"][1] for _ in range(3)] == [10, 30, 20]
    trainer.die()


def test_an_adoption_is_repeated_when_its_uploader_dies(opened, tmp_path, monkeypatch):
    sent = []
    real = saves.UploaderProcess.send

    def send(self, message, descriptors=()):
        sent.append(message["op"])
        if sent == ["open", "adopt"]:
            os.kill(self.pid, signal.SIGKILL)
        return real(self, message, descriptors)

    checkpointer = opened()
    checkpointer.restore(dict(STATE))
    checkpointer.save(1, STATE)
    checkpointer.close()
    monkeypatch.setattr(saves.UploaderProcess, "send", send)
    began = time.monotonic()
    assert opened().restore(dict(STATE)).step == 1
    assert time.monotonic() - began < 30
    assert sent.count("adopt") == 2


def test_an_uploader_that_dies_between_publishing_and_saying_so_is_started_again(opened, monkeypatch):
    checkpointer = opened()
    checkpointer.restore(dict(STATE))
    spool = checkpointer._saves._spool
    spool.path = spool.path.with_name(f".new-{spool.path.name.rpartition('-')[2]}")
    os.kill(checkpointer._saves._uploader.pid, signal.SIGKILL)
    deadline = time.monotonic() + 20
    while spool.path.name.startswith(".") and time.monotonic() < deadline:
        time.sleep(0.01)
    assert checkpointer.save(1, STATE).result(timeout=30).step == 1


# ------------------------------------------------------------------ no hang


def test_a_future_does_not_run_its_callbacks_under_the_lock_of_save(opened):
    checkpointer = opened()
    checkpointer.restore(dict(STATE))
    mine, called = threading.Lock(), threading.Event()

    def callback(_):
        called.set()
        with mine:
            pass

    with mine:
        checkpointer.save(1, STATE).add_done_callback(callback)
        assert called.wait(20)
        thread = threading.Thread(target=checkpointer._saves.open, daemon=True)
        thread.start()
        thread.join(5)
        assert not thread.is_alive(), "the training loop would wait for a callback that waits for it"


def test_a_save_cannot_be_cancelled_while_its_slot_is_read(opened):
    checkpointer = opened()
    checkpointer.restore(dict(STATE))
    future = checkpointer.save(1, STATE)
    assert not future.cancel()
    assert future.result(timeout=30).step == 1


def test_an_uploader_that_cannot_be_started_again_fails_saves_and_does_not_hang(opened, monkeypatch):
    checkpointer = opened()
    checkpointer.restore(dict(STATE))
    checkpointer.save(1, STATE).result(timeout=30)
    pid = checkpointer._saves._uploader.pid
    os.kill(pid, signal.SIGSTOP)
    future = checkpointer.save(2, STATE)
    shutil.rmtree(checkpointer._saves._spool.path)
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(errors.SaveFailedError, match="cannot be started again"):
        future.result(timeout=30)


def test_a_save_whose_slot_was_given_away_is_still_followed_after_its_uploader_died(opened):
    """Durable, but a peer's record is missing: no journal is left to tell a new uploader of it."""
    checkpointer = opened()
    checkpointer.restore(dict(STATE))
    future = checkpointer.save(1, STATE)
    future.result(timeout=30)
    own = checkpointer._saves
    (tracked,) = own._tracked.values()
    tracked.future, tracked.answered = type(future)(), False
    tracked.future.set_running_or_notify_cancel()
    own._spool.forget(tracked.save)
    os.kill(own._uploader.pid, signal.SIGKILL)
    assert tracked.future.result(timeout=30).step == 1


def test_whoever_waits_for_a_future_on_another_rank_than_0_looks_what_became_of_it():
    looks = []

    def look():
        looks.append(1)
        if len(looks) == 3:
            future.set_result("committed")

    future = saves._Followed(look)
    with pytest.raises(TimeoutError):
        future.result(timeout=0)
    assert future.result() == "committed"
    assert future.exception() is None
    assert wait([future], timeout=0).done


def test_a_rank_whose_part_is_durable_leaves_the_outcome_to_rank_0(opened):
    """Its uploader could not commit; but whoever finds all records does, and rank 0 looks."""
    checkpointer = opened()
    checkpointer.restore(dict(STATE))
    own = checkpointer._saves
    told, own._peek, own._rank = [None], lambda _: told[0], 1
    os.kill(own._uploader.pid, signal.SIGSTOP)
    future = checkpointer.save(1, STATE)
    event = {"save": [1, 1], "seconds": 1.0, "error": "no permission"}
    own._event({"op": "durable", **event})
    own._event({"op": "failed", **event})
    assert not future.done()
    told[0] = {}
    assert future.result(timeout=10).step == 1
    own._rank = 0
    os.kill(own._uploader.pid, signal.SIGCONT)


def test_a_checkpointer_can_be_closed_in_another_thread(opened):
    checkpointer = opened()
    checkpointer.restore(dict(STATE))
    checkpointer.save(1, STATE)
    thread = threading.Thread(target=checkpointer.close)
    thread.start()
    thread.join(30)
    assert checkpointer._saves is None
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGUSR1, signal.SIG_DFL)


def test_notices_close_though_the_other_ranks_are_gone(caplog):
    class Lost(Alone):
        size = 2

        def maximum(self, *_):
            return self

        def result(self):
            raise errors.WorldError("a rank is gone")

    notices = Notices(Lost(), 1)
    notices.exchange(fenced=False, final=False)
    notices.close(settle=True)
    assert "a rank is gone" in caplog.text


def test_adoption_answers_though_the_directory_is_gone(store, run, tmp_path):
    version = start(run)
    trainer = Trainer(store, root(tmp_path, version.run), version)
    trainer.channel.send({"op": "adopt", "roots": [str(tmp_path / "gone")], "timeout": 60})
    assert "gone" in trainer.event("adopted")["failed"][0]
    trainer.die()


def test_a_long_adoption_is_no_silence_to_the_other_ranks(opened, monkeypatch):
    """Each slice of it ends in an agreement, whose time-out is for a rank that does not come."""
    checkpointer = opened()
    checkpointer.restore(dict(STATE))
    checkpointer.save(1, STATE)
    checkpointer.close()
    answers, agreements = [None, None, None, []], []
    monkeypatch.setattr(saves.Saves, "adopted", lambda *_: answers.pop(0))
    real = Alone.decide

    def decide(self, value, rule, timeout):
        if rule is agreement.all_done:
            agreements.append(value["done"])
        return real(self, value, rule, timeout)

    monkeypatch.setattr(Alone, "decide", decide)
    assert opened().restore(dict(STATE)).step == 1
    assert agreements[:4] == [False, False, False, True]


# ------------------------------------------------------------------ nothing leaks


def test_slots_that_grow_leave_no_descriptors_but_those_of_their_mappings(opened):
    checkpointer = opened()
    checkpointer.restore({})
    before = _descriptors() - _mappings()
    for step in range(1, 9):
        checkpointer.save(step, {"x": torch.full((step << 19,), float(step))}).result(timeout=30)
    assert _descriptors() - _mappings() == before
    x = objckpt.open(checkpointer._config.uri).load(8)["x"]
    assert torch.equal(x, torch.full((8 << 19,), 8.0))


def _descriptors():
    return sum("/slot-" in str(path.readlink()) for path in Path("/proc/self/fd").iterdir() if path.exists())


def _mappings():
    return sum("/slot-" in line for line in Path("/proc/self/maps").read_text().splitlines())


def test_the_pages_of_a_finished_job_are_given_back(tmp_path):
    spool = Spool.create(root(tmp_path, "r"))
    (slot,) = spool.make_slots(1, 1 << 20)
    slot.view[:] = b"x" * (1 << 20)
    assert os.fstat(slot.descriptor).st_blocks > 0
    slot.discard()
    assert os.fstat(slot.descriptor).st_blocks == 0
    assert slot.view[5] == 0, "the mapping stays valid"
    slot.close()
    spool.remove()


def test_spools_of_earlier_boots_are_removed_unless_somebody_holds_them(tmp_path):
    now = root(tmp_path, "r")
    before = now.with_name(now.name.rpartition("-")[0] + "-01234567")
    other = now.with_name("another-host-01234567")
    spools = []
    for where in (before, before, other, now):
        where.mkdir(exist_ok=True)
        spool = Spool.create(where)
        spool.lock()
        spool.publish(1, Rank(0))
        spools.append(spool)
    dead, held, elsewhere, ours = spools
    for spool in (dead, elsewhere, ours):
        spool.close()
    clear_earlier_boots(now)
    assert [s.path.exists() for s in spools] == [False, True, True, True]
    held.close()


# ------------------------------------------------------------------ one rank's trouble is no other rank's hang


def test_a_save_within_a_save_is_refused_and_harms_neither(opened):
    """From a second thread or a signal handler it would take the slot that the first one is about to fill."""
    checkpointer = opened()
    checkpointer.restore(dict(STATE))
    heard = []

    class Nosy:
        def state_dict(self):
            try:
                checkpointer.save(2, STATE)
            except errors.ConfigError as error:
                heard.append(str(error))
            return {}

        def load_state_dict(self, state):
            pass

    assert checkpointer.save(1, {**STATE, "nosy": Nosy()}).result(timeout=30).step == 1
    assert "one at a time" in heard[0]
    assert checkpointer.save(2, STATE).result(timeout=30).step == 2


@pytest.mark.parametrize("metadata", [{"loss": float("nan")}, {"loss": torch.tensor(1.0)}])
def test_metadata_that_is_not_json_is_refused_before_anything_is_agreed(opened, metadata):
    checkpointer = opened()
    checkpointer.restore(dict(STATE))
    with pytest.raises(errors.ConfigError, match="must be JSON"):
        checkpointer.save(1, STATE, metadata=metadata)
    assert checkpointer.save(1, STATE, metadata={"loss": 1.0}).result(timeout=30).metadata == {"loss": 1.0}


def test_any_error_of_a_state_dict_rises_and_the_same_step_can_be_saved_again(opened):
    checkpointer = opened()
    checkpointer.restore(dict(STATE))

    class Broken:
        def state_dict(self):
            raise ZeroDivisionError

        def load_state_dict(self, state):
            pass

    with pytest.raises(ZeroDivisionError) as raised:
        checkpointer.save(1, {**STATE, "broken": Broken()})
    assert raised.traceback[-1].name == "state_dict", "where the user's code failed is told"
    assert checkpointer.save(1, STATE).result(timeout=30).step == 1


def test_a_disk_that_fills_while_a_save_is_staged_fails_that_save_alone(opened, monkeypatch):
    checkpointer = opened()
    checkpointer.restore(dict(STATE))
    real = Spool.write_journal

    def full(*_):
        raise errors.SpoolError("cannot write: No space left on device")

    monkeypatch.setattr(Spool, "write_journal", full)
    future = checkpointer.save(1, STATE)
    with pytest.raises(errors.SaveFailedError, match="could not be staged on rank 0"):
        future.result(timeout=0)
    assert checkpointer.save(1, STATE) is future
    monkeypatch.setattr(Spool, "write_journal", real)
    assert checkpointer.save(2, STATE).result(timeout=30).step == 2
    assert [c.step for c in checkpointer.checkpoints()] == [2]


def test_a_second_interrupt_skips_the_wait_and_hides_nothing(opened, monkeypatch, caplog):
    def interrupted(*_):
        raise KeyboardInterrupt

    with pytest.raises(ZeroDivisionError), opened() as checkpointer:
        checkpointer.restore(dict(STATE))
        uploader = checkpointer._saves._uploader
        checkpointer.save(1, STATE)
        monkeypatch.setattr(objckpt.Checkpointer, "_settle", interrupted)
        raise ZeroDivisionError
    assert "interrupted again" in caplog.text
    assert "Traceback" not in caplog.text
    deadline = time.monotonic() + 20
    while Path(f"/proc/{uploader.pid}/stat").exists() and time.monotonic() < deadline:
        if Path(f"/proc/{uploader.pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z":
            break
        time.sleep(0.02)
    assert objckpt.open(checkpointer._store.uri).latest().step == 1, "its uploader went on, and ended"
