"""Looking at a run: which checkpoints there are, and their tensors. Never starts an attempt and cannot write.

Invariants: three requests lead from a URI to the newest checkpoint; every byte that reaches a tensor was verified; what a reader does
cannot be noticed by the job that trains.

Used by people (``objckpt.open``), by ``cli``, and by ``checkpointer`` for the way from records to tensors.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import torch

from objckpt.commit import Run
from objckpt.config import Tuning
from objckpt.errors import CheckpointNotFoundError
from objckpt.manifest import DataObject, Entry, Piece
from objckpt.plan import reads, stored
from objckpt.retention import chosen, retain
from objckpt.saves import Checkpoint
from objckpt.state import tensor_memory
from objckpt.store import ObjectStore, open_store
from objckpt.transfer import Local, fetch

_FIRST_POLL, _LAST_POLL = 0.5, 10.0  # seconds between looks of wait_for


def fill(
    store: ObjectStore,
    pieces: Mapping[str, list[tuple[Piece, DataObject]]],
    targets: Mapping[str, torch.Tensor],
    tuning: Tuning,
    local: Local | None = None,
) -> int:
    """Read each target's bytes into its memory, verified. Returns the bytes that came from the store."""
    memory = {name: tensor_memory(tensor) for name, tensor in targets.items()}
    return fetch(
        store,
        reads(pieces, [name for name, tensor in targets.items() if tensor.numel()]),
        memory,
        part_size=tuning.part_size,
        concurrency=tuning.concurrency,
        local=local,
    )


def checkpoint_of(entry: Entry, metadata: Any = None) -> Checkpoint:
    """A listed checkpoint as users see it."""
    return Checkpoint(
        step=entry.save.step,
        attempt=entry.save.attempt,
        world_size=entry.world_size,
        nbytes=entry.nbytes,
        created_at=entry.created_at,
        metadata=metadata,
    )


class Reader:
    """A run, read only. Made by :func:`objckpt.open`."""

    def __init__(self, uri: str, tuning: Tuning | None = None, **storage_options: Any) -> None:
        self._tuning = tuning or Tuning()
        self._store = open_store(
            uri, part_size=self._tuning.part_size, connections=self._tuning.concurrency, **storage_options
        )
        self._run = Run(self._store, retain=retain)

    def latest(self) -> Checkpoint | None:
        """What a restart would resume from; None before the first commit. :class:`CheckpointNotFoundError` if there is no run."""
        version = self._run.existing()
        entry = None if version.head is None else version.entry(version.head)
        return None if entry is None else checkpoint_of(entry, self._run.index(entry).metadata)

    def checkpoints(self) -> list[Checkpoint]:
        """All checkpoints, by attempt and step. Their ``metadata`` is in their indexes, which are not read here."""
        return [checkpoint_of(e) for e in sorted(self._run.existing().kept, key=lambda e: e.save)]

    def load(self, step: int | None = None) -> dict[str, torch.Tensor]:
        """The tensors of a checkpoint (the latest, or that of ``step``) on the CPU, by the names they are stored under.

        What is one rank's own has a name that begins with ``rank-00000/``. :class:`CorruptCheckpointError` if a byte is damaged.
        """
        pieces = stored(self._run.contents(self._entry(step)).records)
        targets = {
            name: torch.empty(found[0][0].global_shape, dtype=getattr(torch, found[0][0].dtype))
            for name, found in pieces.items()
        }
        fill(self._store, pieces, targets, self._tuning)
        return targets

    def wait_for(self, step: int, timeout: float | None = None) -> Checkpoint:
        """Wait until a checkpoint of ``step`` or later is the latest. :class:`TimeoutError` after ``timeout`` seconds."""
        began, pause = time.monotonic(), _FIRST_POLL
        while True:
            try:
                found = self.latest()
            except CheckpointNotFoundError:
                found = None
            if found is not None and found.step >= step:
                return found
            left = pause if timeout is None else min(pause, timeout - (time.monotonic() - began))
            if left <= 0:
                raise TimeoutError(
                    f"{self._store.uri}: no checkpoint of step {step} or later after {timeout} s"
                )
            time.sleep(left)
            pause = min(pause * 1.5, _LAST_POLL)

    def _entry(self, step: int | None) -> Entry:
        version = self._run.existing()
        if step is None:
            if version.head is None:
                raise CheckpointNotFoundError(f"{self._store.uri} has no complete checkpoint yet")
            entry = version.entry(version.head)
            assert entry is not None  # decode_version has checked it
            return entry
        return chosen(self._store.uri, version, step)
