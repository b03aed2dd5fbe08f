"""``objckpt gc``: delete what nothing in a run needs, under a role that may.

Invariants: what a dry run lists is what the same call would delete; a key that is none of ours is counted and left alone; a running
job, its readers and another gc are not disturbed (``retention`` says why).
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Final

from objckpt.cli.run import Document, open_run, run_document, save_document
from objckpt.cli.tables import print_run, shown, size, table
from objckpt.errors import StorePermissionError
from objckpt.retention import GRACE, LEFTOVER_LIFE, abort_uploads, survey, sweep

if TYPE_CHECKING:
    from rich.console import Console

_EXAMPLES: Final = 5  # keys that are shown of what is left alone


def find(said: argparse.Namespace) -> Document:
    """What may be deleted and why; unless it is a dry run, it is deleted then."""
    run, _ = open_run(said)
    grace = GRACE if said.grace is None else said.grace
    found = survey(run, grace=grace)
    uploads = None
    if not said.dry_run:
        try:
            sweep(run.store, found.garbage)
        except StorePermissionError as error:
            raise StorePermissionError(
                f"{error}. Run gc under a role that may delete; --dry-run needs no more than reading",
                uri=error.uri,
                key=error.key,
            ) from error
        try:
            uploads = abort_uploads(run.store, life=max(grace, LEFTOVER_LIFE))
        except StorePermissionError as error:
            raise StorePermissionError(
                f"{len(found.garbage)} objects were deleted, but unfinished uploads could not be looked for: {error}. Let the role "
                f"list and abort multipart uploads",
                uri=error.uri,
                key=error.key,
            ) from error
    return {
        **run_document(run, found.version),
        "dry_run": said.dry_run,
        "grace": grace,
        "garbage": [
            {"key": g.key, "size": g.size, "reason": g.reason, "save": save_document(g.save)}
            for g in found.garbage
        ],
        "uploads": uploads,
        "spared": _sum(g.size for g in found.spared),
        "unknown": {
            **_sum(o.size for o in found.unknown),
            "examples": [o.key for o in found.unknown[:_EXAMPLES]],
        },
    }


def _sum(sizes: Iterable[int]) -> Document:
    listed = list(sizes)
    return {"objects": len(listed), "nbytes": sum(listed)}


def render(console: Console, found: Document) -> None:
    """A row for each save (or other kind of object) and reason, then what was done and what was left."""
    print_run(console, found)
    groups: dict[tuple[str, str, str], list[int]] = {}
    for g in found["garbage"]:
        save = g["save"] or {"step": "", "attempt": ""}
        groups.setdefault((g["reason"], str(save["step"]), str(save["attempt"])), []).append(g["size"])
    if groups:
        rows = table("why", ">step", ">attempt", ">objects", ">bytes")
        for (reason, step, attempt), sizes in groups.items():
            rows.add_row(reason, step, attempt, str(len(sizes)), size(sum(sizes)))
        console.print(rows)
    dry = found["dry_run"]
    total = _amount(_sum(g["size"] for g in found["garbage"]))
    console.print(f"{'would delete' if dry else 'deleted'} {total}" if groups else "nothing to delete")
    if found["uploads"]:
        console.print(f"aborted {found['uploads']} unfinished uploads")
    if dry:
        console.print("unfinished uploads are not looked for in a dry run")
    if found["spared"]["objects"]:
        console.print(
            f"spared for readers: {_amount(found['spared'])}, dropped less than {found['grace']:g} s before the run's last change "
            f"(--grace 0 spares nothing)"
        )
    if found["unknown"]["objects"]:
        examples = ", ".join(map(shown, found["unknown"]["examples"]))
        console.print(
            f"left alone, as the names are none of objckpt's: {_amount(found['unknown'])}, such as {examples}"
        )


def _amount(found: dict[str, Any]) -> str:
    count = found["objects"]
    return f"{count} object{'' if count == 1 else 's'}, {size(found['nbytes'])}"
