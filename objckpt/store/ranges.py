"""One object's bytes by ranged GETs, into the caller's memory.

Invariants: a body that breaks off is gone on with from where it stopped, so that no byte is asked for twice; whatever a server makes of a
range (the range, less of it, the whole object), a byte lands where it belongs and is counted once; a count is short only where the
object ends.

Called by ``s3``, ``gcs`` and ``put_if_absent``.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol

from objckpt.errors import StoreError, StoreNotFoundError, StoreTransientError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from objckpt.errors import ObjckptError
    from objckpt.store.http import Answer
    from objckpt.store.retry import RetryPolicy

_log = logging.getLogger("objckpt.store")

_OK: Final = 200
_PARTIAL: Final = 206
_RANGE_NOT_SATISFIABLE: Final = 416


class Get(Protocol):
    """One GET of an object, not retried. For ``into`` and ``skip`` see :class:`~objckpt.store.http.Request`."""

    def __call__(self, *, headers: Mapping[str, str], into: memoryview, skip: int) -> Answer:
        """The answer, of any status."""


@dataclass(frozen=True, slots=True)
class Source:
    """An object to be read: ``key`` of the store ``uri``, as messages name it. ``refused`` gives the error that an unwelcome answer is;
    it is called by the thread that asked.
    """

    uri: str
    key: str
    get: Get
    refused: Callable[[Answer], ObjckptError]

    def read(self, retry: RetryPolicy, into: memoryview, offset: int) -> int:
        """Fill ``into`` (bytes) from ``offset`` on; for the count see :meth:`ObjectStore.read`."""
        done, more = 0, True

        def attempt() -> tuple[int, bool]:
            return self.read_once(into[done:], offset + done)

        while more and done < len(into):
            # Each round brought bytes, so it is a success, and the rest has a deadline of its own.
            step, more = retry.run(attempt)
            done += step
        return done

    def read_back(self, size: int) -> memoryview | None:
        """What the key holds, up to one byte more than ``size``; None if it is absent. Not retried."""
        into = memoryview(bytearray(size + 1))
        count, more = 0, True
        try:
            while more and count < len(into):
                step, more = self.read_once(into[count:], count)
                count += step
        except StoreNotFoundError as error:
            if not error.key:  # no bucket
                raise
            return None
        return into[:count]

    def read_once(self, into: memoryview, offset: int) -> tuple[int, bool]:
        """What one request brings: how many bytes (0 only at the end), and whether the object goes on behind them. Not retried."""
        headers = {"Range": f"bytes={offset}-{offset + len(into) - 1}"}
        answer = self.get(headers=headers, into=into, skip=offset)
        if answer.status == _RANGE_NOT_SATISFIABLE:
            return 0, False
        if answer.status not in {_OK, _PARTIAL}:
            raise self.refused(answer)
        first, size = answer.extent()
        if first != (0 if answer.is_whole else offset):
            text = f"{self.uri}: {self.key!r}: asked for bytes from {offset} on, the store sent those from {first} on"
            raise StoreError(
                f"{text}: it does not understand ranges, and cannot be used", uri=self.uri, key=self.key
            )
        goes_on = offset + answer.received < size if size is not None else not answer.is_whole
        if not answer.received and (goes_on or answer.failure is not None):
            text = (
                f"{self.uri}: {self.key!r}: the answer broke off before its first byte ({answer.failure!r})"
            )
            raise StoreTransientError(text, uri=self.uri, key=self.key) from answer.failure
        if answer.failure is not None:
            _log.debug(
                "%s: the answer broke off after %d bytes: going on from there", self.key, answer.received
            )
        return answer.received, goes_on or answer.failure is not None
