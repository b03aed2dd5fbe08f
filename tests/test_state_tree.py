"""A state tree comes back in the order that keeps every draw; what does not fit is told at once, before anything changes."""

from __future__ import annotations

import json
import logging
import math
import random
from collections import Counter, OrderedDict, defaultdict, deque
from typing import Any

import numpy as np
import pytest
import torch
from test_state import bits
from test_state_training import Stored, net, step
from test_state_values import Point, same
from torch import nn

from objckpt.errors import CorruptCheckpointError, StateMismatchError
from objckpt.state import PerRank, TensorSpec, capture, prepare

# --- the tree ---------------------------------------------------------------------------------------------------------


class Counting:
    """A user's object."""

    def __init__(self, **content: Any) -> None:
        self.content = content

    def state_dict(self) -> dict[str, Any]:
        return dict(self.content)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.content = state


def test_values_come_back_into_the_users_own_containers() -> None:
    state: dict[str, Any] = {
        "step": 7,
        "history": {"loss": [1.0, math.nan], 3: (1, 2)},
        "queue": deque([1, 2], 5),
        "seen": {1, 2},
        "counts": defaultdict(int, a=1),
        "order": OrderedDict([("z", 1), ("a", [2])]),
        "tally": Counter("abca"),
        "pair": (Point(1, [2]), np.float32(0.5)),
        "array": np.arange(6.0).reshape(2, 3)[:, ::-1],
        "object": Counting(array=np.array(3, np.int16), nested=Point(torch.ones(2), 1), none=None),
    }
    stored = Stored(capture(state))
    history, losses, queue, seen, inner = {"loss": [0.0], "old": 1}, [0.0], deque([9], 5), {9}, [0]
    history["loss"] = losses
    counts: defaultdict[str, int] = defaultdict(None, b=1)
    anew: dict[str, Any] = {"step": 0, "history": history, "queue": queue, "seen": seen, "counts": counts}
    order, tally = OrderedDict(a=inner), Counter("zza")
    anew |= {"order": order, "tally": tally}
    anew |= {"pair": (Point(0, inner), 0), "array": None, "object": Counting(nested=Point(0, 0))}
    stored.restore(anew)
    assert anew["history"] is history
    assert history["loss"] is losses
    assert anew["queue"] is queue
    assert anew["seen"] is seen
    assert anew["counts"] is counts
    assert anew["order"] is order
    assert anew["tally"] is tally
    assert anew["pair"][0].y is inner
    for key in ("step", "history", "queue", "seen", "counts", "order", "tally", "pair"):
        assert same(anew[key], state[key]), key
    assert anew["array"].dtype == np.float64
    assert (anew["array"] == state["array"]).all()
    content = anew["object"].content
    assert list(content) == ["array", "nested", "none"]
    assert content["array"].dtype == np.int16
    assert content["array"].shape == ()
    assert isinstance(content["nested"], Point)
    assert torch.equal(content["nested"].x, torch.ones(2))


def test_modules_and_optimizers_live_anywhere_in_containers() -> None:
    def build(seed: int) -> dict[str, Any]:
        torch.manual_seed(seed)
        first, second = nn.Linear(2, 2), nn.Linear(2, 2)
        optimizers = (torch.optim.Adam(first.parameters()), torch.optim.Adam(second.parameters()))
        return {"gan": {"nets": [first, {"second": second}], "optims": optimizers, "rounds": seed}}

    state, anew = build(1), build(2)
    for optimizer, model in zip(
        state["gan"]["optims"], (state["gan"]["nets"][0], state["gan"]["nets"][1]["second"]), strict=True
    ):
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    stored = Stored(capture(state, rng=False))
    assert "gan.optims.1.gan.nets.1.second.weight.exp_avg" in stored.blobs
    first, second = anew["gan"]["nets"][0], anew["gan"]["nets"][1]["second"]
    optimizers = anew["gan"]["optims"]
    stored.restore(anew)
    assert anew["gan"]["rounds"] == 1
    assert anew["gan"]["nets"][0] is first
    assert anew["gan"]["nets"][1]["second"] is second
    assert all(left is right for left, right in zip(anew["gan"]["optims"], optimizers, strict=True))
    assert Stored(capture(anew, rng=False)).blobs == stored.blobs


