"""``create`` over requests whose answers can get lost.

Invariants: True and False are only said when the store has said so, or when the key was read back; what is not known is told as
:class:`CommitUnknownError` and never guessed.

Called by ``s3`` and ``gcs``, and by ``testing.worlds``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, TypeVar

from objckpt.errors import CommitUnknownError, ObjckptError, StoreTransientError
from objckpt.store.http import NoAnswerError

if TYPE_CHECKING:
    from collections.abc import Callable

    from objckpt.store.retry import RetryPolicy

_A = TypeVar("_A")


class Source(Protocol):
    """What is read back: :class:`~objckpt.store.ranges.Source`, or a test's."""

    @property
    def uri(self) -> str:
        """Of the store, for messages."""

    @property
    def key(self) -> str:
        """Of the object."""

    def read_back(self, size: int) -> memoryview | None:
        """What the key holds, up to one byte more than ``size``; None if it is absent. Not retried."""


def put_if_absent(
    source: Source,
    data: memoryview,
    retry: RetryPolicy,
    send: Callable[[], _A],
    read: Callable[[_A], bool | StoreTransientError],
) -> bool:
    """``data`` (bytes) under the key of ``source``, if it is absent; for the result see :meth:`ObjectStore.create`.

    ``send`` sends it once, on the condition that nothing is there. ``read`` says what the answer means: True if that was done, False if
    the key is said to be taken, or the error of a refusal that may hide a success; it raises what had no effect.
    """
    unknown: StoreTransientError | None = None

    def attempt() -> bool:
        nonlocal unknown
        lost: StoreTransientError | None = None
        try:
            answer = send()
        except StoreTransientError as error:
            if not (isinstance(error.__cause__, NoAnswerError) and error.__cause__.sent):
                raise
            lost = error
        else:
            told = read(answer)
            if told is True:
                return True
            if isinstance(told, StoreTransientError):
                # A 5xx may come from a proxy in front of a store that did what it was told.
                lost = told
        unknown = unknown or lost
        held = source.read_back(len(data))
        if held is not None and held != data:
            held = source.read_back(len(data))  # a bit may have flipped on the way, and "lost" is final
        if held is not None:
            return held == data
        # Refused (a race with a delete makes some stores say 404), or not answered, and yet absent: a delete may run, or the request
        # is still on its way.
        text = f"{source.uri}: {source.key!r} was not created, and is not there either"
        raise lost or StoreTransientError(text, uri=source.uri, key=source.key)

    try:
        return retry.run(attempt)
    except ObjckptError as error:
        if unknown is None:
            raise
        raise CommitUnknownError(
            f"{source.uri}: it is not known whether {source.key!r} was created: a request had no answer, and reading the key back "
            f"did not tell ({error}). Read the key when the store is back; do not assume either"
        ) from unknown
