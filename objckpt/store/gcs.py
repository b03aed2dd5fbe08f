"""Google Cloud Storage as an :class:`~objckpt.store.ObjectStore`.

Invariants: ``create`` is one request with the condition that no generation exists, and never resumable or multipart, whose
conditions are not looked at everywhere; an answer that got lost is found out by reading the key back; the bytes' path neither copies nor
hashes beyond two CRCs; what the store says it holds is compared with a CRC-32C that was taken in our memory.

Called by ``objckpt.store.open_store``.
"""

from __future__ import annotations

import logging
import threading
from collections import defaultdict
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Final

from awscrt.checksums import crc32c, crc64nvme

from objckpt.errors import (
    StoreError,
    StoreNotFoundError,
    StorePermissionError,
    StoreTransientError,
)
from objckpt.store import Buffer, ObjectInfo
from objckpt.store.checksums import check_unchanged
from objckpt.store.gcs_options import GCSOptions
from objckpt.store.keys import INCOMING, bucket_key, split_bucket_uri
from objckpt.store.put_if_absent import put_if_absent
from objckpt.store.ranges import Source
from objckpt.store.retry import RetryPolicy
from objckpt.store.s3_options import part_size_for
from objckpt.store.uploads import abort
from objckpt.store.window import in_window

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from google.cloud.storage import Blob

    from objckpt.errors import ObjckptError
    from objckpt.store.gcs_session import GCSSession, Stored
    from objckpt.store.gcs_upload import Orphan
    from objckpt.store.http import Answer

_log = logging.getLogger("objckpt.store")

_OK: Final = 200
_CONFLICT: Final = 409
_PRECONDITION_FAILED: Final = 412

#: GCS's own limits.
_PAGE: Final = 1000
_SHOWN_FAILURES: Final = 5
#: Below a store's root: the folder of temporary objects, which no list shows and no key may be in.
_FOLDER: Final = f"{INCOMING}/"


