"""Tensors keep their bits, their ties and their names, in place, whatever wraps the model."""

from __future__ import annotations

import gc
import math
from typing import Any

import pytest
import torch
from test_state_training import Stored, net, step
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.optim.swa_utils import AveragedModel

from objckpt.errors import StateMismatchError
from objckpt.staging import names_of, rank_name
from objckpt.state import DTYPES, capture, prepare, tensor_memory

# --- tensors ----------------------------------------------------------------------------------------------------------


def bits(tensor: torch.Tensor) -> bytes:
    return bytes(tensor_memory(tensor.detach().clone(memory_format=torch.contiguous_format).cpu()))


def noise(dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """Random bits of any dtype (NaNs with payloads among them)."""
    if dtype is torch.bool:
        return torch.randint(0, 2, shape, dtype=torch.bool)
    size = torch.empty((), dtype=dtype).element_size()
    flat = torch.randint(0, 256, (math.prod(shape) * size,), dtype=torch.uint8)
    return flat.view(dtype).reshape(shape)


@pytest.mark.parametrize("name", DTYPES)
def test_each_dtype_keeps_its_bits(name: str) -> None:
    torch.manual_seed(1)
    dtype = DTYPES[name]
    shapes = {"whole": (3, 4), "zero": (), "empty": (0, 5), "one": (1,)}
    state: dict[str, Any] = {key: noise(dtype, shape) for key, shape in shapes.items()}
    live = noise(dtype, (3, 4))
    anew: dict[str, Any] = {"whole": live, "zero": None, "empty": 3, "one": "x"}
    Stored(capture(state)).restore(anew)
    assert anew["whole"] is live
    for key in shapes:
        assert anew[key].dtype is dtype
        assert anew[key].shape == state[key].shape
        assert bits(anew[key]) == bits(state[key])


@pytest.mark.parametrize("other", [torch.zeros(5), torch.zeros(4, dtype=torch.float64), torch.zeros(2, 2)])
def test_a_bare_tensor_that_does_not_fit_is_a_mismatch(other: torch.Tensor) -> None:
    """Else it would be replaced in the state, and who holds the old one would not see the restore."""
    stored = Stored(capture({"ema": torch.ones(4), "inner": [{"x": torch.ones(4)}]}))
    for anew in (
        {"ema": other, "inner": [{"x": torch.zeros(4)}]},
        {"ema": torch.zeros(4), "inner": [{"x": other}]},
    ):
        with pytest.raises(StateMismatchError, match=r"the checkpoint has float32 \[4\], the state has"):
            stored.restore(anew)
    assert not other.any()


def test_an_optimizer_of_another_class_is_a_mismatch() -> None:
    model = torch.nn.Linear(2, 2)
    stored = Stored(capture({"m": model, "o": torch.optim.AdamW(model.parameters())}))
    anew = {"m": model, "o": torch.optim.SGD(model.parameters(), lr=0.1)}
    with pytest.raises(StateMismatchError, match=r"betas.*a SGD does not"):
        stored.restore(anew)
    assert anew["o"].param_groups[0]["lr"] == 0.1


@pytest.mark.parametrize("name", DTYPES)
def test_tensor_memory_is_the_tensor_itself_and_keeps_it_alive(name: str) -> None:
    tensor = torch.zeros(4, dtype=DTYPES[name])
    view = tensor_memory(tensor)
    assert (view.format, view.ndim, view.readonly, view.nbytes) == ("B", 1, False, 4 * tensor.element_size())
    view[:] = bytes([1]) * view.nbytes
    assert bits(tensor) == bytes(view)
    assert tensor_memory(torch.zeros(0, 3, dtype=DTYPES[name])).nbytes == 0
    assert tensor_memory(torch.zeros((), dtype=DTYPES[name])).nbytes == tensor.element_size()


def test_tensor_memory_outlives_the_tensors_name_and_refuses_strides() -> None:
    view = tensor_memory(torch.full((1 << 20,), 7, dtype=torch.uint8))
    gc.collect()
    churn = [torch.zeros(1 << 20, dtype=torch.uint8) for _ in range(4)]
    assert bytes(view[:4]) == b"\x07" * 4
    del churn
    for tensor in (
        torch.zeros(3, 4).T,
        torch.zeros(2, dtype=torch.complex64).conj(),
        torch.zeros(2, device="meta"),
    ):
        with pytest.raises(ValueError, match="do not lie in one piece"):
            tensor_memory(tensor)


def test_views_strides_and_lazy_tensors_keep_their_elements_and_only_these_are_stored() -> None:
    torch.manual_seed(2)
    base = torch.randn(6, 8)
    cplx = torch.randn(3, dtype=torch.complex64)

    def make(base: torch.Tensor, cplx: torch.Tensor) -> dict[str, Any]:
        return {
            "rows": base[2:4],
            "columns": base[:, ::3],
            "transposed": base.T,
            "expanded": base[0, :1].expand(5),
            "last": base.view(2, 3, 2, 4).permute(0, 3, 1, 2),
            "conj": cplx.conj(),
            "imag": cplx.conj().imag,
        }

    state = make(base, cplx)
    taken = capture(state, rng=False)
    assert not any(leaf.tensor.is_conj() or leaf.tensor.is_neg() for leaf in taken.leaves)
    stored = Stored(taken)
    assert len(stored.blobs["rows"]) == 2 * 8 * 4
    assert len(stored.blobs["expanded"]) == 5 * 4
    for anew in (make(torch.zeros(6, 8), torch.zeros(3, dtype=torch.complex64)), dict.fromkeys(state)):
        if anew["rows"] is not None:
            del anew["expanded"]  # nothing can be written into one element five times
            anew["expanded"] = None
        stored.restore(anew)
        assert all(torch.equal(anew[key].resolve_conj(), state[key].resolve_conj()) for key in state)


def test_an_expanded_buffer_is_refused_before_anything_is_written() -> None:
    model = nn.Module()
    model.register_buffer("table", torch.ones(1).expand(3))
    stored = Stored(capture({"m": model, "t": torch.zeros(2)}))
    with pytest.raises(
        StateMismatchError, match=r"m\.table: the elements of this expanded tensor share memory"
    ):
        stored.restore({"m": model, "t": torch.zeros(2)})


def test_overlapping_live_tensors_are_filled_from_their_own_pieces() -> None:
    base = torch.arange(10.0)
    stored = Stored(capture({"left": base[:7], "right": base[3:]}))
    live = torch.zeros(10)
    anew = {"left": live[:7], "right": live[3:]}
    stored.restore(anew)
    assert torch.equal(live, base)


def test_targets_are_live_memory_where_that_can_take_the_bytes() -> None:
    model = nn.Conv2d(3, 4, 2).to(memory_format=torch.channels_last)
    state = {"model": model, "bare": torch.zeros(3), "odd": torch.zeros(4, 4).T[:2]}
    taken = capture(state, rng=False)
    stored = Stored(taken)
    plan = prepare(state, taken.values, taken.rank_values, stored.specs, rng=False)
    assert plan.targets["model.bias"].data_ptr() == model.bias.data_ptr()
    assert plan.targets["bare"].data_ptr() == state["bare"].data_ptr()
    for name in ("model.weight", "odd"):
        assert plan.targets[name].is_contiguous()
    assert plan.targets["model.weight"].data_ptr() != model.weight.data_ptr()
    assert all(not target.requires_grad for target in plan.targets.values())


@pytest.mark.parametrize(
    ("tensor", "text"),
    [
        (torch.zeros(2, device="meta"), "meta device"),
        (torch.eye(2).to_sparse(), "sparse_coo"),
        (torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.quint8), "quint8"),
        (torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), "nested"),
        (torch.zeros(2, dtype=torch.complex32), "complex32"),
        (nn.LazyLinear(2).weight, "lazy"),
    ],
)
def test_tensors_that_are_more_than_their_bytes_are_refused(tensor: torch.Tensor, text: str) -> None:
    with pytest.raises(StateMismatchError, match=rf"a\.0: .*{text}"):
        capture({"a": [tensor]})


