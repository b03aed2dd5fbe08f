"""Slots are there, and warm, before the first save; where no file fits they are memory; a place without room is told at restore."""

from __future__ import annotations

import logging
import os
import resource
import signal
import socket
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import pytest
import torch

import objckpt
from objckpt import checkpointer as module
from objckpt import spool as spools
from objckpt.errors import SpoolError
from objckpt.spool import Spool, choose, places, root, roots
from objckpt.spool.slot import Slot
from objckpt.uploader import UploaderProcess
from objckpt.uploader.channel import Channel

MIB = 1 << 20


@pytest.fixture
def opened(tmp_path):
    made = []

    def make(**keywords):
        keywords.setdefault("cache", tmp_path / "cache")
        made.append(objckpt.Checkpointer(f"file://{tmp_path}/run", **keywords))
        return made[-1]

    yield make
    for checkpointer in made:
        checkpointer.close()


@pytest.fixture
def without_files(monkeypatch):
    """No directory has room, memory has."""
    real = places.lack_of_room

    def lack(path, nbytes):
        return real(None, nbytes) if path is None else f"{path}: full, for the test's sake"

    monkeypatch.setattr(spools, "lack_of_room", lack)
    monkeypatch.setattr(places, "lack_of_room", lack)


def faults(slot, size):
    source = memoryview(b"x" * size)  # not bytes(size): its pages would come by faults too
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    slot.view[:size] = source
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


def resident(slot):
    """KiB of a slot's mapping that are in memory."""
    lines = iter(Path("/proc/self/smaps").read_text().splitlines())
    assert any(line.startswith(f"{slot._address:x}-") for line in lines)
    return next(int(line.split()[1]) for line in lines if line.startswith("Rss:"))


def state_of(megabytes, optimizer=torch.optim.AdamW):
    model = torch.nn.Linear(256, megabytes << 10, bias=False)
    return {"model": model, "optim": optimizer(model.parameters(), lr=1e-3)}


def kill_before_the_upload(checkpointer, step, state):
    """What is left of a job that is killed, uploader first, right after ``save`` returned."""
    saves = checkpointer._saves
    os.kill(saves._uploader.pid, signal.SIGSTOP)
    checkpointer.save(step, state)
    saves._closed = checkpointer.closed = True
    os.kill(saves._uploader.pid, signal.SIGKILL)
    assert saves._uploader.wait(10)


def step(state):
    state["model"](torch.ones(1, 256)).sum().backward()
    state["optim"].step()


# ------------------------------------------------------------------ warm


def test_a_touched_slot_is_filled_without_page_faults(tmp_path):
    spool = Spool.create(root(tmp_path, "r"))
    cold, warm = spool.make_slots(2, 32 * MIB)
    assert warm.touch(threading.Event())
    assert faults(warm, 32 * MIB) < 32 < faults(cold, 32 * MIB)


def test_touching_changes_no_byte_and_can_be_ended(tmp_path):
    spool = Spool.create(root(tmp_path, "r"))
    (slot,) = spool.make_slots(1, MIB)
    slot.view[:4] = b"kept"
    ended = threading.Event()
    assert slot.touch(ended)
    assert bytes(slot.view[:5]) == b"kept\0"
    ended.set()
    assert not slot.touch(ended)


def test_a_kernel_that_cannot_touch_is_no_error(tmp_path, monkeypatch):
    from objckpt.spool import slot as touching

    monkeypatch.setattr(touching, "_POPULATE_WRITE", 0x7FFF)
    spool = Spool.create(root(tmp_path, "r"))
    (slot,) = spool.make_slots(1, MIB)
    assert not slot.touch(threading.Event())
    slot.view[:4] = b"fill"


@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.Adagrad, torch.optim.RMSprop])
def test_restore_of_a_fresh_run_makes_slots_that_the_first_save_fits(opened, optimizer):
    state = state_of(4, optimizer)
    first = opened()
    assert first.restore(state) is None
    saves = first._saves
    saves._touching.join(30)
    made = list(saves._slots)
    step(state)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    first.save(1, state).result(30)
    assert saves._slots == made, "no slot had to grow"
    assert resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before < 1500, "12 MiB are 3,000 pages"


