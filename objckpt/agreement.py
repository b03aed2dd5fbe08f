"""What the ranks decide together, as functions over what each of them said.

Invariant: a decision depends on nothing but its arguments, so that it is the same wherever it is made, and an error rises on every rank.

Called by ``checkpointer``, as rules of ``world.decide``.
"""

from __future__ import annotations

import json
import time
from typing import Any, Final

from objckpt.errors import ConfigError, FencedError, SaveFailedError, StateMismatchError, named
from objckpt.manifest import JSON

_STEPS: Final = 10**12  # twelve digits in keys


def check_arguments(step: object, metadata: object) -> None:
    """Refuse a step that has no key, and metadata that is not JSON, before anything is staged."""
    if type(step) is not int or not 0 <= step < _STEPS:
        raise ConfigError(f"step {step!r} is no number of optimizer steps done")
    try:
        json.dumps(metadata, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"metadata must be JSON (no NaN, no tensors; say loss.item()): {error}") from None


def describe(problem: BaseException | None) -> JSON:
    """A rank's problem as it tells the others of it."""
    return None if problem is None else [type(problem).__name__, str(problem)]


def nobody_has_one(problems: list[Any]) -> JSON:
    """Raise the first problem that a rank has."""
    for rank, problem in enumerate(problems):
        if problem is not None:
            kind, text = problem
            raise named(kind, f"rank {rank}: {text}")
    return None


def admit(last_step: int | None, max_failed_saves: int, told: list[dict[str, Any]]) -> JSON:
    """Whether a save is staged, from what all ranks say: ``stage`` (all have a slot), ``nbytes`` in all, ``created_at``."""
    nobody_has_one([t["problem"] for t in told])
    for rank, t in enumerate(told):
        if t["fenced"] is not None:
            raise FencedError(t["fenced"])
        if t["step"] != told[0]["step"]:
            raise ConfigError(
                f"rank {rank} saves step {t['step']}, rank 0 step {told[0]['step']}: every rank saves the same"
            )
        if t["structure"] != told[0]["structure"]:
            raise StateMismatchError(
                f"rank {rank} has other tensors than rank 0 (names, dtypes or shapes differ). What is one rank's own must be wrapped: "
                f"objckpt.PerRank(...)"
            )
    failures = max(t["failures"] for t in told)
    if failures >= max_failed_saves:
        raise SaveFailedError(
            f"{failures} saves in a row were not committed (max_failed_saves={max_failed_saves}); see the errors in the log. The last "
            f"committed checkpoint is safe"
        )
    step = told[0]["step"]
    if last_step is not None and step <= last_step:
        raise ConfigError(
            f"step {step} does not rise: step {last_step} was saved or restored before. To go back, call restore(state, step=...); "
            f"for another experiment, use another run"
        )
    return {
        "stage": all(t["free"] for t in told),
        "nbytes": sum(t["nbytes"] for t in told),
        "created_at": round(time.time(), 3),
    }
