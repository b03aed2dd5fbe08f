"""The user's state tree <-> named tensors and JSON values.

Invariant: what :func:`capture` takes apart, :func:`prepare` and :meth:`Restoration.apply` put together again with the same
types and the same bits, in place where the state lives. No input or output, no collective, no pickle.

Called by the checkpointer, which stores the leaves and the values, and fills the targets.
"""

from __future__ import annotations

from objckpt.state.capture import Captured, Leaf, capture
from objckpt.state.restore import Restoration, prepare
from objckpt.state.tensors import DTYPES, TensorSpec, spec_of, tensor_memory
from objckpt.state.tree import PerRank
from objckpt.state.values import JSON

__all__ = [
    "DTYPES",
    "JSON",
    "Captured",
    "Leaf",
    "PerRank",
    "Restoration",
    "TensorSpec",
    "capture",
    "prepare",
    "spec_of",
    "tensor_memory",
]
