"""Where the local tier may lie: directories of this node, and the room that they have.

Invariants: no file system is used whose pages may vanish or block; a directory is ours alone, or it is refused; a memory file system
gives at most a quarter of the memory that is left; without ``cache=`` a place is looked for, with it that one is taken or refused.

Called by ``spool``, ``checkpointer`` and ``saves``.
"""

from __future__ import annotations

import logging
import os
import socket
import stat
import tempfile
from pathlib import Path

from objckpt.errors import SpoolError

log = logging.getLogger(__name__)

_NETWORK = frozenset({
    "9p", "afs", "beegfs", "ceph", "cifs", "glusterfs", "gpfs", "lustre", "ncpfs", "nfs", "nfs4", "ocfs2", "orangefs", "smb3", "smbfs",
    "virtiofs",
})  # fmt: skip
_IN_MEMORY = frozenset({"tmpfs", "ramfs"})
_MARGIN = 1.05
#: Memory may hold slots of at most this share of what is left of it.
_MEMORY_SHARE = 0.25
_SHARED_MEMORY = Path("/dev/shm")


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


def root(base: Path, run: str) -> Path:
    """The directory of all spools below ``base`` of a run on this node since its last boot; made if absent."""
    try:
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


def roots(cache: Path | None, run: str) -> list[Path]:
    """Every directory in which spools of a run may lie on this node, the best first: below ``cache`` alone, if it is given.

    Else below the temporary directory, then below ``/dev/shm``; :class:`SpoolError` if neither will do.
    """
    if cache is not None:
        return [root(cache, run)]
    found, problems = [], []
    for base in dict.fromkeys((Path(tempfile.gettempdir()), _SHARED_MEMORY)):
        try:
            found.append(root(base, run))
        except SpoolError as error:
            log.debug("not used for slots: %s", error)
            problems.append(str(error))
    if not found:
        raise SpoolError("; ".join(problems))
    return found


def choose(places: list[Path], nbytes: int) -> Path:
    """The first of ``places`` with room for ``nbytes`` bytes of slots; the first of all if none has it."""
    for path in places:
        if lack_of_room(path, nbytes) is None:
            return path
    return places[0]


def file_system(path: Path) -> str:
    """Type of the file system that ``path`` lies on, as mountinfo names it; "" if it cannot be told."""
    device = path.stat().st_dev
    wanted = f"{os.major(device)}:{os.minor(device)}"
    for line in Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="replace").splitlines():
        fields, _, rest = line.partition(" - ")
        if fields.split()[2] == wanted:
            return rest.split()[0]
    return ""


def in_memory(path: Path) -> bool:
    """Whether files below ``path`` are memory."""
    return file_system(path) in _IN_MEMORY


def _memory_left() -> int:
    """Bytes of memory that this container may still take: the smaller of what is available and what its cgroup leaves."""
    info = Path("/proc/meminfo").read_text(encoding="ascii")
    left = next(int(line.split()[1]) << 10 for line in info.splitlines() if line.startswith("MemAvailable"))
    group = Path("/sys/fs/cgroup")
    limit = group / "memory.max"
    if limit.exists() and (text := limit.read_text(encoding="ascii").strip()) != "max":
        left = min(left, int(text) - int((group / "memory.current").read_text(encoding="ascii")))
    return left


def lack_of_room(path: Path | None, nbytes: int) -> str | None:
    """Why ``nbytes`` bytes of slots and a margin do not fit below ``path`` (None: into memory without a file system); None if they do."""
    wanted = int(nbytes * _MARGIN)
    memory = path is None or in_memory(path)
    limits: list[tuple[int, str]] = []
    if path is not None:
        disk = os.statvfs(path)
        limits.append((disk.f_bavail * disk.f_frsize, "its free space"))
    if memory:
        limits.append((int(_memory_left() * _MEMORY_SHARE), "a quarter of the memory that is left"))
    free, what = min(limits)
    if free >= wanted:
        return None
    return f"{path or 'memory'}: the slots need {wanted / 1e9:.2f} GB, {what} is {free / 1e9:.2f} GB"
