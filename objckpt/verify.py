"""Whether a checkpoint can be restored, found out without restoring it. Writes nothing, neither to the store nor to disk.

Invariants: without ``deep``, index and records are read and every shard is asked for its size; with it, every block of every shard is read
once, through buffers of bounded size.

Called by ``cli``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from objckpt.commit import Run
from objckpt.errors import CorruptCheckpointError, StoreNotFoundError
from objckpt.manifest import DataObject, Entry, RankRecord
from objckpt.plan import reads, stored
from objckpt.shard import DTYPES
from objckpt.transfer import verify_object

#: Objects that are looked at side by side. Each that is read takes a buffer of one part.
_READERS: Final = 8


def problems(
    run: Run, entry: Entry, checked: dict[str, str | None], done: Callable[[int], None], *, deep: bool
) -> Iterator[str]:
    """What keeps this checkpoint from being restored, in words.

    ``checked`` has what is wrong with the objects of other checkpoints, by key, and gets this one's: a shard may belong to several.
    ``done`` is told of bytes of shards that were looked at.
    """
    try:
        contents = run.contents(entry)
    except CorruptCheckpointError as error:
        done(entry.nbytes)
        yield str(error)
        return
    yield from _unreadable(contents.records)
    objects = list(_objects(contents.records))
    if (nbytes := sum(o.size for o in objects)) != contents.index.nbytes or nbytes != entry.nbytes:
        yield f"its shards have {nbytes} bytes, its index says {contents.index.nbytes}, the manifest {entry.nbytes}"

    def check(obj: DataObject) -> None:
        if obj.key not in checked:
            checked[obj.key] = _damage(run, obj, done, deep=deep)
        else:
            done(obj.size)

    with ThreadPoolExecutor(min(_READERS, max(1, len(objects)))) as pool:
        list(pool.map(check, objects))
    yield from (problem for o in objects if (problem := checked[o.key]) is not None)


def _unreadable(records: tuple[RankRecord, ...]) -> Iterator[str]:
    """What is wrong with the tensors that the records name, without a look at their bytes."""
    pieces = stored(records)
    for name, found in pieces.items():
        for piece, _ in found:
            if piece.dtype not in DTYPES:
                yield f"tensor {name!r} has the dtype {piece.dtype!r}, which this objckpt does not know"
            elif piece.end - piece.begin != (nbytes := math.prod(piece.shape) * DTYPES[piece.dtype][1]):
                yield f"tensor {name!r} has {piece.end - piece.begin} bytes, its shape and dtype {nbytes}"
        try:
            reads(pieces, [name])
        except CorruptCheckpointError as error:
            yield str(error)


def _objects(records: tuple[RankRecord, ...]) -> Iterator[DataObject]:
    """Each shard once."""
    yield from {o.key: o for record in records for o in record.objects}.values()


def _damage(run: Run, obj: DataObject, done: Callable[[int], None], *, deep: bool) -> str | None:
    where = f"{run.store.uri}/{obj.key}"
    try:
        found = run.store.head(obj.key).size
        if found != obj.size:
            return f"{where} has {found} bytes, not {obj.size}"
        if deep:
            verify_object(run.store, obj, done)
    except StoreNotFoundError:
        return f"{where} is missing though a checkpoint names it: somebody deleted it"
    except CorruptCheckpointError as error:
        return str(error)
    return None
