"""``objckpt verify``: whether each checkpoint of a run can be restored. Reads the bucket, writes nothing, neither there nor to disk.

Invariants: without ``--deep`` it reads index and records and asks for the size of every shard; with it, every block of every shard once,
through buffers of bounded size; what is found damaged in one checkpoint does not end the look at the others; a checkpoint that was
dropped meanwhile is no damage.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Final, Self

from objckpt.cli.run import Document, checkpoint_document, chosen, open_run, run_document
from objckpt.cli.tables import print_run, size, spelled, table
from objckpt.commit import Run
from objckpt.errors import CorruptCheckpointError, StoreNotFoundError
from objckpt.manifest import DataObject, Entry, RankRecord
from objckpt.plan import reads, stored
from objckpt.shard import DTYPES
from objckpt.transfer import verify_object

if TYPE_CHECKING:
    from rich.console import Console

#: Objects that are looked at side by side. Each that is read takes a buffer of one part.
_READERS: Final = 8


def find(said: argparse.Namespace) -> Document:
    """Each checkpoint, or the one that was named, with what is wrong with it."""
    run, version = open_run(said)
    entries = list(version.kept) if said.step is None else [chosen(run, version, said.step, said.attempt)]
    checked: dict[str, str | None] = {}  # a shard may belong to several checkpoints
    found = []
    with _Progress(sum(e.nbytes for e in entries), shown=said.deep and not said.json) as progress:
        for entry in entries:
            problems = list(_problems(run, entry, checked, progress, deep=said.deep))
            if problems and not _still_listed(run, entry):
                continue
            found.append({**checkpoint_document(version, entry), "problems": problems})
    return {
        **run_document(run, version),
        "deep": said.deep,
        "good": not any(c["problems"] for c in found),
        "checkpoints": found,
    }


def _still_listed(run: Run, entry: Entry) -> bool:
    version = run.newest()
    return version is not None and version.entry(entry.save) is not None


def _problems(
    run: Run, entry: Entry, checked: dict[str, str | None], progress: _Progress, *, deep: bool
) -> Iterator[str]:
    """What keeps this checkpoint from being restored."""
    try:
        contents = run.contents(entry)
    except CorruptCheckpointError as error:
        progress.advance(entry.nbytes)
        yield str(error)
        return
    yield from _unreadable(contents.records)
    objects = list(_objects(contents.records))
    if (nbytes := sum(o.size for o in objects)) != contents.index.nbytes or nbytes != entry.nbytes:
        yield f"its shards have {nbytes} bytes, its index says {contents.index.nbytes}, the manifest {entry.nbytes}"

    def check(obj: DataObject) -> None:
        if obj.key not in checked:
            checked[obj.key] = _damage(run, obj, progress, deep=deep)
        else:
            progress.advance(obj.size)

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


def _damage(run: Run, obj: DataObject, progress: _Progress, *, deep: bool) -> str | None:
    where = f"{run.store.uri}/{obj.key}"
    try:
        found = run.store.head(obj.key).size
        if found != obj.size:
            return f"{where} has {found} bytes, not {obj.size}"
        if deep:
            verify_object(run.store, obj, progress.advance)
    except StoreNotFoundError:
        return f"{where} is missing though a checkpoint names it: somebody deleted it"
    except CorruptCheckpointError as error:
        return str(error)
    return None


class _Progress:
    """A progress bar on stderr, if one is wanted and stderr is a terminal."""

    def __init__(self, nbytes: int, *, shown: bool) -> None:
        from rich.console import Console  # noqa: PLC0415 # `--json` needs none of it
        from rich.progress import DownloadColumn, Progress, TransferSpeedColumn  # noqa: PLC0415 # likewise

        console = Console(stderr=True)
        self._bar = Progress(
            *Progress.get_default_columns(),
            DownloadColumn(),
            TransferSpeedColumn(),
            console=console,
            disable=not (shown and console.is_terminal),
            transient=True,
        )
        self._task = self._bar.add_task("verify", total=nbytes)

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def advance(self, nbytes: int) -> None:
        """So many bytes more are done with."""
        self._bar.advance(self._task, nbytes)


def render(console: Console, found: Document) -> None:
    """A row for each checkpoint, then what is wrong."""
    print_run(console, found)
    how = "every block" if found["deep"] else "index, records, and sizes of shards; --deep reads every block"
    console.print(f"checked: {how}\n")
    rows = table(">step", ">attempt", ">size", "", "state")
    for c in found["checkpoints"]:
        marks = " ".join(
            m for m, on in (("head", c["head"]), ("aside", c["aside"]), ("pinned", c["pinned"])) if on
        )
        state = "DAMAGED" if c["problems"] else "good"
        rows.add_row(str(c["step"]), str(c["attempt"]), size(c["nbytes"]), marks, state)
    console.print(rows)
    for c in found["checkpoints"]:
        for problem in c["problems"]:
            console.print(f"step {spelled(c, found['attempt'])}: {problem}", soft_wrap=True)
