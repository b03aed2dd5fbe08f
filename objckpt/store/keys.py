"""Which keys, and which roots, a store takes.

Invariant: a key that passes names one object below the root, in one way only.

Called by ``filesystem`` and ``azure`` (:func:`check_key`), and by ``s3`` and ``gcs`` (the others).
"""

from __future__ import annotations

import re
from typing import Final

from objckpt.errors import ConfigError, StoreError

#: What S3 and GCS allow, so that a run can be copied there.
_KEY_BYTES: Final = 1024
#: The longest file name of every Linux file system in use.
_SEGMENT_BYTES: Final = 255
#: Lists and bulk deletes are XML, which cannot hold these, or reads them as something else; GCS itself refuses line ends.
_NOT_IN_XML: Final = re.compile("[\\x00-\\x1f\\x7f\\ufffe\\uffff]")
#: Holds files that are being written, below the root of each file store. No key may have a segment of this name.
INCOMING: Final = ".objckpt-incoming"


def check_key(uri: str, key: str) -> None:
    """StoreError unless ``key`` names one file below the root in one way only."""
    segments = key.split("/")
    fault = _fault_of(key, "")
    if not fault:
        if "\0" in key:
            fault = "holds a NUL"
        elif max(len(segment.encode()) for segment in segments) > _SEGMENT_BYTES:
            fault = f"has a segment of more than {_SEGMENT_BYTES} bytes"
        elif INCOMING in segments:
            fault = f"has a segment `{INCOMING}`, where unfinished files lie"
    _refuse(uri, key, fault)


def bucket_key(uri: str, root: str, key: str) -> str:
    """The bucket's key: ``root`` (empty, or with a slash at its end) and ``key``. StoreError for one that a store, or XML on its way,
    would refuse or take for another.
    """
    fault = _fault_of(key, root)
    if not fault and _NOT_IN_XML.search(key):
        fault = "holds a control character"
    _refuse(uri, key, fault)
    return root + key


def split_bucket_uri(uri: str, name: str, schemes: tuple[str, ...], instead: str) -> tuple[str, str]:
    """Bucket and prefix (without slashes at its ends) of a URI of the store called ``name``. Not ``urlsplit``: keys may hold ``?`` and
    ``#``. :class:`ConfigError` for another one, and for credentials in it, which are given by ``instead``.
    """
    scheme, _, rest = uri.partition("://")
    bucket, _, prefix = rest.partition("/")
    if scheme not in schemes or not bucket:
        raise ConfigError(
            f"{scheme}://: a URI of {name} is {schemes[0]}://bucket or {schemes[0]}://bucket/prefix"
        )
    if "@" in bucket or ":" in bucket:
        raise ConfigError(
            f"a URI of {name} holds no credentials and no port: give {instead} as storage_options"
        )
    return bucket, prefix.strip("/")


def _fault_of(key: str, root: str) -> str:
    """Why no store takes a key, "" if some do."""
    try:
        size = len((root + key).encode())
    except UnicodeEncodeError:
        return "is not valid Unicode"
    segments = key.split("/")
    if size > _KEY_BYTES:
        return f"has {size} bytes{' with the prefix of the root' if root else ''}, more than {_KEY_BYTES}"
    if not all(segments):
        return "is empty, or has an empty segment between slashes"
    if not {".", ".."}.isdisjoint(segments):
        return "has a segment `.` or `..`"
    return ""


def _refuse(uri: str, key: str, fault: str) -> None:
    if fault:
        raise StoreError(f"{uri}: the key {key!r} {fault}; use another", uri=uri, key=key)
