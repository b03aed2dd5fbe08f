"""Stores over fsspec's protocols: a directory of files, and the memory of one process.

Invariants: a key shows a whole object that is on disk, or nothing, even after SIGKILL or a power cut; ``create`` has one
winner; no key leads out of the root; what cannot be named or created atomically is refused before any effect.

fsspec says what a URI means; its local filesystem has no put-if-absent, no fsync and no read into a given buffer, so the
bytes of a file store go through ``os``. Called by ``open_store`` for every scheme but ``s3`` and ``gs``;
``abfs`` is passed on to ``azure``.
"""

from __future__ import annotations

import errno
import logging
import os
import secrets
import stat
import threading
import urllib.parse
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from awscrt.checksums import crc64nvme
from fsspec.implementations.local import LocalFileSystem
from fsspec.implementations.memory import MemoryFileSystem
from fsspec.utils import get_protocol

from objckpt.errors import (
    ConfigError,
    CorruptCheckpointError,
    StoreError,
    StoreNotFoundError,
    StorePermissionError,
    StoreTransientError,
    StoreUnsuitableError,
)
from objckpt.store import Buffer, ObjectInfo, ObjectStore
from objckpt.store.keys import INCOMING, check_key
from objckpt.store.unsuitable import refusal

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

_log = logging.getLogger(__name__)

#: A key in the name of its temporary is cut to this, which leaves room for the random part.
_QUOTED_KEY: Final = 200
_CHECK_BLOCK: Final = 1 << 20
#: How often a directory may be removed by a concurrent ``delete`` between its making and its use.
_RACES: Final = 100

_NO_PERMISSION: Final = {errno.EACCES, errno.EPERM, errno.EROFS}
_NO_SPACE: Final = {errno.ENOSPC, errno.EDQUOT}
_NO_HARD_LINK: Final = {errno.EPERM, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS, errno.EXDEV, errno.EMLINK}

#: adlfs's.
_AZURE: Final = ("abfs", "abfss", "az")

#: One for all: fsspec's memory is one per process, and two stores of one URI must exclude each other.
_MEMORY_LOCK: Final = threading.Lock()


def open_filesystem(uri: str, storage_options: Mapping[str, Any]) -> ObjectStore:
    """The store that ``uri`` names: ``memory://``, ``file://`` or an absolute path, ``abfs://``. Makes no request and no directory.

    :class:`StoreUnsuitableError` says of every other scheme why it cannot hold a run; :class:`ConfigError` for a relative path,
    for ``storage_options`` that the store does not have, or if the package behind the scheme is not installed.
    """
    scheme = "file" if uri.startswith("/") else get_protocol(uri)
    if scheme in _AZURE:
        if find_spec("adlfs") is None:
            raise ConfigError(f"{scheme}:// needs adlfs: pip install 'objckpt[azure]'")
        from objckpt.store.azure import AzureStore  # noqa: PLC0415 # an extra, which takes its time to load

        return AzureStore(uri, storage_options)
    if scheme not in {*LocalFileSystem.protocol, MemoryFileSystem.protocol}:
        raise refusal(scheme)
    if storage_options:
        names = ", ".join(sorted(storage_options))
        raise ConfigError(f"{uri}: {scheme}:// has no storage_options; leave out {names}")
    if scheme == MemoryFileSystem.protocol:
        return MemoryStore(uri)
    if not uri.removeprefix(f"{scheme}://").startswith("/"):
        raise ConfigError(
            f"{uri}: a directory is named by its absolute path, as in file:///data/runs; add it"
        )
    return FileStore(uri)


def _refuse_damaged(uri: str, key: str, found: int, expected: int | None) -> None:
    if expected is not None and found != expected:
        raise CorruptCheckpointError(
            f"{uri}: the bytes for {key!r} have CRC-64/NVME {found:016x} and not {expected:016x}: they changed since they "
            "were first read. Nothing was stored; save again."
        )


