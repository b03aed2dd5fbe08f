"""Runs that earlier versions wrote, one in each version of the format, are read, restored and continued: the formats are frozen."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import golden
import pytest
import torch

import objckpt

DATA = Path(__file__).parent / "data"


@pytest.fixture(params=["v1", "v2"])
def frozen(request):
    return DATA / request.param


@pytest.fixture
def copied(frozen, tmp_path):
    shutil.copytree(frozen, tmp_path / "copied")
    return f"file://{tmp_path}/copied"


@pytest.mark.parametrize("name", ["run", "groups"])
def test_every_tensor_of_the_golden_run_is_read_bit_for_bit(copied, frozen, name):
    assert golden.contents(f"{copied}/{name}") == json.loads((frozen / "expected.json").read_text())[name]


def test_its_checkpoints_are_listed_as_they_were(copied):
    reader = objckpt.open(f"{copied}/run")
    assert [(c.step, c.world_size) for c in reader.checkpoints()] == [(2, 1), (4, 1), (3, 1)]
    latest = reader.latest()
    assert (latest.step, latest.metadata) == (3, {"step": 3, "note": "golden é"})
    assert objckpt.open(f"{copied}/groups").latest().world_size == golden.GROUP_RANKS


def same(a, b):
    assert type(a) is type(b)
    if isinstance(a, torch.Tensor):
        assert a.dtype == b.dtype
        assert a.shape == b.shape
        assert (
            a.contiguous().reshape(-1).view(torch.uint8).equal(b.contiguous().reshape(-1).view(torch.uint8))
        )
    elif isinstance(a, dict):
        assert list(a) == list(b)
        for key in a:
            same(a[key], b[key])
    elif isinstance(a, float) and math.isnan(a):
        assert math.isnan(b)
    else:
        assert a == b
        assert repr(a) == repr(b)


@pytest.mark.parametrize("step", [2, 4, 3, None])
def test_it_is_restored_into_the_state_that_was_saved_and_goes_on(copied, tmp_path, step):
    state, expected = golden.state_at(3, blank=True), golden.state_at(step or 3)
    with objckpt.Checkpointer(f"{copied}/run", cache=tmp_path / "cache", launch="golden") as checkpointer:
        assert checkpointer.restore(state, step=step).step == (step or 3)
        same(state["values"], expected["values"])
        same(state["tensors"], expected["tensors"])
        same(dict(state["model"].state_dict()), dict(expected["model"].state_dict()))
        same(state["optim"].state_dict(), expected["optim"].state_dict())
        same(state["sched"].state_dict(), expected["sched"].state_dict())
        same(state["generator"].get_state(), expected["generator"].get_state())
        assert state["opaque"].value == state["own"].value["seen"] == (step or 3)
        assert checkpointer.save(9, state).result(timeout=60).step == 9
    assert objckpt.open(f"{copied}/run").latest().step == 9
