"""fsspec's own suite for filesystems, as far as it reads: all of ``AbstractGetTests``, over the tree's own code.

``AbstractOpenTests``, ``AbstractPipeTests``, ``AbstractPutTests`` and ``AbstractCopyTests`` write in every test, and a tree writes nothing.
The suite wants files of its own names, which no checkpoint has: below ``LookTree`` the tree's one way to look something up is
replaced by a table; listing, walking, opening, reading and copying are those of a run.
"""

from __future__ import annotations

from hashlib import md5
from typing import ClassVar

import pytest
from fsspec.tests.abstract import AbstractFixtures, AbstractGetTests

from objckpt.errors import CheckpointNotFoundError
from objckpt.tree import CheckpointTree, Found
from objckpt.tree.files import File, children

EDGE_CASES = ["file1", "file2"] + [
    f"subdir{n}/{name}" for n in range(2) for name in ("subfile1", "subfile2", "nesteddir/nestedfile")
]
HASHED = {
    f"{md5(str(n).encode(), usedforsecurity=False).hexdigest()}.txt": str(n).encode() for n in range(10)
}
FILES = {
    "bulk": dict.fromkeys(
        ["file1", "file2", "subdir/subfile1", "subdir/subfile2", "subdir/nesteddir/nestedfile"], b""
    ),
    "edge": dict.fromkeys(EDGE_CASES, b""),
    "same": {"subdir.txt": b"", "subdir/subfile.txt": b""},
    "hashed": HASHED,
}


class LookTree(CheckpointTree):
    protocol, scheme = "objckpt+look", "look"
    table: ClassVar = {
        f"{scenario}/source/{path}": File(len(data), data)
        for scenario, found in FILES.items()
        for path, data in found.items()
    } | {"own/src/file": File(0)}

    def mkdir(self, path, **_):
        """One test makes its own folder and its own empty file: they are there already."""
        assert self.isdir(path)

    def touch(self, path, **_):
        assert self.isfile(path)

    def _look(self, path):
        below = children(self.table, path)
        if path not in self.table and not below:
            raise CheckpointNotFoundError(path)
        return Found(file=self.table.get(path), children=below)


class TestGet(AbstractFixtures, AbstractGetTests):
    @pytest.fixture
    def fs(self):
        return LookTree()

    @pytest.fixture
    def fs_path(self):
        return "own"

    @pytest.fixture
    def fs_join(self):
        return lambda *parts: "/".join(parts)

    @pytest.fixture
    def fs_bulk_operations_scenario_0(self):
        return "bulk/source"

    @pytest.fixture
    def fs_glob_edge_cases_files(self):
        return "edge/source"

    @pytest.fixture
    def fs_dir_and_file_with_same_name_prefix(self):
        return "same/source"

    @pytest.fixture
    def fs_10_files_with_hashed_names(self):
        return "hashed/source"


def test_the_suite_has_nothing_else_that_reads_only():
    from fsspec.tests import abstract

    suites = {name for name in vars(abstract) if name.startswith("Abstract") and name.endswith("Tests")}
    assert suites == {
        "AbstractCopyTests", "AbstractGetTests", "AbstractOpenTests", "AbstractPipeTests", "AbstractPutTests",
    }  # fmt: skip
