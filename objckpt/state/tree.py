"""What the objects in a state tree are, and what they hold by name.

Invariants: an object is of one kind, decided by its type in one order; a tensor of a module has the name that it has in the
bare module's ``state_dict()``, whether the module is wrapped or not; nothing here changes or copies anything.

Called by ``capture`` and ``restore``, so that both see the same tree.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, Generic, Literal, TypeAlias, TypeVar

import torch

from objckpt.errors import StateMismatchError
from objckpt.state import values

T = TypeVar("T")

Kind: TypeAlias = Literal["per_rank", "module", "optimizer", "generator", "loader", "object"]

#: Children that only wrappers have under this name: they are left out of names wherever they occur.
_WRAPPED_NAMES: Final = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
#: Classes whose child ``module`` is what they wrap. Any other class may have a submodule of that name.
_WRAPPERS: Final = (torch.nn.parallel.DistributedDataParallel, torch.nn.DataParallel)
_FSDP1: Final = "torch.distributed.fsdp.fully_sharded_data_parallel.FullyShardedDataParallel"


@dataclass(slots=True, eq=False)
class PerRank(Generic[T]):
    """Marks what differs from rank to rank: ``state["loader"] = PerRank(loader)``. ``value`` is the object itself.

    Each rank stores its own and gets its own back. Without the mark an object counts as the same on all ranks.
    """

    value: T


@dataclass(frozen=True, slots=True)
class ExtraState:
    """A module's ``get_extra_state`` and ``set_extra_state``."""

    module: torch.nn.Module


def kind_of(value: Any) -> Kind | None:
    """The kind of an object; None for tensors, containers and plain values."""
    if isinstance(value, PerRank):
        return "per_rank"
    if isinstance(value, torch.nn.Module):
        return "module"
    if isinstance(value, torch.optim.Optimizer):
        return "optimizer"
    if isinstance(value, torch.Generator):
        return "generator"
    if isinstance(value, type):
        return None
    if callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None)):
        return "loader" if hasattr(value, "__iter__") else "object"
    return None


def walk(value: Any, path: str = "", depth: int = 0) -> Iterator[tuple[str, Any]]:
    """Each object in the tree with its path: a PerRank first, then what it holds at the same path."""
    kind = kind_of(value)
    if kind == "per_rank":
        yield path, value
        yield from walk(value.value, path, depth + 1)
    elif kind is not None:
        yield path, value
    elif isinstance(value, (dict, list, tuple, deque)):
        if depth > values.MAX_DEPTH:
            raise StateMismatchError(
                f"{path}: nested deeper than {values.MAX_DEPTH}, or holds itself: store it flatter"
            )
        if isinstance(value, dict):
            for key, item in value.items():
                yield from walk(item, values.join(path, key), depth + 1)
        else:
            for index, item in enumerate(value):
                yield from walk(item, values.at(path, index), depth + 1)


