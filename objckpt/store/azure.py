"""Azure Blob Storage as an :class:`~objckpt.store.ObjectStore`, opened through adlfs, fsspec's own way to it.

Invariants: ``create`` is one Put Blob with ``If-None-Match: *``; a large object becomes visible by one Put Block List, and not before all
of its bytes were read and have the checksum that they should have; an answer that got lost is found out by reading the key back.

adlfs says what the URI and the ``storage_options`` mean, and holds the connections. Its own paths take ``?`` and ``..`` apart, and its
reads are copies, so the requests are made with the client that it made. Called by ``open_filesystem`` for ``abfs``, ``abfss`` and ``az``.
"""

from __future__ import annotations

import asyncio
import difflib
import inspect
import io
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeVar

from adlfs import AzureBlobFileSystem
from awscrt.checksums import crc64nvme
from azure.core.exceptions import (
    AzureError,
    HttpResponseError,
    ResourceExistsError,
    ServiceRequestError,
)
from fsspec.asyn import sync

from objckpt.errors import (
    CommitUnknownError,
    ConfigError,
    CorruptCheckpointError,
    ObjckptError,
    StoreError,
    StoreNotFoundError,
    StorePermissionError,
    StoreTransientError,
)
from objckpt.store import Buffer, ObjectInfo
from objckpt.store.keys import check_key
from objckpt.store.retry import RetryPolicy, is_throttling, is_transient

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping

T = TypeVar("T")

#: Azure's 50,000 blocks of the 4 MiB that the client cuts.
_LARGEST: Final = 50_000 * (4 << 20)
#: Blocks of one upload, or deletes, on their way at one time.
_CONNECTIONS: Final = 8
_RANGE_NOT_SATISFIABLE: Final = 416
_NOT_FOUND: Final = 404
_REFUSED: Final = frozenset({401, 403})
#: Retries live in ``retry.py``.
_ONCE: Final[Mapping[str, Any]] = {"retry_total": 0}


