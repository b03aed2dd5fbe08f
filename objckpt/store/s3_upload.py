"""One object in many parts: the multipart upload of ``put``.

Invariants: nothing is visible before the completion, and the completion is only asked for when the CRC of what was sent is the
expected one; every part and the whole carry their CRC-64/NVME, so that the store checks both (where it knows them: else each
part carries an MD5, and an object with a part that the store did not confirm is read back); an upload that fails is aborted once
none of its parts is on its way any more; the answer of a completion that got lost is found out, never guessed.

Called by ``s3``.
"""

from __future__ import annotations

import logging
import threading
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from awscrt.checksums import combine_crc64nvme, crc64nvme

from objckpt.errors import CorruptCheckpointError, StoreError, StoreTransientError
from objckpt.store.s3_session import S3Session, UploadGoneError, encode_crc64

if TYPE_CHECKING:
    from collections.abc import Callable

    from objckpt.store.retry import RetryPolicy

_log = logging.getLogger("objckpt.store")

_OK = 200


@dataclass(frozen=True, slots=True)
class _Part:
    number: int
    size: int
    etag: str
    crc64: int
    confirmed: bool


def mismatch(uri: str, key: str, expected: int, found: int) -> CorruptCheckpointError:
    """The error of a ``put`` whose bytes are not those that were staged."""
    return CorruptCheckpointError(
        f"{uri}: {key!r}: the bytes in memory have CRC-64 {found:016x}, not {expected:016x} as when they were staged: they changed "
        "since (bad memory, or a write into the slot). Nothing was stored: save again"
    )


def not_held(uri: str, key: str) -> CorruptCheckpointError:
    """The error of a ``put`` that the store acknowledged, and did not confirm, and whose bytes do not come back."""
    return CorruptCheckpointError(
        f"{uri}: {key!r}: the store took the object and gives other bytes back: save again, and do not trust this store"
    )


@dataclass(frozen=True, slots=True)
class MultipartUpload:
    """How to put ``data`` under ``key`` (the bucket's) in parts of ``part_size`` bytes over ``connections`` connections.

    ``holds(size, crc64)`` says whether the key now holds such an object: the way out after a lost answer.
    """

    session: S3Session
    retry: RetryPolicy
    key: str
    data: memoryview
    part_size: int
    connections: int
    holds: Callable[[int, int], bool]

    def run(self, crc64: int | None) -> None:
        """Upload all of it. ``crc64`` is what ``data`` should have; None if that is not known."""
        upload_id = self._begin()
        try:
            parts = self._send_all(upload_id)
            whole = self._combined(parts, crc64)
            self._complete(upload_id, parts, whole)
        except BaseException:  # a Ctrl-C too leaves no parts that are billed for ever
            self._abort(upload_id)
            raise
        if not all(part.confirmed for part in parts) and not self.holds(len(self.data), whole):
            raise not_held(self.session.uri, self.session.relative(self.key))

    def _combined(self, parts: list[_Part], expected: int | None) -> int:
        whole = parts[0].crc64
        for part in parts[1:]:
            whole = combine_crc64nvme(whole, part.crc64, part.size)
        if expected is not None and whole != expected:
            raise mismatch(self.session.uri, self.session.relative(self.key), expected, whole)
        return whole

    def _begin(self) -> str:
        def attempt() -> str:
            crc = self.session.sends_crc
            checksum: Any = {"ChecksumAlgorithm": "CRC64NVME", "ChecksumType": "FULL_OBJECT"} if crc else {}
            with self.session.errors(self.key, crc=crc):
                answer = self.session.client.create_multipart_upload(
                    Bucket=self.session.bucket,
                    Key=self.key,
                    ContentType="application/octet-stream",
                    **checksum,
                )
            return answer["UploadId"]

        return self.retry.run(attempt)

    def _send_all(self, upload_id: str) -> list[_Part]:
        failed = threading.Event()
        count = -(-len(self.data) // self.part_size)
        threads = ThreadPoolExecutor(min(self.connections, count), thread_name_prefix="objckpt-part")
        try:
            futures = [
                threads.submit(self._send, upload_id, number, failed) for number in range(1, count + 1)
            ]
            done, waiting = wait(futures, return_when=FIRST_EXCEPTION)
            if waiting:
                next(future for future in done if future.exception()).result()
            return [future.result() for future in futures]
        finally:
            failed.set()
            # Waits for the parts on their way: one that came after the abort would lie there, and be paid, for ever.
            threads.shutdown(cancel_futures=True)

    def _send(self, upload_id: str, number: int, failed: threading.Event) -> _Part:
        offset = (number - 1) * self.part_size
        body = self.data[offset : offset + self.part_size]
        crc64 = crc64nvme(body)
        query = f"partNumber={number}&uploadId={quote(upload_id, safe='-_.~')}"

        def attempt() -> tuple[str, bool]:
            checksum = self.session.checksum(body, crc64)
            answer = self.session.request("PUT", self.key, query=query, headers=checksum, body=body)
            if answer.status != _OK:
                raise self.session.refused(answer, self.key)
            etag = answer.headers.get("ETag")
            if etag is None:
                text = (
                    f"{self.session.uri}: the store took part {number} of {self.key!r} without naming an ETag"
                )
                raise StoreTransientError(text, uri=self.session.uri, key=self.session.relative(self.key))
            return etag, self.session.confirms(answer, checksum)

        etag, confirmed = self.retry.run(attempt, abandoned=failed)
        return _Part(number, len(body), etag, crc64, confirmed)

    def _complete(self, upload_id: str, parts: list[_Part], crc64: int) -> None:
        def attempt() -> None:
            crc = self.session.sends_crc
            listed: Any = [{"PartNumber": part.number, "ETag": part.etag} for part in parts]
            whole: Any = {}
            if crc:
                for entry, part in zip(listed, parts, strict=True):
                    entry["ChecksumCRC64NVME"] = encode_crc64(part.crc64)
                whole = {
                    "ChecksumCRC64NVME": encode_crc64(crc64),
                    "ChecksumType": "FULL_OBJECT",
                    "MpuObjectSize": len(self.data),
                }
            with self.session.errors(self.key, crc=crc):
                self.session.client.complete_multipart_upload(
                    Bucket=self.session.bucket,
                    Key=self.key,
                    UploadId=upload_id,
                    MultipartUpload={"Parts": listed},
                    **whole,
                )

        try:
            self.retry.run(attempt)
        except (StoreTransientError, UploadGoneError) as error:
            # An earlier try may have completed it with its answer lost; then the store has forgotten the upload.
            if self.holds(len(self.data), crc64):
                return
            if isinstance(error, UploadGoneError):
                text = f"{error} (its completion was tried {error.attempts} times)"
                raise StoreTransientError(
                    text, uri=error.uri, key=error.key, attempts=error.attempts
                ) from error
            raise

    def _abort(self, upload_id: str) -> None:
        def attempt() -> None:
            with self.session.errors(self.key):
                self.session.client.abort_multipart_upload(
                    Bucket=self.session.bucket, Key=self.key, UploadId=upload_id
                )

        try:
            self.retry.run(attempt)
        except UploadGoneError:
            _log.debug("the upload of %s is gone already", self.key)
        except StoreError as error:
            # The failure that led here is the one to be told.
            _log.warning(
                "an unfinished upload stays behind until abort_uploads, as its abort failed: %s", error
            )
