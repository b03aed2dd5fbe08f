"""Who writes what, and what to read. Integer geometry without I/O.

Invariants: the plan of a save depends on names, sizes and world size alone, so every rank computes the same one without talking; each
replica is written by exactly one rank; a read covers every wanted byte exactly once, and names whole blocks, so that each byte
can be verified.

Called by ``checkpointer``, and by ``transfer`` for the blocks of a read.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from objckpt.errors import CorruptCheckpointError
from objckpt.manifest import DataObject, Piece, Rank, RankRecord


def assign(replicas: Iterable[tuple[str, int]], world_size: int) -> dict[str, Rank]:
    """The rank that writes each replica, given (name, bytes). Spread by bytes: the largest first, each to the rank with the least."""
    loads = [(0, rank) for rank in range(world_size)]
    owners: dict[str, Rank] = {}
    for name, nbytes in sorted(replicas, key=lambda item: (-item[1], item[0])):
        load, rank = heapq.heappop(loads)
        owners[name] = Rank(rank)
        heapq.heappush(loads, (load + nbytes, rank))
    return owners


@dataclass(frozen=True, slots=True)
class Segment:
    """Bytes ``begin`` to ``end`` of an object that belong to ``name``, from byte ``at`` of it on."""

    name: str
    begin: int
    end: int
    at: int


@dataclass(frozen=True, slots=True)
class ObjectRead:
    """What to read of one object: segments, sorted by ``begin``, that do not overlap."""

    obj: DataObject
    segments: tuple[Segment, ...]


def stored(records: Iterable[RankRecord]) -> dict[str, list[tuple[Piece, DataObject]]]:
    """All pieces of a checkpoint by tensor name, with the object that holds each."""
    pieces: dict[str, list[tuple[Piece, DataObject]]] = {}
    for record in records:
        for piece in record.pieces:
            pieces.setdefault(piece.name, []).append((piece, record.objects[piece.obj]))
    return pieces


def reads(
    pieces: Mapping[str, Sequence[tuple[Piece, DataObject]]], wanted: Iterable[str]
) -> tuple[ObjectRead, ...]:
    """The reads that fill the ``wanted`` tensors, whole, from where their pieces lie."""
    segments: dict[str, list[Segment]] = {}
    objects: dict[str, DataObject] = {}
    for name in wanted:
        whole = [(p, o) for p, o in pieces[name] if p.shape == p.global_shape]
        if not whole:
            raise CorruptCheckpointError(
                f"tensor {name!r} is stored in {len(pieces[name])} boxes, none of them whole: this version of objckpt reads whole "
                f"tensors only"
            )
        piece, obj = whole[0]
        objects[obj.key] = obj
        segments.setdefault(obj.key, []).append(Segment(name, piece.begin, piece.end, 0))
    return tuple(
        ObjectRead(objects[key], tuple(sorted(found, key=lambda s: (s.begin, s.end))))
        for key, found in sorted(segments.items())
    )


@dataclass(frozen=True, slots=True)
class Request:
    """One ranged request: bytes ``begin`` to ``end`` of an object, whole blocks, and what of it goes where."""

    obj: DataObject
    begin: int
    end: int
    segments: tuple[Segment, ...]


def requests(read: ObjectRead, part_size: int) -> tuple[Request, ...]:
    """Cut a read into requests of whole blocks of about ``part_size`` bytes; blocks that nobody wants are left out."""
    block = read.obj.block_size
    blocks: dict[int, list[Segment]] = {}
    for s in read.segments:
        for number in range(s.begin // block, -(-s.end // block)):
            begin, end = max(s.begin, number * block), min(s.end, (number + 1) * block)
            if begin < end:
                blocks.setdefault(number, []).append(Segment(s.name, begin, end, s.at + begin - s.begin))
    limit = max(1, part_size // block)
    runs: list[list[int]] = []
    for number in sorted(blocks):
        if runs and runs[-1][-1] == number - 1 and len(runs[-1]) < limit:
            runs[-1].append(number)
        else:
            runs.append([number])
    return tuple(
        Request(
            read.obj,
            run[0] * block,
            min((run[-1] + 1) * block, read.obj.size),
            _joined([s for number in run for s in blocks[number]]),
        )
        for run in runs
    )


def _joined(segments: list[Segment]) -> tuple[Segment, ...]:
    joined: list[Segment] = []
    for s in segments:
        last = joined[-1] if joined else None
        if (
            last is not None
            and last.name == s.name
            and last.end == s.begin
            and last.at + last.end - last.begin == s.at
        ):
            joined[-1] = Segment(s.name, last.begin, s.end, last.at)
        else:
            joined.append(s)
    return tuple(joined)