def test_what_is_per_rank_is_kept_apart_and_marked() -> None:
    weight = torch.ones(2)
    state = {
        "shared": weight,
        "mine": PerRank({"tensor": weight, "n": 3}),
        "deep": [PerRank(torch.Generator().manual_seed(5))],
    }
    taken = capture(state, rng=False)
    assert {leaf.name: leaf.per_rank for leaf in taken.leaves} == {
        "shared": False,
        "mine.tensor": True,
        "deep.0": True,
    }
    assert taken.values == {
        "shared": {"$": "tensor", "name": "shared"},
        "mine": {"$": "per_rank"},
        "deep": [{"$": "per_rank"}],
    }
    assert list(taken.rank_values["objects"]) == ["mine", "deep.0"]
    inner: dict[str, Any] = {}
    anew: dict[str, Any] = {"shared": None, "mine": PerRank(inner), "deep": [PerRank(torch.Generator())]}
    mine = anew["mine"]
    Stored(taken).restore(anew, rng=False)
    assert anew["mine"] is mine
    assert mine.value is inner
    assert inner["n"] == 3
    assert anew["deep"][0].value.initial_seed() == 5
    plain = PerRank(1)
    Stored(capture({"p": PerRank(4)})).restore({"p": plain})
    assert plain.value == 4


def test_a_rank_without_saved_state_keeps_its_generators_and_is_told_of_its_objects(
    caplog: pytest.LogCaptureFixture,
) -> None:
    taken = capture({"loader": PerRank(Counting(a=1)), "x": 1})
    with pytest.raises(
        StateMismatchError,
        match=r"loader: the checkpoint has nothing of this rank for the PerRank\(test_state_tree\.Counting\)",
    ):
        prepare({"loader": PerRank(Counting()), "x": 0}, taken.values, None, {})
    taken = capture({"x": 1})
    before = torch.get_rng_state()
    with caplog.at_level(logging.WARNING, "objckpt"):
        prepare({"x": 0}, taken.values, None, {}).apply()
    assert "no random number state of this rank" in caplog.text
    assert torch.equal(before, torch.get_rng_state())
    taken = capture({"x": PerRank(1)}, rng=False)
    with pytest.raises(StateMismatchError, match="wrap the object in PerRank"):
        prepare({"x": 1}, taken.values, taken.rank_values, {})


class Ticket:
    """A loader: asked for its state it draws from both generators, as a torch one does when it makes its iterator."""

    def __init__(self, log: list[str], generator: torch.Generator | None = None) -> None:
        self.log = log
        self.generator = generator
        self.made = False

    def __iter__(self) -> Any:
        return iter(())

    def state_dict(self) -> dict[str, Any]:
        self.log.append("loader.state_dict")
        if not self.made:
            torch.rand(1), torch.rand(1, generator=self.generator), random.random(), np.random.rand()  # noqa: NPY002 # the global one is meant
            self.made = True
        return {"made": True}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.log.append("loader.load")
        self.made = False


def draws(*more: torch.Generator) -> list[float]:
    return [
        random.random(),
        float(np.random.rand()),  # noqa: NPY002 # the global one is meant
        torch.rand(1).item(),
        *(torch.rand(1, generator=g).item() for g in more),
    ]


def test_generators_are_taken_last_and_set_last_so_that_every_draw_goes_on() -> None:
    log: list[str] = []
    own, bare = torch.Generator(), torch.Generator()
    state = {"bare": bare, "loader": Ticket(log, own), "object": Counting()}
    stored = Stored(capture(state))
    expected = draws(own, bare)
    draws(own, bare)
    own, bare = torch.Generator().manual_seed(3), torch.Generator().manual_seed(4)
    log.clear()
    anew = {"bare": bare, "loader": Ticket(log, own), "object": Counting()}
    stored.restore(anew)
    assert anew["loader"].made
    assert log == ["loader.load", "loader.state_dict"]
    assert draws(own, bare) == expected
    stored.restore(anew, rng=False)
    assert draws()[0] != expected[0]


