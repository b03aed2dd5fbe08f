"""Where each stored tensor goes, and the memory that it is read into.

Invariants: a stored tensor is read once, however many places it has, and straight into live memory where one of them allows
it; all its places have its bytes afterwards; tensors that are tied in the checkpoint are one tensor wherever they are made
anew. Nothing live is written before :meth:`Places.tensor`.

Called by ``restore`` and ``optimizer``: first ``want_*`` for every place, then ``targets``, and, once these are filled,
``tensor`` for every place.
"""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from objckpt.state import tensors, values
from objckpt.state.tensors import MemoryKey, TensorSpec
from objckpt.state.values import Node

Device: TypeAlias = "torch.device | str"


@dataclass(frozen=True, slots=True)
class _Place:
    """A stored tensor's place: the live tensor that is filled, or the device on which one is made."""

    name: str
    live: torch.Tensor | None
    device: Device


class Findings:
    """What does not fit between a checkpoint and a state: ``problems`` forbid the restore, ``tolerated`` do not."""

    def __init__(self, *, strict: bool) -> None:
        self.problems: list[str] = []
        self.tolerated: list[str] = []
        self._strict = strict

    def problem(self, path: str, text: str) -> None:
        """Something at ``path`` cannot be restored."""
        self.problems.append(f"{path}: {text}")

    def one_sided(self, path: str, text: str) -> None:
        """A name that only the checkpoint or only the state has: a problem if strict."""
        (self.problems if self._strict else self.tolerated).append(f"{path}: {text}")


class Places:
    """All places of the tensors of one checkpoint in one state, by path."""

    def __init__(self, specs: Mapping[str, TensorSpec], findings: Findings) -> None:
        self.per_rank = False
        self.findings = findings
        self._specs = specs
        self._places: dict[str, _Place] = {}
        self._owners: dict[tuple[bool, MemoryKey], tuple[str, str]] = {}
        self._targets: dict[str, torch.Tensor] = {}
        self._made: dict[tuple[str, torch.device], torch.Tensor] = {}

    def spec(self, name: str, path: str) -> TensorSpec:
        """What is stored under ``name``."""
        spec = self._specs.get(name)
        if spec is None:
            values.corrupt(path, f"it refers to a tensor {name!r} that the checkpoint does not have")
        if spec.dtype not in tensors.DTYPES:
            values.corrupt(path, f"a tensor of dtype {spec.dtype!r} is unknown (written by a newer objckpt?)")
        return spec

    def want_exactly(self, path: str, name: str, live: torch.Tensor) -> None:
        """``live`` is filled, or it is a problem that it does not fit."""
        spec = self.spec(name, path)
        reason = tensors.why_not_stored(live)
        if reason is not None:
            self.findings.problem(path, reason)
        elif spec != tensors.spec_of(live):
            self.findings.problem(
                path,
                f"the checkpoint has {spec}, the state has {tensors.spec_of(live)}: build the model as it was saved",
            )
        elif not tensors.is_fillable(live):
            self.findings.problem(
                path, "the elements of this expanded tensor share memory: make it contiguous()"
            )
        elif self._is_free(path, name, live):
            self._places[path] = _Place(name, live, live.device)

    def want_like(self, path: str, name: str, live: Any, device: Device) -> torch.Tensor:
        """``live`` is filled if it is a tensor, or it is a problem that it does not fit; with nothing there, one is made."""
        spec = self.spec(name, path)
        if not isinstance(live, torch.Tensor):
            return self._want(path, name, None, device)
        reason = tensors.why_not_stored(live)
        if reason is not None:
            self.findings.problem(path, reason)
        elif spec != tensors.spec_of(live):
            self.findings.one_sided(
                path,
                f"the checkpoint has {spec}, the state has {tensors.spec_of(live)}: make the tensor as it was saved, or remove it "
                "from the state before restoring, and a new one is put there",
            )
        elif tensors.is_fillable(live) and self._is_free(path, name, live):
            return self._want(path, name, live, live.device)
        return self._want(path, name, None, live.device)

    def want_inside(self, path: str, name: str, live: Any, device: Device) -> torch.Tensor:
        """``live`` is filled if it fits and no other place has its memory, else one is made on ``device``."""
        spec = self.spec(name, path)
        if (
            isinstance(live, torch.Tensor)
            and tensors.why_not_stored(live) is None
            and spec == tensors.spec_of(live)
        ):
            key = tensors.memory_key(live)
            if key is None or self._owners.setdefault((self.per_rank, key), (name, path))[0] == name:
                return self._want(path, name, live, live.device)
        return self._want(path, name, None, device)

    def want_new(self, path: str, name: str, _live: Any, device: Device) -> torch.Tensor:
        """One is made on ``device``."""
        self.spec(name, path)
        return self._want(path, name, None, device)

    def targets(self) -> dict[str, torch.Tensor]:
        """By stored name: the memory to read into."""
        for place in self._places.values():
            if place.live is not None and place.name not in self._targets and tensors.is_target(place.live):
                self._targets[place.name] = tensors.plain(place.live)
        for place in self._places.values():
            if place.name not in self._targets:
                spec = self._specs[place.name]
                self._targets[place.name] = torch.empty(spec.shape, dtype=spec.torch_dtype)
        return self._targets

    def tensor(self, path: str) -> torch.Tensor:
        """The tensor at ``path``, with the stored bytes: the live one, or the one that was made."""
        place = self._places[path]
        target = self._targets[place.name]
        if place.live is None:
            device = torch.device(place.device)
            made = self._made.get((place.name, device))
            if made is None:
                made = self._made[place.name, device] = target.to(device)
            return made
        if tensors.memory_key(place.live) != tensors.memory_key(target):
            place.live.copy_(target)
        return place.live

    def _want(self, path: str, name: str, live: torch.Tensor | None, device: Device) -> torch.Tensor:
        self._places[path] = _Place(name, live, device)
        return torch.empty(0, dtype=self._specs[name].torch_dtype) if live is None else live

    def _is_free(self, path: str, name: str, live: torch.Tensor) -> bool:
        """Whether no place of another stored tensor has the memory of ``live``; a problem if one has."""
        key = tensors.memory_key(live)
        if key is None:
            return True
        owner, where = self._owners.setdefault((self.per_rank, key), (name, path))
        if owner != name:
            self.findings.problem(
                path,
                f"tied to {where} in the state, a tensor of its own in the checkpoint: untie them, or build the model as it was saved",
            )
        return owner == name


class ValueReader:
    """Reads values with tensors in them, and nothing else foreign. ``place`` takes path, name, live value and device."""

    def __init__(
        self, place: Callable[[str, str, Any, Device], torch.Tensor], problem: Callable[[str, str], None]
    ) -> None:
        self._place = place
        self.problem = problem

    def foreign(self, node: Node, path: str, live: Any) -> Any:
        """The tensor or the NumPy array that a node refers to."""
        if node["$"] == "tensor":
            name = values.field(node, "name", str, path)
            return self._place(path, name, live, _device(node, path))
        if node["$"] == "ndarray":
            values.import_numpy(path)
            made = self._place(path, values.field(node, "name", str, path), None, "cpu")
            try:
                return made.numpy()
            except TypeError as error:
                values.corrupt(path, str(error))
        return values.unknown_tag(node, path, live)


def _device(node: Node, path: str) -> torch.device:
    device = values.field(node, "device", str, path) if "device" in node else "cpu"
    try:
        return tensors.available(device)
    except RuntimeError:
        values.corrupt(path, f"{reprlib.repr(device)} is no type of device")
