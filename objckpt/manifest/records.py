"""The records as frozen dataclasses."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, Literal, TypeAlias

from objckpt.manifest.keys import Attempt, Rank, Save, Step

FORMAT_VERSION: Final = 2

JSON: TypeAlias = "None | bool | int | float | str | list[JSON] | dict[str, JSON]"


@dataclass(frozen=True, slots=True)
class Piece:
    """A box of a tensor and where its bytes lie.

    ``offset`` and ``shape`` place the box in the tensor's ``global_shape``; ``dtype`` is torch's name without prefix. ``begin``
    and ``end`` are bytes of object ``obj`` (an index into the record's ``objects``), row-major.
    """

    name: str
    dtype: str
    global_shape: tuple[int, ...]
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    obj: int
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class DataObject:
    """A shard: its key, size in bytes, and the CRC-64/NVME of each block of ``block_size`` bytes."""

    key: str
    size: int
    block_size: int
    crc64: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class RankRecord:
    """What one rank made durable. A pure function of the slot's image and journal: no clock of the uploader, etag or part size.

    ``values`` is the shared state tree (rank 0 only), ``rank_values`` this rank's own; ``bases`` are the committed saves whose
    objects it refers to; ``metadata`` and ``created_at`` (seconds since the epoch, at staging) are rank 0's.
    """

    run: str
    save: Save
    rank: Rank
    world_size: int
    created_at: float
    metadata: JSON
    bases: tuple[Save, ...]
    objects: tuple[DataObject, ...]
    pieces: tuple[Piece, ...]
    values: JSON
    rank_values: JSON


@dataclass(frozen=True, slots=True)
class GroupRecord:
    """The rank records of one folder, merged, in order of rank."""

    run: str
    save: Save
    group: int
    world_size: int
    records: tuple[RankRecord, ...]


@dataclass(frozen=True, slots=True)
class Reference:
    """A record as an index names it: key, size in bytes, CRC-64/NVME of its bytes."""

    key: str
    size: int
    crc64: int


@dataclass(frozen=True, slots=True)
class Index:
    """One checkpoint: its rank records (or, above 256 ranks, its group records), sorted by key. A pure function of them."""

    run: str
    save: Save
    world_size: int
    created_at: float
    metadata: JSON
    nbytes: int
    bases: tuple[Save, ...]
    records: tuple[Reference, ...]


@dataclass(frozen=True, slots=True)
class Entry:
    """A checkpoint as a version lists it. ``parent`` is the head it was committed on; ``nbytes`` its shards' bytes.

    ``metrics`` are the numbers of its metadata, which :class:`KeepBest` compares without a look into the index.
    """

    save: Save
    parent: Save | None
    world_size: int
    nbytes: int
    created_at: float
    index: Reference
    bases: tuple[Save, ...] = ()
    pinned: bool = False
    metrics: tuple[tuple[str, float], ...] = ()


@dataclass(frozen=True, slots=True)
class KeepLast:
    """Keep the newest ``count`` checkpoints."""

    count: int


@dataclass(frozen=True, slots=True)
class KeepEvery:
    """Keep the first checkpoint of every ``steps`` steps: of 0 to ``steps - 1``, of ``steps`` to ``2 * steps - 1``, and so on."""

    steps: int


@dataclass(frozen=True, slots=True)
class KeepBest:
    """Keep the ``count`` checkpoints whose metadata has the lowest (``mode="max"``: highest) number ``metric``. One without it is none
    of the best; of equals the newer one is.
    """

    metric: str
    count: int = 1
    mode: Literal["min", "max"] = "min"


@dataclass(frozen=True, slots=True)
class KeepFor:
    """Keep what was saved within so many ``days`` before the newest checkpoint was."""

    days: float


Keep: TypeAlias = "KeepLast | KeepEvery | KeepBest | KeepFor"


@dataclass(frozen=True, slots=True)
class Policy:
    """Retention along the line of parents: what any rule of ``keep`` keeps stays (without rules: all), and the newest ``lag`` (the number
    of slots) more than :class:`KeepLast` says.
    """

    keep: tuple[Keep, ...] = ()
    lag: int = 2


@dataclass(frozen=True, slots=True)
class Version:
    """The whole state of a run. The one with the highest ``number`` counts.

    ``change`` says what made it (start, commit, roll-forward, retire, rollback, finish), for people. ``attempt`` is the number of
    the version that started it; ``launch`` is None once the job has finished; ``superseded`` are launches that may not start again;
    ``head`` is what a restart resumes from; ``nonce`` tells equal changes by two writers apart.
    """

    number: int
    change: str
    run: str
    attempt: Attempt
    launch: str | None
    nonce: str
    world_size: int
    policy: Policy = field(default_factory=Policy)
    superseded: tuple[str, ...] = ()
    head: Save | None = None
    kept: tuple[Entry, ...] = ()

    def entry(self, save: Save) -> Entry | None:
        """The entry of ``save``, or None if this version does not list it."""
        return next((e for e in self.kept if e.save == save), None)

    def newest_commit(self) -> Step | None:
        """Step of the newest commit of this version's own attempt, None if it has none."""
        return self.head.step if self.head is not None and self.head.attempt == self.attempt else None
