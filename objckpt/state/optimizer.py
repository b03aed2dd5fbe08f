"""An optimizer's state, put in its place by the names of its parameters.

Invariants: tensors keep their saved dtype (``Optimizer.load_state_dict`` would cast them to the parameter's) and stand on
the parameter's device; what the running optimizer has decided for its device (``foreach``, ``fused``, ``capturable``,
``differentiable``) stays; no step is ever made to create state.

Called by ``restore``.
"""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

import torch

from objckpt.state import tree, values
from objckpt.state.places import Device, Places, ValueReader
from objckpt.state.values import JSON, Node

_OWN_OPTIONS: Final = ("foreach", "fused", "capturable", "differentiable")
#: What schedulers of torch add to the groups, so that it may be missing until they are made.
_OF_SCHEDULERS: Final = frozenset(
    {"initial_lr", "max_lr", "min_lr", "max_momentum", "base_momentum", "swa_lr"}
)
_SHOWN: Final = 8  # names in one message: a model's other mismatches name each of them already


class OptimizerRestore:
    """One stored optimizer and the running one. Compares them when made; ``apply`` once the targets are filled.

    ``names``: by ``id``, the names of every parameter in the modules of the state. What does not fit goes to the findings
    of ``places``.
    """

    def __init__(
        self,
        node: Node,
        path: str,
        optimizer: torch.optim.Optimizer,
        names: Mapping[int, list[str]],
        places: Places,
    ) -> None:
        self._path = path
        self._optimizer = optimizer
        self._places = places
        self._problem = places.findings.problem
        self._one_sided = places.findings.one_sided
        self._state: Node = values.field(node, "state", dict, path)
        self._other = node.get("other")
        self._members, self._options = _stored_groups(node, path)
        #: By each of its names: a parameter of the running optimizer, and the index of its group.
        self._parameters: dict[str, tuple[torch.Tensor, int]] = {}
        for index, group in enumerate(optimizer.param_groups):
            for parameter in group["params"]:
                if id(parameter) not in names:
                    self._problem(self._group_path(index), tree.no_name(parameter))
                for name in names.get(id(parameter), ()):
                    self._parameters[name] = (parameter, index)
        self._compare_groups(names)
        self._options = self._options[: len(optimizer.param_groups)]
        self._read(planned=True)

    def apply(self) -> None:
        """Write the state of each parameter, remove what the checkpoint does not have, and write the options of the groups."""
        states, other, options = self._read(planned=False)
        live = self._optimizer.state
        known = {id(self._parameters[name][0]) for name in self._names_stored() if name in self._parameters}
        mine = {id(parameter) for parameter, _ in self._parameters.values()}
        gone = known - {id(parameter) for parameter, _ in states}
        for key in list(live):
            # A parameter that the checkpoint does not know (strict=False) keeps the state that it has.
            if not isinstance(key, torch.Tensor) or id(key) not in mine or id(key) in gone:
                del live[key]
        for parameter, new in states:
            old = live.get(parameter)
            if type(old) is dict and type(new) is dict:
                old.clear()
                old.update(new)
            else:
                live[parameter] = new
        live.update(other)
        for group, saved in zip(self._optimizer.param_groups, options, strict=True):
            for name, value in saved.items():
                if name not in _OWN_OPTIONS:
                    group[name] = _as_running(value, group.get(name))

    def _group_path(self, index: int) -> str:
        return f"{self._path}.[groups].{index}"

    def _names_stored(self) -> Iterable[str]:
        return (name for members in self._members for name in members)

    def _compare_groups(self, names: Mapping[int, list[str]]) -> None:
        groups = self._optimizer.param_groups
        if len(groups) != len(self._members):
            self._problem(
                self._path,
                f"the checkpoint has {len(self._members)} parameter groups, the state has {len(groups)}: "
                "make the optimizer with the groups that it was saved with",
            )
            return
        stored = {
            id(self._parameters[name][0]): index
            for index, members in enumerate(self._members)
            for name in members
            if name in self._parameters
        }
        for index, (group, members) in enumerate(zip(groups, self._members, strict=True)):
            where = self._group_path(index)
            saved = self._options[index]
            unknown = (
                sorted({*saved} - {*group} - {*_OWN_OPTIONS} - _OF_SCHEDULERS) if type(saved) is dict else []
            )
            if unknown:
                self._one_sided(
                    where,
                    f"the checkpoint has the options {_some(unknown)}, a {type(self._optimizer).__name__} does not: "
                    "make an optimizer of the class that was saved",
                )
            gone = [name for name in members if name not in self._parameters]
            if gone:
                self._one_sided(
                    where,
                    f"the checkpoint steps {_some(gone)} in this group, the state does not: group them as saved",
                )
            here = [parameter for parameter in group["params"] if id(parameter) in names]
            new = [names[id(parameter)][0] for parameter in here if id(parameter) not in stored]
            if new:
                self._one_sided(
                    where,
                    f"the state steps {_some(new)} in this group, the checkpoint does not: group them as saved",
                )
            moved = [
                names[id(parameter)][0] for parameter in here if stored.get(id(parameter), index) != index
            ]
            if moved:
                self._problem(
                    where, f"the checkpoint has {_some(moved)} in another group: group them as saved"
                )
            order = [id(self._parameters[name][0]) for name in members if name in self._parameters]
            if isinstance(self._optimizer, torch.optim.LBFGS) and order != [
                id(parameter) for parameter in here
            ]:
                self._problem(
                    where,
                    "LBFGS keeps one flat state: its parameters must come in the order in which they were saved",
                )

    def _read(
        self, *, planned: bool
    ) -> tuple[list[tuple[torch.Tensor, Any]], dict[Any, Any], list[dict[str, Any]]]:
        """The values of all parts: placeholders when their places are ``planned``, with their tensors afterwards."""
        groups = self._optimizer.param_groups
        live_states = self._optimizer.state
        states = []
        for name, node in self._state.items():
            if name in self._parameters:
                parameter, index = self._parameters[name]
                place = self._place_beside(parameter, groups[index], f"{self._path}.{name}.step")
                reader = self._reader(place, planned=planned)
                states.append(
                    (
                        parameter,
                        values.decode(node, f"{self._path}.{name}", reader, live_states.get(parameter)),
                    )
                )
        reader = self._reader(self._places.want_inside, planned=planned)
        live_other = {key: value for key, value in live_states.items() if not isinstance(key, torch.Tensor)}
        other = values.decode(self._other, f"{self._path}.[other]", reader, live_other)
        options = [
            values.decode(node, self._group_path(index), reader, groups[index])
            for index, node in enumerate(self._options)
        ]
        for value, where in [(other, "[other]"), *((option, "[groups]") for option in options)]:
            if type(value) is not dict:
                values.corrupt(f"{self._path}.{where}", f"a dict was expected, not a {type(value).__name__}")
        return states, other, options

    def _reader(
        self, place: Callable[[str, str, Any, Device], torch.Tensor], *, planned: bool
    ) -> ValueReader:
        """Plans the places of tensors, or gets the tensors that are there."""
        return ValueReader(
            place if planned else lambda path, _name, _live, _device: self._places.tensor(path), self._problem
        )

    def _place_beside(
        self, parameter: torch.Tensor, group: Mapping[str, Any], step: str
    ) -> Callable[[str, str, Any, Device], torch.Tensor]:
        """Tensors go to the parameter's device, a ``step`` only where the kernels want it there."""

        def place(path: str, name: str, live: Any, _device: Device) -> torch.Tensor:
            on_device = path != step or group.get("fused") or group.get("capturable")
            return self._places.want_inside(path, name, live, parameter.device if on_device else "cpu")

        return place


def _stored_groups(node: Node, path: str) -> tuple[list[list[str]], list[JSON]]:
    members, options = [], []
    for group in values.field(node, "groups", list, path):
        if type(group) is not dict:
            values.corrupt(path, f"a parameter group should be a dict, it is {reprlib.repr(group)}")
        names = values.field(group, "params", list, path)
        if not all(type(name) is str for name in names):
            values.corrupt(path, "the names of a parameter group should be text")
        members.append(names)
        options.append(group.get("values"))
    return members, options


def _some(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


def _as_running(value: Any, live: Any) -> Any:
    """A group's value, as a tensor or as a number as the running optimizer has it, and in its tensor."""
    if isinstance(live, torch.Tensor):
        if value is live:
            return live
        if isinstance(value, (int, float)) or (isinstance(value, torch.Tensor) and value.shape == live.shape):
            return live.copy_(torch.as_tensor(value))
    if type(live) in (int, float) and isinstance(value, torch.Tensor) and value.numel() == 1:
        return value.item()
    if type(live) is type(value) and type(value) in (tuple, list) and len(live) == len(value):
        return type(value)(_as_running(new, old) for new, old in zip(value, live, strict=True))
    return value
