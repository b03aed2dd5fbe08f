"""The records that lie in the bucket: frozen dataclasses, their JSON, and the key of each.

Invariants: a record's bytes are a pure function of its value; a key only ever gets one content; a record that is malformed, names
an object outside its run, or was written by a newer format raises :class:`CorruptCheckpointError` (:class:`FormatVersionError`)
and never anything else. No I/O. ``FORMAT.md`` beside this file specifies the same for readers in other languages.

Called by ``commit`` and ``retention`` (versions, indexes), ``uploader`` (rank records) and the readers above them.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass, field
from typing import Any, Final, NewType, TypeAlias

from objckpt.errors import CorruptCheckpointError, FormatVersionError

JSON: TypeAlias = "None | bool | int | float | str | list[JSON] | dict[str, JSON]"
Attempt = NewType("Attempt", int)
Step = NewType("Step", int)
Rank = NewType("Rank", int)

FORMAT_VERSION: Final = 1
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


# ------------------------------------------------------------------ keys

MANIFEST_PREFIX: Final = "manifest/"
_SAVE = r"(?P<attempt>\d{6}|[1-9]\d{6,11})-(?P<step>\d{12})"
_VERSION_KEY = re.compile(r"manifest/(\d{20})\.json", re.ASCII)  # \d is also any other script's digit
_SAVE_KEYS = (
    re.compile(rf"index/{_SAVE}\.json", re.ASCII),
    re.compile(rf"records/{_SAVE}/\d{{4}}/r(?P<rank>\d{{5}})\.json", re.ASCII),
    re.compile(rf"records/{_SAVE}/groups/(?P<group>\d{{4}})\.json", re.ASCII),
    re.compile(rf"data/[0-9a-f]{{2}}/{_SAVE}-r(?P<rank>\d{{5}})-\d{{2}}\.safetensors", re.ASCII),
)
_DATA_KEY = _SAVE_KEYS[3]


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


# ------------------------------------------------------------------ the records


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
    """A checkpoint as a version lists it. ``parent`` is the head it was committed on; ``nbytes`` its shards' bytes."""

    save: Save
    parent: Save | None
    world_size: int
    nbytes: int
    created_at: float
    index: Reference
    bases: tuple[Save, ...] = ()
    pinned: bool = False


@dataclass(frozen=True, slots=True)
class Policy:
    """Retention: ``keep`` checkpoints along the line of parents (None keeps all), and ``lag`` more (the number of slots)."""

    keep: int | None = None
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


# ------------------------------------------------------------------ JSON


def _dump(kind: str, body: dict[str, Any]) -> bytes:
    text = json.dumps(
        {"format": f"objckpt.{kind}", "version": FORMAT_VERSION, **body},
        separators=(",", ":"),
        allow_nan=False,
    )
    return text.encode() + b"\n"


def _hex(crc: int) -> str:
    return f"{crc:016x}"


def _save(save: Save | None) -> dict[str, int] | None:
    return None if save is None else {"attempt": save.attempt, "step": save.step}


def _reference(ref: Reference) -> dict[str, Any]:
    return {"key": ref.key, "size": ref.size, "crc64": _hex(ref.crc64)}


def encode_version(v: Version) -> bytes:
    """The bytes of a version."""
    return _dump(
        "manifest",
        {
            "number": v.number,
            "change": v.change,
            "run": v.run,
            "attempt": v.attempt,
            "launch": v.launch,
            "nonce": v.nonce,
            "world_size": v.world_size,
            "policy": {"keep": v.policy.keep, "lag": v.policy.lag},
            "superseded": list(v.superseded),
            "head": _save(v.head),
            "kept": [
                {
                    **(_save(e.save) or {}),
                    "parent": _save(e.parent),
                    "world_size": e.world_size,
                    "nbytes": e.nbytes,
                    "created_at": e.created_at,
                    "index": _reference(e.index),
                    "bases": [_save(b) for b in e.bases],
                    "pinned": e.pinned,
                }
                for e in v.kept
            ],
        },
    )


