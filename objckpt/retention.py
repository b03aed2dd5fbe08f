"""Which checkpoints a version drops, and deleting what no version reaches.

Invariants: ``head`` and pinned checkpoints are never dropped; counting follows parents from ``head``, so a rollback never counts what
it left aside; nothing is deleted that the newest version reaches, that a newer attempt than the deleter's wrote, or that may
still be in flight, nor any object whose key is not one of ours. Deleting needs no trust and no lock: it lists once more after it has
read the newest version, and only the highest counts. What is found dead in its light stays dead, so a deleter may be frozen at any call.

``retain`` is given to ``commit.Run`` by whoever makes one; ``reap`` and ``prune`` are called by rank 0's ``uploader`` between saves;
``survey``, ``sweep`` and ``abort_uploads`` by ``objckpt gc``, which belongs to no attempt.
"""

from __future__ import annotations

import enum
import itertools
import logging
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from objckpt.commit import Run
from objckpt.errors import CheckpointNotFoundError, StoreNotFoundError, StorePermissionError
from objckpt.manifest import (
    MANIFEST_PREFIX,
    Attempt,
    Entry,
    Keep,
    KeepBest,
    KeepEvery,
    KeepFor,
    KeepLast,
    Policy,
    Save,
    Version,
    index_key,
    save_of,
    version_key,
    version_of,
)
from objckpt.store import ObjectInfo, ObjectStore

log = logging.getLogger(__name__)

#: Seconds for which what was dropped stays readable. For the sake of readers only: correctness does not rest on it.
GRACE: Final = 600.0
#: Seconds for which a version stays after its successor was written.
VERSION_LIFE: Final = 86_400.0
#: Seconds after which nobody is at work any more on a probe, or on an upload that was begun. None takes a day.
LEFTOVER_LIFE: Final = 86_400.0

#: Where the objects of saves lie. The index goes last: while it is there, it tells that a checkpoint was meant to be.
_SAVE_PREFIXES: Final = ("data/", "records/", "index/")
#: What a start proves the store with; another writer of the format may draw longer nonces, or shorter ones.
_PROBE_KEY: Final = re.compile(r"probe/[0-9a-f]{8,64}")


class Reason(enum.StrEnum):
    """Why an object may be deleted."""

    RETIRED = (
        "retired"  # of a checkpoint that is no longer listed, or whose commit was overtaken at its last step
    )
    DEAD = "dead"  # of a save that its attempt passed by: a later one was committed
    ORPHANED = "orphaned"  # of a save that an earlier attempt never committed
    VERSION = "version"  # a version of the manifest whose successor is a day old
    PROBE = "probe"  # what a start left that was not allowed to delete it


@dataclass(frozen=True, slots=True)
class Garbage:
    """An object that may be deleted, and why. ``size`` in bytes; ``save`` is None for what belongs to none."""

    key: str
    size: int
    reason: Reason
    save: Save | None = None


@dataclass(frozen=True, slots=True)
class Survey:
    """What lies in a run, in the light of its newest ``version``.

    ``garbage`` is in the order in which it is deleted. ``spared`` is garbage too, but for the grace. ``unknown`` are the objects whose
    keys are none of ours.
    """

    version: Version
    garbage: tuple[Garbage, ...]
    spared: tuple[Garbage, ...]
    unknown: tuple[ObjectInfo, ...]


def line(head: Save | None, kept: tuple[Entry, ...]) -> list[Save]:
    """``head`` and its ancestors among ``kept``, newest first."""
    parents = {e.save: e.parent for e in kept}
    ancestors: list[Save] = []
    while head is not None and head in parents and head not in ancestors:
        ancestors.append(head)
        head = parents[head]
    return ancestors


def find(kept: Iterable[Entry], head: Save | None, step: int, attempt: int | None = None) -> Entry | None:
    """The checkpoint of ``step`` (by ``attempt``, if given): the one on the line of ``head`` if there are several, else the newest
    attempt's.
    """
    listed = tuple(kept)
    entries = {e.save: e for e in listed if e.save.step == step and attempt in (None, int(e.save.attempt))}
    for save in line(head, listed):
        if save in entries:
            return entries[save]
    return entries[max(entries)] if entries else None


