"""Many requests at a time, and an end of all of them at the first failure.

Invariants: never more than so many are under way; when it returns or raises, none is.

Called by ``s3_upload``, ``gcs_upload`` and ``gcs``.
"""

from __future__ import annotations

import threading
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_T = TypeVar("_T")
_U = TypeVar("_U")


def in_window(act: Callable[[_T, threading.Event], _U], items: Sequence[_T], connections: int) -> list[_U]:
    """``act`` of each item, ``connections`` at a time, the results in their order. The first failure sets the event that all others are
    given, waits for them, and is raised.
    """
    failed = threading.Event()
    threads = ThreadPoolExecutor(
        max(1, min(connections, len(items))), thread_name_prefix="objckpt-connection"
    )
    try:
        futures = [threads.submit(act, item, failed) for item in items]
        done, waiting = wait(futures, return_when=FIRST_EXCEPTION)
        if waiting:
            next(future for future in done if future.exception()).result()
        return [future.result() for future in futures]
    finally:
        failed.set()
        # Waits for those on their way: a part that came after the clean-up would lie there, and be paid, for ever.
        threads.shutdown(cancel_futures=True)
