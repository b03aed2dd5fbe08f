"""Pieces and the safetensors image of one rank's shard: header, offsets.

Invariants: an image is a valid safetensors file without holes; every tensor begins at a multiple of its element size and the data at a
multiple of 64 bytes, so that views of a mapped image need no copy; the layout depends on names, dtypes and shapes alone.

Called by ``checkpointer`` (staging) and ``spool`` (the header is the first part of a slot).
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from objckpt.errors import StateMismatchError
from objckpt.manifest import Piece

#: dtype (torch's name without prefix) -> its safetensors code and element size in bytes.
DTYPES: Final[Mapping[str, tuple[str, int]]] = {
    "float64": ("F64", 8),
    "float32": ("F32", 4),
    "float16": ("F16", 2),
    "bfloat16": ("BF16", 2),
    "float8_e4m3fn": ("F8_E4M3", 1),
    "float8_e4m3fnuz": ("F8_E4M3FNUZ", 1),
    "float8_e5m2": ("F8_E5M2", 1),
    "float8_e5m2fnuz": ("F8_E5M2FNUZ", 1),
    "int64": ("I64", 8),
    "int32": ("I32", 4),
    "int16": ("I16", 2),
    "int8": ("I8", 1),
    "uint64": ("U64", 8),
    "uint32": ("U32", 4),
    "uint16": ("U16", 2),
    "uint8": ("U8", 1),
    "bool": ("BOOL", 1),
    "complex64": ("C64", 8),
    # safetensors has no code for it: two float64 each, in a last dimension of 2
    "complex128": ("F64", 16),
}
_ALIGNMENT = 64
_HEADER_LIMIT = 100_000_000  # of the safetensors format, in bytes


@dataclass(frozen=True, slots=True)
class Part:
    """A whole tensor or a box of one, before it has a place: ``dtype`` is torch's name without prefix."""

    name: str
    dtype: str
    global_shape: tuple[int, ...]
    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the box."""
        return math.prod(self.shape) * DTYPES[self.dtype][1]


@dataclass(frozen=True, slots=True)
class Image:
    """The layout of a safetensors file: its first bytes, where each piece lies, and its size in bytes."""

    header: bytes
    pieces: tuple[Piece, ...]
    size: int


def whole(name: str, dtype: str, shape: tuple[int, ...]) -> Part:
    """A whole tensor."""
    return Part(name, dtype, shape, (0,) * len(shape), shape)


def layout(parts: Iterable[Part], metadata: Mapping[str, str]) -> Image:
    """Place ``parts`` in one image, by falling element size, then name. ``metadata`` goes into the header as safetensors has it.

    Raises :class:`StateMismatchError` for two parts of one name, or a header beyond the format's 100 MB.
    """
    ordered = sorted(parts, key=lambda p: (-DTYPES[p.dtype][1], p.name))
    entries: dict[str, object] = {"__metadata__": dict(metadata)}
    spans: list[tuple[Part, int, int]] = []
    position = 0
    for part in ordered:
        code, size = DTYPES[part.dtype]
        shape = [*part.shape, 2] if part.dtype == "complex128" else list(part.shape)
        end = position + math.prod(part.shape) * size
        if part.name in entries:
            raise StateMismatchError(
                f"two tensors of the state have the name {part.name!r}: rename one of the keys of `state` that lead to it"
            )
        entries[part.name] = {"dtype": code, "shape": shape, "data_offsets": [position, end]}
        spans.append((part, position, end))
        position = end
    try:
        text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise StateMismatchError(
            f"a name in the state is no Unicode text ({error}), which safetensors cannot hold: rename that key of `state`"
        ) from error
    text += b" " * (-(8 + len(text)) % _ALIGNMENT)
    if len(text) > _HEADER_LIMIT:
        raise StateMismatchError(
            f"{len(ordered)} tensors give a safetensors header of {len(text)} bytes; the format allows {_HEADER_LIMIT}. Use more ranks."
        )
    header = len(text).to_bytes(8, "little") + text
    start = len(header)
    pieces = tuple(
        Piece(p.name, p.dtype, p.global_shape, p.offset, p.shape, 0, start + begin, start + end)
        for p, begin, end in spans
    )
    return Image(header, pieces, start + position)
