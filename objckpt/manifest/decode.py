"""Records from JSON: any bytes give a correct record or a :class:`CorruptCheckpointError`, never anything else."""

from __future__ import annotations

import json
import math
import re
from typing import Any, Final, Literal

from awscrt.checksums import crc64nvme

from objckpt.errors import CorruptCheckpointError, FormatVersionError
from objckpt.manifest.keys import (
    GROUP_SIZE,
    Attempt,
    Rank,
    Save,
    Step,
    group_key,
    groups,
    index_key,
    is_shard,
    record_key,
    save_of,
    version_key,
)
from objckpt.manifest.records import (
    FORMAT_VERSION,
    DataObject,
    Entry,
    GroupRecord,
    Index,
    Keep,
    KeepBest,
    KeepEvery,
    KeepFor,
    KeepLast,
    Piece,
    Policy,
    RankRecord,
    Reference,
    Version,
)

#: Integers below it fit 64 bits, in any language.
_LIMIT: Final = 1 << 63
#: Up to here a number in seconds is the same whether it is read as an integer or not.
_EXACT: Final = 1 << 53
#: The end of a record: the CRC-64/NVME of all bytes before it.
_SEAL: Final = re.compile(rb',"crc64":"([0-9a-f]{16})"}\n')
_SEAL_SIZE: Final = 29
#: The format version from which on records have it, entries metrics, and policies rules.
_SECOND: Final = 2
_MODES: Final[dict[str, Literal["min", "max"]]] = {"min": "min", "max": "max"}


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

    def names(self) -> list[str]:
        return list(self._body)

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

    def finite(self, name: str) -> float:
        value = self.raw(name)
        try:
            if type(value) in (int, float):
                return float(value)
        except OverflowError:
            pass
        raise self.bad(f"field {name!r} is {value!r:.80}, not a number")

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
    """A record's fields, once its bytes have been checked: before that not even its version can be believed."""
    opened, tail = data[:-_SEAL_SIZE], data[-_SEAL_SIZE:]
    seal = _SEAL.fullmatch(tail)
    if seal is not None and crc64nvme(opened) != int(seal[1], 16):
        raise CorruptCheckpointError(
            f"{key} is damaged: its bytes have the CRC-64 {crc64nvme(opened):016x}, not {seal[1].decode()}. It was not used."
        )
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
    if seal is None and version >= _SECOND:
        raise reader.bad("it does not end with its checksum")
    return reader


def decode_version(data: bytes, number: int) -> Version:
    """The version that lies at ``version_key(number)``."""
    r = _parse(data, "manifest", version_key(number))
    if r.integer("number", 1) != number:
        raise r.bad(f"it says that it is version {r.raw('number')}")
    written = r.integer("version", 1)
    superseded = r.array("superseded")
    if any(type(s) is not str for s in superseded):
        raise r.bad("'superseded' is no array of launch ids")
    kept = tuple(_entry(e, written) for e in r.children("kept"))
    version = Version(
        number=number,
        change=r.text("change"),
        run=r.text("run"),
        attempt=Attempt(r.integer("attempt", 1)),
        launch=None if r.raw("launch") is None else r.text("launch"),
        nonce=r.text("nonce"),
        world_size=r.integer("world_size", 1),
        policy=_policy(r.child("policy"), written),
        superseded=tuple(superseded),
        head=r.save_or_none("head"),
        kept=kept,
    )
    if version.head is not None and version.entry(version.head) is None:
        raise r.bad(f"its head {version.head} is not in 'kept'")
    return version


def _policy(p: _Reader, written: int) -> Policy:
    """A policy of format version ``written``: up to 1 it was one number, or null."""
    if written >= _SECOND:
        return Policy(tuple(_rule(rule) for rule in p.children("keep")), p.integer("lag"))
    return Policy(() if p.raw("keep") is None else (KeepLast(p.integer("keep", 1)),), p.integer("lag"))


def _rule(r: _Reader) -> Keep:
    match r.text("rule"):
        case "last":
            return KeepLast(r.integer("count", 1))
        case "every":
            return KeepEvery(r.integer("steps", 1))
        case "best":
            mode = _MODES.get(r.text("mode"))
            if mode is None:
                raise r.bad(f"its mode is {r.raw('mode')!r:.80}, not 'min' or 'max'")
            return KeepBest(r.text("metric"), r.integer("count", 1), mode)
        case "for":
            return KeepFor(r.number("days"))
        case other:
            raise r.bad(
                f"the rule {other!r:.80} is not known: objckpt drops nothing by a policy that it does not understand"
            )


def _metrics(m: _Reader) -> tuple[tuple[str, float], ...]:
    return tuple((name, m.finite(name)) for name in m.names())


def _entry(e: _Reader, written: int) -> Entry:
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
        metrics=_metrics(e.child("metrics")) if written >= _SECOND else (),
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
    if not is_shard(key) or save_of(key) not in saves:
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
