"""The table of stores is what the conformance classes say and a run has found."""

from __future__ import annotations

import importlib.metadata
import json
from collections import Counter

import conformance_table as table
import pytest

CLASSES = table.classes()
ROWS = json.loads(table.RESULTS.read_text())


@pytest.mark.parametrize("page", table.PAGES, ids=lambda page: page.name)
def test_the_table_on_a_page_is_that_of_the_last_run(page):
    shown = table.between(page.read_text())
    if shown is None:
        pytest.skip(f"{page.name} has no table between {table.BEGIN} and {table.END}")
    assert shown == table.render(ROWS), "run `python tests/conformance_table.py --render`"


def test_every_class_has_a_row_and_every_row_a_class():
    assert set(ROWS) == set(CLASSES), "run `python tests/conformance_table.py`"


@pytest.mark.parametrize("name", CLASSES)
def test_a_row_says_what_its_class_says(name):
    suite = CLASSES[name]
    row = ROWS[name]
    assert suite.backend.endswith("://")
    assert suite.server
    again = table.row_of(suite, Counter())
    told = ["backend", "server", "deviations"]
    if suite.distribution:
        assert importlib.metadata.version(suite.distribution)
        told.append("version")
    assert {field: row[field] for field in told} == {field: again[field] for field in told}
    assert row["passed"] > 50
    # A parameter of each deviation is one test; without one it stands for all of them.
    assert row["xfailed"] >= len(suite.known_deviations)
