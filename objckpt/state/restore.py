"""From named tensors and JSON values back into the state tree.

Invariants: every mismatch between checkpoint and state is found before anything is loaded, and all are told at once; the
state does not change before the loader fills :attr:`Restoration.targets` and :meth:`Restoration.apply` runs; parameters,
buffers and the user's own containers stay the objects that they are.

Called by the checkpointer: :func:`prepare`, then it fills the targets, then ``apply``.
"""

from __future__ import annotations

import logging
import reprlib
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any, Final, Literal, TypeAlias

import torch

from objckpt.errors import StateMismatchError
from objckpt.state import rng as generators
from objckpt.state import tree, values
from objckpt.state.optimizer import OptimizerRestore
from objckpt.state.places import Findings, Places, ValueReader
from objckpt.state.tensors import TensorSpec, spec_of
from objckpt.state.tree import ExtraState, PerRank
from objckpt.state.values import JSON, Node

logger: Final = logging.getLogger("objckpt.state")

#: In this order everything is put in its place. A loader's iterator, once made, draws from generators: so these are set
#: before it (it may begin from them) and once more after it.
Phase: TypeAlias = Literal["module", "optimizer", "object", "tree", "generator", "loader", "iterator", "rng"]
_PHASES: Final[tuple[Phase, ...]] = (
    "module", "optimizer", "object", "tree", "generator", "loader", "iterator", "generator", "rng",
)  # fmt: skip
_WORDS: Final = {
    "per_rank": "a PerRank",
    "module": "a torch.nn.Module",
    "optimizer": "an optimizer",
    "generator": "a torch.Generator",
    "object": "an object with state_dict()",
    "loader": "a data loader",
}


class Restoration:
    """A checkpoint that fits the state. Made by :func:`prepare`.

    ``targets``: by stored name, a contiguous CPU tensor of the stored dtype and shape for each tensor that is wanted, to be
    filled before :meth:`apply`. Where a live tensor can take the bytes itself, it is on the live memory.
    """

    def __init__(
        self, targets: Mapping[str, torch.Tensor], actions: Mapping[Phase, list[Callable[[], None]]]
    ) -> None:
        self.targets = targets
        self._actions = actions

    def apply(self) -> None:
        """Put everything in its place: modules, optimizers, other objects, plain values, generators, loaders, and the random
        number generators last. What an object's ``load_state_dict`` raises is passed on.
        """
        with torch.no_grad():
            for phase in _PHASES:
                for action in self._actions.get(phase, ()):
                    action()


def prepare(
    state: MutableMapping[str, Any],
    values: JSON,
    rank_values: JSON | None,
    tensors: Mapping[str, TensorSpec],
    *,
    strict: bool = True,
    rng: bool = True,
) -> Restoration:
    """Compare a checkpoint with ``state`` and plan the restore.

    ``values`` and ``rank_values`` are what ``capture`` made, the latter None if the checkpoint has nothing of this rank;
    ``tensors`` says what is stored under each name. With ``strict`` every name must be on both sides; without it, what
    only one side has is left alone, with a warning. ``rng``: also set the random number generators, if they were saved.

    :class:`StateMismatchError` lists all that does not fit; :class:`CorruptCheckpointError` if the values are damaged.
    """
    return _Plan(state, tensors, strict=strict).run(values, rank_values, rng=rng)


