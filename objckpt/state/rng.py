"""The random number generators of this process, as one dict of plain values and tensors.

Invariant: after ``write(read())`` every one of them draws what it would have drawn. Which ones: Python's ``random``, torch's
for the CPU, NumPy's global one if NumPy is loaded, CUDA's of the current device if CUDA is in use.

Called by ``capture`` last of all, and by ``restore`` last of all.
"""

from __future__ import annotations

import importlib.util
import logging
import random
import sys
from typing import Any, Final

import torch

from objckpt.state import values
from objckpt.state.values import JSON

logger: Final = logging.getLogger("objckpt.state")


def read() -> dict[str, Any]:
    """The present state of each generator."""
    states: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        states["numpy"] = numpy.random.get_state(legacy=False)
    if _cuda_in_use():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def usable(node: JSON) -> JSON:
    """The stored states without NumPy's where NumPy is not installed, with a warning."""
    if isinstance(node, dict) and "numpy" in node and importlib.util.find_spec("numpy") is None:
        logger.warning(
            "the checkpoint has the state of NumPy's random numbers, but numpy is not installed: it is skipped"
        )
        return {name: state for name, state in node.items() if name != "numpy"}
    return node


def write(states: Any) -> None:
    """Set the generators. One that the checkpoint or this process does not have is left as it is, with a warning.

    :class:`CorruptCheckpointError` if a state is not what its generator takes.
    """
    if not isinstance(states, dict):
        values.corrupt("rng", f"a dict was expected, not a {type(states).__name__}")
    try:
        for name, state in states.items():
            _write_one(name, state)
    except (TypeError, ValueError, KeyError, IndexError, RuntimeError) as error:
        values.corrupt("rng", f"a generator does not take its state ({error})")
    if "numpy" not in states and "numpy" in sys.modules:
        logger.warning("the checkpoint has no state of NumPy's random numbers: they are left as they are")
    if "cuda" not in states and _cuda_in_use():
        logger.warning("the checkpoint has no state of CUDA's random numbers: they are left as they are")


def _write_one(name: str, state: Any) -> None:
    if name == "python":
        random.setstate(state)
    elif name == "torch":
        torch.set_rng_state(state)
    elif name == "numpy":
        values.import_numpy("rng.numpy").random.set_state(state)
    elif name == "cuda" and torch.cuda.is_available():
        torch.cuda.set_rng_state(state)
    else:
        logger.warning(
            "the checkpoint has the state of %s's random numbers, which are not in use here: it is skipped",
            name,
        )


def _cuda_in_use() -> bool:
    return torch.cuda.is_available() and bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call] # torch's own gap
