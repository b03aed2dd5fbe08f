"""Slots and their journal on the local tier: make, stage, adopt, serve a restore on the same node.

Invariants: a slot's journal exists only while the slot holds exactly the image that it describes (it is removed before the slot is
filled again, and written after); nothing here counts as durable; a spool belongs to the process that holds its lock; a spool is
found by what it holds, never by a rank's number; no file system is used whose pages may vanish or block.

Called by ``checkpointer`` (makes the spool, fills slots) and ``uploader`` (holds the lock, drains). A spool's name ends its path
``<cache>/objckpt-<uid>/<run>/<host>-<boot id>/``: after a reboot, pages that never reached the disk are not taken for a save.
"""

from __future__ import annotations

import fcntl
import json
import logging
import mmap
import os
import secrets
import shutil
import socket
import stat
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from awscrt.checksums import crc64nvme

from objckpt.errors import CorruptCheckpointError, SpoolError
from objckpt.manifest import (
    Attempt,
    DataObject,
    Rank,
    RankRecord,
    Save,
    Step,
    decode_record,
    encode_record,
)

log = logging.getLogger(__name__)

_NETWORK = frozenset(
    [
        "nfs",
        "nfs4",
        "cifs",
        "smb3",
        "smbfs",
        "9p",
        "afs",
        "ceph",
        "lustre",
        "gpfs",
        "beegfs",
        "glusterfs",
        "ncpfs",
        "ocfs2",
        "orangefs",
        "virtiofs",
    ]
)
_MARGIN = 1.05
#: A memory file system may hold slots of at most this share of what memory is left.
_MEMORY_SHARE = 0.25
_LOCK: Final = "lock"
_LOG: Final = "uploader.log"
_NEW: Final = ".new-"


# ------------------------------------------------------------------ places


def _boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()[:8]


def _private(path: Path) -> None:
    """Make a directory that is ours alone, or refuse it."""
    path.mkdir(mode=0o700, exist_ok=True)
    info = path.lstat()
    if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.getuid() or info.st_mode & 0o077:
        raise SpoolError(
            f"{path} is not a directory of our own with mode 0700 (a symbolic link, another user's, or open to others): "
            f"remove it, or give another cache="
        )


def root(cache: Path | None, run: str) -> Path:
    """The directory of all spools of a run on this node since its last boot; made if absent. ``cache=None``: the temporary directory."""
    base = Path(tempfile.gettempdir()) if cache is None else cache
    try:
        if cache is not None:
            base.mkdir(parents=True, exist_ok=True)
        path = base
        for part in (
            f"objckpt-{os.getuid()}",
            run,
            f"{socket.gethostname().split('.')[0]}-{_boot_id()}",
        ):
            path /= part
            _private(path)
    except SpoolError:
        raise
    except OSError as error:
        raise SpoolError(
            f"cannot make the local tier below {base}: {error}. Give a writable local directory as cache="
        ) from error
    kind = file_system(path)
    if kind in _NETWORK or kind.startswith("fuse"):
        raise SpoolError(
            f"{path} lies on a {kind} file system: pages of a mapped file may block or vanish there. Give a local directory (NVMe, "
            f"/tmp or /dev/shm) as cache="
        )
    return path


def file_system(path: Path) -> str:
    """Type of the file system that ``path`` lies on, as mountinfo names it; "" if it cannot be told."""
    device = path.stat().st_dev
    wanted = f"{os.major(device)}:{os.minor(device)}"
    for line in Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="replace").splitlines():
        fields, _, rest = line.partition(" - ")
        if fields.split()[2] == wanted:
            return rest.split()[0]
    return ""


def _memory_left() -> int:
    """Bytes of memory that this container may still take: the smaller of what is available and what its cgroup leaves."""
    info = Path("/proc/meminfo").read_text(encoding="ascii")
    left = next(int(line.split()[1]) << 10 for line in info.splitlines() if line.startswith("MemAvailable"))
    group = Path("/sys/fs/cgroup")
    limit = group / "memory.max"
    if limit.exists() and (text := limit.read_text(encoding="ascii").strip()) != "max":
        left = min(left, int(text) - int((group / "memory.current").read_text(encoding="ascii")))
    return left