class MemoryStore:
    """Objects in fsspec's memory filesystem: shared by all stores of this process, gone with it."""

    def __init__(self, uri: str) -> None:
        self._fs: Any = MemoryFileSystem()
        self._root: str = MemoryFileSystem._strip_protocol(uri)  # noqa: SLF001 # fsspec's documented hook
        self._uri = f"memory:/{self._root}" if self._root else "memory:/"

    @property
    def uri(self) -> str:
        """``memory://<root>``."""
        return self._uri

    def put(self, key: str, data: Buffer, *, crc64: int | None = None) -> None:
        """See :class:`ObjectStore`."""
        path = self._path(key)
        content = bytes(data)
        _refuse_damaged(self._uri, key, crc64nvme(content), crc64)
        with _MEMORY_LOCK:
            self._store(key, path, content)

    def create(self, key: str, data: Buffer) -> bool:
        """See :class:`ObjectStore`."""
        path = self._path(key)
        content = bytes(data)
        with _MEMORY_LOCK:
            if self._fs.isfile(path):
                return bool(self._fs.cat_file(path) == content)
            self._store(key, path, content)
            return True

    def read(self, key: str, into: memoryview, offset: int = 0) -> int:
        """See :class:`ObjectStore`."""
        path = self._path(key)
        with _MEMORY_LOCK, self._absence(key):
            found = self._fs.cat_file(path, offset, offset + len(into))
        into[: len(found)] = found
        return len(found)

    def head(self, key: str) -> ObjectInfo:
        """See :class:`ObjectStore`. No checksum is kept."""
        path = self._path(key)
        with _MEMORY_LOCK, self._absence(key):
            return self._info(key, path, self._fs.size(path))

    def list(self, prefix: str, start_after: str = "") -> Iterator[ObjectInfo]:
        """See :class:`ObjectStore`."""
        head = f"{self._root}/"
        with _MEMORY_LOCK:
            found = [
                self._info(path.removeprefix(head), path, details["size"])
                for path, details in self._fs.find(self._root, detail=True).items()
                if path.startswith(head + prefix)
            ]
        return iter(sorted((info for info in found if info.key > start_after), key=lambda info: info.key))

    def delete(self, keys: Iterable[str]) -> None:
        """See :class:`ObjectStore`."""
        paths = [self._path(key) for key in keys]
        with _MEMORY_LOCK:
            for path in paths:
                if self._fs.isfile(path):
                    self._fs.rm_file(path)

    def abort_uploads(self, prefix: str, older_than: float) -> int:  # noqa: ARG002 # the seam's verb
        """0: an object in memory is there at once or not at all."""
        return 0

    def _path(self, key: str) -> str:
        check_key(self._uri, key)
        return f"{self._root}/{key}"

    def _info(self, key: str, path: str, size: int) -> ObjectInfo:
        return ObjectInfo(key, size, self._fs.modified(path).timestamp())

    def _store(self, key: str, path: str, content: bytes) -> None:
        try:
            self._fs.pipe_file(path, content)
        except FileExistsError:
            raise StoreError(
                f"{self._uri}: {key!r} lies below a key that is an object already; use another",
                uri=self._uri,
                key=key,
            ) from None

    @contextmanager
    def _absence(self, key: str) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError:
            raise StoreNotFoundError(
                f"{self._uri}: there is no object {key!r}", uri=self._uri, key=key
            ) from None


