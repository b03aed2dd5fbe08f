"""Orders in which the tasks of a :class:`~objckpt.testing.worlds.World` make their calls: all of them, or some.

Invariants: ``every_schedule`` leaves out a schedule only if another one differs from it by nothing but the order of calls that do not
touch each other; ``every_state`` leaves out, besides, what goes on from a state that was gone on from before.

Called by tests, beside ``worlds``.
"""

from __future__ import annotations

import contextlib
import itertools
import random
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from typing import Final

from objckpt.testing.worlds import Call, Choose, Moment

#: How often, in one call out of so many, the tasks of a walk get other paces.
_CHANGE_OF_PACE: Final = 0.05
#: Of a fault among the calls that wait.
_FAULTY: Final = 0.05


class _CutError(Exception):
    """Nothing new can come of going on from here."""


@dataclass(slots=True)
class _Fork:
    """A moment of a schedule: who could run, who is still to be tried, who need not be, and who runs in this one."""

    waiting: dict[str, Call]
    todo: list[str]
    asleep: dict[str, Call]
    chosen: str = ""


@dataclass(slots=True)
class Explored:
    """How much :func:`every_state` has seen: different states, schedules that were played (many of them cut), calls in the longest."""

    states: int = 0
    schedules: int = 0
    calls: int = 0


def every_schedule(play: Callable[[Choose], object], limit: int, *, longest: int | None = None) -> int:
    """Call ``play`` with every order of calls that can make a difference. Returns how many there were.

    ``play`` makes a :class:`World` with what it is given, and checks what came of it; it must do the same each time. AssertionError
    if there are more than ``limit``: a bound that is met silently would prove nothing. Tasks that can hinder each other for ever
    need ``longest``: a schedule ends after so many calls, its effects checked but not its outcome.
    """
    count = 0
    for ended in _orders(play, _fork, longest):
        count += ended
        assert count <= limit, f"more than {limit} schedules"
    return count


def every_state(play: Callable[[Choose], object], limit: int, *, longest: int | None = None) -> Explored:
    """As :func:`every_schedule`, but what goes on from a state is played once, however it was reached: for what has too many schedules.

    ``play`` must check each change when it is made, and each result when a task ends (:attr:`World.effect`, :attr:`World.ended`): a
    schedule that comes to a known state is cut there. What it remembers from one to the next belongs to the state
    (:attr:`World.remembered`). AssertionError if there are more than ``limit`` states. With ``longest``, what follows a state is seen as
    far as it went when the state was first met.
    """
    known: dict[Hashable, frozenset[str]] = {}
    explored = Explored()

    def fork(before: _Fork | None, moment: Moment) -> _Fork:
        new = _fork(before, moment)
        state = moment.state()
        slept = known.get(state)
        if slept is not None:
            # What was not asleep then has been tried. Of the rest, only what is awake now is new.
            new.todo = [name for name in new.todo if name in slept]
            new.asleep = {name: call for name, call in new.asleep.items() if name in slept}
            if not new.todo:
                raise _CutError
        known[state] = frozenset(new.asleep)
        assert len(known) <= limit, f"more than {limit} states"
        return new

    for _ in _orders(play, fork, longest, explored):
        explored.schedules += 1
    explored.states = len(known)
    return explored


def _orders(
    play: Callable[[Choose], object],
    fork: Callable[[_Fork | None, Moment], _Fork],
    longest: int | None,
    explored: Explored | None = None,
) -> Iterator[bool]:
    """Play one schedule after the other, each up to where it differs from the one before like that. Yields whether it ended uncut."""
    path: list[_Fork] = []
    while True:
        depth = 0

        def choose(moment: Moment) -> str:
            nonlocal depth
            if depth == longest:
                raise _CutError
            if depth == len(path):
                path.append(fork(path[-1] if path else None, moment))
                path[-1].chosen = path[-1].todo.pop(0)
            depth += 1
            return path[depth - 1].chosen

        ended = False
        with contextlib.suppress(_CutError):
            play(choose)
            ended = True
        if explored is not None:
            explored.calls = max(explored.calls, depth)
        yield ended
        # Backwards to the last moment at which someone else could have run.
        while path:
            last = path[-1]
            last.asleep[last.chosen] = last.waiting[last.chosen]
            if last.todo:
                last.chosen = last.todo.pop(0)
                break
            path.pop()
        if not path:
            return


def _fork(before: _Fork | None, moment: Moment) -> _Fork:
    """The next moment. Who could have run before, and does not care about what did, was tried there ("sleep sets")."""
    asleep: dict[str, Call] = {}
    if before is not None:
        ran = before.chosen, before.waiting[before.chosen]
        asleep = {name: call for name, call in before.asleep.items() if not _order_matters((name, call), ran)}
    todo = [name for name in moment if name not in asleep]
    if not todo:
        raise _CutError
    return _Fork(dict(moment), todo, asleep)


def _order_matters(one: tuple[str, Call], other: tuple[str, Call]) -> bool:
    (name, call), (other_name, other_call) = one, other
    of_one_task = name.partition(":")[0] == other_name.partition(":")[0]
    both_faults = ":" in name and ":" in other_name  # of which there may be only so many
    return of_one_task or both_faults or call.touches(other_call)


def walk(seed: int, longest: int | None = None) -> Choose:
    """An order drawn at random from ``seed``, of up to ``longest`` calls. Each task's pace is drawn too: some are frozen for long."""
    draw = random.Random(seed)
    paces: dict[str, float] = {}
    calls = itertools.count()

    def choose(waiting: Moment) -> str | None:
        if next(calls) == longest:
            return None
        if draw.random() < _CHANGE_OF_PACE:
            paces.clear()
        for name in waiting:
            paces.setdefault(name, _FAULTY if ":" in name else draw.choice([1e-3, 1.0, 1.0]))
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

        def choose(waiting: Moment, calls: int = calls) -> str:
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
