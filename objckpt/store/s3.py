"""S3 and what speaks like it, as an :class:`~objckpt.store.ObjectStore`.

Invariants: ``create`` is one plain PUT with ``If-None-Match: *`` and never multipart (a conditional completion has more than
one winner on some stores); an answer that got lost is found out by reading the key back; the bytes' path neither copies nor
hashes beyond one CRC; an object's bytes are checked by the store against a CRC that was taken of them in our memory.

Called by ``objckpt.store.open_store``.
"""

from __future__ import annotations

import base64
import email.utils
import logging
import re
import threading
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from awscrt.checksums import crc64nvme

from objckpt.errors import (
    CommitUnknownError,
    ConfigError,
    ObjckptError,
    StoreError,
    StoreNotFoundError,
    StorePermissionError,
    StoreTransientError,
    StoreUnsuitableError,
)
from objckpt.store import Buffer, ObjectInfo
from objckpt.store.http import NoAnswerError
from objckpt.store.retry import RetryPolicy, is_transient
from objckpt.store.s3_headers import NOT_ON_EXPRESS, is_directory_bucket
from objckpt.store.s3_options import S3Options, part_size_for

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from mypy_boto3_s3.type_defs import ListMultipartUploadsOutputTypeDef, ListObjectsV2OutputTypeDef

    from objckpt.store.http import Answer
    from objckpt.store.s3_session import S3Session

_log = logging.getLogger("objckpt.store")

_OK: Final = 200
_PARTIAL: Final = 206
_NOT_FOUND: Final = 404
_RANGE_NOT_SATISFIABLE: Final = 416
_NOT_IMPLEMENTED: Final = 501
_UNEXPLAINED: Final = frozenset({301, 400, 403, 404})
#: How stores say that a key is taken: 412 as they should, 409 to the loser of a race, 304 by old MinIO.
_TAKEN: Final = frozenset({304, 409, 412})

#: S3's own limits of one request.
_PAGE: Final = 1000
_LONGEST_KEY: Final = 1024
#: Lists and bulk deletes are XML, which cannot hold these, or reads them as something else.
_NOT_IN_XML: Final = re.compile("[\\x00-\\x1f\\x7f\\ufffe\\uffff]")
_CRC_STEP: Final = 8 << 20
_CRC_HEADER: Final = "x-amz-checksum-crc64nvme"
_PUT_HEADERS: Final = {"Content-Type": "application/octet-stream"}
_SHOWN_FAILURES: Final = 5


