"""One schedule of what jobs do to a run, judged at every change and at every answer.

The invariants are those of the explicit-state model that the protocol was designed with:

- I1 what the newest version lists has its index and all its records, as they were when it was made, and these are of one step;
  I4 all data that they name is there, bases' too;
- I2 head is listed; a save that was acknowledged (COMMITTED) is in the run, or was dropped by retention later;
- I3 each version was made from the one before it: starts rise, commits rise within an attempt, nothing is dropped but by retention;
- I5 no two starts hold one attempt; a launch that was superseded before does not start;
- I7 once all ranks are through, no complete save of the newest attempt is left uncommitted;
- I9 who is told "fenced" has not been committed, and never will be.

All but I7 hold at any moment, so a crash needs no word of its own: whoever waits for its turn may be dead, or frozen for a week.
"""

from __future__ import annotations

import functools
import secrets
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from unittest import mock

from awscrt.checksums import crc64nvme

from objckpt.commit import Outcome, Run
from objckpt.errors import FencedError
from objckpt.manifest import (
    Attempt,
    KeepLast,
    Policy,
    Save,
    Step,
    Version,
    data_key,
    decode_index,
    decode_record,
    decode_version,
    index_key,
    rank_of,
    record_key,
    records_prefix,
    save_of,
    version_key,
    version_of,
)
from objckpt.retention import prune, reap, retain
from objckpt.testing.worlds import DictStore, Ended, World, durable

KEEP_ALL = Policy()
KEEP_ONE = Policy((KeepLast(1),), lag=0)

_index = functools.lru_cache(10_000)(decode_index)
_record = functools.lru_cache(10_000)(decode_record)
_local = threading.local()


def S(attempt, step):
    return Save(Attempt(attempt), Step(step))


def run_of(store):
    return Run(store, retain=retain, pause=lambda _: None)


@contextmanager
def one_call_at_a_time() -> Iterator[None]:
    """Tasks that read with one thread, and draw the same nonces in every schedule in which they are answered the same."""

    def serial(read, items, save):
        return [read(item, save) for item in items]

    def drawn(_: int) -> str:
        _local.count = getattr(_local, "count", 0) + 1
        name = f"{threading.current_thread().name}{_local.count}"
        return f"{crc64nvme(name.encode()):016x}"

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(Run, "_each", staticmethod(serial)))
        stack.enter_context(mock.patch.object(secrets, "token_hex", drawn))
        yield


def old_run(world_size=1, policy=KEEP_ALL, steps=(10,)):
    """A run whose attempt 1, of launch "old", has committed ``steps``."""
    store = DictStore()
    run = run_of(store)
    version = run.start(launch="old", world_size=world_size, policy=policy)
    for step in steps:
        for rank in range(world_size):
            durable(store, version.run, S(1, step), rank, world_size)
        assert run.commit(S(1, step), world_size) is Outcome.COMMITTED
    return store, version.run


