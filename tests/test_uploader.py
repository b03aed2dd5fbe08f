"""The uploader's loop, in a thread over a memory store: what was journalled is committed, whatever dies in between."""

from __future__ import annotations

import os
import queue
import socket
import subprocess
import threading
import time
import uuid

import pytest

from objckpt.commit import Run
from objckpt.errors import StoreTransientError
from objckpt.manifest import Attempt, KeepLast, Policy, Rank, RankRecord, Save, Step, data_key, record_key
from objckpt.retention import retain
from objckpt.spool import Spool, root, slot_name, unhashed
from objckpt.store import open_store, read_all
from objckpt.store.retry import RetryPolicy
from objckpt.transfer import block_checksums
from objckpt.uploader import loop
from objckpt.uploader.channel import Channel
from objckpt.uploader.loop import serve

BLOCK = 1024


class CrashError(BaseException):
    """The process is gone. No handler of the code under test may see it."""


class Wrapped:
    """A store that does something at its n-th call."""

    def __init__(self, inner, at=None, action=None):
        self.inner, self.at, self.action, self.calls = inner, at, action, []
        self.uri = inner.uri

    def __getattr__(self, verb):
        method = getattr(self.inner, verb)

        def call(*arguments, **keywords):
            self.calls.append((verb, *(a for a in arguments if isinstance(a, str))))
            if self.at == len(self.calls):
                return self.action(method, arguments, keywords)
            return method(*arguments, **keywords)

        return call


def crash_before(_method, _arguments, _keywords):
    raise CrashError


def crash_after(method, arguments, keywords):
    method(*arguments, **keywords)
    raise CrashError


class Trainer:
    """The other end of the channel, with a spool whose slots it fills."""

    def __init__(self, store, where, version, *, rank=0, world_size=1, spool=None, save_timeout=20.0):
        self.version, self.rank, self.world_size = version, Rank(rank), world_size
        ours, theirs = socket.socketpair()
        self.channel = Channel(ours)
        self.events = queue.SimpleQueue()
        self.channel.listen(self.events.put)
        end = Channel(theirs)
        end.listen()
        self.crashed = False
        self.thread = threading.Thread(target=self._serve, args=(end, store), daemon=True)
        self.thread.start()
        self.channel.send(
            {
                "op": "open",
                "uri": store.uri,
                "storage_options": {},
                "part_size": None,
                "concurrency": None,
                "run": version.run,
                "rank": rank,
                "linger": 20.0,
                "save_timeout": save_timeout,
            }
        )
        self.where = where
        self.spool = spool or Spool.create(where)
        self.slots = None

    def _serve(self, end, store):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(loop, "open_store", lambda *_, **__: store)
            opened = []

            class Recorded(Spool):
                def __init__(self, path):
                    super().__init__(path)
                    opened.append(self)

            patch.setattr(loop, "Spool", Recorded)
            try:
                serve(end)
            except CrashError:
                self.crashed = True
                for spool in opened:  # what the kernel does for a process
                    spool.close()
            end.close()

    def begin(self):
        self.channel.send({"op": "spool", "path": str(self.spool.path), "attempt": self.version.attempt})
        self.spool.path = type(self.spool.path)(self.event("spool")["path"])
        return self

    def fill(self, step, image, slot=0):
        if self.slots is None:
            self.slots = self.spool.make_slots(2, 1 << 16)
        save = Save(self.version.attempt, Step(step))
        self.slots[slot].view[: len(image)] = image
        obj = unhashed(data_key(save, self.rank), len(image), BLOCK)
        record = RankRecord(
            self.version.run, save, self.rank, self.world_size, 1.5, None, (), (obj,), (), {}, None
        )
        self.spool.write_journal(slot, record)
        return save

    def save(self, step, image=None, slot=0):
        image = os.urandom(3 * BLOCK + 5) if image is None else image
        save = self.fill(step, image, slot)
        self.channel.send({"op": "save", "save": [save.attempt, save.step]})
        return save, image

    def event(self, *ops):
        """The next event of one of these kinds; others are passed over, but for the end."""
        while True:
            message = self.events.get(timeout=20)
            if message["op"] in ops:
                return message
            assert message["op"] != "gone", f"the uploader ended while {ops} was awaited"

    def die(self):
        """The trainer is gone; wait for what its uploader still does."""
        self.channel.close()
        self.join()

    def join(self):
        self.thread.join(30)
        assert not self.thread.is_alive(), "the uploader did not end"
        if self.spool._lock is None:
            self.spool.close()


@pytest.fixture
def store():
    return open_store(f"memory://{uuid.uuid4().hex}")


@pytest.fixture
def run(store):
    return Run(store, retain=retain)


