"""The records that lie in the bucket: frozen dataclasses, their JSON, and the key of each.

Invariants: a record's bytes are a pure function of its value; a key only ever gets one content; a record that is malformed, names
an object outside its run, or was written by a newer format raises :class:`CorruptCheckpointError` (:class:`FormatVersionError`)
and never anything else. No I/O. ``FORMAT.md`` specifies the same for readers in other languages.

Called by ``commit`` and ``retention`` (versions, indexes), ``uploader`` (rank records) and the readers above them.
"""

from __future__ import annotations

from objckpt.manifest.decode import decode_group, decode_index, decode_record, decode_version
from objckpt.manifest.encode import encode_group, encode_index, encode_record, encode_version
from objckpt.manifest.keys import (
    BLOCK_SIZE,
    GROUP_SIZE,
    MANIFEST_PREFIX,
    Attempt,
    Rank,
    Save,
    Step,
    data_key,
    folder_prefix,
    group_key,
    group_of,
    groups,
    groups_prefix,
    index_key,
    is_shard,
    probe_key,
    rank_of,
    record_key,
    records_prefix,
    save_of,
    version_key,
    version_of,
)
from objckpt.manifest.records import (
    FORMAT_VERSION,
    JSON,
    DataObject,
    Entry,
    GroupRecord,
    Index,
    Piece,
    Policy,
    RankRecord,
    Reference,
    Version,
)

__all__ = [
    "BLOCK_SIZE",
    "FORMAT_VERSION",
    "GROUP_SIZE",
    "JSON",
    "MANIFEST_PREFIX",
    "Attempt",
    "DataObject",
    "Entry",
    "GroupRecord",
    "Index",
    "Piece",
    "Policy",
    "Rank",
    "RankRecord",
    "Reference",
    "Save",
    "Step",
    "Version",
    "data_key",
    "decode_group",
    "decode_index",
    "decode_record",
    "decode_version",
    "encode_group",
    "encode_index",
    "encode_record",
    "encode_version",
    "folder_prefix",
    "group_key",
    "group_of",
    "groups",
    "groups_prefix",
    "index_key",
    "is_shard",
    "probe_key",
    "rank_of",
    "record_key",
    "records_prefix",
    "save_of",
    "version_key",
    "version_of",
]