class Story:
    """One schedule: its world, what was true of the run after each change, and what the tasks were told."""

    def __init__(self, store, choose, *, lost=0, late=0):
        self.store = store.copy()
        self.world = World(self.store, choose, lost=lost, late=late)
        self.world.effect = self.effect
        self.world.ended = self.ended
        self.world.remembered = lambda: tuple(self.made)
        self.saves = {}
        self.launches = {}
        self.told = {}
        newest = self.newest()
        self.real = {newest.number: newest}
        self.last = newest
        self.made = []

    def newest(self):
        number = max(n for key in self.store.objects if (n := version_of(key)))
        return decode_version(self.store.read_whole(version_key(number)), number)

    def effect(self, call):
        if version_of(call.keys[0]) is not None:
            self.last = newest = self.newest()
            if newest.number not in self.real:
                self.follows(newest, self.real[max(self.real)])
                self.real[newest.number] = newest
                self.made.append((newest.number, newest.nonce))
            assert newest == self.real[newest.number], "I3 a version was written over"
            for name in self.told:
                self.judge(name)
        self.whole(self.last)

    def ended(self, name, result):
        self.told[name] = result
        self.judge(name)

    def whole(self, newest):
        there = self.store.objects
        for e in newest.kept:
            index = there.get(index_key(e.save), (b"",))[0]
            assert crc64nvme(index) == e.index.crc64, f"I1 no index of {e.save}, or another one"
            steps = set()
            for rank, reference in enumerate(_index(index, e.save).records):
                record = there.get(record_key(e.save, rank), (b"",))[0]
                assert crc64nvme(record) == reference.crc64, (
                    f"I1 no record {rank} of {e.save}, or another one"
                )
                steps.add(_record(record, e.save, rank).created_at)
                for save in (e.save, *e.bases):
                    assert data_key(save, rank) in there, f"I4 no data of {save}, which {e.save} needs"
            assert len(steps) == 1, f"I1 the ranks of {e.save} are at different steps"
        assert newest.head is None or newest.entry(newest.head), "I2 head is not kept"

    def follows(self, new, old):
        before = {e.save for e in old.kept}
        added = [e for e in new.kept if e.save not in before]
        assert new.attempt >= old.attempt, "I3 an attempt came back"
        if new.change in {"start", "rollback"}:
            assert new.attempt == new.number, "I5 a start's attempt is its number"
            assert new.kept == old.kept, "I3 a start changed what is kept"
            assert new.launch not in old.superseded, f"I5 {new.launch} was superseded before"
            assert new.change == "rollback" or new.head == old.head, "I3 a start forgot the head"
        elif new.change in {"commit", "roll-forward"}:
            (entry,) = added
            assert new.attempt == old.attempt, "I3 a commit changed the attempt"
            assert entry.save.attempt == old.attempt, f"I3 {entry.save} is not of attempt {old.attempt}"
            newest = old.newest_commit()
            assert newest is None or newest < entry.save.step, "I3 commits out of order"
            assert new.head == entry.save, "I3 head is not what was committed last"
            assert before.issuperset(entry.bases), "I4 a base was not kept"
            listed = (*old.kept, replace(entry, parent=old.head))
            assert new.kept == retain(listed, entry.save, old.policy), "I3 not made from the version before"
        else:
            same = replace(new, change=old.change, number=old.number, nonce=old.nonce, kept=old.kept)
            assert same == (old if new.change != "finish" else replace(old, launch=None, superseded=()))
            assert [e.save for e in new.kept] == [e.save for e in old.kept], "I3 a pin dropped something"

    def judge(self, name):
        """What a task was told is true, and stays true."""
        told, save = self.told[name], self.saves.get(name)
        last = self.last
        match told:
            case Outcome.COMMITTED if save:
                ever = {e.save for v in self.real.values() for e in v.kept}
                assert save in ever, f"I2 {save} was acknowledged and never in the run"
                assert last.policy.keep or last.entry(save), f"I2 {save} is lost"
            case Outcome.FENCED | Outcome.SUPERSEDED if save:
                ever = {e.save for v in self.real.values() for e in v.kept}
                assert save not in (ever if not last.policy.keep else {e.save for e in last.kept}), (
                    f"I9 {save} is committed, and was told {told.value}"
                )
                assert told is Outcome.SUPERSEDED or last.attempt != save.attempt, "I9 fenced by nobody"
            case Outcome() if save:
                pass
            case Version() if told.change in {"start", "rollback"}:
                assert self.real.get(told.number) == told, "I5 a start that is not of the run"
                others = [v for n, v in self.told.items() if n != name and isinstance(v, Version)]
                assert told.attempt not in {v.attempt for v in others}, "I5 two starts hold one attempt"
            case FencedError():
                assert self.launches.get(name, name) in last.superseded, (
                    f"I9 {name} was refused, and is not superseded"
                )
            case Exception():
                raise told
            case _:
                assert save is None or isinstance(told, Ended), f"{name}: {told!r}"

    def start(self, name, *, launch=None, world_size=1, policy=KEEP_ALL, **more):
        self.launches[name] = launch or name

        def body(store):
            return run_of(store).start(launch=launch or name, world_size=world_size, policy=policy, **more)

        self.world.task(name, body)

    def commit(self, name, save, world_size=1):
        self.saves[name] = save
        self.world.task(name, lambda store: run_of(store).commit(save, world_size))

    def rank(self, name, saves, *, rank=0, world_size=1, run, bases=()):
        """An uploader: each save is made durable and committed; its result is that of the last, which refers to ``bases``."""
        self.saves[name] = saves[-1]

        def body(store):
            of_task = run_of(store)
            for save in saves:
                of_save = bases if save == saves[-1] else ()
                durable(store, run, save, rank, world_size, bases=of_save)
                outcome = of_task.commit(save, world_size)
            return outcome

        self.world.task(name, body)

    def play(self, *, settled=False):
        told = self.world.run()
        assert self.last == self.newest()
        if settled:
            self.nothing_left(self.last)
        return told, self.last

    def nothing_left(self, last):
        """I7, and that what is kept can be read by who knows nothing but its index."""
        ranks = {}
        for key in self.store.objects:
            if key.startswith(records_prefix(last.attempt)) and (rank := rank_of(key)) is not None:
                ranks.setdefault(save_of(key), set()).add(rank)
        newest = last.newest_commit()
        for save, found in ranks.items():
            complete = len(found) == last.world_size
            assert not complete or (newest is not None and save.step <= newest), f"I7 {save} is left"


def job(store, *, step, steps=1, deletes=True, policy=KEEP_ONE):
    """A replacement: starts, saves, commits, deletes what is dropped without any grace, and prunes all old versions."""
    run = run_of(store)
    version = run.start(launch="new", world_size=1, policy=policy)
    for number in range(steps):
        save = Save(version.attempt, Step(step + number))
        durable(store, version.run, save)
        run.commit(save, 1)
        if deletes:
            reap(run, version.attempt, grace=0)
            prune(run, life=0)
    return version