def test_restore_of_a_checkpoint_makes_slots_of_its_size_whatever_the_state_looks_like_before(opened):
    state = state_of(1) | {"more": [torch.ones(3 * MIB)]}
    first = opened()
    first.restore(state)
    step(state)
    first.save(1, state).result(30)
    second = opened()
    second.restore(state_of(1) | {"more": None})
    made = list(second._saves._slots)
    second.save(2, state).result(30)
    assert second._saves._slots == made


def test_closing_while_pages_are_touched_leaves_nothing_behind(opened, monkeypatch):
    begun, go, alive = threading.Event(), threading.Event(), []
    touch, send = Slot.touch, UploaderProcess.send

    def slow_touch(self, _):
        begun.set()
        go.wait(20)
        return touch(self, threading.Event())  # as a call into the kernel that has begun

    def watched_send(self, message, descriptors=()):
        if message["op"] == "close":
            alive.append(saves._touching.is_alive())
        return send(self, message, descriptors)

    monkeypatch.setattr(Slot, "touch", slow_touch)
    monkeypatch.setattr(UploaderProcess, "send", watched_send)
    job = opened()
    job.restore(state_of(1))
    saves = job._saves
    assert begun.wait(20)
    threading.Timer(0.2, go.set).start()
    job.close()
    assert alive == [False], "or it would take pages again that are given back then"
    assert resident(saves._slots[0]) == 0


# ------------------------------------------------------------------ places


def test_no_room_is_told_at_restore_with_the_figures(opened, monkeypatch):
    monkeypatch.setattr(places, "_memory_left", lambda: MIB)
    real = places.os.statvfs

    def small(path):
        return os.statvfs_result((*real(path)[:4], 10, *real(path)[5:]))

    monkeypatch.setattr(places.os, "statvfs", small)
    state = state_of(4)
    with pytest.raises(
        SpoolError, match=r"the slots need 0\.03 GB, its free space is 0\.00 GB.*larger local disk as cache="
    ):
        opened().restore(state)
    with pytest.raises(
        SpoolError, match=r"memory: the slots need 0\.03 GB, a quarter of the memory that is left is 0\.00 GB"
    ):
        opened(cache=None).restore(state)


def test_without_cache_the_first_place_with_room_is_taken_and_all_are_looked_through(tmp_path, monkeypatch):
    shared = tmp_path / "shm"
    monkeypatch.setattr(places.tempfile, "gettempdir", lambda: str(tmp_path / "tmp"))
    monkeypatch.setattr(places, "_SHARED_MEMORY", shared)
    first, second = roots(None, "r")
    assert first.is_relative_to(tmp_path / "tmp")
    assert second.is_relative_to(shared)
    assert choose([first, second], 1000) == first
    monkeypatch.setattr(places, "lack_of_room", lambda path, _: "full" if path == first else None)
    assert choose([first, second], 1000) == second
    (tmp_path / "tmp" / "x").parent.chmod(0o700)
    assert roots(tmp_path / "own", "r") == [root(tmp_path / "own", "r")], (
        "what was asked for is taken, or refused"
    )


def test_a_save_is_adopted_from_whichever_place_it_lies_in(opened, monkeypatch, tmp_path):
    monkeypatch.setattr(places.tempfile, "gettempdir", lambda: str(tmp_path / "tmp"))
    monkeypatch.setattr(places, "_SHARED_MEMORY", tmp_path / "shm")
    state = {"x": torch.arange(1000.0)}
    with monkeypatch.context() as patch:
        patch.setattr(module, "choose", lambda found, _: found[1])
        first = opened(cache=None)
        first.restore(state)
    assert first._saves._spool.path.is_relative_to(tmp_path / "shm")
    kill_before_the_upload(first, 1, state)
    assert opened(cache=None).restore(state).step == 1