def chosen(uri: str, version: Version, step: int, attempt: int | None = None) -> Entry:
    """As :func:`find`; :class:`CheckpointNotFoundError` says which steps there are."""
    entry = find(version.kept, version.head, step, attempt)
    if entry is None:
        saves = sorted(e.save for e in version.kept)
        if attempt is None:
            there = ", ".join(map(str, sorted({s.step for s in saves})))
        else:
            there = ", ".join(f"{s.step} (attempt {s.attempt})" for s in saves)
        by = "" if attempt is None else f" by attempt {attempt}"
        raise CheckpointNotFoundError(f"{uri} has no checkpoint of step {step}{by}; it has {there or 'none'}")
    return entry


def retain(kept: tuple[Entry, ...], head: Save, policy: Policy) -> tuple[Entry, ...]:
    """What the next version lists of ``kept`` (which has ``head`` in it). Children of a dropped entry take over its parent.

    Along the line of parents stays what any rule keeps, and the newest ``lag`` more than :class:`KeepLast` says. What a rollback left
    aside is not counted, and goes once the new branch has so many commits of its own.
    """
    if not policy.keep:
        return kept
    ancestors = line(head, kept)
    aside = [e.save for e in kept if e.save not in ancestors]
    own = [save for save in ancestors if save.attempt == head.attempt]
    last = max((rule.count for rule in policy.keep if isinstance(rule, KeepLast)), default=1)
    entries = {e.save: e for e in kept}
    along = [entries[save] for save in ancestors]
    stay = {head, *ancestors[: last + policy.lag], *(e.save for e in kept if e.pinned)}
    stay = stay.union(*(_kept_by(rule, along) for rule in policy.keep))
    gone = {*ancestors, *(aside if len(own) >= last else ())} - stay
    parents = {e.save: e.parent for e in kept}

    def standing(parent: Save | None) -> Save | None:
        while parent is not None and parent in gone:
            parent = parents[parent]
        return parent

    return tuple(replace(e, parent=standing(e.parent)) for e in kept if e.save not in gone)


def _kept_by(rule: Keep, along: Sequence[Entry]) -> Iterable[Save]:
    """What ``rule`` keeps of the line of head, given newest first. No clock: the age of an entry is that before the newest one."""
    match rule:
        case KeepLast(count):
            return [e.save for e in along[:count]]
        case KeepEvery(steps):
            return {
                e.save.step // steps: e.save for e in along
            }.values()  # the last to be put in is the oldest
        case KeepBest(metric, count, mode):
            sign = 1.0 if mode == "min" else -1.0
            valued = [(sign * value, e.save) for e in along for name, value in e.metrics if name == metric]
            return [save for _, save in sorted(valued, key=lambda pair: pair[0])[:count]]
        case KeepFor(days):
            return [e.save for e in along if e.created_at >= along[0].created_at - days * 86_400]


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


@dataclass(frozen=True, slots=True)
class _Light:
    """What a deleter of ``attempt`` judges by: all versions by number, the content of the newest, and the saves that those reach which
    were the newest at some moment of the grace.
    """

    versions: Sequence[ObjectInfo]
    newest: Version
    attempt: Attempt
    recent: frozenset[Save]

    @property
    def now(self) -> float:
        """The time of the newest version: at the least so late it is by the store's clock."""
        return self.versions[-1].modified

    def sort(self, objects: Iterable[ObjectInfo]) -> tuple[list[Garbage], list[Garbage]]:
        """The objects of saves that may be deleted, and those that are spared for readers."""
        listed = [(o, save) for o in objects if (save := save_of(o.key)) is not None]
        indexed = {save for o, save in listed if o.key == index_key(save)}
        live = reached(self.newest)
        garbage: list[Garbage] = []
        spared: list[Garbage] = []
        for o, save in listed:
            if dead(save, self.newest, live, self.attempt):
                reason = Reason.DEAD if save.attempt == self.attempt else Reason.ORPHANED
                found = Garbage(o.key, o.size, Reason.RETIRED if save in indexed else reason, save)
                (spared if save in self.recent else garbage).append(found)
        return garbage, spared


def _light(run: Run, attempt: Attempt | None, grace: float) -> _Light:
    """Versions and the newest one's content, such that it is the highest in a list made after it was read."""
    while True:
        newest = run.existing()
        versions = [o for o in run.store.list(MANIFEST_PREFIX) if version_of(o.key) is not None]
        if not versions or versions[-1].key != version_key(newest.number):
            continue
        recent: set[Save] = set()
        try:
            for older, successor in itertools.pairwise(versions):
                if successor.modified > versions[-1].modified - grace:
                    number = version_of(older.key)
                    assert number is not None
                    recent |= reached(run.version(number, older.size))
        except StoreNotFoundError:
            continue  # pruned meanwhile, under a grace of more than a day
        return _Light(versions, newest, newest.attempt if attempt is None else attempt, frozenset(recent))


