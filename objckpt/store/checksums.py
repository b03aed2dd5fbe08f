"""CRCs of objects: as S3 and GCS write them, of parts joined, and what it means if the bytes in memory have another one.

Invariant: what is joined is the CRC of the parts' bytes one after the other, without a second look at them.

Called by the modules of ``s3`` and ``gcs``.
"""

from __future__ import annotations

import base64
from typing import TYPE_CHECKING

from objckpt.errors import CorruptCheckpointError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable


def encode_crc64(crc64: int) -> str:
    """A CRC-64/NVME as S3 has it: 8 bytes, big endian, in base64."""
    return base64.b64encode(crc64.to_bytes(8, "big")).decode("ascii")


def encode_crc32c(crc32c: int) -> str:
    """A CRC-32C as GCS has it: 4 bytes, big endian, in base64."""
    return base64.b64encode(crc32c.to_bytes(4, "big")).decode("ascii")


def decode_crc(text: str) -> int:
    """The other way round, of both."""
    return int.from_bytes(base64.b64decode(text), "big")


def joined(combine: Callable[[int, int, int], int], parts: Iterable[tuple[int, int]]) -> int:
    """The CRC of ``parts`` (the CRC and the size of each) together; ``combine`` is awscrt's for that kind of CRC."""
    whole = 0
    for crc, size in parts:
        whole = combine(whole, crc, size)
    return whole


def check_unchanged(where: str, staged: int | None, found: int) -> None:
    """:class:`CorruptCheckpointError` if the bytes that are to be put to ``where`` have another CRC-64/NVME than they had when they were
    ``staged``; None if that is not known.
    """
    if staged is not None and found != staged:
        raise CorruptCheckpointError(
            f"{where}: the bytes in memory have CRC-64 {found:016x}, not {staged:016x} as when they were staged: they changed since (bad "
            "memory, or a write into the slot). Nothing was stored: save again"
        )
