"""S3 and what speaks like it, as an :class:`~objckpt.store.ObjectStore`.

Invariants: ``create`` is one plain PUT with ``If-None-Match: *`` and never multipart (a conditional completion has more than
one winner on some stores); an answer that got lost is found out by reading the key back; the bytes' path neither copies nor
hashes beyond one CRC; an object's bytes are checked by the store against a CRC that was taken of them in our memory.

Called by ``objckpt.store.open_store``.
"""

from __future__ import annotations

import logging
import threading
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from awscrt.checksums import crc64nvme

from objckpt.errors import (
    ConfigError,
    ObjckptError,
    StoreError,
    StoreNotFoundError,
    StorePermissionError,
    StoreTransientError,
    StoreUnsuitableError,
)
from objckpt.store import Buffer, ObjectInfo
from objckpt.store.checksums import check_unchanged, decode_crc
from objckpt.store.http import http_date
from objckpt.store.keys import bucket_key, split_bucket_uri
from objckpt.store.put_if_absent import put_if_absent
from objckpt.store.ranges import Source
from objckpt.store.retry import RetryPolicy, is_transient
from objckpt.store.s3_headers import NOT_ON_EXPRESS, is_directory_bucket
from objckpt.store.s3_options import S3Options, part_size_for
from objckpt.store.uploads import abort

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from mypy_boto3_s3.type_defs import ListMultipartUploadsOutputTypeDef, ListObjectsV2OutputTypeDef

    from objckpt.store.http import Answer
    from objckpt.store.s3_session import S3Session

_log = logging.getLogger("objckpt.store")

_OK: Final = 200
_NOT_IMPLEMENTED: Final = 501
_UNEXPLAINED: Final = frozenset({301, 400, 403, 404})
#: How stores say that a key is taken: 412 as they should, 409 to the loser of a race, 304 by old MinIO.
_TAKEN: Final = frozenset({304, 409, 412})

#: S3's own limits of one request.
_PAGE: Final = 1000
_CRC_STEP: Final = 8 << 20
_CRC_HEADER: Final = "x-amz-checksum-crc64nvme"
_PUT_HEADERS: Final = {"Content-Type": "application/octet-stream"}
_SHOWN_FAILURES: Final = 5


