"""Broken versions of the protocol, each with the bounds that must find it out: what the interleavings are worth."""

from __future__ import annotations

import inspect
import itertools
import secrets
import textwrap
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from types import ModuleType
from unittest import mock

import bounds
import stories
from protocol import Odd
from stories import S

from objckpt import commit, retention
from objckpt.commit import Run
from objckpt.testing import worlds
from objckpt.testing.worlds import durable


@dataclass(frozen=True)
class Broken:
    """``breaks`` makes the code so; one of ``bounds`` must tell."""

    name: str
    breaks: Callable[[], AbstractContextManager[object]]
    bounds: tuple[str, ...]

    def found_out(self, seed: int = 0, count: int = 3_000) -> str:
        """By which bound, and what was wrong: by ``count`` schedules drawn from ``seed``, else by all. AssertionError if by none."""
        for tried in (lambda b: b.sample(seed, count), lambda b: b.explore()):
            for name in self.bounds:
                with self.breaks():
                    try:
                        tried(bounds.BOUNDS[name])
                    except AssertionError as error:
                        return f"{name}: {error}"
        raise AssertionError(f"{self.name} was not found out by {', '.join(self.bounds)}")


@contextmanager
def rewritten(owner: type | ModuleType, name: str, old: str, new: str) -> Iterator[None]:
    """A function of ``owner`` with ``new`` in place of ``old``, which stands in it once."""
    function = getattr(owner, name)
    source = textwrap.dedent(inspect.getsource(function))
    assert source.count(old) == 1, f"{name} has {source.count(old)} times {old!r}"
    module = inspect.getmodule(function)
    assert module is not None
    made: dict[str, object] = {}
    exec(compile(source.replace(old, new), f"broken {name}", "exec"), vars(module), made)  # its own source
    with mock.patch.object(owner, name, made[name]):
        yield


# ------------------------------------------------------------------ what ranks write


@contextmanager
def ranks_write(write: Callable[..., object]) -> Iterator[None]:
    """Uploaders make a save durable by ``write``."""
    with mock.patch.object(stories, "durable", write):
        yield


def _with_a_clock() -> AbstractContextManager[None]:
    """Two uploaders of one save do not write the same."""
    clock = itertools.count(1)
    return ranks_write(lambda *args, **more: durable(*args, created_at=float(next(clock)), **more))


def _put_with_a_clock() -> AbstractContextManager[None]:
    clock = itertools.count(1)

    class Putting(Odd):
        def create(self, key, data):
            self.store.put(key, data)
            return True

    return ranks_write(
        lambda store, *args, **more: durable(Putting(store), *args, created_at=float(next(clock)), **more)
    )


@contextmanager
def _named_by_a_counter() -> Iterator[None]:
    """The n-th save that a rank makes durable, whatever its step: after one that failed, ranks mean different ones."""
    rank = stories.Story.rank

    def counted(story, name, saves, **more):
        named = [S(1, 11 + count) for count in range(len(saves))]
        steps = dict(zip(named, (float(save.step) for save in saves), strict=True))

        def write(store, run, save, *args, **others):
            return durable(store, run, save, *args, created_at=steps[save], **others)

        of_name[name] = write
        return rank(story, name, named, **more)

    of_name: dict[str, Callable[..., object]] = {}

    def by_task(store, *args, **more):
        write = of_name.get(threading.current_thread().name.removeprefix("task-"), durable)
        return write(store, *args, **more)

    with ranks_write(by_task), mock.patch.object(stories.Story, "rank", counted):
        yield


# ------------------------------------------------------------------ the list


def _won(body: str) -> AbstractContextManager[None]:
    return rewritten(
        Run,
        "_won",
        "    if not self.store.create(version_key(version.number), encode_version(version)):\n        return False\n",
        textwrap.indent(body, "    "),
    )


@contextmanager
def _older_attempts_rolled_forward() -> Iterator[None]:
    with (
        rewritten(Run, "_complete", "records_prefix(now.attempt)", '"records/"'),
        rewritten(
            commit, "settled", "    if now.attempt != save.attempt:\n        return Outcome.FENCED\n", ""
        ),
    ):
        yield


@contextmanager
def _retired_rolled_forward() -> Iterator[None]:
    with (
        rewritten(Run, "_complete", " and (newest is None or save.step > newest)", ""),
        rewritten(
            commit,
            "settled",
            "    return Outcome.SUPERSEDED if newest is not None and newest >= save.step else None",
            "    return None",
        ),
    ):
        yield