class _Plan:
    """The comparison of one checkpoint with one state: problems, places of tensors and actions to come."""

    def __init__(
        self, state: MutableMapping[str, Any], specs: Mapping[str, TensorSpec], *, strict: bool
    ) -> None:
        self.findings = Findings(strict=strict)
        self.places = Places(specs, self.findings)
        self.objects = tree.objects_in(state)
        self.parameters = tree.parameter_names(self.objects)
        self.actions: dict[Phase, list[Callable[[], None]]] = defaultdict(list)
        self.visited: set[str] = set()
        self.rank_objects: Node | None = None
        self._state = state

    def run(self, shared: JSON, rank_values: JSON | None, *, rng: bool) -> Restoration:
        own_rng: JSON = None
        if rank_values is not None:
            if not isinstance(rank_values, dict):
                values.corrupt("", f"the rank's own values should be a dict, not {reprlib.repr(rank_values)}")
            self.rank_objects = values.field(rank_values, "objects", dict, "")
            own_rng = rank_values.get("rng")
        self._compare_state(shared)
        if rng and own_rng is not None:
            self._plan_rng(own_rng)
        elif rng:
            logger.warning(
                "the checkpoint has no random number state of this rank: the generators are left as they are"
            )
        if self.findings.problems:
            count = len(self.findings.problems)
            raise StateMismatchError(
                f"checkpoint and state differ in {count} place{'s' if count > 1 else ''} (nothing was changed):\n  "
                + "\n  ".join(self.findings.problems)
            )
        if self.findings.tolerated:
            logger.warning(
                "restored in part, as strict=False asks:\n  %s", "\n  ".join(self.findings.tolerated)
            )
        return Restoration(self.places.targets(), self.actions)

    def _compare_state(self, shared: JSON) -> None:
        stored = dict(values.items_of(shared, ""))
        for key, node in stored.items():
            if key not in self._state:
                self.findings.one_sided(
                    values.join("", key),
                    "in the checkpoint, not in the state: add it, or restore with strict=False",
                )
                continue
            self._plan_entry(key, node)
        for key in self._state:
            if key not in stored:
                self.visited.update(path for path, _ in tree.walk(self._state[key], values.join("", key)))
                self.findings.one_sided(
                    values.join("", key),
                    "in the state, not in the checkpoint: leave it out, or restore with strict=False",
                )
        for path, value in self.objects:
            if path not in self.visited:
                kind = values.qualified(type(value))
                self.findings.one_sided(
                    path,
                    f"the state has a {kind}, the checkpoint nothing: leave it out, or restore with strict=False",
                )

    def _plan_entry(self, key: str, node: JSON) -> None:
        path, live = values.join("", key), self._state[key]
        values.decode(node, path, _TreeReader(self), live)

        def write() -> None:
            new = values.decode(node, path, _TreeWriter(self), live)
            merged = _write_back(new, live)
            if merged is not live:
                self._state[key] = merged

        self.actions["tree"].append(write)

    def _plan_rng(self, node: JSON) -> None:
        node = generators.usable(node)
        values.decode(node, "rng", self.value_reader())
        self.actions["rng"].append(lambda: generators.write(values.decode(node, "rng", self.value_writer())))

    def value_reader(self) -> ValueReader:
        return ValueReader(self.places.want_new, self.findings.problem)

    def value_writer(self) -> ValueReader:
        return ValueReader(
            lambda path, _name, _live, _device: self.places.tensor(path), self.findings.problem
        )

    def plan_value(self, node: JSON, path: str, live: Callable[[], Any]) -> Callable[[], Any]:
        """Plan the value of an object that takes it as a whole; returns what makes it, once the targets are filled."""
        # Asking an object for its state may have effects (a loader makes its iterator): only where a class is needed.
        found = live() if _has_namedtuple(node) else None
        values.decode(node, path, self.value_reader(), found)
        return lambda: values.decode(node, path, self.value_writer(), found)