class FileStore:
    """Objects as files below a directory, which the first write makes.

    A write fills a temporary in ``<root>/.objckpt-incoming``, checks it by reading it back, syncs it to disk, and
    only then gives it its name: by rename (``put``) or by hard link (``create``). A key and another key below it
    (``a`` and ``a/b``) exclude each other, as a file and a directory do.
    """

    def __init__(self, uri: str) -> None:
        stripped: str = LocalFileSystem._strip_protocol(uri)  # noqa: SLF001 # fsspec's documented hook
        self._uri = f"file://{stripped}"
        # Resolved once, so that a link that leads out of the root shows up as a path that resolves to another one.
        self._root = Path(stripped).resolve()
        self._incoming = self._root / INCOMING

    @property
    def uri(self) -> str:
        """``file://<root>``."""
        return self._uri

    def put(self, key: str, data: Buffer, *, crc64: int | None = None) -> None:
        """See :class:`ObjectStore`."""
        path = self._path(key)
        with self._told(key), self._temporary(key, data, crc64) as temporary:
            self._place(key, path, lambda: temporary.replace(path))

    def create(self, key: str, data: Buffer) -> bool:
        """See :class:`ObjectStore`. :class:`StoreUnsuitableError` where the file system knows no hard links."""
        path = self._path(key)
        with self._told(key), self._temporary(key, data, None) as temporary:
            for _ in range(_RACES):
                try:
                    self._place(key, path, lambda: path.hardlink_to(temporary))
                except FileExistsError:
                    # Ours too if an equal call, or the lost answer of a network file system, put it there.
                    with suppress(FileNotFoundError):
                        return self._holds(path, data)
                except OSError as error:
                    if error.errno in _NO_HARD_LINK:
                        raise StoreUnsuitableError(
                            f"{self._uri}: its file system makes no hard links ({error.strerror}), so it cannot create "
                            f"{key!r} only if it is absent, and two jobs could both commit. Use another mount.",
                            uri=self._uri,
                            key=key,
                        ) from error
                    raise
                else:
                    return True
        raise self._raced(key)

    def read(self, key: str, into: memoryview, offset: int = 0) -> int:
        """See :class:`ObjectStore`."""
        path = self._path(key)
        with self._told(key), _only_files():
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                return _fill(descriptor, into, offset)
            finally:
                os.close(descriptor)

    def head(self, key: str) -> ObjectInfo:
        """See :class:`ObjectStore`. No checksum is kept."""
        path = self._path(key)
        with self._told(key), _only_files():
            status = path.lstat()
            if not stat.S_ISREG(status.st_mode):
                raise FileNotFoundError(errno.ENOENT, "not a file", str(path))
            return ObjectInfo(key, status.st_size, status.st_mtime)

    def list(self, prefix: str, start_after: str = "") -> Iterator[ObjectInfo]:
        """See :class:`ObjectStore`. Reads one directory at a time, and none that cannot hold such a key."""
        with self._told(""):
            yield from self._walk(self._root, "", prefix, start_after)

    def delete(self, keys: Iterable[str]) -> None:
        """See :class:`ObjectStore`. Directories that become empty go too."""
        parents = set()
        for key, path in [(key, self._path(key)) for key in keys]:
            with self._told(key), suppress(FileNotFoundError, NotADirectoryError, IsADirectoryError):
                path.unlink()
                parents.add(path.parent)
        with self._told(""):
            for parent in parents:
                with suppress(FileNotFoundError):
                    _sync_directory(parent)
            for parent in parents:
                self._prune(parent)

    def abort_uploads(self, prefix: str, older_than: float) -> int:
        """Remove temporaries that nobody has written to for ``older_than`` seconds; see :class:`ObjectStore`.

        One whose key is longer than its name can tell is spared if ``prefix`` is as long.
        """
        count = 0
        with self._told(""), suppress(FileNotFoundError):
            os.utime(self._incoming)
            now = self._incoming.stat().st_mtime
            for path in self._incoming.iterdir():
                quoted = path.name.partition("-")[2]
                if not urllib.parse.unquote(quoted, errors="ignore").startswith(prefix):
                    continue
                with suppress(FileNotFoundError):
                    if now - path.stat().st_mtime > older_than:
                        path.unlink()
                        count += 1
        return count

    def _path(self, key: str) -> Path:
        """Where ``key`` lies. StoreError if it may not be used, or if a symbolic link leads elsewhere."""
        check_key(self._uri, key)
        path = self._root / key
        if path.parent.resolve() != path.parent:
            raise StoreError(
                f"{self._uri}: {key!r} lies behind a symbolic link, which may lead out of the store; remove the link",
                uri=self._uri,
                key=key,
            )
        return path

    @contextmanager
    def _temporary(self, key: str, data: Buffer, crc64: int | None) -> Iterator[Path]:
        """A file with ``data``, checked and on disk, that is gone at exit unless it was renamed."""
        quoted = urllib.parse.quote(key, safe="")[:_QUOTED_KEY]
        path = self._incoming / f"{secrets.token_hex(8)}-{quoted}"
        self._make_directory(self._incoming)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        try:
            try:
                _write(descriptor, data)
                if crc64 is not None:
                    _refuse_damaged(self._uri, key, _checksum(descriptor), crc64)
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
            yield path
        finally:
            path.unlink(missing_ok=True)

    def _place(self, key: str, path: Path, give_name: Callable[[], object]) -> None:
        """Make the directories above ``path``, ``give_name``, and return when the name is on disk."""
        for _ in range(_RACES):
            self._make_directory(path.parent)
            try:
                give_name()
            except FileNotFoundError:
                # A concurrent delete found the directory empty.
                continue
            self._sync_name(path)
            return
        raise self._raced(key)

    def _sync_name(self, path: Path) -> None:
        """Return when the name ``path`` is on disk, and those of all directories above it: another process may have
        made one of them a moment ago, and not have synced it yet.
        """
        while path != self._root:
            path = path.parent
            with suppress(FileNotFoundError):
                _sync_directory(path)

    def _make_directory(self, path: Path) -> None:
        """Make ``path`` and what is missing above it; NotADirectoryError where a file is in the way."""
        try:
            path.mkdir()
        except FileExistsError:
            # Gone again means a concurrent delete: who uses the directory finds out and calls again.
            if not path.is_dir() and path.exists():
                raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(path)) from None
        except FileNotFoundError:
            self._make_directory(path.parent)
            self._make_directory(path)
        else:
            _sync_directory(path.parent)

    def _prune(self, directory: Path) -> None:
        """Remove ``directory`` and those above it, as far as they are empty and below the root."""
        while directory != self._root:
            try:
                directory.rmdir()
            except OSError:
                _log.debug("%s: kept, as it is in use", directory)
                return
            directory = directory.parent

    def _holds(self, path: Path, data: Buffer) -> bool:
        """Whether the file has the content ``data``; if so, its name is on disk at return."""
        content = memoryview(data).cast("B")
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            status = os.fstat(descriptor)
            if stat.S_ISDIR(status.st_mode):
                raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
            if status.st_size != len(content):
                return False
            found = bytearray(len(content))
            if _fill(descriptor, memoryview(found), 0) != len(content) or found != content:
                return False
        finally:
            os.close(descriptor)
        self._sync_name(path)
        return True

    def _walk(self, directory: Path, head: str, prefix: str, start_after: str) -> Iterator[ObjectInfo]:
        """What lies in ``directory``, whose keys begin with ``head``; see ``list``.

        A directory sorts as its name with a slash, which is how all keys below it begin.
        """
        found = []
        with suppress(FileNotFoundError), os.scandir(directory) as entries:
            for entry in entries:
                if entry.name == INCOMING or not _is_unicode(entry.name):
                    continue
                key = head + entry.name
                if entry.is_dir(follow_symlinks=False):
                    key += "/"
                    wanted = key.startswith(prefix) or prefix.startswith(key)
                    later = key > start_after or start_after.startswith(key)
                else:
                    wanted = key.startswith(prefix) and entry.is_file(follow_symlinks=False)
                    later = key > start_after
                if wanted and later:
                    found.append((key, entry))
        for key, entry in sorted(found, key=lambda pair: pair[0]):
            if key.endswith("/"):
                yield from self._walk(Path(entry.path), key, prefix, start_after)
            else:
                with suppress(FileNotFoundError):
                    status = entry.stat(follow_symlinks=False)
                    yield ObjectInfo(key, status.st_size, status.st_mtime)

    @contextmanager
    def _told(self, key: str) -> Iterator[None]:
        """Raise what the operating system says as the house's errors."""
        try:
            yield
        except StoreError:
            raise
        except OSError as error:
            kind, advice = _meaning(error)
            subject = f"object {key!r}" if key else "the store"
            text = f"{self._uri}: {subject}: {error.strerror or error}; {advice}"
            raise kind(text, uri=self._uri, key=key) from error

    def _raced(self, key: str) -> StoreError:
        return StoreTransientError(
            f"{self._uri}: writing {key!r} was undone {_RACES} times by others that delete there or abort uploads; "
            "try again when they are done",
            uri=self._uri,
            key=key,
            attempts=_RACES,
        )