def _check_room(path: Path, nbytes: int) -> None:
    disk = os.statvfs(path)
    free = disk.f_bavail * disk.f_frsize
    kind = file_system(path)
    if kind in ("tmpfs", "ramfs"):
        free = min(free, int(_memory_left() * _MEMORY_SHARE))
    if free < nbytes * _MARGIN:
        where = "a quarter of the memory that is left" if kind in ("tmpfs", "ramfs") else "its free space"
        raise SpoolError(
            f"{path}: the slots need {nbytes * _MARGIN / 1e9:.2f} GB, {where} is {free / 1e9:.2f} GB. Free some, or give a larger local "
            f"disk as cache="
        )


# ------------------------------------------------------------------ slots


class Slot:
    """A preallocated, mapped, reused file that holds one image. ``view`` (writable bytes) is valid as long as the process lives.

    The mapping is never closed: a tensor view of it outlives any reference count that Python sees, and touching it after an unmap
    would be a segmentation fault.
    """

    def __init__(self, number: int, directory: int, capacity: int) -> None:
        self.number = number
        self.capacity = capacity
        self._fd = os.open(
            slot_name(number), os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=directory
        )
        try:
            os.posix_fallocate(self._fd, 0, capacity)
        except OSError as error:
            os.close(self._fd)
            raise SpoolError(
                f"no room for a slot of {capacity / 1e9:.2f} GB ({error.strerror}): free some space or memory, or give another cache="
            ) from error
        self._map = mmap.mmap(self._fd, capacity)
        _MAPPED.append(self._map)
        self.view = memoryview(self._map)

    def check(self) -> None:
        """Refuse a file that somebody cut short: touching its missing pages would kill the process."""
        size = os.fstat(self._fd).st_size
        if size < self.capacity:
            raise SpoolError(
                f"slot {self.number} was cut from {self.capacity} to {size} bytes behind our back; the save was refused. Something "
                f"cleans the cache directory: exempt it, or give another cache="
            )

    def discard(self) -> None:
        """Give back the memory and disk of a slot that nobody needs. The mapping stays, and would else hold a removed file's pages."""
        try:
            self._map.madvise(mmap.MADV_REMOVE)
        except OSError as error:  # not every file system can
            log.debug("slot %d is given back when this process ends: %s", self.number, error)

    def close(self) -> None:
        """Close the file; the mapping stays."""
        os.close(self._fd)


#: Mappings of slots, kept for the life of the process (see Slot).
_MAPPED: Final[list[mmap.mmap]] = []


def slot_name(number: int) -> str:
    """File name of a slot."""
    return f"slot-{number}.safetensors"


# ------------------------------------------------------------------ journal and spool


@dataclass(frozen=True, slots=True)
class Journal:
    """What a slot holds: the rank record to be, whose checksums are 0 until the uploader has hashed the image."""

    slot: int
    record: RankRecord

    @property
    def save(self) -> Save:
        """The save that lies in the slot."""
        return self.record.save