def test_a_place_that_cannot_be_used_gives_way_to_another(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(places.tempfile, "gettempdir", lambda: str(tmp_path / "file" / "tmp"))
    monkeypatch.setattr(places, "_SHARED_MEMORY", tmp_path / "shm")
    (only,) = roots(None, "r")
    assert only.is_relative_to(tmp_path / "shm")
    monkeypatch.setattr(places, "_SHARED_MEMORY", tmp_path / "file" / "shm")
    with pytest.raises(SpoolError, match="cannot make the local tier"):
        roots(None, "r")


@pytest.mark.usefixtures("without_files")
def test_a_cache_that_was_asked_for_is_not_replaced_by_memory(opened):
    with pytest.raises(SpoolError, match="full, for the test's sake"):
        opened().restore(state_of(1))


# ------------------------------------------------------------------ memory


def test_descriptors_come_with_their_message(tmp_path):
    ours, theirs = socket.socketpair()
    sender, receiver = Channel(ours), Channel(theirs)
    receiver.listen()
    files = [os.open(tmp_path / name, os.O_RDWR | os.O_CREAT) for name in "abc"]
    os.write(files[1], b"second")
    sender.send({"op": "before", "text": "x" * 100_000})
    sender.send({"op": "one", "text": "y" * 100_000}, files[:1])
    sender.send({"op": "two"}, files[1:])
    sender.send({"op": "after"})
    for file in files:
        os.close(file)
    assert receiver.receive(10)["op"] == "before"
    assert len(receiver.receive(10)["descriptors"]) == 1
    second, _ = receiver.receive(10)["descriptors"]
    assert os.pread(second, 10, 0) == b"second"
    assert not os.get_inheritable(second)
    assert "descriptors" not in receiver.receive(10)
    sender.close()


@pytest.mark.usefixtures("without_files")
def test_slots_in_memory_are_saved_from_grow_and_survive_their_uploader(opened, caplog, tmp_path):
    state = {"x": torch.arange(1000.0)}
    checkpointer = opened(cache=None)
    checkpointer.restore(state)
    assert "slots lie in memory" in caplog.text
    assert all(slot.in_memory for slot in checkpointer._saves._slots)
    checkpointer.save(1, state).result(30)
    os.kill(checkpointer._saves._uploader.pid, signal.SIGKILL)
    checkpointer.save(2, {"x": state["x"] + 2}).result(30)
    checkpointer.save(3, {"x": torch.ones(2 * MIB)}).result(30)
    reader = objckpt.open(f"file://{tmp_path}/run")
    assert torch.equal(reader.load(1)["x"], state["x"])
    assert torch.equal(reader.load(2)["x"], state["x"] + 2)
    assert torch.equal(reader.load(3)["x"], torch.ones(2 * MIB))


IN_MEMORY = textwrap.dedent(
    """
    import os, signal, sys
    import torch
    import objckpt
    from objckpt import spool
    from objckpt.spool import places
    lack = lambda path, nbytes: "full" if path is not None else None
    spool.lack_of_room = places.lack_of_room = lack
    state = {"x": torch.arange(1000000.0)}
    checkpointer = objckpt.Checkpointer(sys.argv[1])
    checkpointer.restore(state)
    assert checkpointer._saves._slots[0].in_memory
    checkpointer.save(1, state)
    os.kill(os.getpid(), signal.SIGKILL)
    """
)


def test_a_save_in_memory_outlives_its_trainer(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", IN_MEMORY, f"file://{tmp_path}/run"], check=False, timeout=120
    )
    assert done.returncode == -signal.SIGKILL
    reader = objckpt.open(f"file://{tmp_path}/run")
    assert reader.wait_for(1, timeout=60).step == 1
    assert torch.equal(reader.load(1)["x"], torch.arange(1000000.0))


def test_what_lay_in_memory_and_is_gone_is_told_at_adoption_and_stops_nothing(
    opened, caplog, monkeypatch, tmp_path
):
    """The journal of such a save is there; the bytes went with the machine's processes."""
    monkeypatch.setattr(places.tempfile, "gettempdir", lambda: str(tmp_path / "tmp"))
    state = {"x": torch.arange(1000.0)}
    first = opened(cache=None)
    first.restore(state)
    first.save(1, state).result(30)
    kill_before_the_upload(first, 2, state)
    for number in range(2):
        (first._saves._spool.path / f"slot-{number}.safetensors").unlink()
    caplog.set_level(logging.WARNING)
    assert opened(cache=None).restore(state).step == 1
    assert "lay in the memory of processes that are gone" in caplog.text
