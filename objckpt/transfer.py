"""The hot path: checksums of blocks, a shard up, parallel ranges down.

Invariants: a byte that is sent is checked against the checksum of its first reading; a byte that reaches a tensor was verified, block by
block, against its record; memory beyond the destination is one buffer of ``part_size`` for each connection.

Called by ``uploader`` (up) and ``checkpointer`` (down). The parts and connections of one upload are the store's own business.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait

from awscrt.checksums import combine_crc64nvme, crc64nvme

from objckpt.errors import CorruptCheckpointError, StoreNotFoundError
from objckpt.manifest import BLOCK_SIZE, DataObject
from objckpt.plan import ObjectRead, Request, requests
from objckpt.store import ObjectStore

log = logging.getLogger(__name__)

#: Bytes that are read at once to verify an object, or one block if that is more.
_VERIFY_BUFFER = 16 << 20

#: Bytes of a local copy of an object, by its key: fills a buffer from an offset on and returns the count; None if there is no copy.
Local = Callable[[DataObject, memoryview, int], int | None]


def block_checksums(data: memoryview, block_size: int = BLOCK_SIZE) -> tuple[int, ...]:
    """CRC-64/NVME of each block of ``data`` (bytes)."""
    return tuple(crc64nvme(data[at : at + block_size]) for at in range(0, len(data), block_size))


def whole_checksum(obj: DataObject) -> int:
    """CRC-64/NVME of a whole object, from those of its blocks."""
    crc = 0  # of no bytes
    for number, block in enumerate(obj.crc64):
        crc = int(combine_crc64nvme(crc, block, min(obj.block_size, obj.size - number * obj.block_size)))
    return crc


def upload(store: ObjectStore, obj: DataObject, data: memoryview) -> None:
    """Put a shard. The store refuses it if the bytes that it reads are no longer those that ``obj`` was made from."""
    store.put(obj.key, data[: obj.size], crc64=whole_checksum(obj))


def verify(obj: DataObject, begin: int, data: memoryview, where: str) -> None:
    """Check whole blocks of an object, from byte ``begin`` (a multiple of the block size) on."""
    size = obj.block_size
    for at in range(0, len(data), size):
        number = (begin + at) // size
        found = crc64nvme(data[at : at + size])
        if found != obj.crc64[number]:
            raise CorruptCheckpointError(
                f"{where}: block {number} (bytes {begin + at} to {begin + min(at + size, len(data))}) of {obj.key} is damaged: "
                f"CRC-64 {found:016x}, not {obj.crc64[number]:016x}"
            )


class _Buffers(threading.local):
    """One bounce buffer a thread, for requests whose bytes go to several tensors."""

    data: bytearray | None = None

    def take(self, size: int) -> memoryview:
        if self.data is None or len(self.data) < size:
            self.data = bytearray(size)
        return memoryview(self.data)[:size]


def fetch(
    store: ObjectStore,
    reads: Iterable[ObjectRead],
    targets: Mapping[str, memoryview],
    *,
    part_size: int,
    concurrency: int,
    local: Local | None = None,
) -> int:
    """Fill ``targets`` (writable bytes, by name) from the objects, or from local copies of them. Returns the bytes read from the store.

    Raises :class:`CorruptCheckpointError` if a block does not verify; the targets then hold rubbish.
    """
    buffers = _Buffers()
    todo: list[Request] = []
    sizes: dict[str, int] = {}
    for read in reads:
        todo += requests(read, part_size)
        for s in read.segments:
            sizes[s.name] = max(sizes.get(s.name, 0), s.at + s.end - s.begin)
    for name, size in sizes.items():
        if size != len(targets[name]):
            raise CorruptCheckpointError(
                f"{store.uri}: the record of tensor {name!r} gives {size} bytes, its shape and dtype {len(targets[name])}"
            )

    def one(request: Request) -> int:
        whole = request.segments[0]
        direct = len(request.segments) == 1 and (whole.begin, whole.end) == (request.begin, request.end)
        size = request.end - request.begin
        into = targets[whole.name][whole.at : whole.at + size] if direct else buffers.take(size)
        count = _fill(store, request, into, local)
        if not direct:
            for s in request.segments:
                begin, length = s.begin - request.begin, s.end - s.begin
                targets[s.name][s.at : s.at + length] = into[begin : begin + length]
        return count

    with ThreadPoolExecutor(concurrency, thread_name_prefix="objckpt-fetch") as pool:
        futures = [pool.submit(one, request) for request in todo]
        _, pending = wait(futures, return_when=FIRST_EXCEPTION)
        for future in pending:
            future.cancel()
        return sum(future.result() for future in futures if not future.cancelled())


def verify_object(store: ObjectStore, obj: DataObject, done: Callable[[int], None]) -> None:
    """Read a whole object and verify it block by block, through one buffer. ``done`` is told of bytes that were verified.

    Raises :class:`CorruptCheckpointError`.
    """
    step = max(1, _VERIFY_BUFFER // obj.block_size) * obj.block_size
    buffer = memoryview(bytearray(min(step, obj.size)))
    for begin in range(0, obj.size, step):
        end = min(begin + step, obj.size)
        done(_fill(store, Request(obj, begin, end, ()), buffer[: end - begin], None))


def _fill(store: ObjectStore, request: Request, into: memoryview, local: Local | None) -> int:
    """Fill and verify one request. Returns the bytes that came from the store."""
    obj = request.obj
    if local is not None and local(obj, into, request.begin) == len(into):
        try:
            verify(obj, request.begin, into, "local copy")
        except CorruptCheckpointError as error:
            log.warning("%s; reading it from the bucket instead", error)
        else:
            return 0
    try:
        return _read(store, request, into)
    except CorruptCheckpointError as error:
        log.warning("%s; reading it once more, as the damage may have come on the way", error)
    return _read(store, request, into)


def _read(store: ObjectStore, request: Request, into: memoryview) -> int:
    """Read one request from the store and verify it."""
    obj, where = request.obj, f"{store.uri}/{request.obj.key}"
    try:
        count = store.read(obj.key, into, request.begin)
    except StoreNotFoundError as error:
        raise CorruptCheckpointError(
            f"{where} is missing though a checkpoint names it: somebody deleted it"
        ) from error
    if count != len(into):
        raise CorruptCheckpointError(
            f"{where} is cut short: it ends at byte {request.begin + count}, not {obj.size}"
        )
    verify(obj, request.begin, into, where)
    return count
