"""Faults at chosen calls: of a store, and of the system under a spool.

Invariants: what happens at a call follows from the schedule and the calls before it alone (a probability draws from its seed and from the
call itself, so threads that take other turns meet the same faults); every call is recorded, also those that a crash forbids; after a crash
nothing has an effect any more through the same injector, from no thread.

A schedule is a sequence of :class:`Rule`; of several that hit a call, the first counts. Called by tests of whatever talks to a store
through :class:`~objckpt.store.ObjectStore`, ours and those of others.
"""

from __future__ import annotations

import builtins
import contextlib
import enum
import errno
import fcntl
import http.client
import mmap
import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import partial
from types import ModuleType
from typing import Any, Final, NoReturn, Self, TypeVar
from unittest import mock

from objckpt import spool
from objckpt.errors import CommitUnknownError, ObjckptError, StoreTransientError
from objckpt.spool import slot
from objckpt.store import Buffer, ObjectInfo, ObjectStore
from objckpt.store.http import Answer, NoAnswerError
from objckpt.store.put_if_absent import put_if_absent
from objckpt.store.ranges import Source
from objckpt.store.retry import RetryPolicy
from objckpt.testing.worlds import Call

T = TypeVar("T")


class Fault(enum.Enum):
    """What goes wrong at a call. The verbs of a store are those of its protocol; those of a system are its calls."""

    FAIL_BEFORE = "fail before"  # an error, and no effect
    FAIL_AFTER = (
        "fail after"  # an error after the effect, which a `create` cannot find out: CommitUnknownError
    )
    LOSE_ANSWER = (
        "lose answer"  # the effect, then no answer; a `create` reads the key back, by a `read` of its own
    )
    THROTTLE = "throttle"  # 503 SlowDown for as long as a store tries again
    HANG = "hang"  # no answer until the deadline, and no effect
    TRUNCATE = "truncate"  # a read brings half of its bytes
    FLIP = "flip"  # a read brings one bit that is not the object's
    TEAR = "tear"  # a write ends in the middle, with an error
    CRASH_BEFORE = "crash before"  # the process is gone, its call never made
    CRASH_AFTER = "crash after"  # the process is gone, its call has had its effect
    DUPLICATE = "duplicate"  # a write arrives once more, later


#: The verbs that a fault makes sense for; all, if it is not named.
_ONLY: Final = {
    Fault.TRUNCATE: frozenset({"read"}),
    Fault.FLIP: frozenset({"read"}),
    Fault.TEAR: frozenset({"put", "delete", "write"}),
    Fault.DUPLICATE: frozenset({"put", "create", "delete"}),
}


def applies(fault: Fault, verb: str) -> bool:
    """Whether calls of that verb can meet the fault."""
    return fault not in _ONLY or verb in _ONLY[fault]


class Crashed(BaseException):
    """The process is gone: `except Exception` lets it pass, as SIGKILL would."""


def raise_crashed() -> NoReturn:
    """A crash where processes are threads."""
    raise Crashed


def kill_process() -> NoReturn:
    """A crash where processes are real: no handler and no cleaning up."""
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError


@dataclass(frozen=True, slots=True)
class Moment:
    """A call as a schedule sees it: its ``number`` among all (from 1), its ``count`` among those that the rule is about, and a ``name``
    that no other call has: verb, keys, and how many like it there were.
    """

    number: int
    count: int
    name: str


@dataclass(frozen=True, slots=True)
class At:
    """The call with a number, counted from 1 over all calls."""

    number: int

    def hits(self, moment: Moment) -> bool:
        return moment.number == self.number


@dataclass(frozen=True, slots=True)
class Nth:
    """The ``nth`` call that the rule is about, from 1, and the ``times - 1`` that follow it."""

    nth: int = 1
    times: int = 1

    def hits(self, moment: Moment) -> bool:
        return self.nth <= moment.count < self.nth + self.times


@dataclass(frozen=True, slots=True)
class Sometimes:
    """Each call that the rule is about, with a probability. The same call, counted by itself, meets the same fate under a seed."""

    probability: float
    seed: int

    def hits(self, moment: Moment) -> bool:
        return random.Random(f"{self.seed} {moment.name}").random() < self.probability


