"""A run as a read-only tree of files, for every tool that opens files through fsspec.

Invariants: what the newest version of the manifest lists is there, and nothing else; no byte of a tensor is handed out that was not
verified, block by block, against its record; nothing is ever written, so the job that trains cannot notice who reads. Never loads torch.

fsspec finds the classes below by their entry points, so ``objckpt+s3://bucket/run/step-12000/model.safetensors`` opens in pandas,
``fsspec.open`` and the like without an import of objckpt. ``storage_options`` are those of the store. ``files`` says what files there are.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final, NoReturn

from fsspec.spec import AbstractBufferedFile, AbstractFileSystem

from objckpt.commit import Run
from objckpt.config import Tuning
from objckpt.errors import CheckpointNotFoundError, CorruptCheckpointError, StorePermissionError
from objckpt.manifest import BLOCK_SIZE, DataObject, Entry
from objckpt.plan import ObjectRead, Segment
from objckpt.retention import retain
from objckpt.store import open_store
from objckpt.transfer import fetch
from objckpt.tree.files import FOLDER, LISTING, File, children, files, folders, listing

#: Checkpoints whose files are remembered. Their records never change.
_REMEMBERED: Final = 16


@dataclass(frozen=True, slots=True)
class Found:
    """What lies at a path: a ``file``, or a folder of ``children`` (None for a folder in it). ``entry`` is the checkpoint that it is of."""

    run: Run | None = None
    entry: Entry | None = None
    file: File | None = None
    children: Mapping[str, File | None] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Range:
    """Bytes ``start`` to ``end`` of a file."""

    found: Found
    start: int
    end: int


class CheckpointTree(AbstractFileSystem):  # type: ignore[misc] # fsspec has no types
    """The run at a path, and below it ``checkpoints.json`` and a folder ``step-<step>`` for each committed checkpoint.

    Not registered itself; its subclasses say which stores. A path that holds no run has no listing either: there is no way to list
    the runs of a bucket. Each look at the tree asks the store for the newest version (one request); an open file stays the one it was.
    """

    #: Of the store's URI.
    scheme: str

    def __init__(self, **storage_options: Any) -> None:
        super().__init__(**storage_options)
        self._options = storage_options
        self._runs: dict[str, Run] = {}
        self._remembered: dict[tuple[str, Entry], dict[str, File]] = {}

    # -------------------------------------------------------------- what there is

    def ls(self, path: str, detail: bool = True, **_: Any) -> list[Any]:
        """The entries of a folder, or a file's own. FileNotFoundError if there is neither."""
        path = self._strip_protocol(path)
        found = self._look(path)
        if found.file is not None:
            entries = [self._entry(path, found.file, found.entry)]
        else:
            entries = [self._entry(f"{path}/{n}", f, found.entry) for n, f in found.children.items()]
        return entries if detail else [entry["name"] for entry in entries]

    def info(self, path: str, **_: Any) -> dict[str, Any]:
        """Name, size in bytes and type; ``attempt`` and ``created`` (seconds since the epoch) of the checkpoint."""
        path = self._strip_protocol(path)
        found = self._look(path)
        return self._entry(path, found.file, found.entry)

    @staticmethod
    def _entry(path: str, file: File | None, entry: Entry | None) -> dict[str, Any]:
        known: dict[str, Any] = (
            {} if entry is None else {"attempt": entry.save.attempt, "created": entry.created_at}
        )
        if file is None:
            return {"name": path, "size": 0, "type": "directory", **known}
        return {"name": path, "size": file.size, "type": "file", **known}

    def _look(self, path: str) -> Found:
        """What lies at a path without protocol, by the newest version. :class:`CheckpointNotFoundError` if nothing does."""
        run, root, inner = self._run(path)
        version = run.existing()
        if not inner:
            checkpoints: dict[str, File | None] = {
                LISTING: listing(version),
                **dict.fromkeys(folders(version)),
            }
            return Found(run, children=checkpoints)
        if inner == LISTING:
            return Found(run, file=listing(version))
        name, _, rest = inner.partition("/")
        entry = folders(version).get(name)
        if entry is not None:
            made = self._files(run, root, entry)
            below = children(made, rest)
            if rest in made or below:
                return Found(run, entry, made.get(rest), below)
        known = [LISTING, *folders(version)] if entry is None else sorted(children(made, ""))
        raise CheckpointNotFoundError(f"{run.store.uri} has no {inner!r}; what there is: {', '.join(known)}")

    def _run(self, path: str) -> tuple[Run, str, str]:
        """The run that a path leads into, its root, and the rest of the path."""
        names = path.split("/")
        cuts = [at for at, name in enumerate(names) if name == LISTING or FOLDER.fullmatch(name)]
        for cut in (*cuts, len(names)):  # a run may itself lie below a folder with such a name
            root = "/".join(names[:cut])
            run = self._runs.get(root)
            if run is None and root:
                run = Run(open_store(f"{self.scheme}://{root}", **self._options), retain=retain)
                if run.newest() is None:
                    continue
                self._runs[root] = run
            if run is not None:
                return run, root, "/".join(names[cut:])
        raise CheckpointNotFoundError(
            f"no run at {self.scheme}://{path} or above it: check the path, which begins as the run's own URI does",
        )

    def _files(self, run: Run, root: str, entry: Entry) -> dict[str, File]:
        made = self._remembered.get((root, entry))
        if made is None:
            with _unless_dropped(run, entry):
                made = files(run.contents(entry))
            while len(self._remembered) >= _REMEMBERED:
                self._remembered.pop(next(iter(self._remembered)))
            self._remembered[root, entry] = made
        return made

    # -------------------------------------------------------------- bytes

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **_: Any) -> bytes:
        """The bytes of a file, or of a range as slices have them, read in parallel. :class:`CorruptCheckpointError` if one is damaged."""
        return self._read([_range(self._file(path), start, end)])[0]

    def cat_ranges(
        self,
        paths: Sequence[str],
        starts: Sequence[int | None] | int | None,
        ends: Sequence[int | None] | int | None,
        max_gap: int | None = None,
        on_error: str = "return",
        **kwargs: Any,
    ) -> list[Any]:
        """Many ranges at once: a block that several of them touch is read once. See fsspec for ``on_error``."""
        firsts = list(starts) if isinstance(starts, Sequence) else [starts] * len(paths)
        lasts = list(ends) if isinstance(ends, Sequence) else [ends] * len(paths)
        try:
            found = {path: self._file(path) for path in dict.fromkeys(paths)}
            wanted = zip(paths, firsts, lasts, strict=True)
            return list(self._read([_range(found[path], start, end) for path, start, end in wanted]))
        except (OSError, CorruptCheckpointError):
            if on_error != "return":
                raise
        # One by one, to tell the good from the bad.
        answers: list[Any] = super().cat_ranges(paths, firsts, lasts, max_gap, on_error, **kwargs)
        return answers

    def _file(self, path: str) -> Found:
        path = self._strip_protocol(path)
        found = self._look(path)
        if found.file is None:
            raise IsADirectoryError(errno.EISDIR, "a folder, not a file", path)
        return found

    def _read(self, ranges: Sequence[Range]) -> list[bytes]:
        """The bytes of each range, verified."""
        filled = [memoryview(bytearray(r.end - r.start)) for r in ranges]
        by_run: dict[int, list[int]] = {}
        for number, r in enumerate(ranges):
            assert r.found.file is not None
            head = r.found.file.head[r.start : r.end]
            filled[number][: len(head)] = head
            by_run.setdefault(id(r.found.run), []).append(number)
        for numbers in by_run.values():
            self._fetch({number: ranges[number] for number in numbers}, filled)
        return [bytes(target) for target in filled]

    @staticmethod
    def _fetch(ranges: Mapping[int, Range], filled: Sequence[memoryview]) -> None:
        """Fill what of ``ranges``, all of one run, lies in objects."""
        targets: dict[str, memoryview] = {}
        segments: dict[str, tuple[DataObject, list[Segment]]] = {}
        for number, r in ranges.items():
            assert r.found.file is not None
            for s in r.found.file.between(r.start, r.end):
                targets[str(number)] = filled[number]
                _, listed = segments.setdefault(s.obj.key, (s.obj, []))
                listed.append(Segment(str(number), s.begin, s.end, s.at - r.start))
        if not targets:
            return
        some = next(iter(ranges.values())).found
        assert some.run is not None
        tuning = Tuning()
        with _unless_dropped(
            some.run, *(r.found.entry for r in ranges.values() if r.found.entry is not None)
        ):
            fetch(
                some.run.store,
                [read for obj, listed in segments.values() for read in _without_overlaps(obj, listed)],
                targets,
                part_size=tuning.part_size,
                concurrency=tuning.concurrency,
            )

    def _open(
        self,
        path: str,
        mode: str = "rb",
        block_size: int | None = None,
        cache_options: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> _OpenFile:
        if mode != "rb":
            self._refuse(path)
        kwargs.pop("autocommit", None)  # of writers
        return _OpenFile(
            self,
            path,
            _range(self._file(path), None, None),
            block_size=block_size,
            cache_options=cache_options,
            **kwargs,
        )

    # -------------------------------------------------------------- what there is not

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise StorePermissionError(
            f"objckpt+{self.scheme}:// is read-only: checkpoints are written by objckpt.Checkpointer and dropped by its `keep`. To change "
            "a copy, download it first.",
            uri=f"{self.scheme}://",
        )

    mkdir = makedirs = rmdir = rm_file = rm = mv = cp_file = copy = put = put_file = pipe = pipe_file = (
        touch
    ) = _refuse
    makedir = mkdirs = delete = move = rename = cp = upload = write_text = write_bytes = _refuse


def _range(found: Found, start: int | None, end: int | None) -> Range:
    """What a slice means for a file."""
    assert found.file is not None
    first, last, _ = slice(start, end).indices(found.file.size)
    return Range(found, first, max(first, last))


class _OpenFile(AbstractBufferedFile):  # type: ignore[misc] # fsspec has no types
    """A file as it was when it was opened: a version that comes later changes nothing in it."""

    DEFAULT_BLOCK_SIZE = BLOCK_SIZE

    def __init__(self, fs: CheckpointTree, path: str, whole: Range, **kwargs: Any) -> None:
        self._whole = whole
        super().__init__(fs, path, mode="rb", size=whole.end, **kwargs)

    def _fetch_range(self, start: int, end: int) -> bytes:
        return self.fs._read([Range(self._whole.found, start, min(end, self._whole.end))])[0]  # type: ignore[no-any-return] # noqa: SLF001 # likewise; its own file


@contextmanager
def _unless_dropped(run: Run, *entries: Entry) -> Iterator[None]:
    """What cannot be read because a newer version dropped the checkpoint meanwhile is told as such, not as damage."""
    try:
        yield
    except CorruptCheckpointError as error:
        version = run.existing()
        gone = [str(e.save.step) for e in entries if version.entry(e.save) is None]
        if not gone:
            raise
        raise CheckpointNotFoundError(
            f"{run.store.uri}: step {', '.join(gone)} was dropped while it was read; {LISTING} says what there is now"
        ) from error


def _without_overlaps(obj: DataObject, segments: Sequence[Segment]) -> list[ObjectRead]:
    """Reads that together have all ``segments``, each of which has none that overlap."""
    layers: list[list[Segment]] = []
    for s in sorted(segments, key=lambda s: (s.begin, s.end)):
        layer = next((layer for layer in layers if layer[-1].end <= s.begin), None)
        if layer is None:
            layer = []
            layers.append(layer)
        layer.append(s)
    return [ObjectRead(obj, tuple(layer)) for layer in layers]


class S3Tree(CheckpointTree):
    """``objckpt+s3://bucket/run``."""

    protocol, scheme = "objckpt+s3", "s3"


class GSTree(CheckpointTree):
    """``objckpt+gs://bucket/run``."""

    protocol, scheme = "objckpt+gs", "gs"


class AzureTree(CheckpointTree):
    """``objckpt+abfs://container/run``."""

    protocol, scheme = "objckpt+abfs", "abfs"


class FileTree(CheckpointTree):
    """``objckpt+file:///folder/run``."""

    protocol, scheme = "objckpt+file", "file"
    root_marker = "/"
