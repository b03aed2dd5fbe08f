"""What the ranks decide together, as functions over what each of them said.

Invariant: a decision depends on nothing but its arguments, so that it is the same wherever it is made, and an error rises on every rank.

Called by ``checkpointer``, as rules of ``world.decide``.
"""

from __future__ import annotations

import json
import time
from typing import Any, Final

from objckpt.errors import ConfigError, FencedError, SaveFailedError, StateMismatchError, named
from objckpt.manifest import JSON, Save

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


def one_uri(uris: list[str]) -> None:
    """Raise unless every rank has rank 0's URI."""
    for rank, uri in enumerate(uris):
        if uri != uris[0]:
            raise ConfigError(f"rank {rank} has another URI than rank 0: {uri} and {uris[0]}")


def nothing_to_restore(uri: str, head: Save | None) -> None:
    """Raise if there is a newest checkpoint that this job did not continue."""
    if head is not None:
        raise ConfigError(
            f"{uri} has checkpoints (the newest is step {head.step}), but restore() was not called, so this job did not continue them. "
            f"Call restore(state) first, or use another run"
        )


def all_done(told: list[dict[str, Any]]) -> JSON:
    """Whether every rank is ``done``; raises the first ``problem`` that a rank has."""
    _nobody_has_one(told)
    return all(t["done"] for t in told)


def _nobody_has_one(told: list[dict[str, Any]]) -> None:
    for rank, t in enumerate(told):
        if t["problem"] is not None:
            kind, text = t["problem"]
            raise named(kind, f"rank {rank}: {text}")


def admit(last_step: int | None, max_failed_saves: int, told: list[dict[str, Any]]) -> JSON:
    """Whether a save is staged, from what all ranks say: ``stage`` (all have a slot), ``nbytes`` in all, ``created_at``."""
    _nobody_has_one(told)
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
