"""``objckpt verify``: whether each checkpoint of a run can be restored.

Invariants: what is found damaged in one checkpoint does not end the look at the others; a checkpoint that was dropped meanwhile is no
damage.
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from objckpt.cli.run import Document, checkpoint_document, open_run, run_document
from objckpt.cli.tables import print_run, size, spelled, table
from objckpt.commit import Run
from objckpt.manifest import Entry
from objckpt.retention import chosen
from objckpt.verify import problems

if TYPE_CHECKING:
    from rich.console import Console


def find(said: argparse.Namespace) -> Document:
    """Each checkpoint, or the one that was named, with what is wrong with it."""
    run, version = open_run(said)
    entries = (
        version.kept if said.step is None else (chosen(run.store.uri, version, said.step, said.attempt),)
    )
    checked: dict[str, str | None] = {}
    found = []
    nobody = contextlib.nullcontext(lambda _: None)
    with _bar(sum(e.nbytes for e in entries)) if said.deep and not said.json else nobody as done:
        for entry in entries:
            wrong = list(problems(run, entry, checked, done, deep=said.deep))
            if not wrong or _still_listed(run, entry):
                found.append({**checkpoint_document(version, entry), "problems": wrong})
    return {
        **run_document(run, version),
        "deep": said.deep,
        "good": not any(c["problems"] for c in found),
        "checkpoints": found,
    }


def _still_listed(run: Run, entry: Entry) -> bool:
    version = run.newest()
    return version is not None and version.entry(entry.save) is not None


@contextlib.contextmanager
def _bar(nbytes: int) -> Iterator[Callable[[int], None]]:
    """A progress bar on stderr, if that is a terminal. Told of bytes."""
    from rich.console import Console  # noqa: PLC0415 # `--json` needs none of it
    from rich.progress import DownloadColumn, Progress, TransferSpeedColumn  # noqa: PLC0415 # likewise

    console = Console(stderr=True)
    columns = (*Progress.get_default_columns(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as bar:
        task = bar.add_task("verify", total=nbytes)
        yield lambda done: bar.advance(task, done)


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
