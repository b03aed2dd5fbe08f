"""The seam to object stores: one Protocol of seven verbs.

Invariants: keys are ``str`` relative to the store's root and name objects, not files; ``put`` is atomic at any size (a key
shows the whole object or nothing); ``create`` is put-if-absent and has exactly one winner among any number of racers;
``list`` is strongly consistent. A backend that cannot do this is refused when it is opened. All verbs block, are safe to
call from many threads, and retry inside (``retry.py`` is the only place that does).

Called by ``commit``, ``transfer``, ``retention``, ``uploader`` and everything above them.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias, runtime_checkable

from objckpt.errors import ConfigError

#: What ``put`` and ``create`` take and ``read`` fills: contiguous bytes.
Buffer: TypeAlias = "bytes | bytearray | memoryview"


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """What the store says of one object.

    ``size`` in bytes; ``modified`` in seconds since the epoch by the *store's* clock; ``crc64`` the CRC-64/NVME of the whole
    object where the store keeps one, else None (``list`` never knows it).
    """

    key: str
    size: int
    modified: float
    crc64: int | None = None


@runtime_checkable
class ObjectStore(Protocol):
    """An object store, rooted at a URI. Seven verbs; there is no rename, no overwrite, no ``exists``."""

    @property
    def uri(self) -> str:
        """The root, fit for a log: without secrets, without a trailing slash."""

    def put(self, key: str, data: Buffer, *, crc64: int | None = None) -> None:
        """Store ``data`` under ``key``, whole or not at all.

        ``crc64`` is the CRC-64/NVME that ``data`` had when it was first read; if the bytes that are sent do not match it
        (or the store received others), nothing becomes visible and :class:`CorruptCheckpointError` is raised.
        """

    def create(self, key: str, data: Buffer) -> bool:
        """Store ``data`` if ``key`` is absent. True: ``key`` now holds these bytes and this or an equal call put them there;
        False: it holds other bytes. :class:`CommitUnknownError` if neither the call nor the read-back was answered.
        """

    def read(self, key: str, into: memoryview, offset: int = 0) -> int:
        """Fill ``into`` (writable, bytes) from ``offset`` of the object on. Returns the count, less than ``len(into)`` only where the
        object ends first (0 at or past its end). :class:`StoreNotFoundError` if there is no such object.
        """

    def head(self, key: str) -> ObjectInfo:
        """Size, time and checksum of one object. :class:`StoreNotFoundError` if there is none."""

    def list(self, prefix: str, start_after: str = "") -> Iterator[ObjectInfo]:
        """All objects whose key begins with ``prefix``, each key greater than ``start_after``, sorted by key (code points)."""

    def delete(self, keys: Iterable[str]) -> None:
        """Delete every key; a missing one is no error."""

    def abort_uploads(self, prefix: str, older_than: float) -> int:
        """Abort unfinished multipart uploads below ``prefix`` that began more than ``older_than`` seconds ago by the store's clock.
        Returns how many. Stores without such a thing return 0.
        """


def read_all(store: ObjectStore, key: str, size: int | None = None) -> bytes:
    """The whole object. ``size`` (from a listing or a record) saves a request; an object of another size is returned as it is."""
    if size is None:
        size = store.head(key).size
    data = bytearray(size + 1)
    count = store.read(key, memoryview(data))
    if count > size:
        return read_all(store, key)
    return bytes(memoryview(data)[:count])


def open_store(
    uri: str, *, part_size: int | None = None, connections: int | None = None, **storage_options: Any
) -> ObjectStore:
    """The store that ``uri`` names. ``part_size`` (bytes) and ``connections`` tune the transfer where there is a network.

    ``s3://bucket/prefix`` goes through boto3 and signed HTTP, ``gs://bucket/prefix`` (or ``gcs://``) through google-cloud-storage and
    HTTP with its tokens; every other scheme through fsspec's registry, as far as the filesystem behind it can create atomically.
    ``storage_options`` take the names that s3fs users know (``key``, ``secret``, ``token``, ``endpoint_url``, ``client_kwargs``,
    ``profile`` ...), or gcsfs users (``project``, ``token``, ``endpoint_url``). No request is made here. :class:`ConfigError` for a scheme
    or an option that nobody knows; it names the nearest one.
    """
    # Each way is imported by those who go it: the clouds' clients and fsspec's filesystems take their time to load.
    scheme, separator, _ = uri.partition("://")
    tuning = {"part_size": part_size, "connections": connections}
    said = {name: value for name, value in tuning.items() if value is not None}
    if scheme in {"s3", "s3a"} and separator:
        from objckpt.store.s3 import S3Store  # noqa: PLC0415 # see above
        from objckpt.store.s3_options import S3Options  # noqa: PLC0415 # see above

        return S3Store(uri, S3Options.from_storage_options(storage_options | said))
    if scheme in {"gs", "gcs"} and separator:
        from objckpt.store.gcs import GCSStore  # noqa: PLC0415 # see above
        from objckpt.store.gcs_options import GCSOptions  # noqa: PLC0415 # see above

        return GCSStore(uri, GCSOptions.from_storage_options(storage_options | said))
    if not uri.startswith("/"):
        _check_scheme(uri, scheme if separator else "")
    from objckpt.store.filesystem import open_filesystem  # noqa: PLC0415 # see above

    return open_filesystem(uri, storage_options)


def _check_scheme(uri: str, scheme: str) -> None:
    from fsspec import available_protocols  # noqa: PLC0415 # see open_store

    known = sorted({*available_protocols(), "s3", "gs"})
    if not scheme:
        raise ConfigError(
            f"{uri!r} has no scheme: a local folder is file:///absolute/path, a bucket s3://bucket/prefix or gs://bucket/prefix"
        )
    if scheme not in known:
        nearest = difflib.get_close_matches(scheme, known, n=1, cutoff=0.0)[0]
        raise ConfigError(
            f"unknown scheme {scheme}:// (did you mean {nearest}://?): objckpt writes to s3://bucket/prefix, gs://bucket/prefix and file:///folder"
        )
