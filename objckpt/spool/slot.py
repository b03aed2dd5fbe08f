"""One slot: a preallocated, mapped, reused file that holds one image.

Invariants: a mapping is never closed, since a tensor that views it outlives any reference count that Python sees; what is staged into is
backed by blocks or memory that were taken beforehand, so that a full disk is an error and not a SIGBUS; making pages resident changes
no byte, so it may go on beside a fill.

Called by ``spool``.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import logging
import mmap
import os
import threading
from typing import Final

from objckpt.errors import SpoolError

log = logging.getLogger(__name__)

#: Linux 5.14's madvise(2) that faults pages in for writing; Python's mmap does not name it, and its own call holds the GIL.
_POPULATE_WRITE: Final = 23
_TOUCH_STEP: Final = (
    32 << 20
)  # bytes: a call holds the address space's lock, which the training loop's allocations want
_libc: Final = ctypes.CDLL(None, use_errno=True)

#: Mappings of slots, kept for the life of the process (see above).
_MAPPED: Final[list[mmap.mmap]] = []


def slot_name(number: int) -> str:
    """File name of a slot."""
    return f"slot-{number}.safetensors"


class Slot:
    """A slot of ``capacity`` bytes. ``view`` (writable bytes) is valid as long as the process lives.

    A file in ``directory`` (a descriptor), or memory without a name if that is None: such a slot is reached by ``descriptor`` alone.
    :class:`SpoolError` if there is no room.
    """

    def __init__(self, number: int, directory: int | None, capacity: int) -> None:
        self.number = number
        self.capacity = capacity
        self.in_memory = directory is None
        if directory is None:
            self.descriptor = os.memfd_create(slot_name(number), os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        else:
            self.descriptor = os.open(
                slot_name(number),
                os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC,
                0o600,
                dir_fd=directory,
            )
        try:
            os.posix_fallocate(self.descriptor, 0, capacity)
            if directory is None:
                fcntl.fcntl(self.descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
        except OSError as error:
            os.close(self.descriptor)
            raise SpoolError(
                f"no room for a slot of {capacity / 1e9:.2f} GB ({error.strerror}): free some space or memory, or give another cache="
            ) from error
        self._map = mmap.mmap(self.descriptor, capacity)
        _MAPPED.append(self._map)
        self.view = memoryview(self._map)
        self._address = ctypes.addressof((ctypes.c_char * capacity).from_buffer(self._map))

    def touch(self, ended: threading.Event) -> bool:
        """Make all pages resident and writable, so that the first fill is as fast as any other; lets other threads run meanwhile.

        False if ``ended`` is set before all are, and where the kernel cannot: then the first fill does it, a few times slower.
        """
        for begin in range(0, self.capacity, _TOUCH_STEP):
            if ended.is_set():
                return False
            size = min(_TOUCH_STEP, self.capacity - begin)
            address = ctypes.c_void_p(self._address + begin)
            if _libc.madvise(address, ctypes.c_size_t(size), ctypes.c_int(_POPULATE_WRITE)):
                number = ctypes.get_errno()
                reason = "it wants Linux 5.14" if number == errno.EINVAL else os.strerror(number)
                log.debug("the pages of slot %d are not touched beforehand: %s", self.number, reason)
                return False
        return True

    def check(self) -> None:
        """Refuse a file that somebody cut short: touching its missing pages would kill the process."""
        size = os.fstat(self.descriptor).st_size
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
        os.close(self.descriptor)