class AzureStore:
    """A container below a prefix. ``uri`` is ``abfs://container[/prefix]``, or ``abfs://container@account.dfs.core.windows.net/prefix``.

    ``storage_options`` are adlfs's (``account_name``, ``account_key``, ``sas_token``, ``connection_string`` ...), and ``deadline``: how
    long, in seconds, one request is tried. :class:`ConfigError` for others, or for credentials that cannot be used.
    """

    def __init__(self, uri: str, storage_options: Mapping[str, Any]) -> None:
        options = dict(storage_options)
        self._retry = RetryPolicy(options.pop("deadline")) if "deadline" in options else RetryPolicy()
        _check_options(options)
        path: str = AzureBlobFileSystem._strip_protocol(uri)  # noqa: SLF001 # fsspec's documented hook
        self._container, _, self._prefix = path.rstrip("/").partition("/")
        if not self._container:
            raise ConfigError("abfs:// needs a container, as in abfs://container/runs; add it")
        self._root = f"{self._prefix}/" if self._prefix else ""
        self._uri = f"abfs://{path}".rstrip("/")
        account = AzureBlobFileSystem._get_kwargs_from_urls(uri)  # noqa: SLF001 # likewise
        try:
            # One of its own: those that fsspec shares could be closed by others.
            self._fs: Any = AzureBlobFileSystem(**{**account, **options}, skip_instance_cache=True)
        except ValueError as error:
            raise ConfigError(f"{self._uri}: adlfs cannot use these storage_options: {error}") from None

    def __repr__(self) -> str:
        return f"AzureStore({self._uri!r})"

    @property
    def uri(self) -> str:
        """``abfs://container/prefix``."""
        return self._uri

    def put(self, key: str, data: Buffer, *, crc64: int | None = None) -> None:
        """See :class:`ObjectStore`. In blocks of 4 MiB above 64 MiB; 195 GiB at most."""
        blob, view = self._blob(key), memoryview(data).cast("B")
        if len(view) > _LARGEST:
            raise StoreError(
                f"{self._uri}: {key!r} has {len(view)} bytes, more than the {_LARGEST} of 50,000 blocks: use more ranks",
                uri=self._uri,
                key=key,
            )
        if not len(view):
            _check(self._uri, key, 0, crc64)

        def attempt() -> None:
            # Azure's own check of what arrives is by MD5 of each block; it knows no other that its clients send.
            stream = _Checked(view, self._uri, key, crc64)
            self._do(key, lambda: blob.upload_blob(
                stream, length=len(view), overwrite=True, validate_content=True, max_concurrency=_CONNECTIONS, **_ONCE
            ))  # fmt: skip

        self._retry.run(attempt)

    def create(self, key: str, data: Buffer) -> bool:
        """See :class:`ObjectStore`."""
        blob, content = self._blob(key), bytes(data)
        unknown: StoreTransientError | None = None

        def attempt() -> bool:
            nonlocal unknown
            lost: StoreTransientError | None = None
            try:
                self._do(key, lambda: blob.upload_blob(content, overwrite=False, **_ONCE))
            except _ExistsError:
                pass
            except StoreTransientError as error:
                if not _may_have_happened(error.__cause__):
                    raise
                unknown, lost = unknown or error, error
            else:
                return True
            try:
                held = bytearray(len(content) + 1)
                count = self._read(key, memoryview(held), 0)
            except StoreNotFoundError:
                # Refused, or not answered, and yet absent: a delete may run, or the request is still on its way.
                text = f"{self._uri}: {key!r} was not created, and is not there either"
                raise lost or StoreTransientError(text, uri=self._uri, key=key) from None
            return held[:count] == content

        try:
            return self._retry.run(attempt)
        except ObjckptError as error:
            if unknown is None:
                raise
            raise CommitUnknownError(
                f"{self._uri}: it is not known whether {key!r} was created: a request had no answer, and reading the key back "
                f"did not tell ({error}). Read the key when the store is back; do not assume either"
            ) from unknown

    def read(self, key: str, into: memoryview, offset: int = 0) -> int:
        """See :class:`ObjectStore`."""
        view = into.cast("B")
        if not len(view):
            self.head(key)
            return 0
        return self._retry.run(lambda: self._read(key, view, offset))

    def _read(self, key: str, into: memoryview, offset: int) -> int:
        blob = self._blob(key)

        async def download() -> int:
            sink = _Sink(into)
            try:
                stream = await blob.download_blob(offset=offset, length=len(into), max_concurrency=1, **_ONCE)
            except HttpResponseError as error:
                if error.status_code == _RANGE_NOT_SATISFIABLE:
                    return 0
                raise
            await stream.readinto(sink)
            return sink.count

        return self._do(key, download)

    def head(self, key: str) -> ObjectInfo:
        """See :class:`ObjectStore`. No checksum is kept that is ours."""
        blob = self._blob(key)
        found = self._retry.run(lambda: self._do(key, lambda: blob.get_blob_properties(**_ONCE)))
        return ObjectInfo(key, found.size, found.last_modified.timestamp())

    def list(self, prefix: str, start_after: str = "") -> Iterator[ObjectInfo]:
        """See :class:`ObjectStore`. Azure has no start key: all that begin with ``prefix`` are read."""

        async def collect() -> list[ObjectInfo]:
            container = self._fs.service_client.get_container_client(self._container)
            return [
                ObjectInfo(blob.name.removeprefix(self._root), blob.size, blob.last_modified.timestamp())
                # Metadata tell the folders of an account with a hierarchical namespace, which are blobs there too.
                async for blob in container.list_blobs(
                    name_starts_with=self._root + prefix, include=["metadata"], **_ONCE
                )
                if (blob.metadata or {}).get("hdi_isfolder") != "true"
            ]

        found = self._retry.run(lambda: self._do("", collect))
        return iter(sorted((info for info in found if info.key > start_after), key=lambda info: info.key))

    def delete(self, keys: Iterable[str]) -> None:
        """See :class:`ObjectStore`. :class:`StorePermissionError` at the first key that may not be deleted."""
        blobs = [(key, self._blob(key)) for key in dict.fromkeys(keys)]

        def remove(at: int) -> None:
            batch = blobs[at : at + _CONNECTIONS]

            async def together() -> None:
                await asyncio.gather(*(_remove(blob) for _, blob in batch))

            self._do(batch[0][0], together)

        for at in range(0, len(blobs), _CONNECTIONS):
            self._retry.run(partial(remove, at))

    def abort_uploads(self, prefix: str, older_than: float) -> int:  # noqa: ARG002 # the seam's verb
        """0, though it asks the container: Azure itself removes blocks that were never committed, after a week."""
        container = self._fs.service_client.get_container_client(self._container)
        self._retry.run(lambda: self._do("", lambda: container.get_container_properties(**_ONCE)))
        return 0

    def _blob(self, key: str) -> Any:
        check_key(self._uri, key)
        if "\\" in key:
            raise StoreError(
                f"{self._uri}: the key {key!r} has a backslash, which Azure takes for a slash; use another",
                uri=self._uri,
                key=key,
            )
        return self._fs.service_client.get_blob_client(self._container, self._root + key)

    def _do(self, key: str, request: Callable[[], Awaitable[T]]) -> T:
        """The answer to a request, made on adlfs's own loop."""
        with self._told(key):
            answer: T = sync(self._fs.loop, request)
            return answer

    @contextmanager
    def _told(self, key: str) -> Iterator[None]:
        """Raise what the client says as the house's errors."""
        subject = f"{self._uri}: object {key!r}" if key else self._uri
        try:
            yield
        except ResourceExistsError as error:
            raise _ExistsError(f"{subject} exists", uri=self._uri, key=key) from error
        except HttpResponseError as error:
            kind, advice = _meaning(error)
            text = f"{subject}: {error.status_code} {error.reason} ({_code(error)}); {advice}"
            raise kind(text, uri=self._uri, key=key) from error
        except (AzureError, OSError) as error:
            text = f"{subject}: no answer ({type(error).__name__}); check endpoint and network"
            raise StoreTransientError(text, uri=self._uri, key=key) from error