def objects_in(state: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """:func:`walk` over the whole state. :class:`StateMismatchError` if a top-level key is no str."""
    for key in state:
        if type(key) is not str:
            raise StateMismatchError(
                f"the state's key {key!r} is a {type(key).__name__}: its keys must be str"
            )
    return [pair for key, value in state.items() for pair in walk(value, values.join("", key))]


def module_entries(module: torch.nn.Module, path: str) -> dict[str, torch.Tensor | ExtraState]:
    """Parameters, persistent buffers and extra states by FQN, without the names of wrappers, in ``state_dict()`` order.

    Names that occur at two places (a submodule used twice) are both there. ``state_dict`` hooks are not run.
    :class:`StateMismatchError` on a collision and for a module that stores more than its parameters and buffers.
    """
    entries: dict[str, torch.Tensor | ExtraState] = {}
    for name, entry in _entries(module, "", path):
        if name in entries:
            raise StateMismatchError(
                f"{path}.{name}: two tensors have this name once the names of wrappers are left out: rename one of them"
            )
        entries[name] = entry
    return entries


def _entries(
    module: torch.nn.Module, prefix: str, path: str
) -> Iterator[tuple[str, torch.Tensor | ExtraState]]:
    kind = type(module)
    own: dict[str, torch.Tensor] = dict[str, torch.Tensor](
        module.named_parameters(recurse=False, remove_duplicate=False)
    )
    own |= dict(module.named_buffers(recurse=False, remove_duplicate=False))
    for name, tensor in own.items():
        if name not in module._non_persistent_buffers_set:  # noqa: SLF001 # there is no public way to ask
            yield prefix + name, tensor
    if kind.get_extra_state is not torch.nn.Module.get_extra_state:
        yield prefix + "_extra_state", ExtraState(module)
    where = f"{path}.{prefix}".removesuffix(".")
    if any(f"{base.__module__}.{base.__qualname__}" == _FSDP1 for base in kind.__mro__):
        raise StateMismatchError(
            f"{where}: FullyShardedDataParallel holds flat shards that have no names of their own: "
            "wrap the model with torch.distributed.fsdp.fully_shard or DistributedDataParallel"
        )
    children = list(_children(module, prefix, path))
    if (
        kind.state_dict is not torch.nn.Module.state_dict
        or kind._save_to_state_dict is not torch.nn.Module._save_to_state_dict  # noqa: SLF001 # whether it is overridden
    ):
        _check_override(module, where, {*own, *(name.removeprefix(prefix) for name, _ in children)})
    yield from children


def _children(
    module: torch.nn.Module, prefix: str, path: str
) -> Iterator[tuple[str, torch.Tensor | ExtraState]]:
    for name, child in module._modules.items():  # noqa: SLF001 # named_children() leaves out the second of two names
        if child is not None:
            wrapped = name in _WRAPPED_NAMES or (name == "module" and isinstance(module, _WRAPPERS))
            yield from _entries(child, prefix if wrapped else f"{prefix}{name}.", path)


def _check_override(module: torch.nn.Module, where: str, names: set[str]) -> None:
    """A module with its own way to ``state_dict()`` may hold more than tensors that can be filled in place."""
    lost = sorted(
        name for name in module.state_dict() if name not in names and not name.endswith("_extra_state")
    )
    if lost:
        raise StateMismatchError(
            f"{where}: state_dict() of {values.qualified(type(module))} holds {', '.join(lost)}, neither parameter nor buffer: "
            "store it beside the module, as an object with state_dict() and load_state_dict(), or use get_extra_state()"
        )


def parameter_names(objects: list[tuple[str, Any]]) -> dict[int, list[str]]:
    """By ``id``: the names that each tensor has in the modules of the state, the one that it is stored under first."""
    names: dict[int, list[str]] = {}
    for path, value in objects:
        if kind_of(value) == "module":
            for name, entry in module_entries(value, path).items():
                if isinstance(entry, torch.Tensor):
                    names.setdefault(id(entry), []).append(f"{path}.{name}")
    return names


def no_name(parameter: torch.Tensor) -> str:
    """What is wrong with an optimizer's parameter that :func:`parameter_names` does not know."""
    return (
        f"a parameter of shape {list(parameter.shape)} is in no module of the state: "
        "put the model whose parameters this optimizer steps into the state too"
    )


def epoch_sampler(loader: Any) -> Any:
    """The sampler of a loader that must be told its epoch, as DistributedSampler must; None if there is none."""
    for sampler in (
        getattr(loader, "sampler", None),
        getattr(getattr(loader, "batch_sampler", None), "sampler", None),
    ):
        if callable(getattr(sampler, "set_epoch", None)) and type(getattr(sampler, "epoch", None)) is int:
            return sampler
    return None


def loader_generator(loader: Any) -> torch.Generator | None:
    """A loader's own generator, if it has one."""
    generator = getattr(loader, "generator", None)
    return generator if isinstance(generator, torch.Generator) else None