# --- sharing ----------------------------------------------------------------------------------------------------------


class Tied(nn.Module):
    def __init__(self, *, tied: bool = True) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 3)
        self.head = nn.Linear(3, 5, bias=False)
        if tied:
            self.head.weight = self.embed.weight


def test_tied_weights_are_stored_once_and_stay_tied() -> None:
    model = Tied()
    state = {"model": model, "again": model.embed.weight, "values": [model.embed.weight.detach(), 1]}
    stored = Stored(capture(state, rng=False))
    assert list(stored.blobs) == ["model.embed.weight"]
    other = Tied()
    weight = other.embed.weight
    anew = {"model": other, "again": None, "values": None}
    stored.restore(anew)
    assert other.head.weight is weight is other.embed.weight
    assert torch.equal(weight, model.embed.weight)
    assert anew["again"].data_ptr() == anew["values"][0].data_ptr() == weight.data_ptr()


def test_separate_live_tensors_both_get_the_bytes_of_a_tie() -> None:
    model, apart = Tied(), Tied(tied=False)
    Stored(capture({"m": model})).restore({"m": apart})
    assert torch.equal(apart.head.weight, model.embed.weight)
    assert torch.equal(apart.embed.weight, model.embed.weight)
    assert apart.head.weight.data_ptr() != apart.embed.weight.data_ptr()


