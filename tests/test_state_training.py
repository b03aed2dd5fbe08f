"""A training run that is taken apart, stored and put together again goes on with the same losses, bit for bit."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler as sched
from torch.utils.data import Dataset, DistributedSampler
from torchdata.stateful_dataloader import StatefulDataLoader

from objckpt.state import Captured, TensorSpec, capture, prepare, spec_of, tensor_memory

STEPS = 5


class Stored:
    """What a store would hold of a capture: bytes and JSON text, nothing live."""

    def __init__(self, captured: Captured) -> None:
        self.blobs: dict[str, bytes] = {}
        self.specs: dict[str, TensorSpec] = {}
        for leaf in captured.leaves:
            copy = torch.empty(leaf.tensor.shape, dtype=leaf.tensor.dtype)
            copy.copy_(leaf.tensor)
            self.blobs[leaf.name] = bytes(tensor_memory(copy))
            self.specs[leaf.name] = spec_of(leaf.tensor)
        self.values = json.dumps(captured.values, allow_nan=False)
        self.rank_values = json.dumps(captured.rank_values, allow_nan=False)

    def restore(self, state: dict[str, Any], *, strict: bool = True, rng: bool = True) -> None:
        plan = prepare(
            state, json.loads(self.values), json.loads(self.rank_values), self.specs, strict=strict, rng=rng
        )
        for name, target in plan.targets.items():
            assert spec_of(target) == self.specs[name]
            tensor_memory(target)[:] = self.blobs[name]
        plan.apply()


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Tiny tensors: more threads only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def seed_all(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002 # the global one is meant
    torch.manual_seed(seed)


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Dropout(0.3), nn.ReLU(), nn.Linear(16, 2))


def groups(model: nn.Module) -> list[dict[str, Any]]:
    parameters = list(model.parameters())
    return [{"params": parameters[:2]}, {"params": parameters[2:], "lr": 3e-3}]


def step(state: dict[str, Any]) -> float:
    """One step on data and noise from all three generators."""
    model, optimizer = state["model"], state["optim"]
    inputs = torch.randn(8, 6) * float(1 + random.random() + np.random.rand())  # noqa: NPY002 # the global one is meant
    targets = torch.randn(8, 2)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(inputs), targets)
        loss.backward()
        return loss

    loss = optimizer.step(closure)
    if "sched" in state:
        if isinstance(state["sched"], sched.ReduceLROnPlateau):
            state["sched"].step(loss.detach())
        else:
            state["sched"].step()
    return loss.item()


def check_continues(
    build: Callable[[], dict[str, Any]], prepared: Callable[[dict[str, Any]], None] = lambda _: None
) -> None:
    """Interrupt a run of ``build()`` after STEPS steps; the rest must have the losses of the uninterrupted run."""
    seed_all(1)
    state = build()
    for _ in range(STEPS):
        step(state)
    stored = Stored(capture(state))
    expected = [step(state) for _ in range(STEPS)]
    seed_all(2)
    anew = build()
    prepared(anew)
    stored.restore(anew)
    assert [step(anew) for _ in range(STEPS)] == expected
    assert Stored(capture(anew)).blobs == Stored(capture(state)).blobs


OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "sgd": lambda m: torch.optim.SGD(groups(m), lr=1e-2, momentum=0.9, nesterov=True),
    "sgd-tensor-lr": lambda m: torch.optim.SGD(groups(m), lr=torch.tensor(1e-2), momentum=0.9),
    "adam-amsgrad": lambda m: torch.optim.Adam(groups(m), amsgrad=True),
    "adamw-fused": lambda m: torch.optim.AdamW(groups(m), fused=True),
    "adamw-foreach": lambda m: torch.optim.AdamW(groups(m), foreach=True),
    "adamw-tensor-lr": lambda m: torch.optim.AdamW(m.parameters(), lr=torch.tensor(1e-3), foreach=False),
    "adagrad": lambda m: torch.optim.Adagrad(groups(m), lr_decay=0.1),
    "adadelta": lambda m: torch.optim.Adadelta(groups(m)),
    "adamax": lambda m: torch.optim.Adamax(groups(m)),
    "nadam": lambda m: torch.optim.NAdam(groups(m)),
    "radam": lambda m: torch.optim.RAdam(groups(m)),
    "rmsprop": lambda m: torch.optim.RMSprop(groups(m), momentum=0.5, centered=True),
    "rprop": lambda m: torch.optim.Rprop(groups(m)),
    "asgd": lambda m: torch.optim.ASGD(groups(m), t0=2),
    "adafactor": lambda m: torch.optim.Adafactor(groups(m)),
    "lbfgs": lambda m: torch.optim.LBFGS(m.parameters(), max_iter=4, history_size=3),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_losses_go_on_bit_for_bit_with_each_optimizer(name: str) -> None:
    def build() -> dict[str, Any]:
        model = net()
        return {"model": model, "optim": OPTIMIZERS[name](model)}

    check_continues(build)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_stale_optimizer_state_leaves_no_trace(name: str) -> None:
    def build() -> dict[str, Any]:
        model = net()
        return {"optim": OPTIMIZERS[name](model), "model": model}

    check_continues(build, prepared=lambda state: [step(state) for _ in range(3)])


SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "step": lambda o: sched.StepLR(o, 3, 0.5),
    "multistep": lambda o: sched.MultiStepLR(o, [2, 6, 7], 0.5),
    "cosine": lambda o: sched.CosineAnnealingLR(o, 8),
    "onecycle": lambda o: sched.OneCycleLR(o, max_lr=[0.1, 0.2], total_steps=2 * STEPS + 1),
    "sequential": lambda o: sched.SequentialLR(
        o, [sched.ConstantLR(o, 0.1, 4), sched.ExponentialLR(o, 0.8)], [4]
    ),
    "lambda": lambda o: sched.LambdaLR(o, lambda epoch: 0.9**epoch),
    "plateau": lambda o: sched.ReduceLROnPlateau(o, patience=1, factor=0.5),
    "warm-restarts": lambda o: sched.CosineAnnealingWarmRestarts(o, 3, 2),
}


@pytest.mark.parametrize("lr", ["float", "tensor"])
@pytest.mark.parametrize("name", SCHEDULERS)
def test_the_learning_rate_goes_on_with_each_scheduler(name: str, lr: str) -> None:
    def build() -> dict[str, Any]:
        model = net()
        parameters = list(model.parameters())
        rates: list[Any] = [0.05, 0.01] if lr == "float" else [torch.tensor(0.05), torch.tensor(0.01)]
        optimizer = torch.optim.SGD(
            [{"params": parameters[:2], "lr": rates[0]}, {"params": parameters[2:], "lr": rates[1]}],
            momentum=0.9,
        )
        return {"model": model, "sched": SCHEDULERS[name](optimizer), "optim": optimizer}

    check_continues(build)


def test_live_optimizer_state_that_the_checkpoint_lacks_is_removed() -> None:
    seed_all(8)
    state = {"model": (model := net()), "optim": torch.optim.Adam(model.parameters())}
    fresh = Stored(capture(state))
    step(state)
    optimizer, (weight, bias, *_) = state["optim"], model.parameters()
    del optimizer.state[bias]
    optimizer.state["note"] = [1, torch.ones(2)]
    stepped = Stored(capture(state))
    optimizer.state[weight]["stale"] = torch.ones(1)
    optimizer.state[bias] = {"step": torch.tensor(1.0)}
    optimizer.state["stale"] = 3
    optimizer.state[torch.ones(1)] = {}
    stepped.restore(state)
    assert list(optimizer.state[weight]) == ["step", "exp_avg", "exp_avg_sq"]
    assert bias not in optimizer.state
    assert [key for key in optimizer.state if not isinstance(key, nn.Parameter)] == ["note"]
    assert torch.equal(optimizer.state["note"][1], torch.ones(2))
    fresh.restore(state)
    assert not optimizer.state


def test_state_of_another_dtype_than_the_parameter_keeps_it() -> None:
    def build() -> dict[str, Any]:
        model = net()
        optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
        return {"model": model, "optim": optimizer}

    seed_all(3)
    state = build()
    step(state)
    for entry in state["optim"].state.values():
        entry["exp_avg"] = entry["exp_avg"].bfloat16()
    stored = Stored(capture(state))
    assert stored.specs["optim.model.0.weight.exp_avg"].dtype == "bfloat16"
    anew = build()
    stored.restore(anew)
    for live, new in zip(state["model"].parameters(), anew["model"].parameters(), strict=True):
        entry = anew["optim"].state[new]
        assert entry["exp_avg"].dtype is torch.bfloat16
        assert entry["exp_avg_sq"].dtype is torch.float32
        assert torch.equal(entry["exp_avg"], state["optim"].state[live]["exp_avg"])


def test_the_running_optimizer_keeps_its_kernels_and_its_kind_of_learning_rate() -> None:
    seed_all(4)
    model = net()
    state = {"model": model, "optim": torch.optim.AdamW(model.parameters(), lr=0.5, fused=True)}
    step(state)
    stored = Stored(capture(state))
    model = net()
    rate = torch.tensor(0.125)
    anew = {
        "model": model,
        "optim": torch.optim.AdamW(model.parameters(), lr=rate, foreach=False, fused=None),
    }
    stored.restore(anew)
    (group,) = anew["optim"].param_groups
    assert group["lr"] is rate
    assert rate.item() == 0.5
    assert (group["foreach"], group["fused"]) == (False, None)
    again = Stored(capture(anew))
    state["optim"].param_groups[0]["lr"] = 0.0
    again.restore(state)
    assert type(state["optim"].param_groups[0]["lr"]) is float
    assert state["optim"].param_groups[0]["lr"] == 0.5


def test_grad_scaler_goes_on() -> None:
    def build() -> dict[str, Any]:
        model = net()
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
        return {"model": model, "optim": torch.optim.SGD(model.parameters(), lr=0.1), "scaler": scaler}

    def scaled_step(state: dict[str, Any]) -> tuple[float, float]:
        loss = state["model"](torch.randn(4, 6)).square().mean()
        state["optim"].zero_grad()
        state["scaler"].scale(loss).backward()
        state["scaler"].step(state["optim"])
        state["scaler"].update()
        return loss.item(), state["scaler"].get_scale()

    seed_all(5)
    state = build()
    [scaled_step(state) for _ in range(3)]
    stored = Stored(capture(state))
    expected = [scaled_step(state) for _ in range(5)]
    anew = build()
    stored.restore(anew)
    assert [scaled_step(anew) for _ in range(5)] == expected
    assert expected[-1][1] > 8.0


class Squares(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 23

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([float(index) ** 2])


def loader_of(kind: str, workers: int) -> StatefulDataLoader[torch.Tensor]:
    data = Squares()
    if kind == "distributed":
        sampler = DistributedSampler(data, num_replicas=2, rank=1, shuffle=True, seed=9)
        return StatefulDataLoader(data, 3, sampler=sampler, num_workers=workers)
    generator = torch.Generator().manual_seed(17) if kind == "generator" else None
    return StatefulDataLoader(data, 3, shuffle=True, generator=generator, num_workers=workers)


class LoaderRun:
    """Epochs of a loader, one batch at a time, with a draw of noise for each batch."""

    def __init__(self, kind: str, workers: int) -> None:
        self.state: dict[str, Any] = {"loader": loader_of(kind, workers), "epoch": 0}
        self._batches: Iterator[torch.Tensor] | None = None

    def begin_epoch(self) -> None:
        sampler = self.state["loader"].sampler
        if isinstance(sampler, DistributedSampler):
            sampler.set_epoch(self.state["epoch"])
        self._batches = iter(self.state["loader"])

    def take(self, count: int) -> list[Any]:
        seen: list[Any] = []
        while len(seen) < count:
            if self._batches is None:
                self.begin_epoch()
            assert self._batches is not None
            batch = next(self._batches, None)
            if batch is None:
                self.state["epoch"] += 1
                self._batches = None
            else:
                seen.append((self.state["epoch"], batch.flatten().tolist(), torch.rand(()).item()))
        return seen


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", ["shuffle", "generator", "distributed"])
def test_a_loader_goes_on_where_it_was_over_the_end_of_an_epoch(kind: str, workers: int) -> None:
    epoch = 4 if kind == "distributed" else 8
    # Before the first batch, in the middle of the second epoch, after the last batch of one. Forking workers takes time.
    for taken in (0, epoch + 2, 2 * epoch) if workers == 0 else (epoch + 2,):
        seed_all(6)
        run = LoaderRun(kind, workers)
        run.take(taken)
        stored = Stored(capture(run.state))
        expected = run.take(2 * epoch)
        seed_all(7)
        anew = LoaderRun(kind, workers)
        stored.restore(anew.state)
        assert anew.take(2 * epoch) == expected, f"after {taken} batches"
