"""Kill as often as you like: ``make soak KILLS=200 SEED=7 REPORT=docs/soak/7.json``; ``merge`` adds reports up and prints the table.

A report is written after every trial, so that an interrupted soak counts as far as it came. Exit status 0 only if nothing was lost.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

from fork_server import ForkServer
from kills import Report, Trial

from objckpt.testing.servers import SeaweedFS

PER_TRIAL = 20
COLUMNS = [
    "report",
    "kills",
    "under torchrun",
    "launches",
    "committed",
    "rolled forward",
    "adopted",
    "unheard",
    "repeated steps",
]
COLUMNS += ["losses", "corrupt loads", "processes left", "orphans left"]


def soak(seed, kills, *, weed=None, report=None, torchrun=False, only=None, tell=print):
    """Trials of 20 kills each, ``only`` that one if given, on ``weed`` or a SeaweedFS of its own. Returns their sum."""
    total = Report()
    directory = Path(tempfile.mkdtemp(prefix="objckpt-kills-"))
    forks = ForkServer(dict(os.environ), directory / "fork-server.log")
    try:
        with contextlib.nullcontext(weed) if weed else SeaweedFS() as server:
            number = 0 if only is None else only
            while total.kills.total() < kills:
                wanted = min(PER_TRIAL, kills - total.kills.total())
                world = {"weed": server, "directory": directory, "forks": forks}
                total.add(Trial(seed, number, wanted, torchrun=torchrun, **world).run())
                tell(
                    f"{total.kills.total()} kills in {total.seconds:.0f} s, {total.committed} committed, {len(total.failures)} failures"
                )
                if report is not None:
                    document = {"seed": seed, "date": time.strftime("%Y-%m-%d"), **total.document()}
                    report.write_text(json.dumps(document, indent=1) + "\n")
                if only is not None or len(total.failures) > 10:
                    break
                number += 1
    finally:
        forks.close()
    for failure in total.failures:
        tell(f"{failure}\n  again: make soak SEED={seed} KILLS={kills}; what is left of it: {directory}")
    if not total.failures:
        shutil.rmtree(directory, ignore_errors=True)
    return total


def table(reports):
    """Markdown: a row for each report, and their sum."""
    rows = [f"| {' | '.join(COLUMNS)} |", "|---" * len(COLUMNS) + "|"]
    total = Report()
    for name, report in reports:
        total.add(report)
        rows.append(_row(name, report))
    rows.append(_row("**all**", total))
    return "\n".join(rows)


def _row(name, r):
    cells = [name, r.kills.total(), r.torchrun, r.launches, r.committed, r.rolled_forward, r.adopted]
    cells += [r.unheard, r.repeated, r.losses, r.corrupt, r.processes, r.orphans]
    return f"| {' | '.join(map(str, cells))} |"


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(required=True)
    run = commands.add_parser("run")
    run.set_defaults(command=_run)
    run.add_argument("--kills", type=int, default=200)
    run.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10_000))
    run.add_argument("--report", type=Path)
    run.add_argument("--only", type=int, help="one trial of that seed alone, by its number from 0")
    run.add_argument("--torchrun", action="store_true", help="launches by a real torchrun: slower")
    merge = commands.add_parser("merge")
    merge.set_defaults(command=_merge)
    merge.add_argument("reports", type=Path, nargs="+")
    said = parser.parse_args()
    return said.command(said)


def _run(said):
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that what was started is ended then, too
    print(f"seed {said.seed}", flush=True)
    total = soak(
        said.seed,
        said.kills,
        report=said.report,
        torchrun=said.torchrun,
        only=said.only,
        tell=lambda text: print(text, flush=True),
    )
    print(table([(f"seed {said.seed}", total)]))
    return 1 if total.failures else 0


def _merge(said):
    found = [(path.stem, Report.of(json.loads(path.read_text()))) for path in sorted(said.reports)]
    print(table(found))
    return 1 if any(report.failures for _, report in found) else 0


if __name__ == "__main__":
    sys.exit(main())
