"""The table of stores, from a run of the conformance suite: backend, server, version, what passed, and the known deviations.

``python tests/conformance_table.py`` runs ``tests/test_conformance*.py`` (arguments go to pytest, such as ``-n 2``), and writes
``docs/stores.json`` and, between its two markers, the table in the files that have them. ``--render`` writes the tables without a run.
A class whose server is not on this machine keeps the row of the last run that had one. ``test_stores_table.py`` compares.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections import Counter, defaultdict
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parent
RESULTS = TESTS.parent / "docs" / "stores.json"
PAGES = (TESTS.parent / "README.md", TESTS.parent / "docs" / "stores.md")
BEGIN, END = "<!-- stores: begin -->", "<!-- stores: end -->"
HEADER = "| store | server | version | conformance tests | known deviations |\n|---|---|---|---|---|\n"


def classes():
    """Every class that runs the suite, by its name in pytest's ids."""
    from objckpt.testing.conformance import (
        ObjectStoreTests,
    )  # pytest rewrites its assertions only before it is loaded

    if str(TESTS) not in sys.path:
        sys.path.insert(0, str(TESTS))
    found = {}
    for path in sorted(TESTS.glob("test_conformance*.py")):
        module = importlib.import_module(path.stem)
        for name, value in vars(module).items():
            ours = (
                isinstance(value, type)
                and issubclass(value, ObjectStoreTests)
                and value.__module__ == path.stem
            )
            if ours and name.startswith("Test"):
                found[f"{path.stem}::{name}"] = value
    return found


def row_of(suite, counts):
    """What a class says of itself, and what a run found."""
    return {
        "backend": suite.backend,
        "server": suite.server,
        "version": suite.server_version(),
        "passed": counts["passed"],
        "xfailed": counts["xfailed"],
        "skipped": counts["skipped"],
        "deviations": dict(suite.known_deviations),
    }


def render(rows):
    """The table as Markdown."""
    lines = []
    for row in sorted(rows.values(), key=lambda row: (row["backend"], row["server"])):
        passed = f"{row['passed']} of {row['passed'] + row['xfailed']}"
        deviations = "; ".join(dict.fromkeys(row["deviations"].values())).replace("|", "\\|") or "none"
        lines.append(
            f"| `{row['backend']}` | {row['server']} | {row['version'] or '-'} | {passed} | {deviations} |\n"
        )
    return HEADER + "".join(lines)


def between(text):
    """What stands between the markers; None if they are not there."""
    _, found, rest = text.partition(BEGIN + "\n")
    return rest.partition(END)[0] if found and END in rest else None


def write_tables(rows):
    for page in PAGES:
        text = page.read_text() if page.exists() else ""
        old = between(text)
        if old is not None:
            page.write_text(text.replace(f"{BEGIN}\n{old}{END}", f"{BEGIN}\n{render(rows)}{END}"))


class Tally:
    """A pytest plugin: outcomes by class. Under xdist it hears the reports of all workers."""

    def __init__(self):
        self.counts = defaultdict(Counter)

    def pytest_runtest_logreport(self, report):
        path, _, rest = report.nodeid.partition("::")
        name = f"{Path(path).stem}::{rest.partition('::')[0]}"
        if report.when == "call" or not report.passed:
            outcome = "xfailed" if hasattr(report, "wasxfail") else report.outcome
            self.counts[name][outcome] += 1


def main(arguments):
    rows = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    if arguments != ["--render"]:
        tally = Tally()
        suites = [str(path) for path in sorted(TESTS.glob("test_conformance*.py"))]
        code = pytest.main(["-q", "-p", "no:cacheprovider", *suites, *arguments], plugins=[tally])
        if code != 0:
            return int(code)
        known = classes()
        for name, counts in tally.counts.items():
            if name in known and counts["passed"]:
                rows[name] = row_of(known[name], counts)
        rows = {name: row for name, row in sorted(rows.items()) if name in known}
        RESULTS.write_text(json.dumps(rows, indent=1) + "\n")
    write_tables(rows)
    sys.stdout.write(render(rows))
    missing = [name for name in classes() if name not in rows]
    if missing:
        sys.stdout.write(f"never run here, and so not in the table: {', '.join(missing)}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