def unhashed(key: str, size: int, block_size: int) -> DataObject:
    """An object whose blocks have not been hashed yet."""
    return DataObject(key, size, block_size, (0,) * -(-size // block_size))


def hashed(journal: Journal, crc64: tuple[int, ...]) -> RankRecord:
    """The rank record, once the image's blocks are known."""
    (obj,) = journal.record.objects
    return replace(journal.record, objects=(replace(obj, crc64=crc64),))


class Spool:
    """One spool: a directory with slots, a journal for each save that lies in one, and the uploader's marks.

    All access goes through the directory's descriptor, so the uploader's rename does not disturb the trainer.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self.directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError as error:
            raise SpoolError(f"cannot open the spool {path}: {error.strerror}") from error
        self._lock: int | None = None

    @classmethod
    def create(cls, where: Path) -> Spool:
        """A new spool, under a name that no scan looks at until its uploader holds the lock."""
        path = where / f"{_NEW}{secrets.token_hex(8)}"
        path.mkdir(mode=0o700)
        return cls(path)

    def make_slots(self, count: int, capacity: int) -> list[Slot]:
        """``count`` slots of ``capacity`` bytes, or :class:`SpoolError` if the place has no room for them."""
        self.check_room(count * capacity)
        slots: list[Slot] = []
        try:
            for number in range(count):
                slots.append(Slot(number, self.directory, capacity))  # noqa: PERF401 # those made so far are given back
        except SpoolError:
            for slot in slots:
                slot.discard()
                slot.close()
            raise
        return slots

    def check_room(self, nbytes: int) -> None:
        """Raise :class:`SpoolError` unless ``nbytes`` and a margin fit into the place."""
        _check_room(self.path, nbytes)

    def close(self) -> None:
        """Give up the lock and the descriptor; files stay."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None
        os.close(self.directory)

    # ---------------------------------------------------------- the lock

    def lock(self) -> bool:
        """Take the spool. False if a live process holds it."""
        fd = os.open(
            _LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=self.directory
        )
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            return False
        self._lock = fd
        return True

    def where(self) -> Path:
        """Its path by now: another process may have published it."""
        return Path(f"/proc/self/fd/{self.directory}").readlink()

    def publish(self, attempt: Attempt, rank: Rank) -> None:
        """Give a new, locked spool the name under which a later start finds it."""
        name = f"a{attempt:06d}-r{rank:05d}-{self.path.name.removeprefix(_NEW)}"
        self.path = self.path.rename(self.path.with_name(name))

    def remove(self) -> None:
        """Delete the spool and all that is in it, then close. The run's directory goes with its last spool."""
        shutil.rmtree(self.path, ignore_errors=True)
        for directory in (self.path.parent, self.path.parent.parent):
            try:
                directory.rmdir()
            except OSError:
                break  # another spool is in it
        self.close()

    # ---------------------------------------------------------- journals

    def journals(self) -> list[Journal]:
        """Journals by save. One that cannot be read is passed over with an error in the log: its slot is not taken for a save."""
        found = []
        for name in os.listdir(self.directory):
            if name.startswith("save-") and name.endswith(".json"):
                try:
                    found.append(self._journal(name))
                except FileNotFoundError:
                    log.debug("%s/%s was forgotten meanwhile: its slot is filled again", self.path, name)
                except CorruptCheckpointError:
                    log.exception("%s/%s was passed over", self.path, name)
        return sorted(found, key=lambda journal: journal.save)

    def _journal(self, name: str) -> Journal:
        data = self._read(name)
        try:
            head, _, body = data.partition(b"\n")
            fields = json.loads(head)
            slot, attempt, step, rank = (int(fields[k]) for k in ("slot", "attempt", "step", "rank"))
            crc64 = int(fields["crc64"])
        except (ValueError, KeyError, TypeError) as error:
            raise CorruptCheckpointError(f"{self.path}/{name} is no journal: {error!r}") from error
        if crc64nvme(body) != crc64:
            raise CorruptCheckpointError(
                f"{self.path}/{name} is damaged: CRC-64 {crc64nvme(body):016x}, not {crc64:016x}"
            )
        save = Save(Attempt(attempt), Step(step))
        return Journal(slot, decode_record(body, save, Rank(rank)))

    def journal(self, save: Save) -> Journal:
        """The journal of one save."""
        return self._journal(f"save-{save}.json")

    def write_journal(self, slot: int, record: RankRecord) -> None:
        """Say that ``slot`` now holds the image of ``record``. From here on the save survives the death of this process."""
        body = encode_record(record)
        head = {
            "slot": slot,
            "attempt": record.save.attempt,
            "step": record.save.step,
            "rank": record.rank,
            "crc64": crc64nvme(body),  # the values of the state lie in no other checked place
        }
        self._write(f"save-{record.save}.json", json.dumps(head).encode() + b"\n" + body)

    def holds(self, save: Save) -> bool:
        """Whether the save's slot still has its image, and has had it so far: the journal goes before the slot is filled again."""
        return self._exists(f"save-{save}.json")

    def forget(self, save: Save) -> None:
        """Remove the journal of a save: its slot is about to be filled again."""
        for name in (f"save-{save}.json", f"save-{save}.crc", f"save-{save}.durable"):
            try:
                os.unlink(name, dir_fd=self.directory)
            except FileNotFoundError:
                continue

    def checksums(self, save: Save) -> tuple[int, ...] | None:
        """Block checksums that an uploader journalled, or None."""
        try:
            return tuple(int(crc) for crc in json.loads(self._read(f"save-{save}.crc")))
        except FileNotFoundError:
            return None
        except (ValueError, TypeError) as error:
            raise CorruptCheckpointError(
                f"{self.path}/save-{save}.crc does not hold checksums: {error!r}"
            ) from error

    def write_checksums(self, save: Save, crc64: tuple[int, ...]) -> None:
        """Journal the checksums of the first pass over the image; every later read is checked against them."""
        self._write(f"save-{save}.crc", json.dumps(crc64).encode())

    def durable(self, save: Save) -> bool:
        """Whether the save's shard and record are known to be in the bucket."""
        return self._exists(f"save-{save}.durable")

    def mark_durable(self, save: Save) -> None:
        """Note that the store has acknowledged shard and record."""
        self._write(f"save-{save}.durable", b"")

    def pending(self) -> bool:
        """Whether a save still has bytes to send. Names only: the owner may be at work on them."""
        names = set(os.listdir(self.directory))
        return any(
            n.startswith("save-")
            and n.endswith(".json")
            and f"{n.removesuffix('.json')}.durable" not in names
            for n in names
        )

    # ---------------------------------------------------------- slots as read by others

    def image(self, journal: Journal) -> mmap.mmap:
        """The image in a slot, mapped for reading."""
        size = journal.record.objects[0].size
        fd = self.open_slot(journal.slot)
        try:
            if os.fstat(fd).st_size < size:
                raise CorruptCheckpointError(
                    f"{self.path}/{slot_name(journal.slot)} was cut short of its {size} bytes: save {journal.save} is lost unless it "
                    f"was uploaded before"
                )
            return mmap.mmap(fd, size, access=mmap.ACCESS_READ)
        finally:
            os.close(fd)

    def open_slot(self, number: int) -> int:
        """A descriptor of a slot's file, for reading."""
        return os.open(slot_name(number), os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=self.directory)

    def release_pages(self, number: int) -> None:
        """Let the kernel drop a slot's pages from its cache once they are on disk."""
        fd = self.open_slot(number)
        try:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)

    def log_file(self) -> int:
        """A descriptor to which an uploader writes its log."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
        return os.open(_LOG, flags, 0o600, dir_fd=self.directory)

    # ---------------------------------------------------------- files

    def _exists(self, name: str) -> bool:
        try:
            os.stat(name, dir_fd=self.directory, follow_symlinks=False)
        except FileNotFoundError:
            return False
        return True

    def _read(self, name: str) -> bytes:
        fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=self.directory)
        with open(fd, "rb") as file:  # noqa: PTH123 # a descriptor, not a path
            return file.read()

    def _write(self, name: str, data: bytes) -> None:
        """Write a file whole or not at all. Not synced: a spool of another boot is never read."""
        temporary = f".{name}.{secrets.token_hex(4)}"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            fd = os.open(temporary, flags, 0o600, dir_fd=self.directory)
            with open(fd, "wb") as file:  # noqa: PTH123 # a descriptor, not a path
                file.write(data)
            os.rename(temporary, name, src_dir_fd=self.directory, dst_dir_fd=self.directory)
        except OSError as error:
            raise SpoolError(f"cannot write {name} into the spool {self.path}: {error.strerror}") from error


def scan(where: Path) -> Iterator[Spool]:
    """All published spools below ``where`` (see :func:`root`). One that vanishes meanwhile is passed over."""
    for path in sorted(where.iterdir()):
        if path.name.startswith("a") and path.is_dir() and not path.is_symlink():
            try:
                yield Spool(path)
            except SpoolError:
                log.debug("%s is gone", path)


def clear_earlier_boots(where: Path) -> None:
    """Remove what earlier boots of this machine left beside ``where``: it is never taken for a save, and slots are large."""
    host = where.name.rpartition("-")[0]
    for other in where.parent.iterdir():
        if other != where and other.name.rpartition("-")[0] == host and not other.is_symlink():
            for spool in scan(other):
                if spool.lock():
                    spool.remove()
                else:
                    spool.close()
