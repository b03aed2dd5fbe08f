"""How an upload in parts ends, well or badly, on S3 as on GCS.

Invariants: the lost answer of a completion is found out, never guessed; a clean-up that fails hides no failure that led to it.

Called by ``s3_upload``, ``gcs_upload``, ``s3`` and ``gcs``.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, TypeVar

from objckpt.errors import StoreError, StoreTransientError
from objckpt.store.refusals import UploadGoneError

if TYPE_CHECKING:
    from collections.abc import Callable

    from objckpt.store.retry import RetryPolicy

_T = TypeVar("_T")

_log = logging.getLogger("objckpt.store")


def complete(retry: RetryPolicy, finish: Callable[[], _T], held: Callable[[], _T | None]) -> _T:
    """What ``finish``, which makes the parts one object and is retried here, returns. If no answer of it came through, ``held`` is asked
    what the key holds: None if it is not that object.
    """
    try:
        return retry.run(finish)
    except (StoreTransientError, UploadGoneError) as error:
        # An earlier try may have done it, with its answer lost; then the store has forgotten the upload.
        found = held()
        if found is not None:
            return found
        if isinstance(error, UploadGoneError):
            text = f"{error} (its completion was tried {error.attempts} times)"
            raise StoreTransientError(text, uri=error.uri, key=error.key, attempts=error.attempts) from error
        raise


def abort(retry: RetryPolicy, forget: Callable[[], None], key: str) -> bool:
    """Have the store forget an upload and its parts by ``forget``, which is retried here. False if it is gone already."""
    try:
        retry.run(forget)
    except UploadGoneError:
        _log.debug("the upload of %s is gone already", key)
        return False
    return True


def abort_failed(retry: RetryPolicy, forget: Callable[[], None], key: str) -> None:
    """Likewise, after a failure, which is the one to be told: another one is only logged."""
    try:
        abort(retry, forget, key)
    except StoreError as error:
        _log.warning("an unfinished upload stays behind until abort_uploads, as its abort failed: %s", error)
