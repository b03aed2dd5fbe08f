"""Slots and their journal on the local tier: make, stage, adopt, serve a restore on the same node.

Invariants: a slot's journal exists only while the slot holds exactly the image that it describes (it is removed before the slot is
filled again, and written after); nothing here counts as durable; a spool belongs to the process that holds its lock; a spool is
found by what it holds, never by a rank's number. The rules of a slot and of its place stand in ``slot`` and ``places``.

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
from objckpt.spool.places import choose, file_system, lack_of_room, root, roots
from objckpt.spool.slot import Slot, slot_name

__all__ = [
    "Journal",
    "Slot",
    "Spool",
    "choose",
    "clear_earlier_boots",
    "clear_unused",
    "file_system",
    "hashed",
    "root",
    "roots",
    "scan",
    "slot_name",
    "unhashed",
]

log = logging.getLogger(__name__)

_LOCK: Final = "lock"
_LOG: Final = "uploader.log"
_NEW: Final = ".new-"
_PROGRESS: Final = "progress"
_CRC_SIZE: Final = 17  # of the first line of a journal


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


def _checksum(content: bytes) -> bytes:
    """The first line of a journal: the CRC-64/NVME of all that follows."""
    return b"%016x\n" % crc64nvme(content)


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
        self._lent: dict[int, int] = {}

    @classmethod
    def create(cls, where: Path) -> Spool:
        """A new spool, under a name that no scan looks at until its uploader holds the lock."""
        while True:
            path = where / f"{_NEW}{secrets.token_hex(8)}"
            path.mkdir(mode=0o700)
            try:
                spool = cls(path)
            except SpoolError:
                if path.exists():
                    raise
                continue
            fcntl.flock(spool.directory, fcntl.LOCK_SH)  # says that somebody lives who means to use it
            if path.exists():
                return spool
            spool.close()  # an adoption took it for what a dead process left, before we held it

    def make_slots(self, count: int, capacity: int, *, anywhere: bool = False) -> list[Slot]:
        """``count`` slots of ``capacity`` bytes: files of this spool or, if ``anywhere``, memory where the spool has no room.

        Slots in memory are reached by their descriptors alone, so the uploader has to be given them (:meth:`lend`), and nobody adopts
        them. :class:`SpoolError` with the figures if there is no room for all.
        """
        problems = []
        for directory in (self.directory, None) if anywhere else (self.directory,):
            try:
                slots = self._slots_in(directory, count, capacity)
            except SpoolError as error:
                problems.append(str(error))
            else:
                if problems:
                    log.warning(
                        "slots lie in memory: saves in them outlive this process, but not its uploader (%s)",
                        problems[0],
                    )
                return slots
        raise SpoolError(f"{'; '.join(problems)}. Free some, or give a larger local disk as cache=")

    def _slots_in(self, directory: int | None, count: int, capacity: int) -> list[Slot]:
        lack = lack_of_room(None if directory is None else self.path, count * capacity)
        if lack is not None:
            raise SpoolError(lack)
        slots: list[Slot] = []
        try:
            for number in range(count):
                slots.append(Slot(number, directory, capacity))  # noqa: PERF401 # those made so far are given back
        except SpoolError:
            for slot in slots:
                slot.discard()
                slot.close()
            raise
        return slots

    def replace_slot(self, slot: Slot, capacity: int) -> Slot:
        """A larger slot in the place of ``slot``, whose content is lost. :class:`SpoolError` if there is no room."""
        lack = lack_of_room(None if slot.in_memory else self.path, capacity - slot.capacity)
        if lack is not None:
            raise SpoolError(f"{lack}. Free some, or give a larger local disk as cache=")
        if slot.in_memory:
            slot.discard()
        larger = Slot(slot.number, None if slot.in_memory else self.directory, capacity)
        slot.close()
        return larger

    def close(self) -> None:
        """Give up the lock and the descriptor; files stay."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None
        while self._lent:
            os.close(self._lent.popitem()[1])
        # Its number may be another file's at once, which a thread that comes late must not write into.
        directory, self.directory = self.directory, -1
        os.close(directory)

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
        crc64, content = data[:_CRC_SIZE], data[_CRC_SIZE:]
        if crc64 != _checksum(content):
            raise CorruptCheckpointError(
                f"{self.path}/{name} is damaged: its bytes have the CRC-64 {_checksum(content)!r}, not {crc64!r}"
            )
        try:
            head, _, body = content.partition(b"\n")
            fields = json.loads(head)
            slot, attempt, step, rank = (int(fields[k]) for k in ("slot", "attempt", "step", "rank"))
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
            raise CorruptCheckpointError(f"{self.path}/{name} is no journal: {error!r}") from error
        save = Save(Attempt(attempt), Step(step))
        if name != f"save-{save}.json":
            raise CorruptCheckpointError(f"{self.path}/{name} is the journal of save {save}")
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
        }
        content = json.dumps(head).encode() + b"\n" + body
        # Which slot it is and the values of the state lie in no other checked place.
        self._write(f"save-{record.save}.json", _checksum(content) + content)

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

    def pending(self) -> set[str]:
        """The journals of saves that still have bytes to send. Names only: the owner may be at work on them."""
        names = set(os.listdir(self.directory))
        return {
            n
            for n in names
            if n.startswith("save-")
            and n.endswith(".json")
            and f"{n.removesuffix('.json')}.durable" not in names
        }

    def write_progress(self, count: int) -> None:
        """Say how much the uploader has done so far, in any unit."""
        self._write(_PROGRESS, str(count).encode())

    def progress(self) -> object:
        """What changes as long as the uploader that holds the lock does something."""
        marks = {n for n in os.listdir(self.directory) if n.startswith("save-")}
        try:
            return marks, self._read(_PROGRESS)
        except FileNotFoundError:
            return marks, b""

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
        """A descriptor of a slot's file, for reading. :class:`SpoolError` if its bytes went with the process that had them."""
        if number in self._lent:
            return os.dup(self._lent[number])
        try:
            return os.open(
                slot_name(number), os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=self.directory
            )
        except FileNotFoundError as error:
            raise SpoolError(
                f"{self.path}: slot {number} lay in the memory of processes that are gone: its save is lost unless it was uploaded before"
            ) from error

    def lend(self, number: int, descriptor: int) -> None:
        """From now on, slot ``number`` is reached by ``descriptor``, which is ours to close."""
        if number in self._lent:
            os.close(self._lent[number])
        self._lent[number] = descriptor

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


def clear_unused(where: Path) -> None:
    """Remove the spools below ``where`` whose makers died before an uploader had taken them. Nothing lies in them."""
    for path in where.glob(f"{_NEW}*"):
        try:
            spool = Spool(path)
        except SpoolError:
            continue  # taken meanwhile
        try:
            fcntl.flock(spool.directory, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            spool.close()
        else:
            # Their directory stays: others may be about to make theirs in it. One that was published just now has another name.
            shutil.rmtree(path, ignore_errors=True)
            spool.close()


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