class S3Store:
    """An S3 bucket below a prefix. Cheap to make: boto3 is loaded, and credentials are looked for, by the first verb.

    ``uri`` is ``s3://bucket[/prefix]``. :class:`ConfigError` if it, or an option, cannot be.
    """

    def __init__(self, uri: str, options: S3Options | None = None) -> None:
        self._bucket, self._prefix = _split(uri)
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
        """The bucket's key. :class:`StoreError` for one that some S3-like store, or XML on its way, would take for another."""
        full = self._root + key
        fault = _fault_of(key, full)
        if fault:
            raise StoreError(f"{self._uri}: the key {key!r} {fault}; use another", uri=self._uri, key=key)
        return full

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
        if crc64 is not None and found != crc64:
            raise s3_upload.mismatch(self._uri, key, crc64, found)

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
        unknown: Exception | None = None

        def attempt() -> bool:
            nonlocal unknown
            lost: StoreTransientError | None = None
            headers = {**_PUT_HEADERS, **self._session.checksum(view, crc64), "If-None-Match": "*"}
            try:
                answer = self._session.request("PUT", full, headers=headers, body=view)
            except StoreTransientError as error:
                if not (isinstance(error.__cause__, NoAnswerError) and error.__cause__.sent):
                    raise
                unknown = unknown or error
                lost = error
            else:
                if answer.status == _OK:
                    return True
                absent = answer.status == _NOT_FOUND and not self._session.is_bucket_missing(answer)
                if answer.status not in _TAKEN and not absent:
                    refused = self._session.refused(answer, full)
                    if answer.status == _NOT_IMPLEMENTED and not isinstance(refused, StoreTransientError):
                        raise _no_conditions(self._uri, key, refused)
                    if not isinstance(refused, StoreTransientError) or self._session.had_no_effect(answer):
                        raise refused
                    # A 5xx may come from a proxy in front of a store that did what it was told.
                    unknown = unknown or refused
                    lost = refused
            held = self._read_back(full, len(view))
            if held is not None:
                return held == view
            # Refused (a race with a delete makes some say 404), or not answered, and yet absent: a delete may run, or the request
            # is still on its way.
            text = f"{self._uri}: {key!r} was not created, and is not there either"
            raise lost or StoreTransientError(text, uri=self._uri, key=key)

        try:
            return self._retry.run(attempt)
        except ObjckptError as error:
            if unknown is None:
                raise
            raise CommitUnknownError(
                f"{self._uri}: it is not known whether {key!r} was created: a request had no answer, and reading the key back "
                f"did not tell ({error}). Read the key when the store is back; do not assume either"
            ) from unknown

    def _read_back(self, full: str, size: int) -> memoryview | None:
        """What the key holds, up to one byte more than ``size``; None if it is absent. Not retried."""
        into = memoryview(bytearray(size + 1))
        count, more = 0, True
        while more and count < len(into):
            answer = self._get(full, into[count:], count)
            if answer.status == _NOT_FOUND and not self._session.is_bucket_missing(answer):
                return None
            step, more = self._received(answer, full, count)
            count += step
        return into[:count]

    def read(self, key: str, into: memoryview, offset: int = 0) -> int:
        """See :meth:`ObjectStore.read`."""
        full, view = self._full(key), into.cast("B")
        if not len(view):
            self.head(key)
            return 0
        done, more = 0, True

        def attempt() -> tuple[int, bool]:
            return self._received(self._get(full, view[done:], offset + done), full, offset + done)

        while more and done < len(view):
            # Each round brought bytes, so it is a success, and the rest has a deadline of its own.
            step, more = self._retry.run(attempt)
            done += step
        return done

    def _get(self, full: str, into: memoryview, offset: int) -> Answer:
        headers = {"Range": f"bytes={offset}-{offset + len(into) - 1}"}
        return self._session.request("GET", full, headers=headers, into=into, skip=offset)

    def _received(self, answer: Answer, full: str, offset: int) -> tuple[int, bool]:
        """What an answer to :meth:`_get` brought: how many bytes (0 only at the end), and whether the object goes on behind them."""
        if answer.status == _RANGE_NOT_SATISFIABLE:
            return 0, False
        if answer.status not in {_OK, _PARTIAL}:
            raise self._session.refused(answer, full)
        size: int | None
        if answer.is_whole:
            size = int(answer.headers["Content-Length"]) if "Content-Length" in answer.headers else None
        else:
            first, size = _content_range(answer.headers.get("Content-Range", ""))
            if first != offset:
                text = f"{self._uri}: {full!r}: asked for bytes from {offset} on, the store sent those from {first} on"
                raise StoreError(
                    f"{text}: it does not understand ranges, and cannot be used", uri=self._uri, key=full
                )
        goes_on = offset + answer.received < size if size is not None else not answer.is_whole
        if not answer.received and (goes_on or answer.failure is not None):
            text = f"{self._uri}: {full!r}: the answer broke off before its first byte ({answer.failure!r})"
            raise StoreTransientError(text, uri=self._uri, key=self._relative(full)) from answer.failure
        if answer.failure is not None:
            _log.debug("%s: the answer broke off after %d bytes: going on from there", full, answer.received)
        return answer.received, goes_on or answer.failure is not None

    def head(self, key: str) -> ObjectInfo:
        """See :meth:`ObjectStore.head`."""
        full = self._full(key)

        def attempt() -> ObjectInfo:
            answer = self._session.request("HEAD", full, headers={"x-amz-checksum-mode": "ENABLED"})
            if answer.status in _UNEXPLAINED:
                # A HEAD has no body to say which it is: the key or the bucket missing, expired credentials, another region.
                self._received(self._get(full, memoryview(bytearray(1)), 0), full, 0)
                raise StoreTransientError(f"{self._uri}: {key!r} appeared just now", uri=self._uri, key=key)
            if answer.status != _OK:
                raise self._session.refused(answer, full)
            return ObjectInfo(
                key=key,
                size=int(answer.headers["Content-Length"]),
                modified=_seconds(answer.headers["Last-Modified"]),
                crc64=_decode_crc64(answer.headers.get(_CRC_HEADER)),
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
        from objckpt.store.s3_session import UploadGoneError  # noqa: PLC0415 # it loads boto3

        self._refuse_anonymous("")
        old: list[tuple[str, str]] = []
        markers: dict[str, str] = {}
        while True:
            page = self._retry.run(partial(self._list_uploads_page, self._root + prefix, markers))
            now = _seconds(page["ResponseMetadata"]["HTTPHeaders"]["date"])
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

        count = 0
        for full, upload_id in old:
            try:
                self._retry.run(partial(self._abort, full, upload_id))
            except UploadGoneError:
                _log.debug("the upload of %s ended meanwhile", full)
            else:
                count += 1
        return count

    def _list_uploads_page(self, prefix: str, markers: dict[str, str]) -> ListMultipartUploadsOutputTypeDef:
        session = self._session
        arguments: dict[str, Any] = {name: value for name, value in markers.items() if value}
        with session.errors(prefix):
            return session.client.list_multipart_uploads(
                Bucket=self._bucket, Prefix=self._folder(prefix), MaxUploads=_PAGE, **arguments
            )

    def _abort(self, full: str, upload_id: str) -> None:
        session = self._session
        with session.errors(full):
            session.client.abort_multipart_upload(Bucket=self._bucket, Key=full, UploadId=upload_id)

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


def _split(uri: str) -> tuple[str, str]:
    """Bucket and prefix (without slashes at its ends). Not ``urlsplit``: keys may hold ``?`` and ``#``."""
    scheme, _, rest = uri.partition("://")
    bucket, _, prefix = rest.partition("/")
    if scheme not in {"s3", "s3a"} or not bucket:
        raise ConfigError(f"{scheme}://: an S3 URI is s3://bucket or s3://bucket/prefix")
    if "@" in bucket or ":" in bucket:
        raise ConfigError(
            "an S3 URI holds no credentials and no port: give key, secret and endpoint_url as storage_options"
        )
    return bucket, prefix.strip("/")


def _fault_of(key: str, full: str) -> str:
    """Why a key is refused, "" if it is not."""
    try:
        size = len(full.encode())
    except UnicodeEncodeError:
        return "is not valid Unicode"
    segments = key.split("/")
    if size > _LONGEST_KEY:
        return f"has {size} bytes with the root's prefix, more than {_LONGEST_KEY}"
    if not all(segments):
        return "is empty, or has an empty segment between slashes"
    if not {".", ".."}.isdisjoint(segments):
        return "has a segment `.` or `..`"
    if _NOT_IN_XML.search(key):
        return "holds a control character"
    return ""


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


def _decode_crc64(text: str | None) -> int | None:
    return None if text is None else int.from_bytes(base64.b64decode(text), "big")


def _seconds(date: str) -> float:
    return email.utils.parsedate_to_datetime(date).timestamp()


def _content_range(text: str) -> tuple[int, int | None]:
    """The first byte and the object's size (None for ``*``) of ``bytes 5-9/20``; (-1, None) if it is not of that form."""
    interval, _, size = text.removeprefix("bytes ").partition("/")
    first, _, last = interval.partition("-")
    if not (first.isdigit() and last.isdigit()):
        return -1, None
    return int(first), int(size) if size.isdigit() else None