def test_live_ties_that_the_checkpoint_does_not_have_are_a_mismatch() -> None:
    with pytest.raises(StateMismatchError, match=r"m\.head\.weight: tied to m\.embed\.weight in the state"):
        Stored(capture({"m": Tied(tied=False)})).restore({"m": Tied()})


def test_two_modules_with_the_same_parameters() -> None:
    model = net()
    state = {
        "model": model,
        "compiled": torch.compile(model),
        "optim": torch.optim.SGD(model.parameters(), momentum=0.9),
    }
    step(state)
    stored = Stored(capture(state, rng=False))
    assert not any(name.startswith("compiled") for name in stored.blobs)
    model = net()
    anew = {
        "compiled": torch.compile(model),
        "model": model,
        "optim": torch.optim.SGD(model.parameters(), momentum=0.9),
    }
    stored.restore(anew)
    assert Stored(capture({key: anew[key] for key in state}, rng=False)).blobs == stored.blobs


# --- modules ----------------------------------------------------------------------------------------------------------


class Extra(nn.Module):
    def __init__(self, note: Any) -> None:
        super().__init__()
        self.note = note
        self.register_buffer("mean", torch.randn(2))
        self.register_buffer("scratch", torch.randn(2), persistent=False)
        self.register_buffer("none", None)

    def get_extra_state(self) -> Any:
        return {"note": self.note, "tensor": torch.full((2,), 3.0)}

    def set_extra_state(self, state: Any) -> None:
        assert torch.equal(state["tensor"], torch.full((2,), 3.0))
        self.note = state["note"]


class UsersOwn(nn.Module):
    """A plain module with a submodule that is called ``module``."""

    def __init__(self) -> None:
        super().__init__()
        self.module = nn.Linear(2, 2)


def wraps() -> dict[str, Any]:
    return {
        "bare": lambda model: model,
        "compiled": torch.compile,
        "data parallel": nn.DataParallel,
        "checkpointed": lambda model: nn.Sequential(checkpoint_wrapper(model[0]), *model[1:]),
        "all": lambda model: torch.compile(nn.DataParallel(checkpoint_wrapper(model))),
    }


