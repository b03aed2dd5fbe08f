"""``objckpt pin``: exempt a checkpoint from retention for good, or with ``--undo`` no longer. No job notices."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from objckpt.cli.run import Document, checkpoint_document, open_run, run_document
from objckpt.cli.tables import print_run, spelled
from objckpt.retention import chosen

if TYPE_CHECKING:
    from rich.console import Console


def find(said: argparse.Namespace) -> Document:
    """The run after the change, and the checkpoint."""
    run, version = open_run(said)
    entry = chosen(run.store.uri, version, said.step, said.attempt)
    after = run.pin(entry.save, pinned=not said.undo)
    changed = after.entry(entry.save)
    assert changed is not None  # it was pinned in this version
    return {**run_document(run, after), "checkpoint": checkpoint_document(after, changed)}


def render(console: Console, found: Document) -> None:
    """What is true now, in a line below the run."""
    print_run(console, found)
    checkpoint = found["checkpoint"]
    name = spelled(checkpoint, found["attempt"])
    stays = (
        "is pinned: retention never drops it"
        if checkpoint["pinned"]
        else "is not pinned: retention may drop it"
    )
    console.print(f"checkpoint {name} {stays}")
