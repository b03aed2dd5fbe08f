"""The command line: what a run's bucket holds, as tables for people and as JSON for scripts.

Invariants: it reads only, so it never starts an attempt and no job notices it; tables and JSON are made from one document; what
cannot be done is told in one line on stderr, with exit code 1 (2 for wrong usage); torch is never loaded, and what takes its time to
load (a cloud's client, rich) is loaded by those who need it.

The console script ``objckpt`` calls :func:`main`.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias

from objckpt.errors import CheckpointNotFoundError, ConfigError, ObjckptError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from objckpt.commit import Contents, Run
    from objckpt.manifest import Entry, Save, Version

#: What a command found: JSON, printed as it is by ``--json``.
Document: TypeAlias = "dict[str, Any]"

_INTERRUPTED: Final = 130  # as shells count: 128 and the signal's number
#: Options whose value is text even if it looks like a number.
_TEXTS: Final = frozenset({"key", "secret", "token", "username", "password", "profile"})
_NUMBER: Final = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?")
_PREVIEW: Final = 60  # characters of a plain value
_WIDE: Final = 10_000  # columns of what is no terminal: nothing is folded there
_UNITS: Final = ((86_400, "d"), (3_600, "h"), (60, "min"), (1, "s"))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command. Returns the exit code: 0, or 1 after a line on stderr; wrong usage ends the process with 2."""
    said = _parser().parse_args(arguments)
    try:
        document = said.find(said)
        _write(json.dumps(document, indent=2) + "\n" if said.json else _rendered(said.render, document))
    except (ObjckptError, OSError) as error:
        line = " ".join(str(error).split())
        print(f"objckpt: {line}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return _INTERRUPTED
    return 0


# ------------------------------------------------------------------ what was said


def _parser() -> argparse.ArgumentParser:
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument(
        "uri",
        metavar="URI",
        nargs="?",
        help="where the run is: s3://bucket/run or a directory; else OBJCKPT_URI or objckpt.toml says it",
    )
    common.add_argument("--json", action="store_true", help="print one JSON document")
    common.add_argument(
        "-o",
        dest="storage_options",
        metavar="NAME=VALUE",
        action=_StorageOption,
        help="a storage option, such as endpoint_url=http://host:port or client_kwargs.region_name=eu-west-1; repeat it for more. All "
        "processes of a machine see it, so a secret is better put into OBJCKPT_STORAGE_OPTIONS",
    )
    parser = argparse.ArgumentParser(prog="objckpt", description="Look at checkpoints in object storage.")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    ls = commands.add_parser("ls", parents=[common], help="list the checkpoints of a run")
    ls.set_defaults(find=_list, render=_print_list)
    show = commands.add_parser("show", parents=[common], help="show what is in one checkpoint")
    show.add_argument("step", metavar="STEP", type=int, help="the checkpoint's step")
    show.add_argument(
        "--attempt",
        type=int,
        help="whose checkpoint, if several attempts have one of this step; else what a restart would take",
    )
    show.set_defaults(find=_show, render=_print_show)
    return parser


class _StorageOption(argparse.Action):
    """Collects ``name=value`` and ``outer.inner=value`` in one nested dict. Its errors do not show values."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,  # noqa: ARG002 # argparse passes it
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,  # noqa: ARG002 # likewise
    ) -> None:
        name, equals, text = str(values).partition("=")
        *outer, last = name.split(".")
        if not equals or not all([*outer, last]):
            raise argparse.ArgumentError(self, "say name=value, or outer.inner=value")
        options: dict[str, Any] = getattr(namespace, self.dest) or {}
        setattr(namespace, self.dest, options)
        for part in outer:
            options = options.setdefault(part, {})
            if not isinstance(options, dict):
                raise argparse.ArgumentError(self, f"{name}: {part} has a value of its own already")
        if isinstance(options.get(last), dict):
            raise argparse.ArgumentError(self, f"{name}: {last} has values inside it already")
        options[last] = _option_value(last, text)


def _option_value(name: str, text: str) -> str | bool | int | float:
    if name in _TEXTS or name.startswith("aws_"):
        return text
    if text in ("true", "false"):
        return text == "true"
    if _NUMBER.fullmatch(text):
        return float(text) if "." in text else int(text)
    return text


# ------------------------------------------------------------------ what is there


def _open(said: argparse.Namespace) -> tuple[Run, Version]:
    """The run and its newest version. Only here is anything loaded that can talk to a store."""
    from objckpt import config  # noqa: PLC0415 # `objckpt --help` needs none of these
    from objckpt.commit import Run  # noqa: PLC0415 # likewise
    from objckpt.retention import retain  # noqa: PLC0415 # likewise
    from objckpt.store import open_store  # noqa: PLC0415 # likewise

    where = config.load(uri=said.uri, storage_options=said.storage_options)
    try:
        store = open_store(where.uri, **where.storage_options)
    except ObjckptError:
        raise
    except (TypeError, ValueError) as error:  # from the client, about a value that was typed here
        raise ConfigError(
            f"{config.redact(where.uri)}: the store's client refuses one of the storage options {', '.join(where.storage_options)}: "
            f"a name or a kind of value is wrong"
        ) from error
    run = Run(store, retain=retain)
    return run, run.existing()


def _list(said: argparse.Namespace) -> Document:
    run, version = _open(said)
    entries = sorted(version.kept, key=lambda e: e.save)
    return {**_run(run, version), "checkpoints": [_checkpoint(version, entry) for entry in entries]}


def _show(said: argparse.Namespace) -> Document:
    run, version = _open(said)
    entry = _entry(run, version, said.step, said.attempt)
    contents = run.contents(entry)
    return {
        **_run(run, version),
        "checkpoint": _checkpoint(version, entry),
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


def _entry(run: Run, version: Version, step: int, attempt: int | None) -> Entry:
    """The checkpoint of ``step``: as ``restore`` chooses, the one on the line of ``head``, else the newest attempt's."""
    from objckpt.retention import line  # noqa: PLC0415 # see _open

    found = {
        e.save: e for e in version.kept if e.save.step == step and attempt in (None, int(e.save.attempt))
    }
    if not found:
        there = ", ".join(_spelled(e.save, None) for e in sorted(version.kept, key=lambda e: e.save))
        wanted = f"step {step}" + ("" if attempt is None else f" by attempt {attempt}")
        raise CheckpointNotFoundError(
            f"{run.store.uri} has no checkpoint of {wanted}; it has {there or 'none'}"
        )
    return found[next((save for save in line(version.head, version.kept) if save in found), max(found))]


def _run(run: Run, version: Version) -> Document:
    return {
        "uri": run.store.uri,
        "run": version.run,
        "version": version.number,
        "change": version.change,
        "attempt": version.attempt,
        "launch": version.launch,
        "finished": version.launch is None,
        "world_size": version.world_size,
        "policy": {"keep": version.policy.keep, "lag": version.policy.lag},
        "head": _save(version.head),
    }


def _checkpoint(version: Version, entry: Entry) -> Document:
    from objckpt.retention import line  # noqa: PLC0415 # see _open

    return {
        "step": entry.save.step,
        "attempt": entry.save.attempt,
        "world_size": entry.world_size,
        "nbytes": entry.nbytes,
        "created_at": entry.created_at,
        "parent": _save(entry.parent),
        "head": entry.save == version.head,
        "aside": entry.save not in line(version.head, version.kept),
        "pinned": entry.pinned,
        "bases": [_save(base) for base in entry.bases],
    }


def _save(save: Save | None) -> Document | None:
    return None if save is None else {"attempt": save.attempt, "step": save.step}


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


# ------------------------------------------------------------------ for people


def _rendered(render: Callable[[Console, Document], None], document: Document) -> str:
    from rich.console import Console  # noqa: PLC0415 # `--json` needs no tables

    console = Console(markup=False, highlight=False, emoji=False)
    if not console.is_terminal:
        console = Console(markup=False, highlight=False, emoji=False, width=_WIDE)
    with console.capture() as captured:
        render(console, document)
    # What is folded to a width is filled up with spaces, which help nobody.
    return "".join(f"{row.rstrip()}\n" for row in captured.get().splitlines())


def _print_list(console: Console, found: Document) -> None:
    _print_run(console, found)
    if not found["checkpoints"]:
        console.print("no checkpoint yet")
        return
    table = _table(">step", ">attempt", ">ranks", ">bytes", "created", "age", "parent", "notes")
    for c in found["checkpoints"]:
        created, age = _when(c["created_at"])
        notes = ", ".join(name for name in ("head", "aside", "pinned") if c[name])
        parent = _spelled(c["parent"], c["attempt"])
        row = (c["step"], c["attempt"], c["world_size"], _size(c["nbytes"]), created, age, parent, notes)
        table.add_row(*map(str, row))
    console.print(table)


def _print_run(console: Console, found: Document) -> None:
    launch = "finished" if found["finished"] else f"launch {_shown(found['launch'])}"
    keep, lag = found["policy"]["keep"], found["policy"]["lag"]
    kept = "all" if keep is None else f"{keep}{f' + {lag}' if lag else ''}"
    console.print(f"run {_shown(found['run'])} at {_shown(found['uri'])}")
    console.print(
        f"attempt {found['attempt']}, {launch}; {_ranks(found['world_size'])}; keeps {kept}; version {found['version']} "
        f"({_shown(found['change'])})"
    )


def _print_show(console: Console, found: Document) -> None:
    _print_run(console, found)
    c = found["checkpoint"]
    created, age = _when(c["created_at"])
    notes = "".join(f", {name}" for name in ("head", "aside", "pinned") if c[name])
    console.print()
    console.print(f"step {c['step']} of attempt {c['attempt']}{notes}")
    console.print(f"created   {created} ({age} ago) by {_ranks(c['world_size'])}, {_size(c['nbytes'])}")
    console.print(f"parent    {_spelled(c['parent'], c['attempt'])}")
    console.print(f"metadata  {json.dumps(found['metadata'])}")
    console.print(f"index     {found['index']['key']} ({_size(found['index']['size'])})")

    console.print()
    table = _table("record", ">bytes", "crc64")
    for r in found["records"]:
        table.add_row(r["key"], _size(r["size"]), r["crc64"])
    console.print(table)

    console.print()
    table = _table("state", "kind", ">tensors", "value")
    for s in found["state"]:
        kind = _shown(s["kind"]) + (", per rank" if s["per_rank"] else "")
        table.add_row(_shown(s["name"]), kind, str(s["tensors"] or ""), s["value"] or "")
    console.print(table)

    console.print()
    table = _table("tensor", "dtype", "shape", ">bytes", ">rank", "object")
    for t in found["tensors"]:
        shape = str(t["shape"])
        if t["shape"] != t["global_shape"]:
            shape += f" at {t['offset']} of {t['global_shape']}"
        table.add_row(
            _shown(t["name"]), t["dtype"], shape, _size(t["nbytes"]), str(t["rank"]), _shown(t["object"])
        )
    console.print(table)


def _table(*columns: str) -> Table:
    """A table without lines; what is too long is folded and never cut. Numbers, marked by ``>``, stand at the right."""
    from rich.table import Table  # noqa: PLC0415 # see _rendered

    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in columns:
        justify: Literal["left", "right"] = "right" if name.startswith(">") else "left"
        table.add_column(name.removeprefix(">"), justify=justify, overflow="fold")
    return table


def _shown(text: str) -> str:
    """Names come from the bucket: none of them may move the cursor."""
    return text if text.isprintable() else text.encode("unicode_escape").decode()


def _size(nbytes: int) -> str:
    from rich.filesize import decimal  # noqa: PLC0415 # see _rendered

    return decimal(nbytes)


def _ranks(count: int) -> str:
    return f"{count} rank{'' if count == 1 else 's'}"


def _when(seconds: float) -> tuple[str, str]:
    """A moment, given in seconds since the epoch, and how long ago it was."""
    try:
        moment = datetime.fromtimestamp(seconds, UTC)
    except (ValueError, OverflowError, OSError):
        return str(seconds), "?"
    past = max(0.0, time.time() - seconds)
    size, unit = next((u for u in _UNITS if past >= u[0]), _UNITS[-1])
    return f"{moment:%Y-%m-%d %H:%M:%S}Z", f"{int(past // size)} {unit}"


def _spelled(save: Any, attempt: int | None) -> str:
    """A save in words, as seen from another one of ``attempt``."""
    if save is None:
        return "none"
    step, own = (save["step"], save["attempt"]) if isinstance(save, dict) else (save.step, save.attempt)
    return f"{step}" if own == attempt else f"{step} (attempt {own})"


def _write(text: str) -> None:
    out = sys.stdout
    if isinstance(out, io.TextIOWrapper):
        out.reconfigure(errors="backslashreplace")  # a terminal's encoding may lack a character of a name
    try:
        out.write(text)
        out.flush()
    except BrokenPipeError:
        # Whoever read it (head, a pager) has seen enough. The interpreter flushes once more when it ends: into nothing.
        os.dup2(os.open(os.devnull, os.O_WRONLY), out.fileno())