def test_a_checkpoint_without_numpys_state_and_one_without_numpy_here(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = capture({})
    stored = Stored(taken)
    without = json.loads(stored.rank_values)
    del without["rng"]["numpy"]
    kept = np.random.get_state(legacy=False)["state"]["pos"]  # noqa: NPY002 # the global one is meant
    with caplog.at_level(logging.WARNING, "objckpt"):
        prepare({}, taken.values, without, stored.specs).targets["rng.torch"].copy_(torch.get_rng_state())
        plan = prepare({}, taken.values, without, stored.specs)
        plan.targets["rng.torch"].copy_(torch.get_rng_state())
        plan.apply()
    assert "no state of NumPy's" in caplog.text
    assert np.random.get_state(legacy=False)["state"]["pos"] == kept  # noqa: NPY002 # the global one is meant
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    stored.restore({})
    assert "numpy is not installed" in caplog.text
    without["rng"]["python"] = {"$": "tuple", "items": [3, 4, None]}
    plan = prepare({}, taken.values, without, stored.specs)
    plan.targets["rng.torch"].copy_(torch.get_rng_state())
    with pytest.raises(CorruptCheckpointError, match="does not take its state"):
        plan.apply()


# --- mismatches -------------------------------------------------------------------------------------------------------


def test_all_mismatches_are_told_at_once_and_nothing_has_changed() -> None:
    def build(width: int, dtype: torch.dtype = torch.float32) -> nn.Sequential:
        return nn.Sequential(nn.Linear(2, width), nn.Linear(2, 2, dtype=dtype))

    model = build(3)
    state = {
        "model": model,
        "optim": torch.optim.SGD(model.parameters()),
        "obj": Counting(p=Point(1, 2)),
        "gen": torch.Generator(),
    }
    state |= {"gone": 1, "sub": [Counting()]}
    stored = Stored(capture(state))
    other = build(4, torch.float64)
    other[0].bias = None
    other.extra = nn.Linear(1, 1, bias=False)
    half = list(other.parameters())
    anew = {
        "model": other,
        "optim": torch.optim.SGD([{"params": half[:2]}, {"params": half[2:]}]),
        "obj": Counting(),
        "gen": Counting(),
        "new": 2,
        "sub": [3],
    }
    before = [bits(parameter) for parameter in half]
    with pytest.raises(StateMismatchError) as raised:
        stored.restore(anew)
    text = str(raised.value)
    for expected in (
        "differ in 11 places (nothing was changed)",
        "model.0.weight: the checkpoint has float32 [3, 2], the state has float32 [4, 2]",
        "model.1.weight: the checkpoint has float32 [2, 2], the state has float64 [2, 2]",
        "model.0.bias: in the checkpoint, not in the state",
        "model.extra.weight: in the state, not in the checkpoint",
        "optim: the checkpoint has 1 parameter groups, the state has 2",
        "obj.p: the checkpoint has a named tuple test_state_values.Point",
        "gen: the checkpoint has a torch.Generator, the state has a test_state_tree.Counting",
        "gone: in the checkpoint, not in the state",
        "new: in the state, not in the checkpoint",
        "sub.0: the checkpoint has an object with state_dict(), the state has a int",
    ):
        assert expected in text
    assert [bits(parameter) for parameter in half] == before


def test_groups_are_compared_by_the_names_of_their_parameters() -> None:
    model = net()
    parameters = dict(model.named_parameters())
    stored = Stored(
        capture(
            {
                "m": model,
                "o": torch.optim.SGD(
                    [{"params": [parameters["0.weight"]]}, {"params": [parameters["0.bias"]]}]
                ),
            }
        )
    )
    names = ["0.bias", "0.weight"]
    for groups, text in [
        ([["0.bias"], ["0.weight"]], r"o\.\[groups\]\.0: the checkpoint has m\.0\.bias in another group"),
        ([["0.weight", "4.bias"], ["0.bias"]], r"the state steps m\.4\.bias in this group"),
        ([["0.weight"], ["4.bias"]], r"the checkpoint steps m\.0\.bias in this group"),
    ]:
        optimizer = torch.optim.SGD([{"params": [parameters[name] for name in group]} for group in groups])
        with pytest.raises(StateMismatchError, match=text):
            stored.restore({"m": model, "o": optimizer})
    assert names


def test_order_in_a_group_does_not_matter_but_to_lbfgs() -> None:
    def build(kind: Any, order: int) -> dict[str, Any]:
        torch.manual_seed(1)
        model = net()
        return {"model": model, "optim": kind(list(model.parameters())[::order])}

    state = build(torch.optim.Adam, 1)
    step(state)
    anew = build(torch.optim.Adam, -1)
    Stored(capture(state)).restore(anew)
    for left, right in zip(state["model"].parameters(), anew["model"].parameters(), strict=True):
        assert torch.equal(state["optim"].state[left]["exp_avg"], anew["optim"].state[right]["exp_avg"])
    state = build(torch.optim.LBFGS, 1)
    step(state)
    with pytest.raises(StateMismatchError, match="LBFGS keeps one flat state"):
        Stored(capture(state)).restore(build(torch.optim.LBFGS, -1))


def test_an_optimizer_without_its_model_is_refused_on_both_ways() -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters())
    with pytest.raises(
        StateMismatchError,
        match=r"optim\.\[groups\]\.0: a parameter of shape \[16, 6\] is in no module of the state",
    ):
        capture({"optim": optimizer})
    stored = Stored(capture({"optim": optimizer, "model": model}))
    with pytest.raises(StateMismatchError, match="in no module of the state"):
        stored.restore({"optim": optimizer, "model": net()})


