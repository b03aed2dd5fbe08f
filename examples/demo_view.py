"""What the demo shows: a line of the story for each event, and below it a row of the timeline for each launch.

Invariant: colour is loss, so two rows that are equal in colour above each other trained the same. The demo calls this.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.padding import Padding
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

CELLS = 42  # so that a row fits into 80 columns
HOT, COLD = (222, 73, 104), (64, 190, 160)  # colours of a high and of a low loss
HIGH, LOW = 5.6, 3.0


def _colour(loss: float) -> str:
    part = min(max((HIGH - loss) / (HIGH - LOW), 0.0), 1.0)
    red, green, blue = (round(hot + (cold - hot) * part) for hot, cold in zip(HOT, COLD, strict=True))
    return f"rgb({red},{green},{blue})"


@dataclass
class Row:
    """One launch on the timeline."""

    name: str
    steps: int
    note: str = ""
    step: int = 0
    losses: dict[int, float] = field(default_factory=dict)
    saved: set[int] = field(default_factory=set)
    killed: bool = False

    def take(self, event: Mapping[str, Any]) -> None:
        """An event of the job's log."""
        if "loss" in event:
            self.step = event["step"]
            self.losses[self._cell(self.step)] = event["loss"]
            self.note = f"step {self.step:3d}  loss {event['loss']:.4f}"
        elif "saved" in event:
            self.saved.add(self._cell(event["saved"]))
        else:
            self.note = f"resumed from step {event['resumed']}" if event["resumed"] else "fresh start"

    def kill(self, note: str) -> None:
        self.killed, self.note = True, note

    def bar(self) -> Text:
        bar = Text()
        for cell in range(CELLS):
            if self.killed and cell == self._cell(self.step):
                bar.append("✗", "bold red")
            elif cell in self.losses:
                bar.append("◆" if cell in self.saved else "█", _colour(self.losses[cell]))
            else:
                bar.append("·", "bright_black")
        return bar

    def _cell(self, step: int) -> int:
        return max(step - 1, 0) * CELLS // self.steps


class View:
    """A context manager. On a terminal it moves; elsewhere the story is printed, and the timeline once, at the end."""

    def __init__(self, steps: int, epoch: int) -> None:
        self.console = Console(highlight=False)
        self._steps, self._epoch = steps, epoch
        self._rows: list[Row] = []
        self._spinner: Spinner | None = None
        self._live = Live(console=self.console, get_renderable=self._render, refresh_per_second=8)

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._spinner = None
        self._live.stop()
        if not self.console.is_terminal:
            self.console.print()  # there, rich ends the last line on a terminal only

    def row(self, name: str) -> Row:
        self._rows.append(Row(name, self._steps))
        return self._rows[-1]

    def say(self, text: str) -> None:
        """A line of the story, with rich's markup."""
        line = Table.grid(padding=(0, 1))
        line.add_row(" [bright_black]•[/]", text)
        self.console.print(line)

    def doing(self, text: str) -> None:
        """What is going on just now."""
        if self._spinner is None:
            self._spinner = Spinner("dots")
        self._spinner.update(text=Text(text, "italic"))

    def _render(self) -> RenderableType:
        rows = Table.grid(padding=(0, 2, 0, 0))
        ends = {end * CELLS // self._steps for end in range(self._epoch, self._steps, self._epoch)}
        axis = "".join("┆" if cell in ends else " " for cell in range(CELLS))
        rows.add_row("", Text(axis, "bright_black"), Text("┆ epoch  ◆ saved", "bright_black"))
        for row in self._rows:
            rows.add_row(row.name, row.bar(), Text(row.note))
        parts: list[RenderableType] = [rows]
        if self._spinner is not None:
            parts.append(self._spinner)
        return Padding(Group(*parts), (1, 1))
