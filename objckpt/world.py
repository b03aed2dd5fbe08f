"""Rank, size, and the agreements of ranks: alone, or through torch.distributed's own store.

Invariants: an agreement gives every rank the same decision or the same error; ranks that do not come are named, and the next agreement
still works; no collective of a process group is held over I/O. Rank 0 decides, the others wait for its decision: two round trips,
requests in proportion to the ranks.

Called by ``checkpointer``.
"""

from __future__ import annotations

import itertools
import json
import logging
import os
import time
from collections import deque
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore  # type: ignore[attr-defined] # torch's stubs leave it out
from torch.distributed.distributed_c10d import _get_default_store  # the job's own store has no public name

from objckpt import errors
from objckpt.errors import ConfigError, ObjckptError, WorldError
from objckpt.manifest import JSON

log = logging.getLogger(__name__)

#: From the values of all ranks, in order of rank, to what holds for all. Runs on rank 0; an ObjckptError rises on every rank.
Rule = Callable[[list[Any]], JSON]
#: Rank 0's decision reaches the others this many seconds after its own time-out at the latest.
_SLACK = 10.0
_LOOK_PERIOD = 1.0  # seconds of waiting after which it is looked whether a rank has left
_LEFT = "left"
_GLOO_SHARE = 0.25  # of a time-out is gloo's: those whose gloo has failed at once wait longer than others may hang in theirs


class Pending(Protocol):
    """A reduction on its way."""

    def result(self) -> list[int]:
        """The maximum over ranks of each number; waits for all ranks."""


class World(Protocol):
    """The ranks of a job as the Checkpointer sees them."""

    rank: int
    size: int

    def decide(self, value: JSON, rule: Rule, timeout: float) -> Any:
        """Every rank gives a value and gets ``rule`` of all values. :class:`WorldError` names the ranks that did not come."""

    def leave(self, reason: str) -> None:
        """Tell the others that this rank comes to no agreement any more, so that they do not wait for it."""

    def post(self, key: str, value: JSON) -> None:
        """Leave a value for the others. From any thread."""

    def peek(self, key: str) -> Any:
        """What was posted under ``key``; None so far. Does not wait."""

    def maximum(self, numbers: list[int], timeout: float) -> Pending:
        """Begin an element-wise maximum over ranks. Every rank calls it, in the same order, and reads one before it begins the next.

        Where it cannot be had within ``timeout`` seconds of reading it, :class:`WorldError` names the ranks that did not come.
        """


class _Known:
    def __init__(self, numbers: list[int]) -> None:
        self._numbers = numbers

    def result(self) -> list[int]:
        return self._numbers


class Alone:
    """A job of one rank, with or without a process group."""

    rank = 0
    size = 1

    def __init__(self) -> None:
        self._posted: dict[str, JSON] = {}

    def decide(self, value: JSON, rule: Rule, timeout: float) -> Any:  # noqa: ARG002 # one rank waits for nobody
        """See :class:`World`."""
        return rule([value])

    def leave(self, reason: str) -> None:
        """See :class:`World`."""

    def post(self, key: str, value: JSON) -> None:
        """See :class:`World`."""
        self._posted[key] = value

    def peek(self, key: str) -> Any:
        """See :class:`World`."""
        return self._posted.get(key)

    def maximum(self, numbers: list[int], timeout: float) -> Pending:  # noqa: ARG002 # likewise
        """See :class:`World`."""
        return _Known(numbers)


class _Reduction:
    """A maximum by gloo and, where that fails, by the store: with the same numbers, so that all ranks read the same from either."""

    def __init__(self, world: Ranks, number: int, numbers: list[int], timeout: float) -> None:
        self._world = world
        self._number = number
        self._timeout = timeout
        self._tensor = torch.tensor(numbers, dtype=torch.int64)
        self._work = world.reduce(self._tensor, timeout * _GLOO_SHARE)

    def result(self) -> list[int]:
        if self._work is not None:
            try:
                self._work.wait()
            except RuntimeError as error:  # gloo's: it has no class of its own
                self._world.lose_gloo(error)
            else:
                return [int(n) for n in self._tensor.tolist()]
        return self._world.maximum_by_store(self._number, self._timeout * (1 - _GLOO_SHARE))