@dataclass(frozen=True, slots=True)
class Rule:
    """``fault`` hits the calls of ``verbs`` (none: all) with a key like ``keys`` (a pattern of ``fnmatch``), ``when`` says which of them.

    ``error`` makes what is raised instead of the usual; a fault that ends in :class:`Crashed` is a crash. ``later`` is for duplicates: how
    many calls later they arrive (0: when told by :meth:`Injector.deliver`). ``bit`` chooses the one that flips, by a seed.
    """

    fault: Fault
    when: At | Nth | Sometimes = Nth()
    verbs: frozenset[str] = frozenset()
    keys: str = "*"
    error: Callable[[], BaseException] | None = None
    later: int = 0
    bit: int = 0

    def about(self, call: Call) -> bool:
        """Whether the rule is about such calls."""
        of_verb = call.verb in self.verbs if self.verbs else True
        return (
            of_verb and applies(self.fault, call.verb) and any(fnmatchcase(k, self.keys) for k in call.keys)
        )


def _transient(call: Call) -> StoreTransientError:
    key = call.keys[0] if call.keys else ""
    return StoreTransientError(f"faulty://: no answer to {call.verb} {key!r}", uri="faulty://", key=key)


def _slow_down(call: Call) -> StoreTransientError:
    key = call.keys[0] if call.keys else ""
    return StoreTransientError(
        f"faulty://: {call.verb} {key!r}: 503 SlowDown: reduce your request rate", uri="faulty://", key=key
    )


def _input_output(call: Call) -> OSError:
    return OSError(errno.EIO, os.strerror(errno.EIO), *call.keys)


