"""Which checkpoints a version drops, and deleting what no version reaches.

Invariants: ``head`` and pinned checkpoints are never dropped; counting follows parents from ``head``, so a rollback never counts what
it left aside; nothing is deleted that the newest version reaches, that a newer attempt than the deleter's wrote, or that may
still be in flight. Deleting needs no trust and no lock: it lists once more after it has read the newest version, and only the
highest counts.

``retain`` is given to ``commit.Run`` by whoever makes one; ``reap`` and ``prune`` are called by rank 0's ``uploader`` between saves.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterable
from dataclasses import replace

from objckpt.commit import Run
from objckpt.manifest import (
    MANIFEST_PREFIX,
    Attempt,
    Entry,
    Policy,
    Save,
    Version,
    decode_version,
    save_of,
    version_key,
    version_of,
)
from objckpt.store import ObjectInfo, read_all

log = logging.getLogger(__name__)

#: Seconds for which what was dropped stays readable. For the sake of readers only: correctness does not rest on it.
GRACE = 600.0
#: Seconds for which a version stays after its successor was written.
VERSION_LIFE = 86_400.0


def line(head: Save | None, kept: tuple[Entry, ...]) -> list[Save]:
    """``head`` and its ancestors among ``kept``, newest first."""
    parents = {e.save: e.parent for e in kept}
    ancestors: list[Save] = []
    while head is not None and head in parents and head not in ancestors:
        ancestors.append(head)
        head = parents[head]
    return ancestors


def find(kept: Iterable[Entry], head: Save | None, step: int) -> Entry | None:
    """The checkpoint of ``step``: the one on the line of ``head`` if there are several, else the newest attempt's."""
    entries = {e.save: e for e in kept if e.save.step == step}
    for save in line(head, tuple(kept)):
        if save in entries:
            return entries[save]
    return entries[max(entries)] if entries else None


def no_such_step(uri: str, step: int, kept: Iterable[Entry]) -> str:
    """Why a step cannot be had, and which can."""
    steps = sorted({e.save.step for e in kept})
    return f"{uri} has no checkpoint of step {step}; it has {', '.join(map(str, steps)) or 'none'}"


def retain(kept: tuple[Entry, ...], head: Save, policy: Policy) -> tuple[Entry, ...]:
    """What the next version lists of ``kept`` (which has ``head`` in it). Children of a dropped entry take over its parent.

    Along the line of parents the newest ``keep + lag`` stay. What a rollback left aside is not counted, and goes once the new branch
    has ``keep`` commits of its own.
    """
    if policy.keep is None:
        return kept
    ancestors = line(head, kept)
    aside = [e.save for e in kept if e.save not in ancestors]
    own = [save for save in ancestors if save.attempt == head.attempt]
    gone = {*ancestors[policy.keep + policy.lag :], *(aside if len(own) >= policy.keep else ())} - {head}
    gone -= {e.save for e in kept if e.pinned}
    parents = {e.save: e.parent for e in kept}

    def standing(parent: Save | None) -> Save | None:
        while parent is not None and parent in gone:
            parent = parents[parent]
        return parent

    return tuple(replace(e, parent=standing(e.parent)) for e in kept if e.save not in gone)


def reached(version: Version) -> set[Save]:
    """The saves whose objects a version reaches: what it lists, and their bases."""
    return {save for e in version.kept for save in (e.save, *e.bases)}


def dead(save: Save, version: Version, live: set[Save], attempt: Attempt) -> bool:
    """Whether a deleter of ``attempt`` may delete the objects of ``save`` in the light of the newest version."""
    if save in live or save.attempt > attempt:
        return False
    if save.attempt < attempt:
        return True
    newest = version.newest_commit() if version.attempt == attempt else _newest_of(version, attempt)
    return newest is not None and save.step <= newest


def _newest_of(version: Version, attempt: Attempt) -> int | None:
    return max((e.save.step for e in version.kept if e.save.attempt == attempt), default=None)


def reap(run: Run, attempt: Attempt | None = None, *, grace: float = GRACE) -> list[str]:
    """Delete the objects of saves that no version reaches, and of dead saves. Returns the keys.

    ``attempt`` is the deleter's own (None: that of the newest version, for an offline run). Whatever a version reached that was the
    newest at some moment of the last ``grace`` seconds, by the store's clock, is spared for its readers.
    """
    versions, newest = _stable(run)
    own = newest.attempt if attempt is None else attempt
    live = reached(newest)
    now = versions[-1].modified
    for older, successor in itertools.pairwise(versions):
        if successor.modified > now - grace:
            number = version_of(older.key)
            assert number is not None
            live |= reached(decode_version(read_all(run.store, older.key), number))
    keys = [
        found.key
        for prefix in ("data/", "records/", "index/")
        for found in run.store.list(prefix)
        if (save := save_of(found.key)) is not None and dead(save, newest, live, own)
    ]
    run.store.delete(keys)
    return keys


def _stable(run: Run) -> tuple[list[ObjectInfo], Version]:
    """All versions by number and the newest one's content, such that it is the highest in a list made after it was read."""
    while True:
        newest = run.existing()
        versions = [o for o in run.store.list(MANIFEST_PREFIX) if version_of(o.key) is not None]
        if versions and versions[-1].key == version_key(newest.number):
            return versions, newest


def prune(run: Run, *, life: float = VERSION_LIFE) -> int:
    """Delete versions, lowest first, whose successor is older than ``life`` seconds by the store's clock. Returns how many."""
    versions = [o for o in run.store.list(MANIFEST_PREFIX) if version_of(o.key) is not None]
    if not versions:
        return 0
    now = versions[-1].modified
    count = 0
    for older, successor in itertools.pairwise(versions):
        if successor.modified > now - life:
            break
        run.store.delete([older.key])  # one by one: a batch may land in any order
        count += 1
    return count
