"""From the state tree to named tensors and JSON values.

Invariants: nothing is copied and nothing of the state changes, but for what ``state_dict()`` of its objects does; each byte
of memory that is used twice under one shape is named once; names are unique; and the tree is a function of the state alone,
so that ranks with equal states make equal trees.

Besides the tags of ``values`` the tree has these, read back by ``restore``:

==========  ===================================  ==========================================================
``$``       other fields                         what it stands for
==========  ===================================  ==========================================================
tensor      name; device, if not the CPU         a tensor, by the name of the leaf that holds its bytes
ndarray     name                                 a NumPy array, likewise
module      state: {FQN: value}                  a torch.nn.Module
optimizer   state: {FQN: value}; groups:         a torch.optim.Optimizer; ``other`` is what its state has under
            [{params, values}]; other: dict      keys that are no parameters
generator   state: tensor                        a torch.Generator
object      state: value                         anything with state_dict() and load_state_dict()
loader      state; generator: tensor or null;    the same, iterable; ``epoch`` is its sampler's
            epoch: int or null
per_rank    (none)                               its value is in the rank's own tree, ``objects``, by path
==========  ===================================  ==========================================================

The rank's own tree is ``{"objects": {path: value}, "rng": value or null}``.

Called by the checkpointer, once a save.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from objckpt.errors import StateMismatchError
from objckpt.state import rng as generators
from objckpt.state import tensors, tree, values
from objckpt.state.tree import ExtraState
from objckpt.state.values import JSON, Node


@dataclass(frozen=True, slots=True)
class Leaf:
    """One tensor to be stored.

    ``tensor`` is the live memory, detached: any device, any strides. ``per_rank``: it is this rank's own; otherwise every
    rank has the same under this name.
    """

    name: str
    tensor: torch.Tensor
    per_rank: bool


@dataclass(frozen=True, slots=True)
class Captured:
    """A state tree, taken apart. ``values`` is the same on all ranks, ``rank_values`` this rank's own."""

    leaves: tuple[Leaf, ...]
    values: JSON
    rank_values: JSON


def capture(state: Mapping[str, Any], *, rng: bool = True) -> Captured:
    """Take ``state`` apart; with ``rng`` the random number generators of this process too.

    :class:`StateMismatchError` names the first thing that cannot be stored, its type and the way out.
    """
    objects = tree.objects_in(state)
    taken = _Capture(objects)
    # A loader's state_dict() may make its iterator, which draws random numbers: so all of them come before any generator.
    for _, value in objects:
        if tree.kind_of(value) in ("object", "loader"):
            taken.state_dicts[id(value)] = value.state_dict()
    shared = values.encode(dict(state), "", taken.tree_node)
    ranks_own = None
    if rng:
        taken.per_rank = True
        ranks_own = values.encode(generators.read(), "rng", taken.value_node)
    return Captured(tuple(taken.leaves.values()), shared, {"objects": taken.rank_objects, "rng": ranks_own})