class Injector:
    """Meets each call with what the schedule has for it. Safe for threads.

    ``calls`` are all that were made, ``hits`` the numbers (from 1) of those that met a fault, with its rule. ``hang`` is how long a call
    that hangs does, in seconds; ``sleep`` waits.
    """

    def __init__(
        self,
        schedule: Iterable[Rule],
        *,
        error: Callable[[Call], BaseException] = _transient,
        crash: Callable[[], NoReturn] = raise_crashed,
        hang: float = 120.0,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        self.calls: list[Call] = []
        self.hits: list[tuple[int, Rule]] = []
        self.crashed = False
        self._schedule = tuple(schedule)
        self._error = error
        self._crash = crash
        self._hang = hang
        self._sleep = sleep
        self._lock = threading.Lock()
        self._counts = [0] * len(self._schedule)
        self._same: Counter[Call] = Counter()
        self._late: list[tuple[int | None, Callable[[], object]]] = []

    def replay(self) -> tuple[Rule, ...]:
        """A schedule that does again, by numbers of calls, what this one did."""
        return tuple(
            replace(rule, when=At(number), verbs=frozenset(), keys="*") for number, rule in self.hits
        )

    def perform(
        self,
        call: Call,
        effect: Callable[[], T],
        *,
        torn: Callable[[], object] = lambda: None,
        spoiled: Callable[[Fault, T, random.Random], T] | None = None,
        again: Callable[[], object] | None = None,
        unanswered: Callable[[BaseException], T] | None = None,
    ) -> T:
        """Do what is done at ``call``: ``effect``, and what its fault has in its place, before or after it.

        ``torn`` has the effect by half; ``spoiled`` makes of an answer what a fault of reads does; ``again`` has the effect once more;
        ``unanswered`` finds out what a lost answer was, given the error that told of the loss.
        """
        rule, name = self._meet(call)
        if rule is None:
            return effect()
        error = (
            rule.error()
            if rule.error is not None
            else (_slow_down if rule.fault is Fault.THROTTLE else self._error)(call)
        )
        match rule.fault:
            case Fault.CRASH_BEFORE:
                self._end()
            case Fault.CRASH_AFTER:
                effect()
                self._end()
            case Fault.FLIP | Fault.TRUNCATE:
                assert spoiled is not None
                return spoiled(rule.fault, effect(), random.Random(f"{rule.bit} {name}"))
            case Fault.DUPLICATE:
                answer = effect()
                with self._lock:
                    self._late.append((len(self.calls) + rule.later if rule.later else None, again or effect))
                return answer
            case Fault.TEAR:
                torn()
            case Fault.HANG:
                self._sleep(self._hang)
            case Fault.FAIL_AFTER:
                effect()
                if call.verb == "create" and rule.error is None:
                    error = CommitUnknownError(
                        f"faulty://: it is not known whether {call.keys[0]!r} was created"
                    )
            case Fault.LOSE_ANSWER:
                effect()
                if unanswered is not None:
                    return unanswered(error)
        if isinstance(error, Crashed):
            self._end()
        raise error

    def deliver(self) -> int:
        """Let all duplicates arrive that are still on their way, also those of a process that crashed. Returns how many."""
        return self._arrive(None)

    def _arrive(self, now: int | None) -> int:
        with self._lock:
            due = [again for at, again in self._late if now is None or (at is not None and at <= now)]
            self._late = [(at, again) for at, again in self._late if again not in due]
        for again in due:
            # Whom it would tell has had an answer long ago.
            with contextlib.suppress(ObjckptError, OSError):
                again()
        return len(due)

    def _meet(self, call: Call) -> tuple[Rule | None, str]:
        """Record the call; the rule that hits it, and a name of the call that no other has."""
        with self._lock:
            self.calls.append(call)
            number = len(self.calls)
            self._same[call] += 1
            name = f"{call.verb} {' '.join(call.keys)} {self._same[call]}"
            hitting = None
            for position, rule in enumerate(self._schedule):
                if rule.about(call):
                    self._counts[position] += 1
                    if hitting is None and rule.when.hits(Moment(number, self._counts[position], name)):
                        hitting = rule
            if hitting is not None and not self.crashed:
                self.hits.append((number, hitting))
        if self.crashed:
            raise_crashed()
        self._arrive(number)
        return hitting, name

    def _end(self) -> NoReturn:
        self.crashed = True
        self._crash()


# ------------------------------------------------------------------ stores


class FaultyStore:
    """A store whose calls meet a schedule of faults. It is atomic as :class:`~objckpt.store.ObjectStore` says, whatever happens.

    So a torn ``put`` shows nothing, but leaves an upload that never ended, until it is aborted; a torn ``delete`` has taken half of its
    keys. A real store tries again until its deadline: a fault here is one that lasts so long, or of the kind that no other try mends.
    ``create`` without an answer goes the way of the stores over HTTP (``put_if_absent``). ``clock`` is the store's, in seconds; for the
    rest see :class:`Injector`.
    """

    def __init__(
        self,
        inner: ObjectStore,
        schedule: Iterable[Rule] = (),
        *,
        crash: Callable[[], NoReturn] = raise_crashed,
        hang: float = 120.0,
        sleep: Callable[[float], object] = time.sleep,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.inner = inner
        self.injector = Injector(schedule, crash=crash, hang=hang, sleep=sleep)
        self.torn: list[tuple[str, float]] = []  # keys of uploads that never ended, and when they began
        self._clock = clock

    @property
    def uri(self) -> str:
        return self.inner.uri

    @property
    def calls(self) -> list[Call]:
        """All calls that were made."""
        return self.injector.calls

    @property
    def crashed(self) -> bool:
        """Whether the process that this store stands for is gone."""
        return self.injector.crashed

    def put(self, key: str, data: Buffer, *, crc64: int | None = None) -> None:
        copy = bytes(data)  # a duplicate comes when the caller's buffer is another's
        self.injector.perform(
            Call("put", (key,)),
            lambda: self.inner.put(key, data, crc64=crc64),
            torn=lambda: self.torn.append((key, self._clock())),
            again=lambda: self.inner.put(key, copy, crc64=crc64),
        )

    def create(self, key: str, data: Buffer) -> bool:
        copy = bytes(data)
        return self.injector.perform(
            Call("create", (key,)),
            lambda: self.inner.create(key, data),
            again=lambda: self.inner.create(key, copy),
            unanswered=lambda error: self._find_out(key, copy, error),
        )

    def read(self, key: str, into: memoryview, offset: int = 0) -> int:
        def spoiled(fault: Fault, count: int, draw: random.Random) -> int:
            view = into.cast("B")
            if fault is Fault.FLIP and count:
                bit = draw.randrange(count * 8)
                view[bit // 8] ^= 1 << bit % 8
            elif fault is Fault.TRUNCATE:
                view[count // 2 :] = bytes(
                    len(view) - count // 2
                )  # nobody is to be right without looking at the count
                return count // 2
            return count

        effect = partial(self.inner.read, key, into, offset)
        return self.injector.perform(Call("read", (key,)), effect, spoiled=spoiled)

    def head(self, key: str) -> ObjectInfo:
        return self.injector.perform(Call("head", (key,)), lambda: self.inner.head(key))

    def list(self, prefix: str, start_after: str = "") -> Iterator[ObjectInfo]:
        found = self.injector.perform(
            Call("list", (prefix,)), lambda: [*self.inner.list(prefix, start_after)]
        )
        return iter(found)

    def delete(self, keys: Iterable[str]) -> None:
        wanted = list(keys)
        self.injector.perform(
            Call("delete", tuple(wanted)),
            lambda: self.inner.delete(wanted),
            torn=lambda: self.inner.delete(wanted[: len(wanted) // 2]),
        )

    def abort_uploads(self, prefix: str, older_than: float) -> int:
        return self.injector.perform(
            Call("abort_uploads", (prefix,)), lambda: self._abort_uploads(prefix, older_than)
        )

    def _abort_uploads(self, prefix: str, older_than: float) -> int:
        old = self._clock() - older_than
        aborted = [(key, began) for key, began in self.torn if key.startswith(prefix) and began < old]
        self.torn = [upload for upload in self.torn if upload not in aborted]
        return len(aborted) + self.inner.abort_uploads(prefix, older_than)

    def _find_out(self, key: str, data: bytes, lost: BaseException) -> bool:
        """What a ``create`` without an answer comes to, once its deadline is over."""

        def send() -> Answer:
            no_answer = NoAnswerError(str(lost), sent=True)
            raise StoreTransientError(str(lost), uri=self.uri, key=key) from no_answer

        def read(answer: Answer) -> bool:
            raise AssertionError(answer)

        def get(*, into: memoryview, skip: int, **_: object) -> Answer:
            return Answer(http.client.OK, http.client.HTTPMessage(), received=self.read(key, into, skip))

        def refused(answer: Answer) -> ObjckptError:
            raise AssertionError(answer)

        source = Source(self.uri, key, get, refused)
        return put_if_absent(source, memoryview(data), RetryPolicy(deadline=0.0), send, read)


# ------------------------------------------------------------------ the system under a spool

#: Calls that can fail or be the last of a process. ``close`` cannot be told from the end of what was called before it.
_SYSTEM: Final = frozenset({
    "fcntl", "flock", "fstat", "listdir", "memfd_create", "mmap", "open", "posix_fadvise", "posix_fallocate", "rename", "stat", "unlink",
})  # fmt: skip


class _Calls:
    """A module of the standard library whose calls meet the faults of an injector."""

    def __init__(self, module: ModuleType, injector: Injector) -> None:
        self._module = module
        self._injector = injector

    def __getattr__(self, name: str) -> Any:
        real = getattr(self._module, name)
        if name not in _SYSTEM:
            return real

        def call(*arguments: Any, **keywords: Any) -> Any:
            effect = partial(real, *arguments, **keywords)
            return self._injector.perform(_system_call(name, arguments), effect)

        return call


def _system_call(name: str, arguments: Sequence[Any]) -> Call:
    return Call(name, (next((a for a in arguments if isinstance(a, str)), ""),))


class _File:
    """An open file whose reads and writes meet the faults of an injector."""

    def __init__(self, file: Any, injector: Injector) -> None:
        self._file = file
        self._injector = injector

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def read(self) -> Any:
        def spoiled(fault: Fault, data: bytes, draw: random.Random) -> bytes:
            if fault is Fault.TRUNCATE or not data:
                return data[: len(data) // 2]
            bit = draw.randrange(len(data) * 8)
            return (int.from_bytes(data) ^ 1 << bit).to_bytes(len(data))

        return self._injector.perform(Call("read", ("",)), self._file.read, spoiled=spoiled)

    def write(self, data: bytes) -> Any:
        return self._injector.perform(
            Call("write", ("",)),
            lambda: self._file.write(data),
            torn=lambda: self._file.write(data[: len(data) // 2]),
        )


@contextlib.contextmanager
def faulty_spool(schedule: Iterable[Rule] = (), **options: Any) -> Iterator[Injector]:
    """While this lasts, what spools and slots of this process ask of the system meets a schedule of faults; EIO where it names no error.

    ``options`` are :class:`Injector`'s. The verbs are the names of the system's calls: ``open``, ``write``, ``rename``, ``mmap`` ...
    """
    injector = Injector(schedule, error=_input_output, **options)

    def open_file(*arguments: Any, **keywords: Any) -> _File:
        return _File(builtins.open(*arguments, **keywords), injector)  # noqa: PTH123 # a descriptor, closed by the caller's `with`

    with contextlib.ExitStack() as stack:
        for module in (spool, slot):
            for real in (os, mmap, fcntl):
                stack.enter_context(mock.patch.object(module, real.__name__, _Calls(real, injector)))
        stack.enter_context(mock.patch.object(spool, "open", open_file, create=True))
        yield injector