class _ExistsError(StoreError):
    """The key is there already."""


async def _remove(blob: Any) -> None:
    try:
        await blob.delete_blob(**_ONCE)
    except HttpResponseError as error:
        if _code(error) != "BlobNotFound":
            raise


def _check_options(options: Mapping[str, Any]) -> None:
    """Refuse an option that adlfs does not know: it would ignore it in silence."""
    known = [*inspect.signature(AzureBlobFileSystem.__init__).parameters, "deadline"]
    for name in options:
        if name not in known:
            nearest = difflib.get_close_matches(name, known, n=1, cutoff=0.0)[0]
            raise ConfigError(f"abfs:// has no storage option {name!r} (did you mean {nearest!r}?)")


def _code(error: HttpResponseError) -> str:
    """Azure's word for what went wrong, "" if it gave none."""
    code = getattr(error, "error_code", None)
    return str(getattr(code, "value", code) or "")


def _meaning(error: HttpResponseError) -> tuple[type[StoreError], str]:
    """The class to raise, and what to do next."""
    status = error.status_code or 0
    if status == _NOT_FOUND:
        return StoreNotFoundError, "check the container and the key"
    if status in _REFUSED:
        return StorePermissionError, "check the credentials and their role"
    if is_transient(status, _code(error)):
        return StoreTransientError, "it may work later"
    return StoreError, "look the code up in Azure's documentation"


def _may_have_happened(cause: BaseException | None) -> bool:
    """Whether a request that failed for now may have had its effect all the same."""
    if isinstance(cause, HttpResponseError):
        return not is_throttling(cause.status_code or 0, _code(cause))
    return not isinstance(cause, ServiceRequestError)  # which was never sent


def _check(uri: str, key: str, found: int, expected: int | None) -> None:
    if expected is not None and found != expected:
        raise CorruptCheckpointError(
            f"{uri}: the bytes for {key!r} have CRC-64/NVME {found:016x} and not {expected:016x}: they changed since they "
            "were first read. Nothing was stored; save again."
        )


class _Checked(io.RawIOBase):
    """What the client reads: copies of ``view``, block by block. The last block is only given if all of them had the checksum."""

    def __init__(self, view: memoryview, uri: str, key: str, crc64: int | None) -> None:
        self._view, self._uri, self._key, self._expected = view, uri, key, crc64
        self._at = self._crc = 0

    def readable(self) -> bool:
        """Yes."""
        return True

    def read(self, size: int = -1) -> bytes:
        """The next ``size`` bytes, all that are left if negative."""
        end = len(self._view) if size < 0 else min(self._at + size, len(self._view))
        block = bytes(self._view[self._at : end])
        self._at = end
        if self._expected is not None and block:
            self._crc = crc64nvme(block, self._crc)
            if end == len(self._view):
                _check(self._uri, self._key, self._crc, self._expected)
        return block


class _Sink:
    """Takes what is downloaded, in order, into ``into``."""

    def __init__(self, into: memoryview) -> None:
        self._into = into
        self.count = 0

    def write(self, data: bytes) -> int:
        """Append. Returns the count."""
        self._into[self.count : self.count + len(data)] = data
        self.count += len(data)
        return len(data)
