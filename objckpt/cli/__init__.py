"""The command line: what a run's bucket holds, as tables for people and as JSON for scripts, and the few changes that people make.

Invariants: a job notices no command but ``rollback``, which fences it; only ``gc`` deletes, and only what nothing reaches; tables and
JSON are made from one document; what cannot be done is told in one line on stderr, with exit code 1 (2 for wrong usage), and ``verify``
ends with 1 too if anything is damaged; torch is never loaded, and what takes its time to load (a command, a cloud's client, rich) is
loaded by those who need it.

The console script ``objckpt`` calls :func:`main`. Each command is a module with a ``find``, which makes the document from what was said,
and a ``render``, which shows it to people.
"""

from __future__ import annotations

import argparse
import importlib
import io
import json
import math
import os
import re
import sys
from collections.abc import Sequence
from typing import Any, Final

from objckpt.errors import ObjckptError

_INTERRUPTED: Final = 130  # as shells count: 128 and the signal's number
#: Options whose value is text even if it looks like a number.
_TEXTS: Final = frozenset({"key", "secret", "token", "username", "password", "profile"})
_NUMBER: Final = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command. Returns the exit code: 0, or 1 after a line on stderr; wrong usage ends the process with 2."""
    said = _parser().parse_args(arguments)
    try:
        command = importlib.import_module(f"objckpt.cli.{said.command}")
        document = command.find(said)
        _write(json.dumps(document, indent=2) + "\n" if said.json else _table(command, document))
    except (ObjckptError, OSError) as error:
        line = " ".join(str(error).split())
        sys.stderr.write(f"objckpt: {line}\n")
        return 1
    except KeyboardInterrupt:
        return _INTERRUPTED
    return 0 if document.get("good", True) else 1


def _table(command: Any, document: dict[str, Any]) -> str:
    from objckpt.cli.tables import rendered  # noqa: PLC0415 # `--json` needs no tables

    return rendered(command.render, document)


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
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    commands.add_parser("ls", parents=[common], help="list the checkpoints of a run")
    show = commands.add_parser("show", parents=[common], help="show what is in one checkpoint")
    show.add_argument("step", metavar="STEP", type=int, help="the checkpoint's step")
    gc = commands.add_parser("gc", parents=[common], help="delete what no checkpoint needs")
    gc.add_argument("--dry-run", action="store_true", help="say what would be deleted, and delete nothing")
    gc.add_argument(
        "--grace",
        metavar="SECONDS",
        type=_seconds,
        help="spare for its readers what was dropped within so many seconds before the run's last change, by the store's clock; else 600",
    )
    verify = commands.add_parser("verify", parents=[common], help="check that checkpoints can be restored")
    verify.add_argument("--step", type=int, help="only the checkpoint of this step; else all")
    verify.add_argument("--deep", action="store_true", help="read every block of every shard")
    pin = commands.add_parser("pin", parents=[common], help="keep one checkpoint for good")
    pin.add_argument("step", metavar="STEP", type=int, help="the checkpoint's step")
    pin.add_argument("--undo", action="store_true", help="let retention drop it again")
    rollback = commands.add_parser(
        "rollback", parents=[common], help="fence what runs; the next start resumes from an older checkpoint"
    )
    rollback.add_argument("--to", metavar="STEP", type=int, required=True, help="the checkpoint's step")
    for command in (show, verify, pin, rollback):
        command.add_argument(
            "--attempt",
            type=int,
            help="whose checkpoint, if several attempts have one of this step; else what a restart would take",
        )
    return parser


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds, 0 or more")
    return seconds


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
