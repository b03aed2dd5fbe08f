"""Tensors into a slot: the plan of this rank's shard, and the one memory copy.

Invariants: the layout is made once for a structure and reused until the structure changes; a tensor is copied once, straight to its
final offset; what is in the slot when ``stage`` returns no longer depends on the live tensors.

Called by ``checkpointer``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import xxhash

from objckpt.manifest import Rank, Save
from objckpt.plan import assign
from objckpt.shard import DTYPES, Image, Part, layout, whole
from objckpt.spool import Slot
from objckpt.state import Leaf, PerRank


def rank_name(rank: int, name: str) -> str:
    """The name under which a tensor that is one rank's own is stored."""
    return f"rank-{rank:05d}/{name}"


def names_of(rank: int, stored: Iterable[str]) -> dict[str, str]:
    """What ``rank`` restores of the ``stored`` names: those that all ranks share, and its own. The stored name by that in its state."""
    own = rank_name(rank, "")
    names = {name.removeprefix(own): name for name in stored}
    # What is left is another rank's own: a shared name never begins so.
    return {name: stored_name for name, stored_name in names.items() if not name.startswith("rank-")}


def dtype_name(tensor: torch.Tensor) -> str:
    """Torch's name of the dtype, without prefix."""
    return str(tensor.dtype).removeprefix("torch.")


def digest(leaves: Sequence[Leaf]) -> str:
    """Identity of the structure that all ranks must share: names, dtypes and shapes of the replicas."""
    shared = [
        (leaf.name, dtype_name(leaf.tensor), tuple(leaf.tensor.shape)) for leaf in leaves if not leaf.per_rank
    ]
    return xxhash.xxh3_128_hexdigest(repr(shared).encode())


@dataclass(frozen=True, slots=True)
class Shard:
    """What one rank writes: the parts of its image, and for each the position of its leaf."""

    key: tuple[object, ...]
    parts: tuple[Part, ...]
    leaves: tuple[int, ...]


class Stager:
    """Plans, lays out and copies one rank's shard. Caches by structure: layout per save size, views per slot."""

    def __init__(self, rank: Rank, world_size: int) -> None:
        self._rank = rank
        self._world_size = world_size
        self._shard: Shard | None = None
        self._views: dict[int, tuple[Shard, memoryview, list[torch.Tensor]]] = {}

    def plan(self, leaves: Sequence[Leaf]) -> Shard:
        """The part of ``leaves`` that this rank writes."""
        key = tuple((leaf.name, leaf.tensor.dtype, leaf.tensor.shape, leaf.per_rank) for leaf in leaves)
        if self._shard is not None and self._shard.key == key:
            return self._shard
        owners = assign(
            (
                (leaf.name, leaf.tensor.numel() * DTYPES[dtype_name(leaf.tensor)][1])
                for leaf in leaves
                if not leaf.per_rank
            ),
            self._world_size,
        )
        chosen = [i for i, leaf in enumerate(leaves) if leaf.per_rank or owners[leaf.name] == self._rank]
        parts = tuple(
            whole(
                rank_name(self._rank, leaf.name) if leaf.per_rank else leaf.name,
                dtype_name(leaf.tensor),
                tuple(leaf.tensor.shape),
            )
            for leaf in (leaves[i] for i in chosen)
        )
        self._shard = Shard(key, parts, tuple(chosen))
        return self._shard

    def image(self, shard: Shard, run: str, save: Save) -> Image:
        """The layout of ``shard`` as the shard of ``save``. All fields have a fixed width, so it does not move from save to save."""
        return layout(
            shard.parts, {"format": "objckpt", "run": run, "save": str(save), "rank": f"{self._rank:05d}"}
        )

    def stage(self, slot: Slot, shard: Shard, image: Image, leaves: Sequence[Leaf]) -> None:
        """Fill ``slot`` with the image."""
        slot.view[: len(image.header)] = image.header
        cached = self._views.get(slot.number)
        if cached is None or cached[0] is not shard or cached[1] is not slot.view:
            places = {piece.name: piece for piece in image.pieces}
            views = []
            for part in shard.parts:
                piece = places[part.name]
                dtype: torch.dtype = getattr(torch, part.dtype)
                if piece.begin == piece.end:
                    views.append(torch.empty(part.shape, dtype=dtype))
                else:
                    count = (piece.end - piece.begin) // DTYPES[part.dtype][1]
                    flat = torch.frombuffer(slot.view, dtype=dtype, count=count, offset=piece.begin)
                    views.append(flat.view(part.shape))
            cached = (shard, slot.view, views)
            self._views[slot.number] = cached
        sources = [leaves[i].tensor for i in shard.leaves]
        if sources:
            torch._foreach_copy_(cached[2], sources)


def estimate(state: Mapping[str, Any]) -> int:
    """Bytes that the state will have, as far as can be told before the first step: modules, and what torch's optimizers keep."""
    total = 0
    for wrapped in state.values():
        value = wrapped.value if isinstance(wrapped, PerRank) else wrapped
        if isinstance(value, torch.nn.Module):
            total += sum(_nbytes(t) for t in value.state_dict().values() if isinstance(t, torch.Tensor))
        elif isinstance(value, torch.optim.Optimizer):
            for group in value.param_groups:
                total += _kept_per_parameter(group) * sum(_nbytes(p) for p in group["params"])
        elif isinstance(value, torch.Tensor):
            total += _nbytes(value)
    return total


def _kept_per_parameter(group: Mapping[str, Any]) -> int:
    """How many tensors of a parameter's size its optimizer will keep, told by the hyperparameters that torch's optimizers have."""
    return (
        (2 + bool(group.get("amsgrad")) if "betas" in group else 0)
        + (1 if group.get("momentum") else 0)
        + (1 if "lr_decay" in group else 0)  # Adagrad
        + (1 + bool(group.get("centered")) if "alpha" in group else 0)  # RMSprop
    )


def _nbytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()