class _Capture:
    """The leaves of one capture, and the encoders of what ``values`` does not know."""

    def __init__(self, objects: list[tuple[str, Any]]) -> None:
        self.leaves: dict[str, Leaf] = {}
        self.rank_objects: Node = {}
        self.state_dicts: dict[int, Any] = {}
        self.per_rank = False
        self._parameters = tree.parameter_names(objects)
        self._names: dict[tuple[bool, tensors.MemoryKey], str] = {}

    def tensor(self, tensor: torch.Tensor, path: str) -> Node:
        """A reference to the leaf that holds ``tensor``: a new one, or the one on the same memory."""
        reason = tensors.why_not_stored(tensor)
        if reason is not None:
            raise StateMismatchError(f"{path}: {reason}")
        plain = tensors.plain(tensor)
        key = tensors.memory_key(plain)
        name = path if key is None else self._names.setdefault((self.per_rank, key), path)
        if name == path:
            if path in self.leaves:
                raise StateMismatchError(
                    f"two tensors of the state are both named {path!r}: rename one of the keys"
                )
            self.leaves[path] = Leaf(path, plain, self.per_rank)
        node: Node = {"$": "tensor", "name": name}
        if plain.device.type != "cpu":
            node["device"] = plain.device.type
        return node

    def value_node(self, value: Any, path: str) -> JSON:
        """Tensors and NumPy arrays, wherever they stand."""
        if isinstance(value, torch.Tensor):
            return self.tensor(value, path)
        numpy = sys.modules.get("numpy")
        if numpy is not None and isinstance(value, numpy.ndarray):
            return {**self.tensor(_array_tensor(value, path, numpy), path), "$": "ndarray"}
        return None

    def tree_node(self, value: Any, path: str) -> JSON:
        """The same, and the objects of the state tree."""
        kind = tree.kind_of(value)
        if kind is None:
            return self.value_node(value, path)
        if kind == "per_rank":
            return self._per_rank(value.value, path)
        if kind == "module":
            return self._module(value, path)
        if kind == "optimizer":
            return self._optimizer(value, path)
        if kind == "generator":
            return {"$": "generator", "state": self.tensor(value.get_state(), path)}
        node: Node = {"$": kind, "state": values.encode(self.state_dicts[id(value)], path, self.value_node)}
        if kind == "loader":
            generator = tree.loader_generator(value)
            state = None if generator is None else generator.get_state()
            sampler = tree.epoch_sampler(value)
            node["generator"] = None if state is None else self.tensor(state, f"{path}.[generator]")
            node["epoch"] = None if sampler is None else sampler.epoch
        return node

    def _per_rank(self, value: Any, path: str) -> Node:
        if self.per_rank:
            raise StateMismatchError(f"{path}: a PerRank inside a PerRank: leave out one of them")
        self.per_rank = True
        self.rank_objects[path] = values.encode(value, path, self.tree_node)
        self.per_rank = False
        return {"$": "per_rank"}

    def _module(self, module: torch.nn.Module, path: str) -> Node:
        state: Node = {}
        for name, entry in tree.module_entries(module, path).items():
            where = f"{path}.{name}"
            if isinstance(entry, ExtraState):
                state[name] = values.encode(entry.module.get_extra_state(), where, self.value_node)
            else:
                state[name] = self.tensor(entry, where)
        return {"$": "module", "state": state}

    def _optimizer(self, optimizer: torch.optim.Optimizer, path: str) -> Node:
        state: Node = {}
        groups: list[JSON] = []
        for index, group in enumerate(optimizer.param_groups):
            members: list[JSON] = []
            for parameter in group["params"]:
                if id(parameter) not in self._parameters:
                    raise StateMismatchError(f"{path}.[groups].{index}: {tree.no_name(parameter)}")
                name = self._parameters[id(parameter)][0]
                members.append(name)
                if parameter in optimizer.state:
                    state[name] = values.encode(optimizer.state[parameter], f"{path}.{name}", self.value_node)
            options = {key: value for key, value in group.items() if key != "params"}
            where = f"{path}.[groups].{index}"
            groups.append({"params": members, "values": values.encode(options, where, self.value_node)})
        other = {key: value for key, value in optimizer.state.items() if not isinstance(key, torch.Tensor)}
        encoded = values.encode(other, f"{path}.[other]", self.value_node)
        return {"$": "optimizer", "state": state, "groups": groups, "other": encoded}


def _array_tensor(array: Any, path: str, numpy: Any) -> torch.Tensor:
    """A NumPy array as a tensor on the same memory where torch allows it, else a copy."""
    if type(array) is not numpy.ndarray:
        raise StateMismatchError(
            f"{path}: an array of type {values.qualified(type(array))} cannot be stored: store its parts as plain arrays"
        )
    if array.dtype.name not in tensors.DTYPES or not array.dtype.isnative:
        raise StateMismatchError(
            f"{path}: a NumPy array of dtype {array.dtype} cannot be stored: convert it to numbers in native byte order, or to a list"
        )
    readable = array.flags.writeable and all(
        stride >= 0 and stride % array.itemsize == 0 for stride in array.strides
    )
    return torch.from_numpy(array if readable else array.copy())
