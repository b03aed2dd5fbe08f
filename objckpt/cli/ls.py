"""``objckpt ls``: the checkpoints of a run. Reads the newest version of the manifest and nothing else."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from objckpt.cli.run import Document, checkpoint_document, open_run, run_document
from objckpt.cli.tables import print_run, size, spelled, table, when

if TYPE_CHECKING:
    from rich.console import Console


def find(said: argparse.Namespace) -> Document:
    """What the newest version lists."""
    run, version = open_run(said)
    entries = sorted(version.kept, key=lambda e: e.save)
    return {
        **run_document(run, version),
        "checkpoints": [checkpoint_document(version, entry) for entry in entries],
    }


def render(console: Console, found: Document) -> None:
    """A row for each checkpoint."""
    print_run(console, found)
    if not found["checkpoints"]:
        console.print("no checkpoint yet")
        return
    rows = table(">step", ">attempt", ">ranks", ">bytes", "created", "age", "parent", "notes")
    for c in found["checkpoints"]:
        created, age = when(c["created_at"])
        notes = ", ".join(name for name in ("head", "aside", "pinned") if c[name])
        parent = spelled(c["parent"], c["attempt"])
        row = (c["step"], c["attempt"], c["world_size"], size(c["nbytes"]), created, age, parent, notes)
        rows.add_row(*map(str, row))
    console.print(rows)