class _TreeReader(ValueReader):
    """The state tree, first pass: compares, and plans what is to be done."""

    def __init__(self, plan: _Plan) -> None:
        super().__init__(plan.places.want_like, plan.findings.problem)
        self._plan = plan

    def foreign(self, node: Node, path: str, live: Any) -> Any:
        tag = str(node["$"])
        actions: dict[str, Callable[[Node, str, Any], None]] = {
            "per_rank": self._per_rank,
            "module": self._module,
            "optimizer": self._optimizer,
            "generator": self._generator,
            "object": self._object,
            "loader": self._object,
        }
        plan = actions.get(tag)
        if plan is None:
            return super().foreign(node, path, live)
        kind = tree.kind_of(live)
        if kind != tag and {kind, tag} != {"object", "loader"}:
            there = "nothing" if live is None else f"a {values.qualified(type(live))}"
            way_out = (
                "wrap the object in PerRank" if tag == "per_rank" else "put the object there before restoring"
            )
            self._plan.visited.update(inner for inner, _ in tree.walk(live, path))
            self.problem(path, f"the checkpoint has {_WORDS[tag]}, the state has {there}: {way_out}")
            return live
        self._plan.visited.add(path)
        plan(node, path, live)
        return live

    def _per_rank(self, _node: Node, path: str, live: PerRank[Any]) -> None:
        stored = self._plan.rank_objects
        self._plan.visited.update(
            inner for inner, _ in tree.walk(live.value, path) if stored is None or path not in stored
        )
        if stored is None or path not in stored:
            self.problem(
                path,
                f"the checkpoint has nothing of this rank for the PerRank({values.qualified(type(live.value))}), "
                "for it was saved by other ranks: restore with as many ranks, or leave it out and set it up anew",
            )
            return
        node, old = stored[path], live.value
        self._plan.places.per_rank = True
        values.decode(node, path, self, old)
        self._plan.places.per_rank = False

        def write() -> None:
            live.value = _write_back(values.decode(node, path, _TreeWriter(self._plan), old), old)

        self._plan.actions["tree"].append(write)

    def _module(self, node: Node, path: str, module: torch.nn.Module) -> None:
        plan, stored = self._plan, values.field(node, "state", dict, path)
        entries = tree.module_entries(module, path)
        for name, entry in entries.items():
            where = f"{path}.{name}"
            if name not in stored:
                plan.findings.one_sided(
                    where, "in the state, not in the checkpoint: build the model as it was saved"
                )
            elif isinstance(entry, ExtraState):
                value = plan.plan_value(stored[name], where, entry.module.get_extra_state)
                plan.actions["module"].append(_setter(entry.module.set_extra_state, value))
            else:
                reference = stored[name]
                if not isinstance(reference, dict) or reference.get("$") != "tensor":
                    self.problem(
                        where,
                        "the checkpoint has an extra state, the state has a tensor: build the model as it was saved",
                    )
                    continue
                plan.places.want_exactly(where, values.field(reference, "name", str, where), entry)
                plan.actions["module"].append(_filler(plan.places, where))
        for name in stored:
            if name not in entries:
                plan.findings.one_sided(
                    f"{path}.{name}", "in the checkpoint, not in the state: build the model as it was saved"
                )

    def _optimizer(self, node: Node, path: str, optimizer: torch.optim.Optimizer) -> None:
        plan = self._plan
        restore = OptimizerRestore(node, path, optimizer, plan.parameters, plan.places)
        plan.actions["optimizer"].append(restore.apply)

    def _generator(self, node: Node, path: str, generator: torch.Generator) -> None:
        plan, state = self._plan, node.get("state")
        live = generator.get_state()
        if not isinstance(state, dict) or state.get("$") != "tensor":
            values.corrupt(path, "the state of a generator should be a tensor")
        spec = plan.places.spec(values.field(state, "name", str, path), path)
        if spec != spec_of(live):
            self.problem(
                path,
                f"the checkpoint has a generator's state of {spec}, a generator on {generator.device} has {spec_of(live)}",
            )
            return
        value = plan.plan_value(state, path, lambda: None)
        plan.actions["generator"].append(_setter(generator.set_state, value))

    def _object(self, node: Node, path: str, live: Any) -> None:
        plan = self._plan
        if "state" not in node:
            values.corrupt(path, "an object without state")
        value = plan.plan_value(node["state"], path, live.state_dict)
        phase: Phase = "loader" if tree.kind_of(live) == "loader" else "object"
        if phase == "loader":
            sampler, epoch = tree.epoch_sampler(live), node.get("epoch")
            if epoch is not None and type(epoch) is not int:
                values.corrupt(path, f"{epoch!r} is no epoch")
            if sampler is not None and epoch is not None:
                plan.actions["loader"].append(lambda: sampler.set_epoch(epoch))
            generator, state = tree.loader_generator(live), node.get("generator")
            if generator is not None and state is not None:
                self._generator({"$": "generator", "state": state}, f"{path}.[generator]", generator)
            plan.actions["iterator"].append(live.state_dict)
        plan.actions[phase].append(_setter(live.load_state_dict, value))


class _TreeWriter(ValueReader):
    """The state tree, second pass: the tensors are there, and objects stay as they are in the state."""

    def __init__(self, plan: _Plan) -> None:
        super().__init__(lambda path, _name, _live, _device: plan.places.tensor(path), plan.findings.problem)

    def foreign(self, node: Node, path: str, live: Any) -> Any:
        return super().foreign(node, path, live) if node["$"] in ("tensor", "ndarray") else live


def _setter(put: Callable[[Any], Any], value: Callable[[], Any]) -> Callable[[], None]:
    return lambda: put(value())


def _filler(places: Places, path: str) -> Callable[[], None]:
    def fill() -> None:
        places.tensor(path)

    return fill


def _has_namedtuple(node: JSON) -> bool:
    pending = [node]  # no recursion: how deep the node is has not been checked yet
    while pending:
        item = pending.pop()
        if isinstance(item, dict):
            if item.get("$") == "namedtuple":
                return True
            pending.extend(item.values())
        elif isinstance(item, list):
            pending.extend(item)
    return False


def _write_back(new: Any, live: Any) -> Any:
    """``new``, but in the containers that the user holds where these are of the same type."""
    kind = type(new)
    if kind is not type(live):
        return new
    if isinstance(new, dict):
        merged = {key: _write_back(item, live.get(key)) for key, item in new.items()}
        kept = {
            key: item for key, item in live.items() if key not in merged and tree.kind_of(item) is not None
        }
        live.clear()
        for key, item in {**merged, **kept}.items():  # Counter.update would add
            live[key] = item
        if isinstance(live, defaultdict) and isinstance(new, defaultdict):
            live.default_factory = new.default_factory
        return live
    if kind is list or (kind is deque and new.maxlen == live.maxlen):
        items = [_write_back(item, live[i] if i < len(live) else None) for i, item in enumerate(new)]
        live.clear()
        live.extend(items)
        return live
    if kind is set:
        live.clear()
        live.update(new)
        return live
    if kind is tuple or values.is_namedtuple(new):
        items = [_write_back(item, live[i] if i < len(live) else None) for i, item in enumerate(new)]
        return tuple(items) if kind is tuple else kind._make(items)
    return new