def start(run, launch="a", world_size=1, keep=None):
    return run.start(
        launch=launch, world_size=world_size, policy=Policy((KeepLast(keep),) if keep else (), 0)
    )


def committed(run):
    return [e.save for e in run.existing().kept]


def test_a_save_becomes_durable_then_committed(store, run, tmp_path):
    version = start(run)
    trainer = Trainer(store, root(tmp_path, version.run), version).begin()
    save, image = trainer.save(10)
    assert trainer.event("durable")["nbytes"] == len(image)
    # What a later process finds in the slot is checked against this first pass.
    assert trainer.spool.checksums(save) == block_checksums(memoryview(image), BLOCK)
    assert run.store.head(record_key(save, Rank(0)))
    assert trainer.event("committed")["save"] == [save.attempt, save.step]
    assert committed(run) == [save]
    assert read_all(store, data_key(save, Rank(0))) == image
    trainer.channel.send({"op": "close", "remove": True})
    trainer.join()
    assert not trainer.spool.path.exists()


def test_what_was_journalled_is_committed_after_the_trainer_is_gone(store, run, tmp_path):
    version = start(run)
    trainer = Trainer(store, root(tmp_path, version.run), version).begin()
    saves = [trainer.save(step, slot=slot)[0] for slot, step in enumerate((10, 20))]
    trainer.die()
    assert committed(run) == saves
    assert trainer.spool.path.exists(), "the newest image serves a restart on this node"


@pytest.mark.parametrize("action", [crash_before, crash_after])
def test_an_uploader_that_crashes_at_any_store_call_leaves_work_that_another_finishes(
    run, store, tmp_path, action
):
    """First the calls of one save are counted, then each of them is the last that a process makes."""
    image = os.urandom(2 * BLOCK + 9)

    def one(number, at):
        inner = open_store(f"memory://{uuid.uuid4().hex}")
        runs = Run(inner, retain=retain)
        version = start(runs)
        wrapped = Wrapped(inner, at, action)
        trainer = Trainer(wrapped, root(tmp_path / str(number), version.run), version).begin()
        save, _ = trainer.save(10, image)
        if at is None:
            trainer.event("committed")
        trainer.die()
        assert trainer.crashed == (at is not None)
        if at is not None:
            # Should the node be lost now, the next start may list the save only if all of it is there.
            if any(e.save == save for e in runs.roll_forward(runs.existing()).kept):
                assert read_all(inner, data_key(save, Rank(0))) == image, f"call {at}"
            spool = Spool(trainer.spool.path)
            again = Trainer(inner, trainer.where, version, spool=spool).begin()
            assert again.event("committed", "failed")["op"] == "committed", f"call {at}"
            again.die()
        assert committed(runs) == [save], f"call {at}"
        assert read_all(inner, data_key(save, Rank(0))) == image
        assert len(list(inner.list("data/"))) == 1
        return wrapped.calls

    calls = one(0, None)
    verbs = [verb for verb, *_ in calls]
    # Up to the commit: what comes after it is retention's.
    last = max(i for i, call in enumerate(calls) if call[0] == "create") + 2
    assert {"put", "create", "list", "read"} <= set(verbs[:last])
    for at in range(1, last + 1):
        one(at, at)


def test_a_flipped_bit_in_the_slot_after_its_first_pass_is_refused(store, run, tmp_path):
    version = start(run)
    trainer = Trainer(store, root(tmp_path, version.run), version)
    image = bytes(5 * BLOCK)
    save = trainer.fill(10, image)
    trainer.spool.write_checksums(save, block_checksums(memoryview(image), BLOCK))
    trainer.slots[0].view[4 * BLOCK + 3] ^= 4
    trainer.begin()  # an uploader that takes over after a crash
    assert "block 4" in trainer.event("failed")["error"]
    trainer.die()
    assert committed(run) == []
    assert list(store.list("records/")) == []


def test_the_last_of_two_ranks_commits_and_rank_0_tells(store, run, tmp_path):
    version = start(run, world_size=2)
    where = root(tmp_path, version.run)
    ranks = [Trainer(store, where, version, rank=r, world_size=2).begin() for r in (0, 1)]
    save, _ = ranks[0].save(10)
    ranks[0].event("durable")
    assert committed(run) == []
    ranks[1].save(10)
    assert ranks[1].event("committed")["op"] == "committed"
    assert ranks[0].event("committed")["save"] == [save.attempt, save.step]
    for rank in ranks:
        rank.die()
    assert committed(run) == [save]


def test_an_uploader_whose_run_was_taken_over_says_fenced_and_commits_nothing(store, run, tmp_path):
    version = start(run)
    trainer = Trainer(store, root(tmp_path, version.run), version).begin()
    start(run, launch="b")
    trainer.save(10)
    assert trainer.event("fenced", "committed")["op"] == "fenced"
    trainer.save(20, slot=1)
    assert trainer.event("fenced", "committed")["op"] == "fenced"
    trainer.die()
    assert committed(run) == []


