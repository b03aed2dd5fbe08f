"""Worlds of ranks in one process: threads that take turns, one store call at a time, in an order that a test chooses.

Invariants: at most one task runs at any moment, and between two of its store calls nobody else does anything, so a schedule (the
tasks' names in the order of their calls) says all and can be played again; a failure names its schedule.

Called by tests of whatever talks to a store through :class:`~objckpt.store.ObjectStore`, ours and those of others; ``orders`` has the
schedules. A task may make only one call at a time: what reads with many threads is given one.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final, TypeVar

from objckpt.errors import StoreNotFoundError, StoreTransientError
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
from objckpt.store.http import NoAnswerError
from objckpt.store.put_if_absent import put_if_absent
from objckpt.store.retry import RetryPolicy
from objckpt.transfer import block_checksums

T = TypeVar("T")


class _AtOnce(RetryPolicy):
    """Tries again without a wait, and for ever: a world has only so many faults."""

    def run(self, attempt: Callable[[], T], *, abandoned: threading.Event | None = None) -> T:  # noqa: ARG002 # as all have it
        while True:
            with contextlib.suppress(StoreTransientError):
                return attempt()


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


#: What a ``create`` may suffer: it is done and its answer is lost; it is under way still when the caller has given it up.
LOST: Final = "lost"
LATE: Final = "late"


class Moment(dict[str, Call]):
    """Who may run now, each with the call that it is about to make.

    ``zombie:lost`` is the call of ``zombie`` whose answer is lost, ``zombie:late`` the one that reaches the store later, as ``zombie~3``.
    """

    def __init__(self, world: World, calls: Mapping[str, Call]) -> None:
        super().__init__(calls)
        self._world = world

    def state(self) -> Hashable:
        """All that what comes next depends on: the objects, what each task was answered so far, what is under way, and what the
        test remembers (:attr:`World.remembered`). Worth as much as the test is deterministic.
        """
        return self._world.state()


#: Given a moment: whose turn it is, or None to end them all here.
Choose = Callable[[Moment], "str | None"]


@dataclass(slots=True)
class _Task:
    name: str
    body: Callable[[ObjectStore], object]
    gate: threading.Lock = field(default_factory=threading.Lock)  # held while it is not the task's turn
    call: Call | None = None
    fault: str = ""
    answers: int = 0  # a hash of all that it was answered so far
    result: object = None


class World:
    """Tasks over one store, run to their ends in the order that ``choose`` says. Used once.

    ``effect``, if set, is called after each call that can change the store, and ``ended`` with the name and the result of a task that has
    ended, while nobody runs. ``lost`` and ``late`` are how many answers may be lost, and how many creates may land later, in all.
    """

    def __init__(self, store: DictStore, choose: Choose, *, lost: int = 0, late: int = 0) -> None:
        self.store = store
        self.schedule: list[str] = []
        self.effect: Callable[[Call], None] | None = None
        self.ended: Callable[[str, object], None] | None = None
        self.remembered: Callable[[], Hashable] = lambda: None
        self._choose = choose
        self._faults = {LOST: lost, LATE: late}
        self._tasks: dict[str, _Task] = {}
        self._unstarted: list[str] = []
        self._flying: dict[str, tuple[Call, bytes]] = {}
        self._ending = False
        self._over = threading.Event()
        self._failure: Exception | None = None

    def task(self, name: str, body: Callable[[ObjectStore], object]) -> None:
        """Add a task. ``body`` is called with a store each of whose calls waits for its turn."""
        self._tasks[name] = _Task(name, body)
        self._tasks[name].gate.acquire()
        self._unstarted.append(name)

    def run(self) -> dict[str, object]:
        """Run all tasks. What each returned, or the exception that it raised (:class:`Ended` if the world ended before it).

        What ``choose``, ``effect`` or ``ended`` raises ends the world and is raised again here.
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

    def state(self) -> Hashable:
        """See :meth:`Moment.state`."""
        return (
            frozenset(self.store.objects.items()).__hash__(),
            tuple(task.answers for task in self._tasks.values()),
            tuple(self._faults.values()),
            tuple(self._flying),
            self.remembered(),
        )

    def _live(self, task: _Task) -> None:
        task.gate.acquire()
        try:
            task.result = task.body(_Turns(self, task))
        except BaseException as error:  # noqa: BLE001 # it is what became of the task; the others go on
            task.result = error
        if self.ended is not None:
            self._watched(functools.partial(self.ended, task.name, task.result))
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
        while True:
            waiting = {name: task.call for name, task in self._tasks.items() if task.call is not None}
            if not (waiting or (self._flying and not self._ending)):
                return None
            chosen = None if self._ending else self._chosen(waiting)
            if chosen is None:
                self._ending = True
                if not waiting:
                    return None
                return self._tasks[next(iter(waiting))]
            self.schedule.append(chosen)
            if chosen in self._flying:
                self._land(chosen)
                continue
            name, _, fault = chosen.partition(":")
            task = self._tasks[name]
            task.fault = fault
            if fault:
                self._faults[fault] -= 1
            return task

    def _chosen(self, waiting: dict[str, Call]) -> str | None:
        faulty = {
            f"{name}:{fault}": call
            for fault, left in self._faults.items()
            for name, call in waiting.items()
            if left and call.verb == "create"
        }
        under_way = {name: call for name, (call, _) in self._flying.items()}
        moment = Moment(self, waiting | under_way | faulty)
        try:
            return self._choose(moment)
        except Exception as error:  # noqa: BLE001 # raised again by run()
            self._failure = error
            return None

    def turn(self, task: _Task, call: Call) -> None:
        """Wait until ``task`` may make ``call``."""
        task.call = call
        self._hand_over(task)
        task.call = None
        if self._ending:
            raise Ended

    def done(self, call: Call) -> None:
        """A call has had its effect."""
        if self.effect is not None and call.writes:
            self._watched(functools.partial(self.effect, call))

    def fly(self, task: _Task, call: Call, data: bytes) -> None:
        """A create that reaches the store later."""
        self._flying[f"{task.name}~{len(self.schedule)}"] = call, data

    def _land(self, name: str) -> None:
        call, data = self._flying.pop(name)
        self.store.create(call.keys[0], data)
        self.done(call)

    def _watched(self, look: Callable[[], object]) -> None:
        if self._failure is None:
            try:
                look()
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
        content = bytes(data)
        return put_if_absent(
            _Key(self, key),
            memoryview(content),
            _AtOnce(),
            lambda: self._send(key, content),
            lambda told: told,
        )

    def _send(self, key: str, data: bytes) -> bool:
        """Whether the object was made by this request. As over a network: the answer may be lost, the request may be late."""
        call = Call("create", (key,))
        self._world.turn(self._task, call)
        if self._task.fault == LATE:
            self._world.fly(self._task, call, data)
        made = self._task.fault != LATE and key not in self._store.objects
        if made:
            self._store.create(key, data)
        self._answer(call, made, self._task.fault)
        if made:
            self._world.done(call)
        if self._task.fault:
            raise StoreTransientError("no answer", uri=self.uri, key=key) from NoAnswerError(
                "lost", sent=True
            )
        return made

    def read(self, key: str, into: memoryview, offset: int = 0) -> int:
        count = self._turn(Call("read", (key,)), lambda: self._store.read(key, into, offset))
        self._answer(bytes(into[:count]))
        return count

    def head(self, key: str) -> ObjectInfo:
        return self._turn(Call("head", (key,)), lambda: self._store.head(key))

    def list(self, prefix: str, start_after: str = "") -> Iterator[ObjectInfo]:
        found = self._turn(Call("list", (prefix,)), lambda: (*self._store.list(prefix, start_after),))
        return iter(found)

    def delete(self, keys: Iterable[str]) -> None:
        for key in keys:  # one by one: a batch may land in any order, with others' calls between
            self._turn(Call("delete", (key,)), functools.partial(self._store.delete, [key]))

    def abort_uploads(self, prefix: str, older_than: float) -> int:
        return self._turn(Call("list", (prefix,)), lambda: self._store.abort_uploads(prefix, older_than))

    def _turn(self, call: Call, effect: Callable[[], T]) -> T:
        self._world.turn(self._task, call)
        try:
            result = effect()
        except StoreNotFoundError:
            self._answer(call, None)
            raise
        self._answer(call, result)
        self._world.done(call)
        return result

    def _answer(self, *told: Hashable) -> None:
        self._task.answers = hash((self._task.answers, *told))


@dataclass(frozen=True, slots=True)
class _Key:
    """One key of a task's store, as :func:`put_if_absent` reads it back."""

    store: _Turns
    key: str

    @property
    def uri(self) -> str:
        return self.store.uri

    def read_back(self, size: int) -> memoryview | None:
        into = memoryview(bytearray(size + 1))
        try:
            return into[: self.store.read(self.key, into)]
        except StoreNotFoundError:
            return None


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
    created_at: float | None = None,
) -> RankRecord:
    """Make the part of ``rank`` in a save durable, as its uploader does: a shard of a few bytes, then the record.

    ``bases`` are saves whose shard of this rank the record refers to as well; ``created_at`` is the step if it is not given.
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
        created_at=float(save.step) if created_at is None else created_at,
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