def _meaning(error: OSError) -> tuple[type[StoreError], str]:
    """The class to raise for ``error``, and what to do next."""
    if error.errno == errno.ENOENT:
        return StoreNotFoundError, "check the URI and the key"
    if error.errno in {errno.ENOTDIR, errno.EISDIR}:
        return StoreError, "a key and a key below it cannot both be files: use another key"
    if error.errno in _NO_PERMISSION:
        return StorePermissionError, "check the owner, the mode and the mount options of the directory"
    if error.errno in _NO_SPACE:
        return StoreError, "free some space, or keep fewer checkpoints"
    if error.errno in {errno.ESTALE, errno.ETIMEDOUT}:
        return StoreTransientError, "the file server may be away for a while: try again"
    return StoreError, "look at the mount and at the kernel's log"


@contextmanager
def _only_files() -> Iterator[None]:
    """For who reads, a directory in place of the object, or a file above it, means that there is no such object."""
    try:
        yield
    except (IsADirectoryError, NotADirectoryError) as error:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT)) from error


def _is_unicode(name: str) -> bool:
    """Whether a key can name it: os.scandir smuggles bytes that are no UTF-8 through as lone surrogates."""
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def _write(descriptor: int, data: Buffer) -> None:
    rest = memoryview(data).cast("B")
    while len(rest):
        rest = rest[os.write(descriptor, rest) :]


def _fill(descriptor: int, into: memoryview, offset: int) -> int:
    """Read from ``offset`` on until ``into`` is full or the file ends; the count of bytes."""
    done = 0
    while done < len(into):
        count = os.preadv(descriptor, [into[done:]], offset + done)
        if count == 0:
            break
        done += count
    return done


def _checksum(descriptor: int) -> int:
    """CRC-64/NVME of what the file holds, read back: of the caller's buffer it would not see what changed since."""
    block = memoryview(bytearray(_CHECK_BLOCK))
    crc, offset = 0, 0
    while count := _fill(descriptor, block, offset):
        crc = crc64nvme(block[:count], crc)
        offset += count
    return crc


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some FUSE file systems know no such thing, and put names on disk at once.
        if error.errno != errno.EINVAL:
            raise
    finally:
        os.close(descriptor)