ALL = [
    Broken(
        "no nonce in a start",
        lambda: mock.patch.object(secrets, "token_hex", return_value="0" * 16),
        ("two-equal-starts",),
    ),
    Broken("a clock in a record", _with_a_clock, ("uploader-started-again",)),
    Broken("records put, not created, with a clock", _put_with_a_clock, ("uploader-started-again",)),
    Broken("a save named by a counter", _named_by_a_counter, ("rank-fails-a-save",)),
    Broken(
        "versions put, not created",
        lambda: _won("self.store.put(version_key(version.number), encode_version(version))\n"),
        ("commit-and-start", "two-starts"),
    ),
    Broken(
        "a look instead of a create",
        lambda: _won(
            "if self._highest(version.number) == version.number:\n    return False\n"
            "self.store.put(version_key(version.number), encode_version(version))\n"
        ),
        ("commit-and-start", "two-starts"),
    ),
    Broken(
        "a win without the list after it",
        lambda: rewritten(Run, "_won", "self._highest(version.number) == version.number", "True"),
        ("pruned-number",),
    ),
    Broken(
        "an outcome told without the list after it",
        lambda: rewritten(
            Run, "settled", "outcome is None or self._highest(now.number) == now.number", "True"
        ),
        ("pruned-number",),
    ),
    Broken(
        "saves of older attempts rolled forward", _older_attempts_rolled_forward, ("save-and-two-starts",)
    ),
    Broken("retired saves rolled forward", _retired_rolled_forward, ("frozen-reaper",)),
    Broken(
        "a start that rolls nothing forward",
        lambda: rewritten(Run, "start", "self.roll_forward(now)", "now"),
        ("commit-and-start",),
    ),
    Broken(
        "a start that does not ask again after its roll-forward",
        lambda: rewritten(Run, "start", "rolled.attempt != now.attempt", "False"),
        ("three-starts",),
    ),
    Broken(
        "a commit after another attempt has started",
        lambda: rewritten(
            commit, "settled", "    if now.attempt != save.attempt:\n        return Outcome.FENCED\n", ""
        ),
        ("save-and-start",),
    ),
    Broken(
        "fenced before it is asked whether it is committed",
        lambda: rewritten(
            commit,
            "settled",
            "    if now.entry(save) is not None:\n        return Outcome.COMMITTED  # even if another attempt has started since\n"
            "    if now.attempt != save.attempt:\n        return Outcome.FENCED\n",
            "    if now.attempt != save.attempt:\n        return Outcome.FENCED\n"
            "    if now.entry(save) is not None:\n        return Outcome.COMMITTED\n",
        ),
        ("commit-and-start",),
    ),
    Broken(
        "launches that were superseded may start",
        lambda: rewritten(
            Run, "_admit", "launch in now.superseded and takeover != now.attempt", "launch in ()"
        ),
        ("three-starts",),
    ),
    Broken(
        "a job that was fenced releases the run",
        lambda: rewritten(Run, "finish", "now.attempt != attempt", "False"),
        ("finish-and-start",),
    ),
    Broken(
        "a lost answer taken for a success",
        lambda: rewritten(worlds, "put_if_absent", "return held == data", "return True"),
        ("commit-and-start", "two-starts"),
    ),
    Broken(
        "a lost answer taken for a refusal",
        lambda: rewritten(worlds, "put_if_absent", "return held == data", "return False"),
        ("uploader-started-again",),
    ),
    Broken(
        "a deleter that does not list again",
        lambda: rewritten(
            retention,
            "_light",
            "not versions or versions[-1].key != version_key(newest.number)",
            "not versions",
        ),
        ("deleter-and-pruned-number",),
    ),
    Broken(
        "a reaper that takes a newer attempt's data",
        lambda: rewritten(retention, "dead", "save in live or save.attempt > attempt", "save in live"),
        ("frozen-reaper",),
    ),
    Broken(
        "a reaper that takes what may still be in flight",
        lambda: rewritten(
            retention, "dead", "return newest is not None and save.step <= newest", "return True"
        ),
        ("frozen-reaper", "frozen-gc"),
    ),
    Broken(
        "a base that is not in kept",
        lambda: rewritten(Run, "_append", "any(now.entry(base) is None for base in index.bases)", "False"),
        ("base-and-retention",),
    ),
    Broken(
        "a pruner that frees the highest number",
        lambda: rewritten(
            retention, "_outlived", "for older, _ in young", "for older in (versions if young else ())"
        ),
        ("frozen-zombie",),
    ),
]
