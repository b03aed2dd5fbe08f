"""``objckpt show``: what is in one checkpoint, down to the bytes of each tensor. Reads the index and the records."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final

from objckpt.cli.run import Document, checkpoint_document, open_run, run_document
from objckpt.cli.tables import print_run, ranks, shown, size, spelled, table, when
from objckpt.commit import Contents
from objckpt.retention import chosen

if TYPE_CHECKING:
    from rich.console import Console

_PREVIEW: Final = 60  # characters of a plain value


def find(said: argparse.Namespace) -> Document:
    """The checkpoint of the step that was named."""
    run, version = open_run(said)
    entry = chosen(run.store.uri, version, said.step, said.attempt)
    contents = run.contents(entry)
    return {
        **run_document(run, version),
        "checkpoint": checkpoint_document(version, entry),
        "metadata": contents.index.metadata,
        "index": _reference(entry.index),
        "records": [_reference(record) for record in contents.index.records],
        "ranks": [
            {
                "rank": record.rank,
                "pieces": len(record.pieces),
                "objects": [
                    {"key": o.key, "size": o.size, "block_size": o.block_size} for o in record.objects
                ],
            }
            for record in contents.records
        ],
        "tensors": list(_tensors(contents)),
        "state": list(_state(contents.records[0].values, contents.records[0].rank_values)),
    }


def _reference(reference: Any) -> Document:
    return {"key": reference.key, "size": reference.size, "crc64": f"{reference.crc64:016x}"}


def _tensors(contents: Contents) -> Iterator[Document]:
    """The pieces of all ranks by name, in the words of FORMAT.md."""
    pieces = [(p, record) for record in contents.records for p in record.pieces]
    for piece, record in sorted(pieces, key=lambda found: (found[0].name, found[0].offset)):
        yield {
            "name": piece.name,
            "dtype": piece.dtype,
            "global_shape": list(piece.global_shape),
            "offset": list(piece.offset),
            "shape": list(piece.shape),
            "rank": record.rank,
            "object": record.objects[piece.obj].key,
            "range": [piece.begin, piece.end],
            "nbytes": piece.end - piece.begin,
        }


def _state(values: Any, own: Any) -> Iterator[Document]:
    """What stands under each key of the state (rank 0's, where it differs): kind, number of tensors, a plain value's beginning."""
    entries = values.items() if isinstance(values, dict) and "$" not in values else _pairs(values)
    objects = own.get("objects") if isinstance(own, dict) else None
    for name, node in entries:
        per_rank = _kind(node) == "per_rank"
        own_node = objects.get(name) if isinstance(objects, dict) else None
        shown = own_node if per_rank else node
        count = _count(shown)
        plain = count == 0 and not (isinstance(shown, dict) and "$" in shown and "state" in shown)
        yield {
            "name": name,
            "kind": _kind(shown),
            "per_rank": per_rank,
            "tensors": count,
            "value": json.dumps(shown)[:_PREVIEW] if plain else None,
        }


def _pairs(node: Any) -> list[tuple[str, Any]]:
    items = node.get("items", []) if isinstance(node, dict) else []
    return [(key if isinstance(key, str) else json.dumps(key), value) for key, value in items]


def _kind(node: Any) -> str:
    if isinstance(node, dict):
        return str(node.get("$", "dict"))
    return "none" if node is None else type(node).__name__


def _count(node: Any) -> int:
    if isinstance(node, list):
        return sum(map(_count, node))
    if not isinstance(node, dict):
        return 0
    return 1 if node.get("$") in ("tensor", "ndarray") else sum(map(_count, node.values()))


def render(console: Console, found: Document) -> None:
    """The checkpoint, then a table each of its records, its state and its tensors."""
    print_run(console, found)
    c = found["checkpoint"]
    created, age = when(c["created_at"])
    notes = "".join(f", {name}" for name in ("head", "aside", "pinned") if c[name])
    console.print()
    console.print(f"step {c['step']} of attempt {c['attempt']}{notes}")
    console.print(f"created   {created} ({age} ago) by {ranks(c['world_size'])}, {size(c['nbytes'])}")
    console.print(f"parent    {spelled(c['parent'], c['attempt'])}")
    console.print(f"metadata  {json.dumps(found['metadata'])}")
    console.print(f"index     {found['index']['key']} ({size(found['index']['size'])})")

    console.print()
    rows = table("record", ">bytes", "crc64")
    for r in found["records"]:
        rows.add_row(r["key"], size(r["size"]), r["crc64"])
    console.print(rows)

    console.print()
    rows = table("state", "kind", ">tensors", "value")
    for s in found["state"]:
        kind = shown(s["kind"]) + (", per rank" if s["per_rank"] else "")
        rows.add_row(shown(s["name"]), kind, str(s["tensors"] or ""), s["value"] or "")
    console.print(rows)

    console.print()
    rows = table("tensor", "dtype", "shape", ">bytes", ">rank", "object")
    for t in found["tensors"]:
        shape = str(t["shape"])
        if t["shape"] != t["global_shape"]:
            shape += f" at {t['offset']} of {t['global_shape']}"
        rows.add_row(
            shown(t["name"]), t["dtype"], shape, size(t["nbytes"]), str(t["rank"]), shown(t["object"])
        )
    console.print(rows)