class S3Store:
    """An S3 bucket below a prefix. Cheap to make: boto3 is loaded, and credentials are looked for, by the first verb.

    ``uri`` is ``s3://bucket[/prefix]``. :class:`ConfigError` if it, or an option, cannot be.
    """

    def __init__(self, uri: str, options: S3Options | None = None) -> None:
        self._bucket, self._prefix = split_bucket_uri(
            uri, "S3", ("s3", "s3a"), "key, secret and endpoint_url"
        )
        self._root = f"{self._prefix}/" if self._prefix else ""
        self._uri = f"s3://{self._bucket}/{self._prefix}".rstrip("/")
        self._options = options or S3Options()
        if is_directory_bucket(self._bucket):
            _check_express(self._uri, self._options)
        self._retry = RetryPolicy(deadline=self._options.deadline)
        self._lock = threading.Lock()
        self._opened: S3Session | None = None

    def __repr__(self) -> str:
        return f"S3Store({self._uri!r})"

    @property
    def uri(self) -> str:
        """``s3://bucket/prefix``."""
        return self._uri

    @property
    def _session(self) -> S3Session:
        if self._opened is None:
            with self._lock:
                if self._opened is None:
                    from objckpt.store.s3_session import S3Session  # noqa: PLC0415 # it loads boto3, which takes its time

                    self._opened = S3Session(self._uri, self._bucket, self._root, self._options)
        return self._opened

    def _full(self, key: str) -> str:
        """The bucket's key. :class:`StoreError` for one that no bucket takes."""
        return bucket_key(self._uri, self._root, key)

    def _full_to_write(self, key: str) -> str:
        self._refuse_anonymous(key)
        return self._full(key)

    def _refuse_anonymous(self, key: str) -> None:
        if self._options.anon:
            text = (
                f"{self._uri}: anon=True sends no credentials, and so reads only: give credentials to write"
            )
            raise StorePermissionError(text, uri=self._uri, key=key)

    def _relative(self, full: str) -> str:
        return full.removeprefix(self._root)

    def put(self, key: str, data: Buffer, *, crc64: int | None = None) -> None:
        """See :meth:`ObjectStore.put`. In one request up to the part size, in parts above it."""
        from objckpt.store import s3_upload  # noqa: PLC0415 # it loads boto3

        full, view = self._full_to_write(key), memoryview(data).cast("B")
        part_size = part_size_for(len(view), self._options.part_size)
        if len(view) > part_size:
            s3_upload.MultipartUpload(
                session=self._session,
                retry=self._retry,
                key=full,
                data=view,
                part_size=part_size,
                connections=self._options.connections,
                holds=lambda size, found: self._holds(key, size, found),
            ).run(crc64)
            return
        found = crc64nvme(view)
        check_unchanged(f"{self._uri}/{key}", crc64, found)

        def attempt() -> bool:
            checksum = self._session.checksum(view, found)
            answer = self._session.request("PUT", full, headers=_PUT_HEADERS | checksum, body=view)
            if answer.status != _OK:
                raise self._session.refused(answer, full)
            return self._session.confirms(answer, checksum)

        if not self._retry.run(attempt) and not self._holds(key, len(view), found):
            raise s3_upload.not_held(self._uri, key)

    def create(self, key: str, data: Buffer) -> bool:
        """See :meth:`ObjectStore.create`."""
        full, view = self._full_to_write(key), memoryview(data).cast("B")
        crc64 = crc64nvme(view)

        def send() -> Answer:
            headers = {**_PUT_HEADERS, **self._session.checksum(view, crc64), "If-None-Match": "*"}
            return self._session.request("PUT", full, headers=headers, body=view)

        def read(answer: Answer) -> bool | StoreTransientError:
            if answer.status == _OK or answer.status in _TAKEN:
                return answer.status == _OK
            refused = self._session.refused(answer, full)
            if isinstance(refused, StoreNotFoundError) and refused.key:
                # Not of the bucket: some say so in a race with a delete.
                return False
            if isinstance(refused, StoreTransientError):
                if self._session.had_no_effect(answer):
                    raise refused
                return refused
            if answer.status == _NOT_IMPLEMENTED:
                raise _no_conditions(self._uri, key, refused)
            raise refused

        return put_if_absent(self._source(full), view, self._retry, send, read)

    def read(self, key: str, into: memoryview, offset: int = 0) -> int:
        """See :meth:`ObjectStore.read`."""
        full, view = self._full(key), into.cast("B")
        if not len(view):
            self.head(key)
            return 0
        return self._source(full).read(self._retry, view, offset)

    def _source(self, full: str) -> Source:
        def get(*, headers: Mapping[str, str], into: memoryview, skip: int) -> Answer:
            return self._session.request("GET", full, headers=headers, into=into, skip=skip)

        def refused(answer: Answer) -> ObjckptError:
            return self._session.refused(answer, full)

        return Source(self._uri, self._relative(full), get, refused)

    def head(self, key: str) -> ObjectInfo:
        """See :meth:`ObjectStore.head`."""
        full = self._full(key)

        def attempt() -> ObjectInfo:
            answer = self._session.request("HEAD", full, headers={"x-amz-checksum-mode": "ENABLED"})
            if answer.status in _UNEXPLAINED:
                # A HEAD has no body to say which it is: the key or the bucket missing, expired credentials, another region.
                self._source(full).read_once(memoryview(bytearray(1)), 0)
                raise StoreTransientError(f"{self._uri}: {key!r} appeared just now", uri=self._uri, key=key)
            if answer.status != _OK:
                raise self._session.refused(answer, full)
            return ObjectInfo(
                key=key,
                size=int(answer.headers["Content-Length"]),
                modified=http_date(answer.headers["Last-Modified"]),
                crc64=None if (crc64 := answer.headers.get(_CRC_HEADER)) is None else decode_crc(crc64),
            )

        return self._retry.run(attempt)

    def list(self, prefix: str, start_after: str = "") -> Iterator[ObjectInfo]:
        """See :meth:`ObjectStore.list`.

        Others than S3 are listed to the end before the first key is yielded (some 300 bytes of memory a key): their order is not
        always that of code points. SeaweedFS goes by folders, and puts ``a/b`` before ``a-b``; S3 Express has no order.
        """
        pages = self._list_pages(prefix, start_after)
        if not self._lists_in_order:
            pages = iter([[info for page in pages for info in page]])
        for page in pages:
            yield from sorted((info for info in page if info.key > start_after), key=lambda info: info.key)

    @property
    def _lists_in_order(self) -> bool:
        """Whether lists come in the order of code points, and understand where to start."""
        return self._session.is_aws and not self._session.is_express

    def _folder(self, full_prefix: str) -> str:
        """What to ask a list for, so that all keys below ``full_prefix`` are in it: S3 Express knows whole folders only."""
        return full_prefix[: full_prefix.rfind("/") + 1] if self._session.is_express else full_prefix

    def _list_pages(self, prefix: str, start_after: str) -> Iterator[Sequence[ObjectInfo]]:
        token: str | None = None
        while True:
            page = self._retry.run(partial(self._list_page, prefix, start_after, token))
            yield [
                ObjectInfo(self._relative(entry["Key"]), entry["Size"], entry["LastModified"].timestamp())
                for entry in page.get("Contents", ())
                if entry["Key"].startswith(self._root + prefix) and entry["Key"] != self._root
            ]
            if not page.get("IsTruncated"):
                return
            token = page.get("NextContinuationToken")
            if not token:
                text = f"{self._uri}: the listing of {prefix!r} was cut without saying how to go on"
                raise StoreError(f"{text}: the store cannot be used", uri=self._uri, key=prefix)

    def _list_page(self, prefix: str, start_after: str, token: str | None) -> ListObjectsV2OutputTypeDef:
        session = self._session
        arguments: dict[str, Any] = {}
        if start_after and self._lists_in_order:
            # Others than S3 may leave out more: after `d/4` SeaweedFS does not show `d/4/x`.
            arguments["StartAfter"] = self._root + start_after
        if token is not None:
            arguments["ContinuationToken"] = token
        with session.errors(self._root + prefix):
            # boto3 asks for URL-encoded keys and decodes them: XML has no room for some characters.
            return session.client.list_objects_v2(
                Bucket=self._bucket, Prefix=self._folder(self._root + prefix), MaxKeys=_PAGE, **arguments
            )

    def delete(self, keys: Iterable[str]) -> None:
        """See :meth:`ObjectStore.delete`. :class:`StoreError` names the keys that stayed; the others are gone."""
        batch: list[str] = []
        for key in keys:
            batch.append(self._full_to_write(key))
            if len(batch) == _PAGE:
                self._delete_batch(batch)
                batch = []
        if batch:
            self._delete_batch(batch)

    def _delete_batch(self, full_keys: Sequence[str]) -> None:
        waiting = list(full_keys)
        failed: dict[str, str] = {}

        def attempt() -> None:
            nonlocal waiting
            session = self._session
            with session.errors(waiting[0]):
                answer = session.client.delete_objects(
                    Bucket=self._bucket,
                    Delete={"Objects": [{"Key": full} for full in waiting], "Quiet": True},
                )
            again = []
            for error in answer.get("Errors", ()):
                full, code = error.get("Key", ""), error.get("Code", "")
                if is_transient(0, code):
                    again.append(full)
                elif code not in {"NoSuchKey", "NoSuchVersion"}:
                    failed[full] = f"{code} {error.get('Message', '')}".strip()
            waiting = again
            if waiting:
                text = f"{self._uri}: {len(waiting)} keys could not be deleted yet, {waiting[0]!r} among them"
                raise StoreTransientError(text, uri=self._uri, key=self._relative(waiting[0]))

        self._retry.run(attempt)
        if failed:
            shown = "; ".join(
                f"{full!r}: {reason}" for full, reason in list(failed.items())[:_SHOWN_FAILURES]
            )
            kind = (
                StorePermissionError
                if all("AccessDenied" in reason for reason in failed.values())
                else StoreError
            )
            text = f"{self._uri}: {len(failed)} of {len(full_keys)} keys were not deleted ({shown})"
            raise kind(
                f"{text}: let the policy allow s3:DeleteObject there",
                uri=self._uri,
                key=self._relative(next(iter(failed))),
            )

    def abort_uploads(self, prefix: str, older_than: float) -> int:
        """See :meth:`ObjectStore.abort_uploads`."""
        from objckpt.store.s3_upload import abort_upload  # noqa: PLC0415 # it loads boto3

        self._refuse_anonymous("")
        old: list[tuple[str, str]] = []
        markers: dict[str, str] = {}
        while True:
            page = self._retry.run(partial(self._list_uploads_page, self._root + prefix, markers))
            now = http_date(page["ResponseMetadata"]["HTTPHeaders"]["date"])
            old += [
                (upload["Key"], upload["UploadId"])
                for upload in page.get("Uploads", ())
                if upload["Key"].startswith(self._root + prefix)
                and now - upload["Initiated"].timestamp() > older_than
            ]
            if not page.get("IsTruncated"):
                break
            markers = {
                "KeyMarker": page.get("NextKeyMarker", ""),
                "UploadIdMarker": page.get("NextUploadIdMarker", ""),
            }

        return sum(
            abort(self._retry, partial(abort_upload, self._session, full, upload_id), full)
            for full, upload_id in old
        )

    def _list_uploads_page(self, prefix: str, markers: dict[str, str]) -> ListMultipartUploadsOutputTypeDef:
        session = self._session
        arguments: dict[str, Any] = {name: value for name, value in markers.items() if value}
        with session.errors(prefix):
            return session.client.list_multipart_uploads(
                Bucket=self._bucket, Prefix=self._folder(prefix), MaxUploads=_PAGE, **arguments
            )

    def _holds(self, key: str, size: int, crc64: int) -> bool:
        """Whether the key holds ``size`` bytes with that CRC; read in full where the store keeps no such checksum."""
        try:
            info = self.head(key)
            if info.size != size or info.crc64 is not None:
                return info.size == size and info.crc64 == crc64
            _log.info("%s keeps no CRC-64: %s is read back to see whether it was stored", self._uri, key)
            into = memoryview(bytearray(min(size, _CRC_STEP)))
            found = done = 0
            while done < size:
                count = self.read(key, into[: size - done], done)
                if not count:
                    return False
                found = crc64nvme(into[:count], found)
                done += count
        except StoreNotFoundError:
            return False
        return found == crc64


def _check_express(uri: str, options: S3Options) -> None:
    """:class:`ConfigError` for what a directory bucket does not have."""
    if options.anon:
        raise ConfigError(f"{uri}: anon=True cannot be: a directory bucket (S3 Express) wants a session")
    for name in sorted(NOT_ON_EXPRESS.intersection(options.s3_additional_kwargs)):
        raise ConfigError(f"{uri}: directory buckets (S3 Express) have no {name}: leave it out")


def _no_conditions(uri: str, key: str, refused: ObjckptError) -> StoreUnsuitableError:
    return StoreUnsuitableError(
        f"{uri}: the store does not know put-if-absent (If-None-Match: *), so two jobs could overwrite each other's checkpoints: "
        f"objckpt reads there and does not write ({refused}). Use a store with conditional writes, such as AWS S3 or SeaweedFS",
        uri=uri,
        key=key,
    )
