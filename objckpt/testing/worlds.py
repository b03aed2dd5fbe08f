"""Worlds of ranks in one process: threads that take turns, one store call at a time, in an order that a test chooses.

Invariants: at most one task runs at any moment, and between two of its store calls nobody else does anything, so a schedule (the
tasks' names in the order of their calls) says all and can be played again; ``every_schedule`` leaves out a schedule only if another
one differs from it by nothing but the order of calls that do not touch each other; a failure names its schedule.

Called by tests of whatever talks to a store through :class:`~objckpt.store.ObjectStore`, ours and those of others. A task may make
only one call at a time: what reads with many threads is given one.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import random
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Final, TypeVar

from objckpt.errors import StoreNotFoundError
from objckpt.manifest import (
    BLOCK_SIZE,
    JSON,
    DataObject,
    Piece,
    Rank,
    RankRecord,
    Save,
    data_key,
    encode_record,
    record_key,
)
from objckpt.store import Buffer, ObjectInfo, ObjectStore
from objckpt.transfer import block_checksums

T = TypeVar("T")

#: How often, in one call out of so many, the tasks of a walk get other paces.
_CHANGE_OF_PACE: Final = 0.05


class DictStore:
    """Objects in a dict, with a clock that only the test moves: ``now`` in seconds. Copies are cheap, which 10,000 worlds need.

    Not safe for threads that do not take turns. Objects are whole and immutable, so there is nothing to tear.
    """

    def __init__(self, objects: dict[str, tuple[bytes, float]] | None = None, now: float = 0.0) -> None:
        self.objects = dict(objects or {})
        self.now = now

    def copy(self) -> DictStore:
        """Another store with the same objects and the same time."""
        return DictStore(self.objects, self.now)

    @property
    def uri(self) -> str:
        return "dict://"

    def put(self, key: str, data: Buffer, *, crc64: int | None = None) -> None:  # noqa: ARG002 # nothing can change on the way
        self.objects[key] = (bytes(data), self.now)

    def create(self, key: str, data: Buffer) -> bool:
        if key in self.objects:
            return self.objects[key][0] == bytes(data)
        self.objects[key] = (bytes(data), self.now)
        return True

    def read(self, key: str, into: memoryview, offset: int = 0) -> int:
        found = self._object(key)[0][offset : offset + len(into)]
        into[: len(found)] = found
        return len(found)

    def head(self, key: str) -> ObjectInfo:
        data, modified = self._object(key)
        return ObjectInfo(key, len(data), modified)

    def list(self, prefix: str, start_after: str = "") -> Iterator[ObjectInfo]:
        keys = sorted(key for key in self.objects if key.startswith(prefix) and key > start_after)
        return iter([self.head(key) for key in keys])

    def delete(self, keys: Iterable[str]) -> None:
        for key in keys:
            self.objects.pop(key, None)

    def abort_uploads(self, prefix: str, older_than: float) -> int:  # noqa: ARG002 # the seam's verb
        return 0

    def read_whole(self, key: str) -> bytes:
        """The bytes of an object; KeyError if there is none."""
        return self.objects[key][0]

    def _object(self, key: str) -> tuple[bytes, float]:
        if key not in self.objects:
            raise StoreNotFoundError(f"dict://: there is no object {key!r}", uri=self.uri, key=key)
        return self.objects[key]


@dataclass(frozen=True, slots=True)
class Call:
    """A store call that a task is about to make. ``keys`` are the keys it writes, or the one key (``list``: the prefix) it reads."""

    verb: str
    keys: tuple[str, ...]

    @property
    def writes(self) -> bool:
        """Whether it can change the store."""
        return self.verb in {"put", "create", "delete"}

    def touches(self, other: Call) -> bool:
        """Whether the order of the two may matter. What is deleted is judged by what the last object made says, so these do too."""
        if not (self.writes or other.writes):
            return False
        if self.writes and other.writes:
            return "delete" in {self.verb, other.verb} or not set(self.keys).isdisjoint(other.keys)
        writer, reader = (self, other) if self.writes else (other, self)
        if reader.verb == "list":
            return any(key.startswith(reader.keys[0]) for key in writer.keys)
        return reader.keys[0] in writer.keys


class Ended(BaseException):
    """Raised by the next store call of a task whose world has ended without it. `except Exception` lets it pass, as if by SIGKILL."""


#: Given the tasks that may run, with the call that each is about to make: whose turn it is, or None to end them all here.
Choose = Callable[[dict[str, Call]], "str | None"]


@dataclass(slots=True)
class _Task:
    body: Callable[[ObjectStore], object]
    gate: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    call: Call | None = None
    result: object = None


class World:
    """Tasks over one store, run to their ends in the order that ``choose`` says. Used once.

    ``effect``, if set, is called after each call that can change the store, while nobody runs.
    """

    def __init__(self, store: ObjectStore, choose: Choose) -> None:
        self.store = store
        self.schedule: list[str] = []
        self.effect: Callable[[Call], None] | None = None
        self._choose = choose
        self._tasks: dict[str, _Task] = {}
        self._unstarted: list[str] = []
        self._ending = False
        self._over = threading.Event()
        self._failure: Exception | None = None

    def task(self, name: str, body: Callable[[ObjectStore], object]) -> None:
        """Add a task. ``body`` is called with a store each of whose calls waits for its turn."""
        self._tasks[name] = _Task(body)
        self._unstarted.append(name)

    def run(self) -> dict[str, object]:
        """Run all tasks. What each returned, or the exception that it raised (:class:`Ended` if the world ended before it).

        What ``choose`` or ``effect`` raises ends the world and is raised again here.
        """
        threads = [
            threading.Thread(target=self._live, args=(task,), name=f"task-{name}", daemon=True)
            for name, task in self._tasks.items()
        ]
        for thread in threads:
            thread.start()
        self._hand_over(None)
        self._over.wait()
        for thread in threads:
            thread.join()
        if self._failure is not None:
            self._failure.add_note(f"the schedule: {' '.join(self.schedule)}")
            raise self._failure
        return {name: task.result for name, task in self._tasks.items()}

    def _live(self, task: _Task) -> None:
        task.gate.acquire()
        try:
            task.result = task.body(_Turns(self, task))
        except BaseException as error:  # noqa: BLE001 # it is what became of the task; the others go on
            task.result = error
        self._hand_over(None)

    def _hand_over(self, me: _Task | None) -> None:
        """Let the next task run. Returns when it is the turn of ``me``; at once if ``me`` is None."""
        task = self._next()
        if task is None:
            self._over.set()
        elif task is me:
            return
        else:
            task.gate.release()
        if me is not None:
            me.gate.acquire()

    def _next(self) -> _Task | None:
        if self._unstarted:
            return self._tasks[self._unstarted.pop(0)]
        waiting = {name: task.call for name, task in self._tasks.items() if task.call is not None}
        if not waiting:
            return None
        chosen = None
        if not self._ending:
            try:
                chosen = self._choose(waiting)
            except Exception as error:  # noqa: BLE001 # raised again by run()
                self._failure = error
        if chosen is None:
            self._ending = True
            return self._tasks[next(iter(waiting))]
        self.schedule.append(chosen)
        return self._tasks[chosen]

    def turn(self, task: _Task, call: Call) -> None:
        """Wait until ``task`` may make ``call``."""
        task.call = call
        self._hand_over(task)
        task.call = None
        if self._ending:
            raise Ended

    def done(self, call: Call) -> None:
        """A call has had its effect."""
        if self.effect is not None and call.writes and self._failure is None:
            try:
                self.effect(call)
            except Exception as error:  # noqa: BLE001 # raised again by run()
                self._failure, self._ending = error, True


class _Turns:
    """The store as one task sees it: every call waits for its turn."""

    def __init__(self, world: World, task: _Task) -> None:
        self._world = world
        self._task = task
        self._store = world.store

    @property
    def uri(self) -> str:
        return self._store.uri

    def put(self, key: str, data: Buffer, *, crc64: int | None = None) -> None:
        self._turn(Call("put", (key,)), lambda: self._store.put(key, data, crc64=crc64))

    def create(self, key: str, data: Buffer) -> bool:
        return self._turn(Call("create", (key,)), lambda: self._store.create(key, data))

    def read(self, key: str, into: memoryview, offset: int = 0) -> int:
        return self._turn(Call("read", (key,)), lambda: self._store.read(key, into, offset))

    def head(self, key: str) -> ObjectInfo:
        return self._turn(Call("head", (key,)), lambda: self._store.head(key))

    def list(self, prefix: str, start_after: str = "") -> Iterator[ObjectInfo]:
        found = self._turn(Call("list", (prefix,)), lambda: [*self._store.list(prefix, start_after)])
        return iter(found)

    def delete(self, keys: Iterable[str]) -> None:
        for key in keys:  # one by one: a batch may land in any order, with others' calls between
            self._turn(Call("delete", (key,)), functools.partial(self._store.delete, [key]))

    def abort_uploads(self, prefix: str, older_than: float) -> int:
        return self._turn(Call("list", (prefix,)), lambda: self._store.abort_uploads(prefix, older_than))

    def _turn(self, call: Call, effect: Callable[[], T]) -> T:
        self._world.turn(self._task, call)
        result = effect()
        self._world.done(call)
        return result


# ------------------------------------------------------------------ orders


class _RedundantError(Exception):
    """All that may still run here was tried before, in an order that makes no difference."""


class _EndlessError(Exception):
    """The schedule has the length at which it was to be cut."""


@dataclass(slots=True)
class _Fork:
    """A moment of a schedule: who could run, who need not be tried (again), and who runs in this one."""

    waiting: dict[str, Call]
    asleep: dict[str, Call]
    chosen: str


def every_schedule(play: Callable[[Choose], object], limit: int, *, longest: int | None = None) -> int:
    """Call ``play`` with every order of calls that can make a difference. Returns how many there were.

    ``play`` makes a :class:`World` with what it is given, and checks what came of it; it must do the same each time. AssertionError
    if there are more than ``limit``: a bound that is met silently would prove nothing. Tasks that can hinder each other for ever
    need ``longest``: a schedule ends after so many calls, its effects checked but not its outcome.
    """
    path: list[_Fork] = []
    count = 0
    while True:
        depth = 0

        def choose(waiting: dict[str, Call]) -> str:
            nonlocal depth
            if depth == longest:
                raise _EndlessError
            if depth == len(path):
                path.append(_fork(path[-1] if path else None, waiting))
            depth += 1
            return path[depth - 1].chosen

        with contextlib.suppress(_RedundantError, _EndlessError):
            play(choose)
            count += 1
        assert count <= limit, f"more than {limit} schedules"
        # Backwards to the last moment at which someone else could have run.
        while path:
            fork = path[-1]
            fork.asleep[fork.chosen] = fork.waiting[fork.chosen]
            awake = [name for name in fork.waiting if name not in fork.asleep]
            if awake:
                fork.chosen = awake[0]
                break
            path.pop()
        if not path:
            return count


def _fork(before: _Fork | None, waiting: dict[str, Call]) -> _Fork:
    """The next moment. Who could have run before, and does not care about what did, was tried there ("sleep sets")."""
    asleep: dict[str, Call] = {}
    if before is not None:
        ran = before.waiting[before.chosen]
        asleep = {name: call for name, call in before.asleep.items() if not call.touches(ran)}
    awake = [name for name in waiting if name not in asleep]
    if not awake:
        raise _RedundantError
    return _Fork(waiting, asleep, awake[0])


def walk(seed: int) -> Choose:
    """An order drawn at random from ``seed``. Each task's pace is drawn too, so that some are frozen for long."""
    draw = random.Random(seed)
    paces: dict[str, float] = {}

    def choose(waiting: dict[str, Call]) -> str:
        if draw.random() < _CHANGE_OF_PACE:
            paces.clear()
        for name in waiting:
            paces.setdefault(name, draw.choice([1e-3, 1.0, 1.0]))
        names = list(waiting)
        return draw.choices(names, [paces[name] for name in names])[0]

    return choose


