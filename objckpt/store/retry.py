"""The one retry loop of the package, and the one place that says what is worth another try.

Invariants: only what may work later is tried again (throttling, 5xx, resets, time-outs, truncated bodies), and never past
the deadline; a refusal (403, 404, a bad checksum) goes up at once. Clients' own retries are off, so that nothing multiplies.
What is raised at the end says how often it was tried and is chained to the *first* cause, which tells more than the last.

Called by the stores (``s3``), and by nobody above them.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, TypeVar

import tenacity

from objckpt.errors import StoreError, StoreTransientError

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable

_T = TypeVar("_T")

_log = logging.getLogger("objckpt.store")

#: Refusals that ask for patience, whatever status they come with (some stores send SlowDown with 400, or inside a 200).
_TRANSIENT_CODES: Final = frozenset({
    "BandwidthLimitExceeded",
    "IncompleteBody",
    "InternalError",
    "InternalServerError",
    "OperationAborted",
    "PriorRequestNotComplete",
    "ProvisionedThroughputExceededException",
    "RequestLimitExceeded",
    "RequestThrottled",
    "RequestThrottledException",
    "RequestTimeout",
    "RequestTimeoutException",
    "ServiceUnavailable",
    "SlowDown",
    "ThrottledException",
    "Throttling",
    "ThrottlingException",
    "TooManyRequests",
    "TooManyRequestsException",
    "XMinioServerNotInitialized",
})  # fmt: skip

_THROTTLING_CODES: Final = frozenset(
    {"RequestLimitExceeded", "SlowDown", "ThrottlingException", "TooManyRequests"}
)

_REQUEST_TIMEOUT: Final = 408
_TOO_MANY_REQUESTS: Final = 429
_SERVER_ERRORS: Final = 500
_PERMANENT_SERVER_ERRORS: Final = frozenset({501, 505})
#: A redirect of a bucket whose name has not spread yet: it goes away by itself.
_TEMPORARY_REDIRECT: Final = 307


class _Successes:
    """How many requests of this process have succeeded: where it does not grow, nothing moves."""

    def __init__(self) -> None:
        self.count = 0


_successes: Final = _Successes()


def successes() -> int:
    """How many requests of this process have succeeded so far, roughly (threads are not kept apart): it grows while bytes move."""
    return _successes.count


def is_transient(status: int, code: str = "") -> bool:
    """Whether a refusal with this HTTP status and this error code (from the body; "" if it has none) may go away by itself."""
    if code in _TRANSIENT_CODES or status in {_REQUEST_TIMEOUT, _TOO_MANY_REQUESTS, _TEMPORARY_REDIRECT}:
        return True
    return status >= _SERVER_ERRORS and status not in _PERMANENT_SERVER_ERRORS


def is_throttling(status: int, code: str = "") -> bool:
    """Whether the refusal says for certain that the request was turned away before it had an effect."""
    return status == _TOO_MANY_REQUESTS or code in _THROTTLING_CODES


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """How long one request is tried.

    ``deadline``: no attempt begins later than this many seconds after the first. ``first_wait`` and ``longest_wait`` (seconds)
    bound the back-off: a random time up to ``first_wait * 2**n`` after the n-th failure, so that a thousand ranks do not come
    back together.
    """

    deadline: float = 120.0
    first_wait: float = 0.2
    longest_wait: float = 20.0

    def run(self, attempt: Callable[[], _T], *, abandoned: threading.Event | None = None) -> _T:
        """Call ``attempt`` until it returns, or raises anything but :class:`StoreTransientError`, or the deadline comes.

        ``abandoned``, once set, ends the back-off: the sister of this request has failed for good. Raises what ``attempt``
        raised, with ``attempts`` set.
        """
        begun = time.monotonic()
        first: StoreTransientError | None = None
        count = 0

        def counted() -> _T:
            nonlocal first, count
            count += 1
            try:
                answer = attempt()
            except StoreTransientError as error:
                first = first or error
                raise
            _successes.count += 1
            return answer

        def say(state: tenacity.RetryCallState) -> None:
            _log.debug("attempt %d failed, again in %.2f s: %s", count, state.upcoming_sleep, first)

        stop: tenacity.stop.stop_base = tenacity.stop_before_delay(self.deadline)
        if abandoned is not None:
            stop = stop | tenacity.stop_when_event_set(abandoned)
        retrying = tenacity.Retrying(
            retry=tenacity.retry_if_exception_type(StoreTransientError),
            stop=stop,
            wait=tenacity.wait_random_exponential(multiplier=self.first_wait, max=self.longest_wait),
            sleep=time.sleep if abandoned is None else tenacity.sleep_using_event(abandoned),
            before_sleep=say,
            reraise=True,
        )
        try:
            return retrying(counted)
        except StoreTransientError as last:
            assert first is not None
            message = f"{last} (gave up after {count} attempts in {time.monotonic() - begun:.1f} s; it may work later)"
            raise StoreTransientError(message, uri=last.uri, key=last.key, attempts=count) from (
                first.__cause__ or first
            )
        except StoreError as error:
            error.attempts = count
            raise