def encode_index(index: Index) -> bytes:
    """The bytes of an index."""
    return _dump(
        "index",
        {
            "run": index.run,
            **(_save(index.save) or {}),
            "world_size": index.world_size,
            "created_at": index.created_at,
            "metadata": index.metadata,
            "nbytes": index.nbytes,
            "bases": [_save(b) for b in index.bases],
            "records": [_reference(r) for r in index.records],
        },
    )


def _record_body(r: RankRecord) -> dict[str, Any]:
    return {
        "run": r.run,
        **(_save(r.save) or {}),
        "rank": r.rank,
        "world_size": r.world_size,
        "created_at": r.created_at,
        "metadata": r.metadata,
        "bases": [_save(b) for b in r.bases],
        "objects": [
            {"key": o.key, "size": o.size, "block_size": o.block_size, "crc64": [_hex(c) for c in o.crc64]}
            for o in r.objects
        ],
        "pieces": [piece_json(p) for p in r.pieces],
        "values": r.values,
        "rank_values": r.rank_values,
    }


def piece_json(p: Piece) -> dict[str, Any]:
    """A piece as it stands in records and journals."""
    return {
        "name": p.name,
        "dtype": p.dtype,
        "global_shape": list(p.global_shape),
        "offset": list(p.offset),
        "shape": list(p.shape),
        "object": p.obj,
        "range": [p.begin, p.end],
    }


def encode_record(record: RankRecord) -> bytes:
    """The bytes of a rank record."""
    return _dump("record", _record_body(record))


def encode_group(group: GroupRecord) -> bytes:
    """The bytes of a group record."""
    return _dump(
        "group",
        {
            "run": group.run,
            **(_save(group.save) or {}),
            "group": group.group,
            "world_size": group.world_size,
            "records": [_record_body(r) for r in group.records],
        },
    )


#: Integers below it fit 64 bits, in any language.
_LIMIT: Final = 1 << 63
#: Up to here a number in seconds is the same whether it is read as an integer or not.
_EXACT: Final = 1 << 53


class _Reader:
    """Typed access to one JSON object; every mistake is a :class:`CorruptCheckpointError` that names the key and the field."""

    __slots__ = ("_body", "key")

    def __init__(self, body: object, key: str) -> None:
        self.key = key
        if not isinstance(body, dict):
            raise self.bad("an object was expected")
        self._body: dict[str, Any] = body

    def bad(self, what: str) -> CorruptCheckpointError:
        return CorruptCheckpointError(
            f"{self.key} is no valid record of objckpt: {what}. It was damaged or written by something else; "
            f"objckpt did not use it. `objckpt verify` shows which checkpoints are whole."
        )

    def raw(self, name: str) -> Any:
        if name not in self._body:
            raise self.bad(f"field {name!r} is missing")
        return self._body[name]

    def integer(self, name: str, low: int = 0) -> int:
        value = self.raw(name)
        if type(value) is not int or not low <= value < _LIMIT:
            raise self.bad(f"field {name!r} is {value!r:.80}, not an integer from {low} on")
        return value

    def number(self, name: str) -> float:
        value = self.raw(name)
        if type(value) not in (int, float) or not -_EXACT <= value <= _EXACT:
            raise self.bad(f"field {name!r} is {value!r:.80}, not a number")
        return float(value)

    def text(self, name: str) -> str:
        value = self.raw(name)
        if type(value) is not str:
            raise self.bad(f"field {name!r} is {value!r:.80}, not a string")
        return value

    def array(self, name: str) -> list[Any]:
        value = self.raw(name)
        if type(value) is not list:
            raise self.bad(f"field {name!r} is {value!r:.80}, not an array")
        return value

    def children(self, name: str) -> list[_Reader]:
        return [_Reader(item, f"{self.key}:{name}[{i}]") for i, item in enumerate(self.array(name))]

    def child(self, name: str) -> _Reader:
        return _Reader(self.raw(name), f"{self.key}:{name}")

    def integers(self, name: str) -> tuple[int, ...]:
        values = self.array(name)
        if any(type(v) is not int or not 0 <= v < _LIMIT for v in values):
            raise self.bad(f"field {name!r} is {values!r:.80}, not an array of sizes")
        return tuple(values)

    def crc(self, value: object) -> int:
        if type(value) is not str or not re.fullmatch(r"[0-9a-f]{16}", value):
            raise self.bad(f"{value!r:.80} is no CRC-64 in 16 hex digits")
        return int(value, 16)

    def save(self) -> Save:
        return Save(Attempt(self.integer("attempt", 1)), Step(self.integer("step")))

    def save_or_none(self, name: str) -> Save | None:
        return None if self.raw(name) is None else self.child(name).save()

    def reference(self, name: str | None = None) -> Reference:
        at = self if name is None else self.child(name)
        return Reference(at.text("key"), at.integer("size"), at.crc(at.raw("crc64")))