class GCSStore:
    """A GCS bucket below a prefix. Cheap to make: google-cloud-storage is loaded, and credentials are looked for, by the first verb.

    ``uri`` is ``gs://bucket[/prefix]``. :class:`ConfigError` if it cannot be.
    """

    def __init__(self, uri: str, options: GCSOptions | None = None) -> None:
        self._bucket, self._prefix = split_bucket_uri(uri, "GCS", ("gs", "gcs"), "token and endpoint_url")
        self._root = f"{self._prefix}/" if self._prefix else ""
        self._uri = f"gs://{self._bucket}/{self._prefix}".rstrip("/")
        self._options = options or GCSOptions()
        self._retry = RetryPolicy(deadline=self._options.deadline)
        self._lock = threading.Lock()
        self._opened: GCSSession | None = None

    def __repr__(self) -> str:
        return f"GCSStore({self._uri!r})"

    @property
    def uri(self) -> str:
        """``gs://bucket/prefix``."""
        return self._uri

    @property
    def _session(self) -> GCSSession:
        if self._opened is None:
            with self._lock:
                if self._opened is None:
                    from objckpt.store.gcs_session import GCSSession  # noqa: PLC0415 # it loads the client, which takes its time

                    self._opened = GCSSession(self._uri, self._bucket, self._root, self._options)
        return self._opened

    def _full(self, key: str) -> str:
        """The bucket's key. :class:`StoreError` for one that no bucket takes, and for one among the temporary objects."""
        full = bucket_key(self._uri, self._root, key)
        if key.startswith(_FOLDER):
            text = f"{self._uri}: the key {key!r} is below {_FOLDER}, where parts wait to be composed; use another"
            raise StoreError(text, uri=self._uri, key=key)
        return full

    def _relative(self, full: str) -> str:
        return full.removeprefix(self._root)

    def put(self, key: str, data: Buffer, *, crc64: int | None = None) -> None:
        """See :meth:`ObjectStore.put`. In one request up to the part size, in parts above it."""
        from objckpt.store import gcs_upload  # noqa: PLC0415 # it loads the client

        full, view, session = self._full(key), memoryview(data).cast("B"), self._session
        part_size = part_size_for(len(view), self._options.part_size)
        if len(view) > part_size:
            incoming = self._root + _FOLDER
            connections = self._options.connections
            gcs_upload.put_in_parts(
                gcs_upload.Job(session, self._retry, full, incoming, view, part_size, connections), crc64
            )
            return
        if crc64 is not None:
            check_unchanged(f"{self._uri}/{key}", crc64, crc64nvme(view))
        crc = crc32c(view)

        def attempt() -> Stored:
            answer = session.insert(full, view, crc)
            if answer.status != _OK:
                raise session.refused(answer, full)
            return session.inserted(answer, full)

        gcs_upload.check_stored(session, self._retry, full, self._retry.run(attempt), crc)

    def create(self, key: str, data: Buffer) -> bool:
        """See :meth:`ObjectStore.create`."""
        from objckpt.store.gcs_refusals import Refusal  # noqa: PLC0415 # only those who come here need it
        from objckpt.store.gcs_upload import check_stored  # noqa: PLC0415 # it loads the client

        full, view, session = self._full(key), memoryview(data).cast("B"), self._session
        crc = crc32c(view)

        def send() -> Answer:
            return session.insert(full, view, crc, if_absent=True)

        def read(answer: Answer) -> bool | StoreTransientError:
            if answer.status == _OK and answer.failure is None:
                check_stored(session, self._retry, full, session.inserted(answer, full), crc)
                return True
            if answer.status in {_OK, _CONFLICT, _PRECONDITION_FAILED}:
                return False
            refused = session.refused(answer, full)
            if isinstance(refused, StoreTransientError) and not Refusal.of(answer).is_throttling:
                return refused
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
            target = f"{self._session.object_target(full, '/download/storage/v1')}?alt=media"
            return self._session.request("GET", target, full, headers=headers, into=into, skip=skip)

        def refused(answer: Answer) -> ObjckptError:
            return self._session.refused(answer, full)

        return Source(self._uri, self._relative(full), get, refused)

    def head(self, key: str) -> ObjectInfo:
        """See :meth:`ObjectStore.head`. GCS keeps a CRC-32C, so ``crc64`` is None."""
        full, session = self._full(key), self._session

        def attempt() -> ObjectInfo:
            blob = session.blob(full)
            with session.errors(full):
                blob.reload(timeout=session.timeout, retry=None)
            return self._info(blob)

        return self._retry.run(attempt)

    def _info(self, blob: Blob) -> ObjectInfo:
        return ObjectInfo(self._relative(blob.name), blob.size, blob.time_created.timestamp())

    def list(self, prefix: str, start_after: str = "") -> Iterator[ObjectInfo]:
        """See :meth:`ObjectStore.list`. Parts that wait to be composed are not shown."""
        for page in self._list_pages(self._root + prefix, self._root + start_after if start_after else ""):
            for blob in page:
                if not blob.name.startswith(self._root + _FOLDER) and blob.name != self._root:
                    info = self._info(blob)
                    # GCS begins *at* the key that it is given.
                    if info.key > start_after:
                        yield info

    def _list_pages(self, prefix: str, start: str, fields: str = "") -> Iterator[Sequence[Blob]]:
        token: str | None = None
        while True:
            page, token = self._retry.run(partial(self._list_page, prefix, start, fields, token))
            yield page
            if not token:
                return

    def _list_page(
        self, prefix: str, start: str, fields: str, token: str | None
    ) -> tuple[Sequence[Blob], str | None]:
        session = self._session
        with session.errors(prefix):
            pages = session.client.list_blobs(
                self._bucket,
                prefix=prefix or None,
                start_offset=start or None,
                page_token=token,
                page_size=_PAGE,
                fields=f"items(name,size,timeCreated{fields}),nextPageToken",
                timeout=session.timeout,
                retry=None,
            )
            page = list(next(pages.pages, ()))
        return page, pages.next_page_token

    def delete(self, keys: Iterable[str]) -> None:
        """See :meth:`ObjectStore.delete`. :class:`StoreError` names the keys that stayed; the others are gone, unless the store could
        not be reached.
        """
        waiting = iter(keys)
        while batch := [self._full(key) for key in islice(waiting, _PAGE)]:
            self._delete_batch(batch)

    def _delete_batch(self, full_keys: Sequence[str]) -> None:
        from objckpt.store.gcs_session import CONTROL_CONNECTIONS  # noqa: PLC0415 # it loads the client

        failed: dict[str, StoreError] = {}

        def remove(full: str, abandoned: threading.Event) -> None:
            try:
                self._retry.run(partial(self._session.remove, full), abandoned=abandoned)
            except (StoreTransientError, StoreNotFoundError):  # of no bucket: the same for all
                raise
            except StoreError as error:
                failed[full] = error

        in_window(remove, list(dict.fromkeys(full_keys)), CONTROL_CONNECTIONS)
        if failed:
            shown = "; ".join(str(error) for error in list(failed.values())[:_SHOWN_FAILURES])
            refused = all(isinstance(error, StorePermissionError) for error in failed.values())
            raise (StorePermissionError if refused else StoreError)(
                f"{self._uri}: {len(failed)} of {len(full_keys)} keys were not deleted ({shown}): let a role of these credentials allow "
                "storage.objects.delete there",
                uri=self._uri,
                key=self._relative(next(iter(failed))),
            )

    def abort_uploads(self, prefix: str, older_than: float) -> int:
        """See :meth:`ObjectStore.abort_uploads`. Temporary objects that wait to be composed are an unfinished upload, too."""
        from objckpt.store.gcs_upload import abort_upload  # noqa: PLC0415 # it loads the client

        session = self._session
        now = self._retry.run(session.now)
        orphans = [*self._composed(prefix), *self._multipart(self._root + prefix)]
        count = 0
        for orphan in orphans:
            if now - orphan.began <= older_than:
                continue
            if orphan.upload_id:
                forget = partial(abort_upload, session, orphan.key, orphan.upload_id)
                count += abort(self._retry, forget, orphan.key)
            else:
                self._delete_batch(orphan.temporaries)
                count += 1
        return count

    def _multipart(self, prefix: str) -> Iterator[Orphan]:
        from objckpt.store.gcs_upload import multipart_uploads  # noqa: PLC0415 # it loads the client

        markers: Mapping[str, str] = {}
        while self._session.has_xml is not False:
            found, markers = self._retry.run(partial(multipart_uploads, self._session, prefix, markers))
            yield from (orphan for orphan in found if orphan.key.startswith(prefix))
            if not markers:
                return

    def _composed(self, prefix: str) -> Iterator[Orphan]:
        """The uploads whose temporary objects are still there. One began when its oldest one was made."""
        from objckpt.store.gcs_session import UPLOAD_OF  # noqa: PLC0415 # it loads the client
        from objckpt.store.gcs_upload import Orphan  # noqa: PLC0415 # likewise

        uploads: dict[str, list[Blob]] = defaultdict(list)
        for page in self._list_pages(self._root + _FOLDER, "", ",metadata"):
            for blob in page:
                uploads[blob.name.rpartition("/")[0]].append(blob)
        for blobs in uploads.values():
            key = next((blob.metadata[UPLOAD_OF] for blob in blobs if UPLOAD_OF in (blob.metadata or {})), "")
            if key.startswith(self._root + prefix):
                began = min(blob.time_created.timestamp() for blob in blobs)
                yield Orphan(key, began, temporaries=[blob.name for blob in blobs])
