"""One object in many parts: the multipart upload of ``put``.

Invariants: nothing is visible before the completion, and the completion is only asked for when the CRC of what was sent is the
expected one; every part and the whole carry their CRC-64/NVME, so that the store checks both (where it knows them: else each
part carries an MD5, and an object with a part that the store did not confirm is read back); an upload that fails is aborted once
none of its parts is on its way any more; the answer of a completion that got lost is found out, never guessed.

Called by ``s3``.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from awscrt.checksums import combine_crc64nvme, crc64nvme

from objckpt.errors import CorruptCheckpointError, StoreTransientError
from objckpt.store.checksums import check_unchanged, encode_crc64, joined
from objckpt.store.s3_session import S3Session
from objckpt.store.uploads import abort_failed, complete
from objckpt.store.window import in_window

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable

    from objckpt.store.retry import RetryPolicy

_OK = 200


@dataclass(frozen=True, slots=True)
class _Part:
    number: int
    size: int
    etag: str
    crc64: int
    confirmed: bool


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
            whole = joined(combine_crc64nvme, [(part.crc64, part.size) for part in parts])
            check_unchanged(self.session.place.where(self.key), crc64, whole)
            self._complete(upload_id, parts, whole)
        except BaseException:  # a Ctrl-C too leaves no parts that are billed for ever
            self._abort(upload_id)
            raise
        if not all(part.confirmed for part in parts) and not self.holds(len(self.data), whole):
            raise not_held(self.session.uri, self.session.place.relative(self.key))

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
        count = -(-len(self.data) // self.part_size)
        return in_window(partial(self._send, upload_id), range(1, count + 1), self.connections)

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
                raise StoreTransientError(
                    text, uri=self.session.uri, key=self.session.place.relative(self.key)
                )
            return etag, self.session.confirms(answer, checksum)

        etag, confirmed = self.retry.run(attempt, abandoned=failed)
        return _Part(number, len(body), etag, crc64, confirmed)

    def _complete(self, upload_id: str, parts: list[_Part], crc64: int) -> None:
        def attempt() -> bool:
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
            return True

        complete(self.retry, attempt, lambda: self.holds(len(self.data), crc64) or None)

    def _abort(self, upload_id: str) -> None:
        abort_failed(self.retry, partial(abort_upload, self.session, self.key, upload_id), self.key)


def abort_upload(session: S3Session, key: str, upload_id: str) -> None:
    """Forget a multipart upload and its parts, not retried. :class:`UploadGoneError` if there is none."""
    with session.errors(key):
        session.client.abort_multipart_upload(Bucket=session.bucket, Key=key, UploadId=upload_id)
