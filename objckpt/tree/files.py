"""The files that a committed checkpoint is shown as, and where the bytes of each lie.

Invariants: a file's size and content are a function of the index and the records, which never change; every byte of a tensor is named by
object and range, so that it can be verified; different tensors and different keys of the state have different paths. No I/O.

Called by ``tree``. Below ``step-12000/`` there are::

    info.json                        step, attempt, world size, time, metadata
    tensors.json                     name, dtype, shape, bytes and shard of each tensor
    values.json                      the state without its tensors, as FORMAT.md has it
    model.safetensors                all tensors below the state's key "model", named relative to it
    model/layer.weight.safetensors   one of them
    rank-00000.safetensors           what is one rank's own, likewise
    rank-00000/values.json
    shards/...-r00000-00.safetensors the objects of the bucket, byte for byte
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final
from urllib.parse import quote

from objckpt.commit import Contents
from objckpt.errors import CorruptCheckpointError, FormatVersionError
from objckpt.manifest import DataObject, Entry, Index, Piece, Version
from objckpt.plan import reads, stored
from objckpt.retention import find
from objckpt.shard import DTYPES, layout, whole

#: The listing of all checkpoints, in the root of the tree.
LISTING: Final = "checkpoints.json"
#: A checkpoint's folder; the attempt stands there only where the step alone names another one's.
FOLDER: Final = re.compile(r"step-[0-9]+(\.attempt-[0-9]+)?", re.ASCII)
_SHARDS: Final = "shards"
#: The key of the state that a name begins with (its dots and backslashes are escaped), or the rank that it is the own of.
_NAME: Final = re.compile(
    r"(?P<rank>rank-[0-9]{5})/(?P<own>.*)|(?P<key>(?:[^.\\]|\\.)*)(?:\.(?P<rest>.*))?", re.DOTALL
)


@dataclass(frozen=True, slots=True)
class Section:
    """Bytes ``begin`` to ``end`` of an object, which stand in the file from byte ``at`` on."""

    at: int
    obj: DataObject
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class File:
    """``size`` bytes: ``head``, then the sections, in order and without gaps."""

    size: int
    head: bytes = b""
    sections: tuple[Section, ...] = ()

    def between(self, start: int, end: int) -> Iterator[Section]:
        """What of the sections lies in bytes ``start`` to ``end`` of the file."""
        for s in self.sections:
            first, last = max(start, s.at), min(end, s.at + s.end - s.begin)
            if first < last:
                yield Section(first, s.obj, s.begin + first - s.at, s.begin + last - s.at)


def folders(version: Version) -> dict[str, Entry]:
    """The checkpoints of a version by the name of their folder, by step. What ``restore(step=...)`` would take has the plain name."""
    named: dict[str, Entry] = {}
    for entry in sorted(version.kept, key=lambda e: (e.save.step, e.save.attempt)):
        plain = find(version.kept, version.head, entry.save.step) == entry
        name = f"step-{entry.save.step}"
        named[name if plain else f"{name}.attempt-{entry.save.attempt}"] = entry
    return named


def listing(version: Version) -> File:
    """All checkpoints of a version as JSON: an array of one flat object each, in the order of :func:`folders`."""
    return _json(
        [
            {
                "path": name,
                "step": e.save.step,
                "attempt": e.save.attempt,
                "head": e.save == version.head,
                "pinned": e.pinned,
                "world_size": e.world_size,
                "nbytes": e.nbytes,
                "created_at": _time(e.created_at),
            }
            for name, e in folders(version).items()
        ]
    )


def files(contents: Contents) -> dict[str, File]:
    """The files of a checkpoint by path.

    :class:`CorruptCheckpointError` if the records contradict themselves, or hold what this version of objckpt cannot put together.
    """
    index = contents.index
    pieces = stored(contents.records)
    places = {
        s.name: Section(0, read.obj, s.begin, s.end) for read in reads(pieces, pieces) for s in read.segments
    }
    first = {name: found[0][0] for name, found in pieces.items()}
    made = {
        "info.json": _json(_info(index)),
        "tensors.json": _json([_described(first[name], place) for name, place in sorted(places.items())]),
        "values.json": _json(contents.records[0].values),
    }
    for record in contents.records:
        made[f"rank-{record.rank:05d}/values.json"] = _json(record.rank_values)
        made |= {
            f"{_SHARDS}/{obj.key.rpartition('/')[2]}": File(obj.size, b"", (Section(0, obj, 0, obj.size),))
            for obj in record.objects
        }
    for group, members in _grouped(first).items():
        made[f"{group}.safetensors"] = _safetensors(index, members, first, places)
        for short, name in members.items():
            made[f"{group}/{quote(short, safe='')}.safetensors"] = _safetensors(
                index, {short: name}, first, places
            )
    return made


def _grouped(names: Iterable[str]) -> dict[str, dict[str, str]]:
    """Stored names by folder, then by their name in it."""
    groups: dict[str, dict[str, str]] = {}
    for name in sorted(names):
        match = _NAME.fullmatch(name)
        if match is None or match["key"] == "":  # no writer of ours makes such a name
            folder, short = quote(name, safe="").replace(".", "%2E"), name
        elif match["rank"] is not None:
            folder, short = match["rank"], match["own"]
        else:
            folder, short = quote(match["key"], safe=""), match["rest"] or match["key"]
        if folder == _SHARDS:
            folder = "%73hards"
        members = groups.setdefault(folder, {})
        members[name if short in members else short] = name
    return groups


def _safetensors(
    index: Index, members: Mapping[str, str], first: Mapping[str, Piece], places: Mapping[str, Section]
) -> File:
    """A file of the tensors ``members`` (name in the file to stored name)."""
    parts = [whole(short, first[name].dtype, first[name].global_shape) for short, name in members.items()]
    image = layout(parts, {"format": "pt", "run": index.run, "save": str(index.save)})
    sections = []
    for piece in image.pieces:
        place = places[members[piece.name]]
        if piece.begin < piece.end:
            sections.append(Section(piece.begin, place.obj, place.begin, place.end))
    return File(image.size, image.header, tuple(sections))


def _info(index: Index) -> dict[str, Any]:
    return {
        "step": index.save.step,
        "attempt": index.save.attempt,
        "run": index.run,
        "world_size": index.world_size,
        "nbytes": index.nbytes,
        "created_at": _time(index.created_at),
        "metadata": index.metadata,
    }


def _described(piece: Piece, place: Section) -> dict[str, Any]:
    """One line of ``tensors.json``. Refuses what the files cannot hold."""
    if piece.dtype not in DTYPES:
        raise FormatVersionError(
            f"tensor {piece.name!r} has dtype {piece.dtype!r}, which this objckpt does not know: upgrade objckpt to read it"
        )
    nbytes = whole(piece.name, piece.dtype, piece.global_shape).nbytes
    if place.end - place.begin != nbytes:
        raise CorruptCheckpointError(
            f"the record of tensor {piece.name!r} gives {place.end - place.begin} bytes of {place.obj.key}, its shape and dtype "
            f"{nbytes}: restore another checkpoint"
        )
    return {
        "name": piece.name,
        "dtype": piece.dtype,
        "shape": list(piece.global_shape),
        "nbytes": nbytes,
        "shard": place.obj.key.rpartition("/")[2],
    }


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds")


def _json(value: Any) -> File:
    text = (json.dumps(value, indent=1, ensure_ascii=False) + "\n").encode("utf-8", "surrogatepass")
    return File(len(text), text)


def children(found: Mapping[str, File], folder: str) -> dict[str, File | None]:
    """What lies in ``folder`` ("" for the root), by name: None for a folder. Empty if there is no such folder."""
    head = f"{folder}/" if folder else ""
    below: dict[str, File | None] = {}
    for path, file in found.items():
        if path.startswith(head):
            name, slash, _ = path.removeprefix(head).partition("/")
            below[name] = None if slash else file
    return below