def _finite(text: str) -> float:
    """A number that can be written again: Python's parser takes ``NaN`` and reads ``1e999`` as infinity, JSON has neither."""
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text:.80} is no JSON number")
    return value


def _parse(data: bytes, kind: str, key: str) -> _Reader:
    try:
        reader = _Reader(json.loads(data, parse_constant=_finite, parse_float=_finite), key)
    except (ValueError, RecursionError) as error:
        raise CorruptCheckpointError(
            f"{key} is not JSON ({error}): it was damaged or written by something else, and was not used."
        ) from error
    found = reader.text("format")
    if found != f"objckpt.{kind}":
        raise reader.bad(f"its format is {found!r:.80}, not 'objckpt.{kind}'")
    version = reader.integer("version", 1)
    if version > FORMAT_VERSION:
        raise FormatVersionError(
            f"{key} has format version {version}; this objckpt reads up to {FORMAT_VERSION}. "
            f"It was written by a newer objckpt: upgrade objckpt to read it."
        )
    return reader


def decode_version(data: bytes, number: int) -> Version:
    """The version that lies at ``version_key(number)``."""
    r = _parse(data, "manifest", version_key(number))
    if r.integer("number", 1) != number:
        raise r.bad(f"it says that it is version {r.raw('number')}")
    policy = r.child("policy")
    keep = None if policy.raw("keep") is None else policy.integer("keep", 1)
    superseded = r.array("superseded")
    if any(type(s) is not str for s in superseded):
        raise r.bad("'superseded' is no array of launch ids")
    kept = tuple(_entry(e) for e in r.children("kept"))
    version = Version(
        number=number,
        change=r.text("change"),
        run=r.text("run"),
        attempt=Attempt(r.integer("attempt", 1)),
        launch=None if r.raw("launch") is None else r.text("launch"),
        nonce=r.text("nonce"),
        world_size=r.integer("world_size", 1),
        policy=Policy(keep, policy.integer("lag")),
        superseded=tuple(superseded),
        head=r.save_or_none("head"),
        kept=kept,
    )
    if version.head is not None and version.entry(version.head) is None:
        raise r.bad(f"its head {version.head} is not in 'kept'")
    return version


def _entry(e: _Reader) -> Entry:
    if type(e.raw("pinned")) is not bool:
        raise e.bad("'pinned' is no boolean")
    save, index = e.save(), e.reference("index")
    if index.key != index_key(save):
        raise e.bad(f"the index of {save} is said to lie at {index.key!r:.80}")
    return Entry(
        save=save,
        parent=e.save_or_none("parent"),
        world_size=e.integer("world_size", 1),
        nbytes=e.integer("nbytes"),
        created_at=e.number("created_at"),
        index=index,
        bases=tuple(b.save() for b in e.children("bases")),
        pinned=e.raw("pinned"),
    )