def every_freeze(play: Callable[[Choose], object], name: str) -> int:
    """Call ``play`` with task ``name`` frozen before each of its calls in turn, until all others have ended; they run in the order in
    which they were added. Returns how many calls it makes.
    """
    for calls in itertools.count():
        made = 0
        frozen = False

        def choose(waiting: dict[str, Call], calls: int = calls) -> str:
            nonlocal made, frozen
            others = [other for other in waiting if other != name]
            if name in waiting and (made < calls or not others):
                made += 1
                return name
            frozen |= name in waiting
            return others[0]

        play(choose)
        if not frozen:
            return calls
    raise AssertionError  # count() has no end


# ------------------------------------------------------------------ what ranks do


def durable(
    store: ObjectStore,
    run: str,
    save: Save,
    rank: int = 0,
    world_size: int = 1,
    *,
    bases: tuple[Save, ...] = (),
    metadata: JSON = None,
) -> RankRecord:
    """Make the part of ``rank`` in a save durable, as its uploader does: a shard of a few bytes, then the record.

    ``bases`` are saves whose shard of this rank the record refers to as well.
    """
    of_rank = Rank(rank)
    data = f"{save} of rank {rank}".encode()
    objects = tuple(
        DataObject(data_key(s, of_rank), len(d), BLOCK_SIZE, block_checksums(memoryview(d)))
        for s, d in ((s, f"{s} of rank {rank}".encode()) for s in (save, *bases))
    )
    record = RankRecord(
        run=run,
        save=save,
        rank=of_rank,
        world_size=world_size,
        created_at=float(save.step),
        metadata=metadata,
        bases=bases,
        objects=objects,
        pieces=tuple(
            Piece(f"tensor-{number}-of-{rank}", "uint8", (o.size,), (0,), (o.size,), number, 0, o.size)
            for number, o in enumerate(objects)
        ),
        values=None,
        rank_values=None,
    )
    store.put(objects[0].key, data)
    assert store.create(record_key(save, of_rank), encode_record(record))
    return record
