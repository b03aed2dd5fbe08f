"""Names: of attempts, steps, ranks and saves, and of the key of each record.

Invariants: a key is a pure function of what it names, sorts as its numbers do, and parses back to them; what is not exactly a key of ours
is none.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final, NewType

Attempt = NewType("Attempt", int)
Step = NewType("Step", int)
Rank = NewType("Rank", int)

#: Ranks whose records share a folder; above this many ranks, folders are merged into group records.
GROUP_SIZE: Final = 256
#: Bytes that one CRC-64/NVME of a shard covers (the last block of an object is shorter).
BLOCK_SIZE: Final = 4 << 20


@dataclass(frozen=True, slots=True, order=True)
class Save:
    """The name of a save: the attempt that made it and the optimizer steps done. Ordered by attempt, then step."""

    attempt: Attempt
    step: Step

    def __str__(self) -> str:
        """The form that stands in keys, ``000041-000000012000``."""
        return f"{self.attempt:06d}-{self.step:012d}"


MANIFEST_PREFIX: Final = "manifest/"
_SAVE = r"(?P<attempt>\d{6}|[1-9]\d{6,11})-(?P<step>\d{12})"
_VERSION_KEY = re.compile(r"manifest/(\d{20})\.json", re.ASCII)  # \d is also any other script's digit
_SAVE_KEYS = (
    re.compile(rf"index/{_SAVE}\.json", re.ASCII),
    re.compile(rf"records/{_SAVE}/\d{{4}}/r(?P<rank>\d{{5}})\.json", re.ASCII),
    re.compile(rf"records/{_SAVE}/groups/(?P<group>\d{{4}})\.json", re.ASCII),
    re.compile(rf"data/[0-9a-f]{{2}}/{_SAVE}-r(?P<rank>\d{{5}})-\d{{2}}\.safetensors", re.ASCII),
)


def version_key(number: int) -> str:
    """Key of version ``number`` of the manifest; they sort as numbers do."""
    return f"{MANIFEST_PREFIX}{number:020d}.json"


def index_key(save: Save) -> str:
    """Key of the index of ``save``."""
    return f"index/{save}.json"


def records_prefix(attempt: Attempt) -> str:
    """Where all rank records and group records of an attempt lie."""
    return f"records/{attempt:06d}-"


def folder_prefix(save: Save, group: int) -> str:
    """The folder of the rank records of ranks ``256 * group`` to ``256 * group + 255``."""
    return f"records/{save}/{group:04d}/"


def record_key(save: Save, rank: Rank) -> str:
    """Key of the record of ``rank``."""
    return f"{folder_prefix(save, rank // GROUP_SIZE)}r{rank:05d}.json"


def groups_prefix(save: Save) -> str:
    """The folder of the group records of ``save``."""
    return f"records/{save}/groups/"


def group_key(save: Save, group: int) -> str:
    """Key of the record that merges folder ``group``."""
    return f"{groups_prefix(save)}{group:04d}.json"


def data_key(save: Save, rank: Rank, number: int = 0) -> str:
    """Key of shard ``number`` of ``rank``; ranks spread over 256 prefixes, since stores limit requests by prefix."""
    return f"data/{rank % 256:02x}/{save}-r{rank:05d}-{number:02d}.safetensors"


def probe_key(nonce: str) -> str:
    """Key on which a start proves that the store refuses a second create."""
    return f"probe/{nonce}"


def version_of(key: str) -> int | None:
    """The version's number, or None for a key that is no version."""
    match = _VERSION_KEY.fullmatch(key)
    return int(match[1]) if match else None


def save_of(key: str) -> Save | None:
    """The save that an index, record, group record or shard belongs to; None for any other key."""
    for pattern in _SAVE_KEYS:
        if match := pattern.fullmatch(key):
            return Save(Attempt(int(match["attempt"])), Step(int(match["step"])))
    return None


def rank_of(key: str) -> Rank | None:
    """The rank of a rank record's key; None for any other key."""
    match = _SAVE_KEYS[1].fullmatch(key)
    return Rank(int(match["rank"])) if match else None


def group_of(key: str) -> int | None:
    """The group of a group record's key; None for any other key."""
    match = _SAVE_KEYS[2].fullmatch(key)
    return int(match["group"]) if match else None


def groups(world_size: int) -> int:
    """How many folders of records a save of ``world_size`` ranks has."""
    return -(-world_size // GROUP_SIZE)


def is_shard(key: str) -> bool:
    """Whether ``key`` is that of a shard."""
    return _SAVE_KEYS[3].fullmatch(key) is not None
