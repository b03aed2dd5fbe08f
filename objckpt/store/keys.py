"""Which keys a store behind fsspec takes.

Invariant: a key that passes names one object below the root, in one way only.

Called by ``filesystem`` and ``azure``. S3 and GCS have rules of their own.
"""

from __future__ import annotations

from typing import Final

from objckpt.errors import StoreError

#: What S3 and GCS allow, so that a run can be copied there.
_KEY_BYTES: Final = 1024
#: The longest file name of every Linux file system in use.
_SEGMENT_BYTES: Final = 255
#: Holds files that are being written, below the root of each file store. No key may have a segment of this name.
INCOMING: Final = ".objckpt-incoming"


def check_key(uri: str, key: str) -> None:
    """StoreError unless ``key`` names one object below the root in one way only."""
    try:
        encoded = key.encode()
    except UnicodeEncodeError:
        raise StoreError(
            f"{uri}: the key {key!r} is not valid Unicode; use another", uri=uri, key=key
        ) from None
    segments = encoded.split(b"/")
    if len(encoded) > _KEY_BYTES:
        reason = f"has {len(encoded)} bytes, more than {_KEY_BYTES}"
    elif not all(segments):
        reason = "is empty, or has an empty segment between slashes"
    elif not {b".", b".."}.isdisjoint(segments):
        reason = "has a segment `.` or `..`"
    elif b"\0" in encoded:
        reason = "holds a NUL"
    elif max(map(len, segments)) > _SEGMENT_BYTES:
        reason = f"has a segment of more than {_SEGMENT_BYTES} bytes"
    elif INCOMING.encode() in segments:
        reason = f"has a segment `{INCOMING}`, where unfinished files lie"
    else:
        return
    raise StoreError(f"{uri}: the key {key!r} {reason}; use another", uri=uri, key=key)
