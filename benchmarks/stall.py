"""How long `save()` holds the training loop up, against a plain copy of the same bytes in the same run.

    python benchmarks/stall.py --gib 0.25

One process, no GPU, a state of --gib GiB in 300 tensors. Each round takes one `save()` and one `Tensor.copy_` of as many bytes between
two buffers that are in memory already, in turn the one and the other first. The save's upload, to a directory, has ended before the
round does, so neither is measured beside one. README.md in this folder says what the figures mean.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

import objckpt
from objckpt.spool import file_system

TENSORS = 300
WARM_UP = 4  # rounds that are not counted: the slots are made and their pages touched


def timed(action: Callable[[], object]) -> float:
    """Milliseconds that ``action`` takes."""
    begun = time.perf_counter()
    action()
    return (time.perf_counter() - begun) * 1e3


def spread(values: list[float], figures: int) -> tuple[str, ...]:
    """Median, quartiles, least and most, as they stand in the table."""
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return tuple(f"{value:.{figures}f}" for value in (middle, low, high, min(values), max(values)))


def measure(gib: float, rounds: int, where: Path) -> tuple[list[float], list[float]]:
    """Milliseconds of `save()` and of the plain copy, round by round, warm-up first."""
    count = int(gib * (1 << 30)) // 4 // TENSORS
    state = {f"tensor-{number:03}": torch.randn(count) for number in range(TENSORS)}
    source = torch.randn(count * TENSORS)
    target = torch.zeros_like(source)
    saves, copies = [], []
    with objckpt.Checkpointer(f"file://{where}/run", cache=where / "cache", keep=2) as ckpt:
        ckpt.restore(state)
        for step in range(1, WARM_UP + rounds + 1):
            if step % 2:
                copies.append(timed(lambda: target.copy_(source)))
            saves.append(timed(lambda step=step: ckpt.save(step, state)))
            ckpt.wait()
            if not step % 2:
                copies.append(timed(lambda: target.copy_(source)))
    return saves, copies


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure the stall of save() against a plain copy.")
    parser.add_argument("--gib", type=float, default=0.25, help="size of the state (default 0.25)")
    parser.add_argument("--rounds", type=int, default=30, help="rounds that count (default 30)")
    parser.add_argument(
        "--directory", type=Path, help="local directory for slots and bucket (default: the temporary one)"
    )
    parser.add_argument(
        "--threads", type=int, default=1, help="of torch (default 1, which torchrun sets too)"
    )
    said = parser.parse_args()
    torch.set_num_threads(said.threads)
    with tempfile.TemporaryDirectory(prefix="objckpt-stall-", dir=said.directory) as folder:
        where = Path(folder)
        kind = file_system(where)
        load = os.getloadavg()[0]
        saves, copies = measure(said.gib, said.rounds, where)
    ratios = [save / copy for save, copy in zip(saves[WARM_UP:], copies[WARM_UP:], strict=True)]
    title = (
        f"{said.gib} GiB in {TENSORS} tensors, {said.rounds} rounds, slots on {kind or 'an unknown file system'}, "
        f"torch {torch.__version__}, threads: {said.threads}, cores: {os.cpu_count()}, load at the start: {load:.1f}"
    )
    table = Table(title=title, title_justify="left")
    table.add_column("")
    for name in ("median", "1st quartile", "3rd quartile", "least", "most"):
        table.add_column(name, justify="right")
    table.add_row("save(), ms", *spread(saves[WARM_UP:], 1))
    table.add_row("plain copy, ms", *spread(copies[WARM_UP:], 1))
    table.add_row("ratio within a round", *spread(ratios, 2))
    table.add_row("the first two saves, ms", *spread(saves[:2], 1))
    console = Console()
    console.print(table)
    medians = statistics.median(saves[WARM_UP:]), statistics.median(copies[WARM_UP:])
    console.print(f"ratio of the medians: {medians[0] / medians[1]:.2f}")


if __name__ == "__main__":
    main()
