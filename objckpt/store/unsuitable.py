"""Why a scheme that fsspec knows is no store for objckpt.

Invariant: a scheme is refused when it is opened, before any effect, unless the conformance suite has shown that it creates
atomically (32 threads and 8 processes that race for a key have one winner).

Called by ``filesystem``.
"""

from __future__ import annotations

from typing import Final

from objckpt.errors import StoreUnsuitableError

_LOOKS_FIRST: Final = (
    "its create looks whether the key is there and then writes, so two who look at once both write"
)
_READ_ONLY: Final = "it only reads"
_VEILED: Final = "it wraps another filesystem, whose create it does not pass on: name that one by its own URI"

#: By scheme, as fsspec has it. What is not here says what ``open_filesystem`` has to say of any.
REASONS: Final = {
    "sftp": "an exclusive open shows the file before its bytes are there, and whether a rename spares an existing file is "
    "each server's own affair",
    "hdfs": f"{_LOOKS_FIRST}; its file is visible while it is written",
    "webhdfs": "it always asks the server to overwrite, and its file is visible while it is written",
    "smb": f"{_LOOKS_FIRST}; it makes no hard links. Mount the share and use file:// if the mount makes them",
    "ftp": _LOOKS_FIRST,
    "webdav": _LOOKS_FIRST,
    "http": _READ_ONLY,
    "zip": "an archive has one writer",
    "tar": _READ_ONLY,
    "libarchive": _READ_ONLY,
    "git": _READ_ONLY,
    "github": _READ_ONLY,
    "reference": _READ_ONLY,
    "data": _READ_ONLY,
    "dir": _VEILED,
    "simplecache": _VEILED,
    "filecache": _VEILED,
    "blockcache": _VEILED,
    "cached": _VEILED,
} | dict.fromkeys(
    ("objckpt+file", "objckpt+s3", "objckpt+gs", "objckpt+abfs"), "it shows a run and writes none"
)
_ALIASES: Final = {"ssh": "sftp", "arrow_hdfs": "hdfs", "https": "http"}


def refusal(scheme: str) -> StoreUnsuitableError:
    """The error that says why ``scheme`` cannot hold a run. It is not told the rest of the URI, where people put passwords."""
    reason = REASONS.get(_ALIASES.get(scheme, scheme), "nobody has shown that the filesystem behind it can")
    return StoreUnsuitableError(
        f"{scheme}:// cannot create an object only if it is absent, and two jobs could both commit: {reason}. Use s3://, gs://, "
        "abfs://, or file:// on a mount with hard links.",
        uri=f"{scheme}://",
    )