def test_a_zombie_of_two_ranks_learns_that_it_is_fenced_while_it_waits_for_its_peer(store, run, tmp_path):
    version = start(run, world_size=2)
    trainer = Trainer(store, root(tmp_path, version.run), version, world_size=2).begin()
    trainer.save(10)
    trainer.event("durable")
    start(run, launch="b", world_size=2)
    assert trainer.event("fenced")["op"] == "fenced"
    trainer.die()


def test_a_transient_failure_is_tried_again(store, run, tmp_path, monkeypatch):
    monkeypatch.setattr(loop, "_FIRST_RETRY", 0.01)
    version = start(run)

    def unreachable(_method, _arguments, _keywords):
        raise StoreTransientError("the bucket is away")

    trainer = Trainer(Wrapped(store, 1, unreachable), root(tmp_path, version.run), version).begin()
    save, _ = trainer.save(10)
    assert "the bucket is away" in trainer.event("delayed")["error"]
    assert trainer.event("committed")["save"] == [save.attempt, save.step]
    trainer.die()


def test_a_bucket_that_stays_away_fails_the_save_by_its_deadline(store, run, tmp_path, monkeypatch):
    monkeypatch.setattr(loop, "_FIRST_RETRY", 0.01)
    version = start(run)

    class Away(Wrapped):
        def __getattr__(self, verb):
            def call(*_, **__):
                raise StoreTransientError("the bucket is away")

            return call

    trainer = Trainer(Away(store), root(tmp_path, version.run), version, save_timeout=0.1).begin()
    trainer.save(10)
    assert "not durable after" in trainer.event("failed")["error"]
    trainer.die()


def test_adoption_finishes_what_a_dead_uploader_left_whatever_its_rank(store, run, tmp_path):
    version = start(run)
    where = root(tmp_path, version.run)
    dead = Trainer(Wrapped(store, 1, crash_before), where, version).begin()
    save, image = dead.save(10)
    dead.die()
    assert dead.crashed
    other = Trainer(store, where, version, rank=7)
    other.channel.send({"op": "adopt", "roots": [str(where)], "timeout": 10})
    assert other.event("adopted")["finished"] == [f"{save}: committed"]
    assert committed(run) == [save]
    assert read_all(store, data_key(save, Rank(0))) == image
    assert dead.spool.path.exists(), "a restore may still read the slot"
    other.channel.send({"op": "release"})
    other.die()
    assert not dead.spool.path.exists()


def test_adoption_waits_for_a_live_uploader_that_still_sends(store, run, tmp_path):
    version = start(run)
    where = root(tmp_path, version.run)
    going, go = threading.Event(), threading.Event()

    def slowly(method, arguments, keywords):
        going.set()
        go.wait(20)
        return method(*arguments, **keywords)

    live = Trainer(Wrapped(store, 1, slowly), where, version).begin()
    save, _ = live.save(10)
    assert going.wait(20)
    other = Trainer(store, where, version)
    other.channel.send({"op": "adopt", "roots": [str(where)], "timeout": 20})
    with pytest.raises(queue.Empty):
        other.events.get(timeout=0.3)
    go.set()
    other.event("adopted")
    assert committed(run) == [save]
    live.die()
    other.die()


class Stuck:
    """A live uploader, as far as its lock tells, with a save on its way that goes no further."""

    def __init__(self, store, where, version):
        self.spool = Spool.create(where)
        assert self.spool.lock()
        self.spool.publish(version.attempt, Rank(0))
        self.trainer = Trainer(store, where, version, spool=self.spool)
        self.save = self.trainer.fill(10, b"x" * 10)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.trainer.die()
        self.spool.close()


def test_adoption_gives_up_an_uploader_that_does_not_get_on(store, run, tmp_path):
    version = start(run)
    where = root(tmp_path, version.run)
    with Stuck(store, where, version):
        other = Trainer(store, where, version, rank=1)
        other.channel.send({"op": "adopt", "roots": [str(where)], "timeout": 0.2})
        adopted = other.event("adopted")
        assert adopted["finished"] == []
        assert "its live uploader has not got on for 0 s; not waiting for it" in adopted["failed"][0]
        other.die()


