"""A notice that this machine goes: a signal to one rank becomes one answer on all ranks.

Invariants: ``preempted`` changes only inside ``exchange``, at the same step on every rank; ranks agree by one asynchronous reduction that
is begun at one step and read at a later one, and every k-th step shares one, k chosen so that it costs under 1 % of a step; none is
outstanding after the final one.

Called by ``checkpointer``.
"""

from __future__ import annotations

import logging
import signal
import threading
import time
from types import FrameType
from typing import Any

from objckpt.errors import WorldError
from objckpt.world import Pending, World

log = logging.getLogger(__name__)

_PERIOD = 100_000  # microseconds of training that one reduction (about 1 ms) may be shared by
_MOST_STEPS = 100  # between two reductions


class Notices:
    """What the ranks tell each other between steps: a notice, or that a rank was fenced. ``timeout`` (seconds): for the other ranks."""

    def __init__(self, world: World, timeout: float) -> None:
        self._world = world
        self._timeout = timeout
        self._told = False  # this rank, by a signal
        self.preempted = False  # all ranks know
        self.fenced = False  # likewise
        self._handlers: dict[int, Any] = {}
        self._outstanding: Pending | None = None
        self._calls = 0
        self._every = 1
        self._last = 0.0

    def watch(self) -> None:
        """From now on, SIGTERM and SIGUSR1 are notices. Handlers that were there are called too."""
        if self._handlers or threading.current_thread() is not threading.main_thread():
            return
        for number in (signal.SIGTERM, signal.SIGUSR1):
            self._handlers[number] = signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._told = True
        earlier = self._handlers.get(number)
        if callable(earlier):
            earlier(number, frame)

    def exchange(self, *, fenced: bool, final: bool) -> None:
        """Called once a step by every rank; ``fenced``: this rank was."""
        now = time.perf_counter()
        took = int((now - self._last) * 1e6) if self._last else 0
        self._last = now
        self._calls += 1
        if self._outstanding is not None and (final or self._calls % self._every == 0):
            self._read()
        if self._outstanding is None and not final:
            self._outstanding = self._world.maximum([int(self._told), int(fenced), took], self._timeout)
            if self._world.size == 1:
                self._read()

    def _read(self) -> None:
        assert self._outstanding is not None
        told, fenced, slowest = self._outstanding.result()
        self._outstanding = None
        if slowest:
            self._every = max(1, min(_MOST_STEPS, _PERIOD // slowest))
        self.fenced = bool(fenced)
        self.preempted = self.preempted or bool(told)

    def close(self, *, settle: bool) -> None:
        """Put the handlers back. ``settle``: read what is outstanding, since all ranks are here."""
        # Python sets handlers in the main thread only. One that is left in place sets a flag that nobody reads, and passes the signal on.
        if threading.current_thread() is threading.main_thread():
            for number, handler in self._handlers.items():
                if handler is not None:  # None: not set from Python, so it cannot be put back from here
                    signal.signal(number, handler)
            self._handlers.clear()
        if settle and self._outstanding is not None:
            try:
                self._read()
            except WorldError as error:  # what is to be closed still has to be
                log.warning("closing without the other ranks: %s", error)
