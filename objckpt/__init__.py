"""objckpt: checkpoints of PyTorch training on preemptible machines, committed to object storage.

The public names are loaded when they are first used, so that what needs no torch (``objckpt.errors``, the command line, the uploader)
does not load it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from objckpt._version import __version__

if TYPE_CHECKING:
    from objckpt.checkpointer import Checkpointer
    from objckpt.config import Tuning
    from objckpt.errors import (
        CheckpointNotFoundError,
        CommitUnknownError,
        ConfigError,
        CorruptCheckpointError,
        FencedError,
        FormatVersionError,
        ObjckptError,
        SaveFailedError,
        SpoolError,
        StateMismatchError,
        StoreError,
        WorldError,
    )
    from objckpt.manifest import KeepBest, KeepEvery, KeepFor, KeepLast
    from objckpt.reader import Reader
    from objckpt.saves import Checkpoint
    from objckpt.state import PerRank

_HOMES = {
    "Checkpointer": "checkpointer",
    "Checkpoint": "saves",
    "PerRank": "state",
    "Reader": "reader",
    "Tuning": "config",
    **dict.fromkeys(("KeepBest", "KeepEvery", "KeepFor", "KeepLast"), "manifest"),
    **dict.fromkeys(
        (
            "CheckpointNotFoundError",
            "CommitUnknownError",
            "ConfigError",
            "CorruptCheckpointError",
            "FencedError",
            "FormatVersionError",
            "ObjckptError",
            "SaveFailedError",
            "SpoolError",
            "StateMismatchError",
            "StoreError",
            "WorldError",
        ),
        "errors",
    ),
}

__all__ = [
    "Checkpoint",
    "CheckpointNotFoundError",
    "Checkpointer",
    "CommitUnknownError",
    "ConfigError",
    "CorruptCheckpointError",
    "FencedError",
    "FormatVersionError",
    "KeepBest",
    "KeepEvery",
    "KeepFor",
    "KeepLast",
    "ObjckptError",
    "PerRank",
    "Reader",
    "SaveFailedError",
    "SpoolError",
    "StateMismatchError",
    "StoreError",
    "Tuning",
    "WorldError",
    "__version__",
    "open",
]


def open(uri: str, *, tuning: Tuning | None = None, **storage_options: Any) -> Reader:  # noqa: A001 # objckpt.open reads well
    """A reader of the run at ``uri``. It never starts an attempt, so looking does not disturb the job that trains."""
    from objckpt.reader import Reader  # noqa: PLC0415 # loads torch

    return Reader(uri, tuning, **storage_options)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'objckpt' has no attribute {name!r}")
    return getattr(importlib.import_module(f"objckpt.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return __all__
