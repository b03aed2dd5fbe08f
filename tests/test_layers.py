"""What starts in a fraction of a second stays so: the layers below torch do not load it, and the public names are all there."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

import objckpt
from objckpt import errors
from objckpt.commit import Run
from objckpt.manifest import Policy
from objckpt.retention import retain
from objckpt.store import open_store

HEAVY = ["torch", "numpy", "boto3", "botocore", "google"]


def loaded_by(statement: str) -> list[str]:
    """Which heavy packages a fresh interpreter has loaded after ``statement``."""
    program = f"{statement}\nimport json, sys\nprint(json.dumps([n for n in {HEAVY} if n in sys.modules]))"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60
    )
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize(
    "module", ["objckpt", "objckpt.errors", "objckpt.config", "objckpt.cli", "objckpt.uploader.loop"]
)
def test_importing_it_loads_nothing_heavy(module):
    assert loaded_by(f"import {module}") == []


def test_the_probe_sees_what_is_loaded():
    assert "torch" in loaded_by("import objckpt; objckpt.Checkpointer")


def test_a_command_on_a_directory_loads_nothing_heavy(tmp_path):
    Run(open_store(f"file://{tmp_path}"), retain=retain).start(launch="one", world_size=1, policy=Policy())
    listing = f"from objckpt.cli import main\nassert main(['ls', {str(tmp_path)!r}]) == 0"
    assert loaded_by(listing) == []


def test_every_public_name_is_there():
    for name in objckpt.__all__:
        assert getattr(objckpt, name) is not None, name
    assert dir(objckpt) == objckpt.__all__


def test_every_public_error_is_the_one_of_the_tree():
    for name in objckpt.__all__:
        if name.endswith("Error"):
            assert getattr(objckpt, name) is getattr(errors, name)


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'Snapshot'"):
        _ = objckpt.Snapshot