def decode_index(data: bytes, save: Save) -> Index:
    """The index of ``save``."""
    r = _parse(data, "index", index_key(save))
    if r.save() != save:
        raise r.bad(f"it is the index of {r.save()}")
    world_size = r.integer("world_size", 1)
    records = tuple(x.reference() for x in r.children("records"))
    count = groups(world_size)
    wanted = (
        [record_key(save, Rank(i)) for i in range(world_size)]
        if count == 1
        else [
            group_key(save, g) for g in range(min(count, len(records) + 1))
        ]  # `count` may be a lie, and huge
    )
    if [x.key for x in records] != wanted:
        raise r.bad(f"its records are not those of {world_size} ranks")
    return Index(
        run=r.text("run"),
        save=save,
        world_size=world_size,
        created_at=r.number("created_at"),
        metadata=r.raw("metadata"),
        nbytes=r.integer("nbytes"),
        bases=tuple(b.save() for b in r.children("bases")),
        records=records,
    )


def decode_record(data: bytes, save: Save, rank: Rank) -> RankRecord:
    """The record of ``rank`` of ``save``."""
    return _record(_parse(data, "record", record_key(save, rank)), save, rank)


def decode_group(data: bytes, save: Save, group: int) -> GroupRecord:
    """Group record ``group`` of ``save``."""
    r = _parse(data, "group", group_key(save, group))
    if r.save() != save or r.integer("group") != group:
        raise r.bad(f"it is group {r.raw('group')} of {r.save()}")
    world_size = r.integer("world_size", 1)
    first = group * GROUP_SIZE
    ranks = range(first, min(first + GROUP_SIZE, world_size))
    bodies = r.children("records")
    if len(bodies) != len(ranks):
        raise r.bad(f"it holds {len(bodies)} records, not {len(ranks)}")
    records = tuple(_record(body, save, Rank(rank)) for body, rank in zip(bodies, ranks, strict=True))
    return GroupRecord(r.text("run"), save, group, world_size, records)


def _record(r: _Reader, save: Save, rank: Rank) -> RankRecord:
    if r.save() != save or r.integer("rank") != rank:
        raise r.bad(f"it is the record of rank {r.raw('rank')} of {r.save()}")
    world_size = r.integer("world_size", 1)
    if rank >= world_size:
        raise r.bad(f"rank {rank} of {world_size}")
    bases = tuple(b.save() for b in r.children("bases"))
    objects = tuple(_object(o, {save, *bases}) for o in r.children("objects"))
    return RankRecord(
        run=r.text("run"),
        save=save,
        rank=rank,
        world_size=world_size,
        created_at=r.number("created_at"),
        metadata=r.raw("metadata"),
        bases=bases,
        objects=objects,
        pieces=tuple(_piece(p, objects) for p in r.children("pieces")),
        values=r.raw("values"),
        rank_values=r.raw("rank_values"),
    )


def _object(o: _Reader, saves: set[Save]) -> DataObject:
    key, size, block = o.text("key"), o.integer("size"), o.integer("block_size", 1)
    match = _DATA_KEY.fullmatch(key)
    if match is None or save_of(key) not in saves:
        raise o.bad(f"{key!r:.80} is no shard of this save or of one of its bases")
    crcs = tuple(o.crc(c) for c in o.array("crc64"))
    if len(crcs) != -(-size // block):
        raise o.bad(f"{len(crcs)} checksums for {size} bytes in blocks of {block}")
    return DataObject(key, size, block, crcs)


def _piece(p: _Reader, objects: tuple[DataObject, ...]) -> Piece:
    span = p.integers("range")
    obj = p.integer("object")
    if obj >= len(objects) or len(span) != 2 or not span[0] <= span[1] <= objects[obj].size:  # noqa: PLR2004 # a range has two ends
        raise p.bad(f"its bytes {span} do not lie in object {obj}")
    whole, offset, shape = p.integers("global_shape"), p.integers("offset"), p.integers("shape")
    if not len(whole) == len(offset) == len(shape) or any(
        o + s > g for o, s, g in zip(offset, shape, whole, strict=True)
    ):
        raise p.bad(f"box {offset}+{shape} does not lie in {whole}")
    return Piece(p.text("name"), p.text("dtype"), whole, offset, shape, obj, span[0], span[1])


def decode_pieces(body: object, objects: tuple[DataObject, ...], where: str) -> tuple[Piece, ...]:
    """Pieces of a journal, checked as those of a record are."""
    return tuple(_piece(p, objects) for p in _Reader({"pieces": body}, where).children("pieces"))
