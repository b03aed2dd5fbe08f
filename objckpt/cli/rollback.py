"""``objckpt rollback``: choose an older checkpoint for the next start, and fence what runs. Deletes nothing.

Invariant: it is a start version of no launch, so a commit on its way either comes before it, and stays listed, or is fenced.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from objckpt.cli.run import Document, checkpoint_document, open_run, run_document
from objckpt.cli.tables import print_run, spelled
from objckpt.retention import chosen, line

if TYPE_CHECKING:
    from rich.console import Console


def find(said: argparse.Namespace) -> Document:
    """The run after the rollback, and the checkpoints that it left aside."""
    run, version = open_run(said)
    entry = chosen(run.store.uri, version, said.to, said.attempt)
    after = run.rollback(entry.save)
    along = line(after.head, after.kept)
    return {
        **run_document(run, after),
        "checkpoint": checkpoint_document(after, entry),
        "aside": [checkpoint_document(after, e) for e in after.kept if e.save not in along],
    }


def render(console: Console, found: Document) -> None:
    """What the next start does, and what stays beside it."""
    print_run(console, found)
    console.print(
        f"the next start resumes from step {spelled(found['checkpoint'], None)}; what still runs is fenced"
    )
    aside = ", ".join(spelled(checkpoint, None) for checkpoint in found["aside"])
    if aside:
        console.print(
            f"left aside: {aside}. They stay until the new branch has enough commits of its own; `objckpt pin` keeps one"
        )
