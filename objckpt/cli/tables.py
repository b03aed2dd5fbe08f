"""Tables for people.

Invariants: nothing is cut, a narrow terminal folds it; no name from the bucket moves the cursor; rich is loaded only by who prints a table.

Called by ``objckpt.cli`` and the commands beside this file.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from objckpt.cli.run import Document

#: Shows a document to people.
Render: TypeAlias = "Callable[[Console, Document], None]"

_WIDE: Final = 10_000  # columns of what is no terminal: nothing is folded there
_UNITS: Final = ((86_400, "d"), (3_600, "h"), (60, "min"), (1, "s"))


def rendered(render: Render, document: Document) -> str:
    """What ``render`` prints, in colour on a terminal."""
    from rich.console import Console  # noqa: PLC0415 # `--json` needs no tables

    console = Console(markup=False, highlight=False, emoji=False)
    if not console.is_terminal:
        console = Console(markup=False, highlight=False, emoji=False, width=_WIDE)
    with console.capture() as captured:
        render(console, document)
    # What is folded to a width is filled up with spaces, which help nobody.
    return "".join(f"{row.rstrip()}\n" for row in captured.get().splitlines())


def print_run(console: Console, found: Document) -> None:
    """Two lines about the run."""
    launch = "finished" if found["finished"] else f"launch {shown(found['launch'])}"
    rules, lag = found["policy"]["keep"], found["policy"]["lag"]
    kept = ", ".join(_rule(rule, lag) for rule in rules) or "all"
    console.print(f"run {shown(found['run'])} at {shown(found['uri'])}")
    console.print(
        f"attempt {found['attempt']}, {launch}; {ranks(found['world_size'])}; keeps {kept}; version {found['version']} "
        f"({shown(found['change'])})"
    )


def _rule(rule: Document, lag: int) -> str:
    match rule["rule"]:
        case "last":
            return f"{rule['count']}{f' + {lag}' if lag else ''}"
        case "every":
            return f"one of every {rule['steps']} steps"
        case "best":
            return f"{rule['count']} of the {'lowest' if rule['mode'] == 'min' else 'highest'} {shown(rule['metric'])}"
        case _:
            return f"those of {rule['days']:g} days"


def table(*columns: str) -> Table:
    """A table without lines; what is too long is folded and never cut. Numbers, marked by ``>``, stand at the right."""
    from rich.table import Table  # noqa: PLC0415 # see rendered

    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in columns:
        justify: Literal["left", "right"] = "right" if name.startswith(">") else "left"
        table.add_column(name.removeprefix(">"), justify=justify, overflow="fold")
    return table


def shown(text: str) -> str:
    """Names come from the bucket: none of them may move the cursor."""
    return text if text.isprintable() else text.encode("unicode_escape").decode()


def size(nbytes: int) -> str:
    """Bytes, for people."""
    from rich.filesize import decimal  # noqa: PLC0415 # see rendered

    return decimal(nbytes)


def ranks(count: int) -> str:
    """So many ranks."""
    return f"{count} rank{'' if count == 1 else 's'}"


def when(seconds: float) -> tuple[str, str]:
    """A moment, given in seconds since the epoch, and how long ago it was."""
    try:
        moment = datetime.fromtimestamp(seconds, UTC)
    except (ValueError, OverflowError, OSError):
        return str(seconds), "?"
    past = max(0.0, time.time() - seconds)
    size, unit = next((u for u in _UNITS if past >= u[0]), _UNITS[-1])
    return f"{moment:%Y-%m-%d %H:%M:%S}Z", f"{int(past // size)} {unit}"


def spelled(save: Any, attempt: int | None) -> str:
    """A save in words, as seen from another one of ``attempt``."""
    if save is None:
        return "none"
    step, own = (save["step"], save["attempt"]) if isinstance(save, dict) else (save.step, save.attempt)
    return f"{step}" if own == attempt else f"{step} (attempt {own})"
