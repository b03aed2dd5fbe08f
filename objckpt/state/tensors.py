"""What a tensor is to a checkpoint: a dtype by name, a shape, and bytes.

Invariants: a tensor that passes :func:`why_not_stored` is nothing but its dtype, its shape and its elements, so that these
restore it bit for bit; two tensors with the same :func:`memory_key` are the same elements in the same memory. Nothing is
copied here.

Called by ``capture`` and ``restore``, and by the checkpointer for the bytes of a tensor.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Final, TypeAlias

import torch
from torch.nn.parameter import is_lazy

#: Every dtype that can be stored: those that safetensors holds, and complex128 (stored as F64 with a last dimension of 2).
DTYPES: Final[dict[str, torch.dtype]] = {
    "float64": torch.float64,
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float8_e4m3fn": torch.float8_e4m3fn,
    "float8_e4m3fnuz": torch.float8_e4m3fnuz,
    "float8_e5m2": torch.float8_e5m2,
    "float8_e5m2fnuz": torch.float8_e5m2fnuz,
    "complex128": torch.complex128,
    "complex64": torch.complex64,
    "int64": torch.int64,
    "int32": torch.int32,
    "int16": torch.int16,
    "int8": torch.int8,
    "uint64": torch.uint64,
    "uint32": torch.uint32,
    "uint16": torch.uint16,
    "uint8": torch.uint8,
    "bool": torch.bool,
}
_NAMES: Final = {dtype: name for name, dtype in DTYPES.items()}

#: Device, address, dtype, shape and strides in elements: equal keys are equal elements in one memory.
MemoryKey: TypeAlias = "tuple[torch.device, int, torch.dtype, tuple[int, ...], tuple[int, ...]]"


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """What is stored of a tensor besides its bytes. ``dtype`` is torch's name without prefix, a key of :data:`DTYPES`."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype itself. KeyError for a name that is not in :data:`DTYPES`."""
        return DTYPES[self.dtype]

    def __str__(self) -> str:
        return f"{self.dtype} {list(self.shape)}"


def spec_of(tensor: torch.Tensor) -> TensorSpec:
    """Dtype and shape of a tensor that :func:`why_not_stored` lets pass."""
    return TensorSpec(_NAMES[tensor.dtype], tuple(tensor.shape))


def why_not_stored(tensor: torch.Tensor) -> str | None:
    """Why ``tensor`` cannot be stored as dtype, shape and bytes, and the way out; None if it can."""
    kind = f"{type(tensor).__module__}.{type(tensor).__qualname__}"
    if is_lazy(tensor):
        return f"a {kind} has no shape yet: run one batch through the lazy module first"
    if type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        return f"a tensor of type {kind} (sharded, fake or wrapped) cannot be stored yet: store a plain torch.Tensor"
    if tensor.is_nested or tensor.layout is not torch.strided:
        layout = "nested" if tensor.is_nested else str(tensor.layout)
        return f"a {layout} tensor cannot be stored: store its parts (values, indices or offsets) as plain tensors"
    if tensor.dtype not in _NAMES:
        return f"a tensor of {tensor.dtype} cannot be stored: convert it to one of {', '.join(DTYPES)}"
    if tensor.is_meta:
        return "a tensor on the meta device has no bytes: materialise it first (Module.to_empty, then initialise it)"
    if tensor.numel() and not tensor.untyped_storage().nbytes():
        return "the storage of this tensor was freed (resized to 0): gather the parameter before it is stored"
    return None


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor`` detached, as a torch.Tensor on the same memory (resolved where torch holds it lazily conjugated or negated)."""
    return tensor.detach().as_subclass(torch.Tensor).resolve_conj().resolve_neg()


def memory_key(tensor: torch.Tensor) -> MemoryKey | None:
    """Equal for tensors that are tied. None for an empty tensor, which has no memory to share."""
    if not tensor.numel():
        return None
    return tensor.device, tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tuple(tensor.stride())


def is_target(tensor: torch.Tensor) -> bool:
    """Whether the bytes of a stored tensor can be read straight into the memory of ``tensor``."""
    lazy = tensor.is_conj() or tensor.is_neg()
    return tensor.device.type == "cpu" and tensor.is_contiguous() and not lazy


def is_fillable(tensor: torch.Tensor) -> bool:
    """Whether each element has memory of its own (an expanded tensor's have not)."""
    return all(size < 2 or stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))  # noqa: PLR2004 # one element


def available(device: str) -> torch.device:
    """The device of this type that is current here, or the CPU where there is none. RuntimeError if there is no such type."""
    found = torch.device(device)
    usable = getattr(getattr(torch, found.type, None), "is_available", None)
    return found if usable is not None and usable() else torch.device("cpu")


def tensor_memory(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor: a writable, one-dimensional memoryview of format ``B``, without a copy.

    The view keeps the tensor alive. Any dtype; an empty tensor gives an empty view. ValueError for any other tensor.
    """
    if not is_target(tensor):
        raise ValueError(
            f"the bytes of a {tensor.device} tensor of strides {tensor.stride()} do not lie in one piece on the CPU"
        )
    size = tensor.numel() * tensor.element_size()
    array = (ctypes.c_ubyte * size).from_address(tensor.data_ptr()) if size else (ctypes.c_ubyte * 0)()
    array.tensor = tensor  # type: ignore[attr-defined] # ctypes holds no owner for an address: this attribute does
    return memoryview(array).cast("B")