def test_restore_in_part_leaves_the_rest_alone_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(1)
    model = net()
    state = {"model": model, "optim": torch.optim.Adam(model.parameters()), "step": 3}
    step(state)
    stored = Stored(capture(state))
    other = nn.Sequential(*net(), nn.Linear(2, 7))
    kept = other[5].weight.clone()
    with caplog.at_level(logging.WARNING, "objckpt"):
        stored.restore({"model": other, "fresh": {"a": Counting(b=1)}}, strict=False)
    assert torch.equal(other[0].weight, model[0].weight)
    assert torch.equal(other[5].weight, kept)
    for name in ("model.5.weight", "optim", "step", "fresh"):
        assert f"  {name}: " in caplog.text
    optimizer = torch.optim.Adam(other.parameters())
    step({"model": nn.Sequential(other, nn.Flatten(), nn.LazyLinear(2)), "optim": optimizer})
    own = optimizer.state[other[5].weight]["exp_avg"].clone()
    stored.restore({"model": other, "optim": optimizer, "step": 0}, strict=False)
    assert torch.equal(optimizer.state[other[5].weight]["exp_avg"], own)
    assert torch.equal(
        optimizer.state[other[0].weight]["exp_avg"], state["optim"].state[model[0].weight]["exp_avg"]
    )
    with pytest.raises(StateMismatchError, match="the checkpoint has float32"):
        stored.restore({"model": nn.Sequential(nn.Linear(6, 17))}, strict=False)


def test_a_reference_to_a_tensor_that_is_not_there_is_corruption() -> None:
    taken = capture({"a": torch.zeros(2)})
    with pytest.raises(CorruptCheckpointError, match="refers to a tensor 'a'"):
        prepare({"a": None}, taken.values, None, {})
    with pytest.raises(CorruptCheckpointError, match="dtype 'float5'"):
        prepare({"a": None}, taken.values, None, {"a": TensorSpec("float5", (2,))})


@pytest.mark.parametrize(
    "node",
    [
        {"$": "tensor", "name": "a", "device": "moon"},
        {"$": "tensor", "name": "a", "device": 3},
        {"$": "tensor", "name": ["a"]},
        {"$": "ndarray", "name": "b"},
        {"$": "object", "state": {"$": "object", "state": 1}},
        {"$": "object"},
        {"$": "loader", "state": 1, "epoch": "x"},
    ],
)
def test_damaged_nodes_of_tensors_and_objects_are_corruption(node: Any) -> None:
    specs = {"a": TensorSpec("float32", (2,)), "b": TensorSpec("bfloat16", (2,))}
    live = Ticket([]) if node["$"] in ("object", "loader") else None
    with pytest.raises(CorruptCheckpointError, match="damaged at x"):
        prepare({"x": live}, {"x": node}, None, specs)


def test_a_state_of_any_depth_is_corruption_and_no_recursion_error() -> None:
    nest: Any = 1
    for _ in range(900):
        nest = [nest]
    for node in (nest, {"$": "object", "state": nest}, {"$": "int", "value": nest}):
        with pytest.raises(CorruptCheckpointError):
            prepare({"x": Counting()}, {"x": node}, None, {})


def test_tensors_of_a_device_that_is_not_here_come_to_the_cpu() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    counting = Counting()
    node = {"$": "object", "state": {"a": {"$": "tensor", "name": "a", "device": "cuda"}}}
    plan = prepare({"x": counting}, {"x": node}, None, {"a": TensorSpec("float32", (2,))})
    plan.targets["a"].fill_(2)
    plan.apply()
    assert torch.equal(counting.content["a"], torch.full((2,), 2.0))


def test_top_level_keys_are_text_and_leaves_come_in_the_order_of_the_state() -> None:
    with pytest.raises(StateMismatchError, match="its keys must be str"):
        capture({1: 2})  # type: ignore[dict-item] # the point
    state = {"z": torch.zeros(1), "a": {"q": torch.zeros(1), "b": torch.zeros(1)}}
    assert [leaf.name for leaf in capture(state).leaves][:3] == ["z", "a.q", "a.b"]


def test_capture_and_restore_copy_nothing_that_they_need_not() -> None:
    model = net()
    taken = capture({"m": model}, rng=False)
    live = {f"m.{name}": value for name, value in model.state_dict().items()}
    assert {leaf.name: leaf.tensor.data_ptr() for leaf in taken.leaves} == {
        name: value.data_ptr() for name, value in live.items()
    }
    assert not any(leaf.tensor.requires_grad for leaf in taken.leaves)