class Ranks:
    """The default process group's ranks, over its store."""

    # Every rank opens its worlds in the same order, so the number is the same on all.
    _opened = itertools.count()

    def __init__(self) -> None:
        self.rank = dist.get_rank()
        self.size = dist.get_world_size()
        self._store = PrefixStore(f"objckpt/{next(Ranks._opened)}", _get_default_store())
        # A client that waits lets no other thread in, so what is posted has one of its own.
        self._posts: Any = self._store.clone()  # type: ignore[attr-defined] # torch's stubs leave it out
        self._sequence = 0
        self._group: Any = None
        self._without_gloo = False
        self._reductions = itertools.count()
        #: What this rank gave to the last two reductions: no rank is further ahead of another.
        self._given: deque[tuple[int, list[int]]] = deque(maxlen=2)

    def decide(self, value: JSON, rule: Rule, timeout: float) -> Any:
        """See :class:`World`."""
        try:
            return self._decide(value, rule, timeout)
        except dist.DistError as error:
            raise _unanswered(error) from error

    def _decide(self, value: JSON, rule: Rule, timeout: float) -> Any:
        number = self._sequence
        self._sequence += 1
        answer_key = f"{number}/decision"
        if self.rank == 0:
            answer: dict[str, Any] = self._rule(number, value, rule, timeout)
            self._store.set(answer_key, json.dumps(answer))
            self._forget(number - 2)
        else:
            self._store.set(f"{number}/{self.rank}", json.dumps(value))
            if not self._wait([answer_key], timeout + _SLACK):
                raise WorldError(
                    f"rank 0 did not come to an agreement of all ranks within {timeout + _SLACK:.0f} s: look at its log"
                )
            answer = json.loads(self._store.get(answer_key))
        if "error" in answer:
            raise errors.named(answer["error"], answer["message"])
        return answer["decision"]

    def _rule(self, number: int, value: JSON, rule: Rule, timeout: float) -> dict[str, Any]:
        keys = [f"{number}/{rank}" for rank in range(1, self.size)]
        try:
            self._gather(keys, range(1, self.size), timeout)
            values = [value, *(json.loads(v) for v in self._store.multi_get(keys))]
            return {"decision": rule(values)}
        except ObjckptError as error:
            return {"error": type(error).__name__, "message": str(error)}
        except Exception as error:  # whatever it is, the other ranks must not wait for the decision
            self._store.set(
                f"{number}/decision", json.dumps({"error": "ObjckptError", "message": f"rank 0: {error!r}"})
            )
            raise

    def _gather(self, keys: list[str], ranks: Iterable[int], timeout: float) -> None:
        """Wait for the keys of ``ranks``, in that order."""
        if not self._wait(keys, timeout):
            missing = [rank for rank, key in zip(ranks, keys, strict=True) if not self._store.check([key])]
            raise WorldError(
                f"rank(s) {', '.join(map(str, missing))} did not come to an agreement of all {self.size} ranks within "
                f"{timeout:.0f} s: look at their logs; every rank must call restore, save and due at the same steps"
            )

    def _wait(self, keys: list[str], timeout: float) -> bool:
        if not keys:
            return True
        deadline = time.monotonic() + timeout
        while True:
            began = time.monotonic()
            left = deadline - began
            period = max(0.001, min(left, _LOOK_PERIOD))
            try:
                self._store.wait(keys, timedelta(seconds=period))
            except RuntimeError:  # TCPStore's time-out is a DistStoreError, FileStore's is no more than this
                if time.monotonic() - began < period / 2:
                    raise  # no time-out: the store itself failed
                if self._store.check([_LEFT]):
                    raise WorldError(self._store.get(_LEFT).decode()) from None
                if left <= _LOOK_PERIOD:
                    return False
            else:
                return True

    def leave(self, reason: str) -> None:
        """See :class:`World`."""
        self._posts.set(_LEFT, f"rank {self.rank} left the training loop with an error: {reason}")

    def _forget(self, number: int) -> None:
        if number >= 0:
            for key in (f"{number}/decision", *(f"{number}/{rank}" for rank in range(1, self.size))):
                self._store.delete_key(key)

    def post(self, key: str, value: JSON) -> None:
        """See :class:`World`."""
        self._posts.set(f"posted/{key}", json.dumps(value))

    def peek(self, key: str) -> Any:
        """See :class:`World`."""
        name = f"posted/{key}"
        return json.loads(self._posts.get(name)) if self._posts.check([name]) else None

    def maximum(self, numbers: list[int], timeout: float) -> Pending:
        """See :class:`World`."""
        number = next(self._reductions)
        self._given.append((number, numbers))
        if self._without_gloo:
            self._give(number, numbers)
            self._store.delete_key(f"maximum/{number - 2}/{self.rank}")
        return _Reduction(self, number, numbers, timeout)

    def reduce(self, tensor: torch.Tensor, timeout: float) -> Any:
        """Begin the reduction by gloo; None if that does not work, or did not before."""
        if self._without_gloo:
            return None
        try:
            if self._group is None:
                self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout))
            return dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=self._group, async_op=True)
        except RuntimeError as error:
            self.lose_gloo(error)
            return None

    def lose_gloo(self, error: RuntimeError) -> None:
        """From now on, reduce through the store. Whatever another rank may still wait for is given there."""
        log.warning("gloo failed; ranks agree through the process group's store from now on (%s)", error)
        self._without_gloo = True
        for number, numbers in self._given:
            self._give(number, numbers)

    def _give(self, number: int, numbers: list[int]) -> None:
        self._store.set(f"maximum/{number}/{self.rank}", json.dumps(numbers))

    def maximum_by_store(self, number: int, timeout: float) -> list[int]:
        """What gloo would have said of reduction ``number``."""
        keys = [f"maximum/{number}/{rank}" for rank in range(self.size)]
        try:
            self._gather(keys, range(self.size), timeout)
            return [
                max(numbers) for numbers in zip(*map(json.loads, self._store.multi_get(keys)), strict=True)
            ]
        except dist.DistError as error:
            raise _unanswered(error) from error


def _unanswered(error: Exception) -> WorldError:
    return WorldError(
        f"the process group's store does not answer: the launcher or rank 0 is gone, so look at their logs ({error})"
    )


def current() -> World:
    """The world of this process. :class:`ConfigError` if it is one of several that were never joined."""
    if dist.is_available() and dist.is_initialized():
        return Ranks() if dist.get_world_size() > 1 else Alone()
    size = os.environ.get("WORLD_SIZE", "1")
    if size != "1":
        raise ConfigError(
            f"WORLD_SIZE is {size} but there is no process group: call torch.distributed.init_process_group() first, or each rank "
            f"would start an attempt of its own and fence the others"
        )
    return Alone()
