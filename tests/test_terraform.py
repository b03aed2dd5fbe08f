"""What holds for all of ``terraform/`` and needs no provider: its form, its READMEs, and a reason beside each check that is skipped."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import hcl2
import pytest
from terraform_docs import MODULES, TERRAFORM, entries, parsed, section, written
from terraform_tool import MissingError, Terraform

EXAMPLES = [module / "examples" / name for module in MODULES for name in ("minimal", "complete")]
FILES = sorted(
    path
    for path in TERRAFORM.rglob("*.*")
    if path.suffix in {".tf", ".hcl"} and ".terraform" not in path.parts
)

by_path = pytest.mark.parametrize("module", MODULES, ids=lambda path: path.name)


def test_terraform_formats_it_the_same():
    try:
        Terraform.program()
    except MissingError as error:
        pytest.skip(str(error))
    Terraform(TERRAFORM)("fmt", "-check", "-recursive", "-diff")


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(TERRAFORM)))
def test_each_file_parses(path):
    assert hcl2.loads(path.read_text())


@by_path
def test_a_readme_says_what_the_module_takes_and_gives(module):
    _, between, _ = written(module)
    assert between == section(module), "write it anew: python tests/terraform_docs.py"


@by_path
def test_each_variable_and_output_is_described_and_typed(module):
    document = parsed(module)
    for name, body in entries(document, "variable").items():
        assert body["description"].endswith("."), name
        assert "type" in body, name
        assert body.get("nullable") is False or body.get("default", ...) is None, (
            f"{name}: null is another value than its default"
        )
        free = body["type"] in {"${bool}", "${map(string)}"} or body["type"] in {"bool", "map(string)"}
        assert free or body["validation"], f"{name} takes any value"
    for name, body in entries(document, "output").items():
        assert body["description"].endswith("."), name
    assert "provider" not in document, "a module leaves its provider to the root"


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: "-".join(path.parts[-3::2]))
def test_an_example_names_variables_that_there_are(example):
    module = example.parents[1]
    known = entries(parsed(module), "variable")
    (called,) = entries(parsed(example), "module").values()
    assert (example / called.pop("source")).resolve() == module
    assert called.keys() <= known.keys()
    assert {name for name, body in known.items() if "default" not in body} <= called.keys()
    if example.name == "complete":
        assert len(called) >= len(known) - 1, "it shows all but switches that should stay as they are"


def test_each_skipped_check_has_its_reason():
    skips = re.findall(r"checkov:skip=(\w+)(.*)", "\n".join(path.read_text() for path in FILES))
    assert skips
    for check, reason in skips:
        assert re.fullmatch(r":[A-Z].{30,}", reason), f"{check} is skipped without a reason"


def test_checkov_finds_nothing():
    """Where it is installed: it has more dependencies than all else, so it has an environment of its own (``make terraform``)."""
    beside = Path(sys.prefix).with_name(".venv-checkov") / "bin/checkov"
    program = str(beside) if beside.exists() else shutil.which("checkov")
    if program is None:
        pytest.skip("checkov is not installed: make terraform installs it")
    command = [
        program,
        "-d",
        str(TERRAFORM),
        "--framework",
        "terraform",
        "--compact",
        "--quiet",
        "--skip-download",
    ]
    # Its hcl2 is another one than ours.
    environment = {name: text for name, text in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"Passed checks: [1-9]\d+, Failed checks: 0", done.stdout), done.stdout