@pytest.mark.parametrize("before", wraps())
@pytest.mark.parametrize("after", wraps())
def test_names_are_those_of_the_bare_module_before_and_after_each_wrap(before: str, after: str) -> None:
    def build(seed: int) -> nn.Sequential:
        torch.manual_seed(seed)
        return nn.Sequential(UsersOwn(), Extra(f"seed {seed}"), nn.BatchNorm1d(2))

    model, other = build(1), build(2)
    stored = Stored(capture({"m": wraps()[before](model)}, rng=False))
    names = [f"m.{name}" for name, value in model.state_dict().items() if isinstance(value, torch.Tensor)]
    assert list(stored.blobs) == [*names[:3], "m.1._extra_state.tensor", *names[3:]]
    parameters = list(other.parameters())
    stored.restore({"m": wraps()[after](other)})
    assert other[1].note == "seed 1"
    assert all(left is right for left, right in zip(parameters, other.parameters(), strict=True))
    for (name, left), right in zip(model.state_dict().items(), other.state_dict().values(), strict=True):
        assert not isinstance(left, torch.Tensor) or torch.equal(left, right), name


def test_averaged_model_goes_on() -> None:
    torch.manual_seed(3)
    model = net()
    average = AveragedModel(model, use_buffers=True)
    for parameter in model.parameters():
        parameter.data += 1
    average.update_parameters(model)
    stored = Stored(capture({"average": average}))
    assert "average.module.0.weight" in stored.blobs
    other = AveragedModel(net(), use_buffers=True)
    stored.restore({"average": other})
    assert other.n_averaged == 1
    for moved in (average, other):
        moved.update_parameters(model)
    assert all(
        torch.equal(left, right) for left, right in zip(average.parameters(), other.parameters(), strict=True)
    )


def test_a_collision_of_names_is_an_error() -> None:
    wrapped = checkpoint_wrapper(nn.Linear(1, 1))
    wrapped._parameters["weight"] = nn.Parameter(torch.zeros(1))
    with pytest.raises(StateMismatchError, match=r"m\.weight: two tensors have this name"):
        capture({"m": wrapped})
    with pytest.raises(StateMismatchError, match=r"both named 'rng\.torch'"):
        capture({"rng": {"torch": torch.zeros(1)}})


def test_keys_with_dots_and_of_other_types_give_names_of_their_own() -> None:
    tree = {
        "a": {
            "b.c": torch.zeros(1),
            "b": {"c": torch.ones(1)},
            3: torch.zeros(2),
            "3": torch.ones(2),
            "[3]": torch.ones(3),
        }
    }
    tree |= {"a.b": torch.zeros(4), "": torch.ones(4), "__metadata__": torch.ones(5), "x\ny": torch.ones(6)}
    stored = Stored(capture(tree, rng=False))
    assert sorted(stored.blobs) == sorted(
        ["a.b\\.c", "a.b.c", "a.[3]", "a.3", "a.\\[3]", "a\\.b", "['']", "\\__metadata__", "x\ny"]
    )
    anew: dict[str, Any] = dict.fromkeys(tree)
    stored.restore(anew)
    assert torch.equal(anew["a"]["b.c"], torch.zeros(1))
    assert torch.equal(anew["a"]["b"]["c"], torch.ones(1))


def test_a_key_like_the_name_of_another_ranks_own_tensor_is_no_such_name() -> None:
    tree = {"rank-00001/x": torch.ones(2), "a": {"rank-00001/x": torch.zeros(2)}}
    names = set(Stored(capture(tree, rng=False)).blobs)
    assert names == {"\\rank-00001/x", "a.rank-00001/x"}
    own = {rank_name(rank, "y") for rank in range(3)}
    assert names_of(0, names | own) == {name: name for name in names} | {"y": "rank-00000/y"}
    assert names_of(2, names | own) == {name: name for name in names} | {"y": "rank-00002/y"}


def test_a_module_that_stores_more_than_its_tensors_is_refused() -> None:
    class Packed(nn.Module):
        def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
            super()._save_to_state_dict(destination, prefix, keep_vars)
            destination[prefix + "packed"] = torch.zeros(1)

    class Renames(nn.Linear):
        def state_dict(self, *args: Any, **kwargs: Any) -> Any:
            return super().state_dict(*args, **kwargs)

    with pytest.raises(StateMismatchError, match=r"m\.1: state_dict\(\) of .*Packed holds packed"):
        capture({"m": nn.Sequential(nn.ReLU(), Packed())})
    capture({"m": nn.Sequential(nn.Sequential(nn.ReLU(), Renames(1, 1)))})