def test_adoption_waits_far_beyond_its_time_out_for_an_uploader_that_gets_on(store, run, tmp_path):
    version = start(run)
    where = root(tmp_path, version.run)
    with Stuck(store, where, version) as stuck:
        other = Trainer(store, where, version, rank=1)
        other.channel.send({"op": "adopt", "roots": [str(where)], "timeout": 1.0})
        for count in range(20):
            stuck.spool.write_progress(count)
            with pytest.raises(queue.Empty):
                other.events.get(timeout=0.1)
        stuck.spool.mark_durable(stuck.save)
        assert other.event("adopted")["failed"] == []
        other.die()


def test_adoption_does_not_wait_for_what_another_job_saves_from_now_on(store, run, tmp_path):
    version = start(run)
    where = root(tmp_path, version.run)
    with Stuck(store, where, version) as stuck:
        other = Trainer(store, where, version, rank=1)
        other.channel.send({"op": "adopt", "roots": [str(where)], "timeout": 3600})
        with pytest.raises(queue.Empty):
            other.events.get(timeout=0.3)
        stuck.trainer.fill(20, b"x" * 10, slot=1)
        stuck.spool.mark_durable(stuck.save)
        assert other.event("adopted")["failed"] == []
        other.die()


def test_an_uploader_tells_that_it_gets_on(store, run, tmp_path, monkeypatch):
    monkeypatch.setattr(loop, "_PROGRESS_PERIOD", 0.01)
    version = start(run)
    trainer = Trainer(store, root(tmp_path, version.run), version).begin()
    trainer.save(10)
    trainer.event("committed")
    deadline = time.monotonic() + 20
    RetryPolicy().run(lambda: None)  # what each request of a store over a network goes through
    while trainer.spool.progress()[1] == b"" and time.monotonic() < deadline:
        time.sleep(0.01)
    assert int(trainer.spool.progress()[1]) > 0
    trainer.die()


def test_adoption_does_not_wait_for_one_that_only_waits_for_its_peers(store, run, tmp_path):
    version = start(run, world_size=2)
    where = root(tmp_path, version.run)
    live = Trainer(store, where, version, world_size=2).begin()
    live.save(10)
    live.event("durable")
    other = Trainer(store, where, version, world_size=2)
    other.channel.send({"op": "adopt", "roots": [str(where)], "timeout": 3600})
    other.event("adopted")
    live.die()
    other.die()


def test_retention_deletes_what_no_version_reaches(store, run, tmp_path, monkeypatch):
    monkeypatch.setattr(loop, "reap", lambda *a: real(*a, grace=0))
    from objckpt.retention import reap as real

    version = start(run, keep=2)
    trainer = Trainer(store, root(tmp_path, version.run), version).begin()
    for step in range(10, 60, 10):
        trainer.save(step, slot=step // 10 % 2)
        trainer.event("committed")
    trainer.channel.send({"op": "close", "remove": True})
    trainer.join()
    assert [s.step for s in committed(run)] == [40, 50]
    left = {key.key.rsplit("/", 1)[1][7:19] for key in store.list("data/")}
    assert left == {"000000000040", "000000000050"}


def test_what_an_image_holds_is_read_from_its_own_slot(store, run, tmp_path):
    version = start(run)
    trainer = Trainer(store, root(tmp_path, version.run), version).begin()
    first, a = trainer.save(10, slot=0)
    second, b = trainer.save(20, slot=1)
    trainer.event("committed")
    trainer.event("committed")
    trainer.die()
    assert (read_all(store, data_key(first, Rank(0))), read_all(store, data_key(second, Rank(0)))) == (a, b)
    assert (trainer.spool.path / slot_name(1)).exists()
    assert Attempt(1) == first.attempt


def test_a_trainer_that_ended_before_its_uploader_could_watch_it_is_gone_and_what_it_said_comes_first():
    """A child that it forked may hold its end of the socket for ever."""
    with subprocess.Popen(["/bin/true"]) as trainer:
        trainer.wait()
    ours, theirs = socket.socketpair()
    with ours:
        Channel(ours).send({"op": "open"})
        uploader = Channel(theirs)
        uploader.listen(peer=trainer.pid)
        assert uploader.receive(20) == {"op": "open"}
        assert uploader.receive(20) == {"op": "gone"}
    uploader.close()


def test_a_channel_that_is_closed_leaves_no_thread_behind():
    """A socket that is closed while it is waited for wakes nobody: its number is gone from the kernel's list."""
    before = set(threading.enumerate())
    for _ in range(200):
        ours, theirs = map(Channel, socket.socketpair())
        ours.listen()
        theirs.listen()
        assert ours.send({"op": "open"})
        assert theirs.receive(20) == {"op": "open"}
        ours.close()
        assert theirs.receive(20) == {"op": "gone"}
        assert ours.receive(20) == {"op": "gone"}
        assert not theirs.send({"op": "late"})
        theirs.close()
    for thread in set(threading.enumerate()) - before:
        thread.join(20)
        assert not thread.is_alive()