def reap(run: Run, attempt: Attempt | None = None, *, grace: float = GRACE) -> list[str]:
    """Delete the objects of saves that no version reaches, and of dead saves. Returns the keys.

    ``attempt`` is the deleter's own (None: that of the newest version). Whatever a version reached that was the newest at some moment
    of the last ``grace`` seconds, by the store's clock, is spared for its readers. :class:`StorePermissionError` says what stayed.
    """
    light = _light(run, attempt, grace)
    garbage, _ = light.sort(found for prefix in _SAVE_PREFIXES for found in run.store.list(prefix))
    sweep(run.store, garbage)
    return [g.key for g in garbage]


def prune(run: Run, *, life: float = VERSION_LIFE) -> int:
    """Delete versions, lowest first, whose successor is older than ``life`` seconds by the store's clock. Returns how many.

    :class:`StorePermissionError` says what stayed.
    """
    old = _outlived([o for o in run.store.list(MANIFEST_PREFIX) if version_of(o.key) is not None], life)
    sweep(run.store, old)
    return len(old)


def _outlived(versions: Sequence[ObjectInfo], life: float) -> list[Garbage]:
    """The lowest versions, as far as each one's successor is older than ``life`` seconds. Never the highest."""
    young = itertools.takewhile(
        lambda pair: pair[1].modified <= versions[-1].modified - life, itertools.pairwise(versions)
    )
    return [Garbage(older.key, older.size, Reason.VERSION) for older, _ in young]


def survey(run: Run, *, grace: float = GRACE) -> Survey:
    """What a deleter that belongs to no attempt may delete in the whole run, and why. Deletes nothing.

    ``grace`` in seconds, as for :func:`reap`; one of more than a day holds for versions and probes too.
    :class:`CheckpointNotFoundError` if there is no run here.
    """
    light = _light(run, None, grace)
    everything = list(run.store.list(""))
    garbage, spared = light.sort(everything)
    garbage.sort(key=lambda g: next(n for n, p in enumerate(_SAVE_PREFIXES) if g.key.startswith(p)))
    old = light.now - max(grace, LEFTOVER_LIFE)
    garbage += [
        Garbage(o.key, o.size, Reason.PROBE)
        for o in everything
        if _PROBE_KEY.fullmatch(o.key) and o.modified < old
    ]
    garbage += _outlived(light.versions, max(grace, VERSION_LIFE))
    return Survey(
        light.newest,
        tuple(garbage),
        tuple(spared),
        tuple(o for o in everything if not _ours(o.key)),
    )


def _ours(key: str) -> bool:
    return save_of(key) is not None or version_of(key) is not None or _PROBE_KEY.fullmatch(key) is not None


def sweep(store: ObjectStore, garbage: Sequence[Garbage]) -> None:
    """Delete what was found, versions last and one by one. :class:`StorePermissionError` says what stayed.

    May come as late after the look as it likes, and run beside others that delete the same.
    """
    at_once = [g.key for g in garbage if g.reason is not Reason.VERSION]
    # A batch may land in any order, and of versions the lowest must go first.
    one_by_one = [[g.key] for g in garbage if g.reason is Reason.VERSION]
    try:
        for keys in ([at_once] if at_once else []) + one_by_one:
            store.delete(keys)
    except StorePermissionError as error:
        size = sum(g.size for g in garbage)
        raise StorePermissionError(
            f"{store.uri}: {len(garbage)} objects that may be deleted ({size} bytes, {garbage[0].key} the first) were not, or not all "
            f"of them, as the credentials do not allow it: {error}",
            uri=store.uri,
            key=error.key,
        ) from error


def abort_uploads(store: ObjectStore, *, life: float = LEFTOVER_LIFE) -> int:
    """Abort uploads into the run that were begun more than ``life`` seconds ago by the store's clock and never ended. Returns how many.

    Whoever still works on one so old is told that it is gone; nothing of it was to be seen.
    """
    return sum(store.abort_uploads(p, life) for p in (*_SAVE_PREFIXES, MANIFEST_PREFIX, "probe/"))
