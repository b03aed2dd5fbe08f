"""Images of a checkpoint that still lie in slots of this node, for a restore that need not ask the bucket.

Invariant: a local copy is used only if its journalled checksums are those of the record, and its bytes are verified like any others.

Called by ``checkpointer``.
"""

from __future__ import annotations

import itertools
import logging
import os
from pathlib import Path
from typing import Self

from objckpt.errors import ObjckptError
from objckpt.manifest import DataObject
from objckpt.spool import hashed, scan

log = logging.getLogger(__name__)


class LocalCopies:
    """All images below some spool roots, open for reading, so that they stay readable even when their spool is removed."""

    def __init__(self, roots: list[Path]) -> None:
        self._files: dict[DataObject, int] = {}
        for spool in itertools.chain.from_iterable(map(scan, roots)):
            try:
                for journal in spool.journals():
                    crc64 = spool.checksums(journal.save)
                    if crc64 is not None and len(crc64) == len(journal.record.objects[0].crc64):
                        (obj,) = hashed(journal, crc64).objects
                        self._files.setdefault(obj, spool.open_slot(journal.slot))
            except (ObjckptError, OSError) as error:
                log.warning("%s is not used for the restore: %s", spool.path, error)
            finally:
                spool.close()

    def read(self, obj: DataObject, into: memoryview, offset: int) -> int | None:
        """Fill ``into`` from ``offset`` of the local copy of ``obj``; None if there is none."""
        file = self._files.get(obj)
        if file is None:
            return None
        count = 0
        while count < len(into):
            got = os.preadv(file, [into[count:]], offset + count)
            if got == 0:
                break
            count += got
        return count

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for file in self._files.values():
            os.close(file)
        self._files.clear()
