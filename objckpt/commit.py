"""The manifest's versions: start, commit, roll-forward, rollback, finish. Alone in writing them.

Invariants (checked by an explicit-state model before they were written here):

- a checkpoint exists if and only if the newest version lists it, and the newest version is the one with the highest number;
- every change is the ``create`` of version n+1 computed from version n, and counts only if n+1 is the highest number in a list
  made *after* the create: a frozen writer may otherwise win a number that was pruned long ago;
- a version lists a save only if all its rank records exist, its index was created from them, and all its bases are listed;
- saves are committed in the order of steps within an attempt, and only while that attempt is the newest: a start and a commit meet
  on one key, and one of them loses.

Losing a race is a result here, not an exception. Called by ``uploader`` (commit), ``checkpointer`` (start, finish, reading) and ``cli``
(reading). The steps of a start that lie before the version (adoption of spools, the agreement of all ranks) are the caller's.
"""

from __future__ import annotations

import enum
import logging
import random
import secrets
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TypeVar

from awscrt.checksums import crc64nvme

from objckpt.errors import (
    CheckpointNotFoundError,
    CorruptCheckpointError,
    FencedError,
    FormatVersionError,
    StoreNotFoundError,
    StorePermissionError,
    StoreUnsuitableError,
)
from objckpt.manifest import (
    GROUP_SIZE,
    JSON,
    MANIFEST_PREFIX,
    Attempt,
    Entry,
    GroupRecord,
    Index,
    Policy,
    Rank,
    RankRecord,
    Reference,
    Save,
    Version,
    decode_group,
    decode_index,
    decode_record,
    decode_version,
    encode_group,
    encode_index,
    encode_version,
    folder_prefix,
    group_key,
    group_of,
    groups,
    groups_prefix,
    index_key,
    probe_key,
    rank_of,
    record_key,
    records_prefix,
    save_of,
    version_key,
    version_of,
)
from objckpt.store import ObjectStore, read_all

log = logging.getLogger(__name__)

T = TypeVar("T")
R = TypeVar("R")

#: Which entries the next version lists, given the entries with the new one, the new head, and the policy.
Retain = Callable[[tuple[Entry, ...], Save, Policy], tuple[Entry, ...]]

#: Requests in flight when the records of one save are read.
_READERS = 8
#: Longest random wait, in seconds, of a rank that found all records before it commits: usually a peer has done it by then.
_COMMIT_WAIT = 0.05
#: Numbers of its metadata that an entry repeats: every version lists every entry.
_METRICS = 64
_LARGEST = sys.float_info.max


class Outcome(enum.Enum):
    """How a commit ended. Only COMMITTED means that the checkpoint exists."""

    COMMITTED = "committed"
    INCOMPLETE = "incomplete"  # some rank's record is missing: whoever writes the last one commits
    SUPERSEDED = "superseded"  # a later save of the attempt was committed first: this one never will be
    FENCED = "fenced"  # another attempt has taken over
    REFUSED = "refused"  # a base is no longer listed


@dataclass(frozen=True, slots=True)
class Contents:
    """What is in one committed checkpoint: its index, and its rank records in order of rank."""

    index: Index
    records: tuple[RankRecord, ...]


class Run:
    """The manifest of the run at the root of ``store``. Holds no state but a hint where the newest version was; safe for threads."""

    def __init__(
        self,
        store: ObjectStore,
        *,
        retain: Retain,
        pause: Callable[[float], None] = time.sleep,
    ) -> None:
        self.store = store
        self._retain = retain
        self._pause = pause
        self._latest: Version | None = None  # the newest one seen; its number is where listing begins

    # -------------------------------------------------------------- reading

    def newest(self) -> Version | None:
        """The highest version; None if there is no run here. Two requests, one if it has not changed since the last call."""
        while True:
            known = self._latest
            found = self._newest_key(known.number if known else 0)
            if found is None:
                if known is None:
                    return None
                # Versions only ever grow: the hint's version is missing only if somebody removed the whole run.
                self._latest = None
                continue
            number, size = found
            if known is not None and number == known.number:
                return known  # a number that is the highest keeps its content: only lower ones are pruned and freed
            try:
                self._latest = self.version(number, size)
            except StoreNotFoundError:
                continue  # pruned between list and read, so there is a higher one
            return self._latest

    def version(self, number: int, size: int | None = None) -> Version:
        """Version ``number``, of ``size`` bytes if they are known. :class:`StoreNotFoundError` if it was pruned."""
        return self._read(version_key(number), size, lambda data: decode_version(data, number))

    def _read(self, key: str, size: int | None, decode: Callable[[bytes], T]) -> T:
        """A record, decoded. One that does not verify is read once more: the damage may have come on the way."""
        try:
            return decode(read_all(self.store, key, size))
        except CorruptCheckpointError as error:
            log.warning("%s: %s Reading it once more", self.store.uri, error)
        try:
            return decode(read_all(self.store, key, size))
        except CorruptCheckpointError as error:
            raise type(error)(f"{self.store.uri}: {error}") from error

    def _highest(self, known: int = 0) -> int | None:
        found = self._newest_key(known)
        return None if found is None else found[0]

    def _newest_key(self, known: int) -> tuple[int, int] | None:
        """Number and size of the highest version, listed from ``known`` on."""
        after = version_key(known - 1) if known > 0 else ""
        listed = self.store.list(MANIFEST_PREFIX, after)
        return max(((n, o.size) for o in listed if (n := version_of(o.key))), default=None)

    def existing(self) -> Version:
        """The highest version, or :class:`CheckpointNotFoundError` if there is no run here."""
        version = self.newest()
        if version is None:
            raise CheckpointNotFoundError(
                f"There is no run at {self.store.uri}: no version of a manifest was found. Check the URI; a job makes the run when "
                f"it calls restore() or save() for the first time."
            )
        return version

    def index(self, entry: Entry) -> Index:
        """The index of a listed checkpoint, verified."""
        return self._referenced(entry.index, lambda data: decode_index(data, entry.save))

    def contents(self, entry: Entry) -> Contents:
        """Index and rank records of a listed checkpoint, each verified against what names it."""
        index = self.index(entry)
        records = tuple(r for batch in self._each(self.records, index.records, entry.save) for r in batch)
        if [r.rank for r in records] != list(range(index.world_size)):
            raise CorruptCheckpointError(
                f"{entry.index.key}: its records are not those of {index.world_size} ranks"
            )
        return Contents(index, records)

    def _referenced(self, ref: Reference, decode: Callable[[bytes], T]) -> T:
        def checked(data: bytes) -> T:
            found = _refer(ref.key, data)
            if found != ref:
                raise CorruptCheckpointError(
                    f"{ref.key} is damaged: {found.size} bytes with CRC-64 {found.crc64:016x}, not {ref.size} with {ref.crc64:016x}. "
                    f"Nothing of it was used."
                )
            return decode(data)

        try:
            return self._read(ref.key, ref.size, checked)
        except StoreNotFoundError as error:
            raise CorruptCheckpointError(
                f"{self.store.uri}/{ref.key} is missing though a checkpoint names it: somebody deleted it."
            ) from error

    def records(self, ref: Reference, save: Save) -> tuple[RankRecord, ...]:
        """The rank records behind one reference of an index, verified: one, or those of a group."""
        group = group_of(ref.key)
        if group is not None:
            return self._referenced(ref, lambda data: decode_group(data, save, group).records)
        rank = rank_of(ref.key)
        assert rank is not None  # decode_index has checked the keys
        return self._referenced(ref, lambda data: (decode_record(data, save, rank),))

    @staticmethod
    def _each(read: Callable[[T, Save], R], items: Sequence[T], save: Save) -> list[R]:
        if len(items) == 1:
            return [read(items[0], save)]
        with ThreadPoolExecutor(min(_READERS, max(1, len(items)))) as pool:
            return list(pool.map(lambda item: read(item, save), items))

    # -------------------------------------------------------------- writing a version

    def _won(self, version: Version) -> bool:
        """Create the version. True only if it is the highest in a list made after the create."""
        if not self.store.create(version_key(version.number), encode_version(version)):
            return False
        return self._highest(version.number) == version.number

    # -------------------------------------------------------------- start

    def prove(self) -> None:
        """Refuse a store that lets a second ``create`` of one key pass: no promise of ours would hold on it."""
        key = probe_key(secrets.token_hex(12))
        first = self.store.create(key, b"first\n")
        second = self.store.create(key, b"second\n")
        try:
            self.store.delete([key])
        except StorePermissionError:
            log.debug("may not delete %s; gc does", key)
        if not first or second:
            raise StoreUnsuitableError(
                f"{self.store.uri} does not honour put-if-absent: a second create of {key} was "
                f"{'accepted' if second else 'the only one to succeed'}. Two jobs could overwrite each other's checkpoints, so "
                f"objckpt does not write there. Use a store with conditional writes, such as AWS S3, GCS or SeaweedFS.",
                uri=self.store.uri,
                key=key,
            )

    def start(
        self,
        *,
        launch: str,
        world_size: int,
        policy: Policy,
        takeover: int | None = None,
        rollback: Save | None = None,
    ) -> Version:
        """Begin an attempt: roll complete saves forward, then create the start version. Returns it.

        ``launch`` names the launch of the job (a requeue keeps it); ``takeover`` the attempt that a superseded launch may supersede
        all the same; ``rollback`` an older checkpoint to resume from, which fences what runs and rolls nothing forward.

        Raises :class:`FencedError` if this launch was superseded, :class:`CheckpointNotFoundError` if ``rollback`` is not listed.
        """
        while True:
            now = self.newest()
            if now is not None:
                now = self._admit(now, launch, takeover)
                if rollback is None:
                    rolled = self.roll_forward(now)
                    if rolled.attempt != now.attempt:
                        continue  # a rival started meanwhile: it may have superseded this launch, and has saves of its own
                    now = rolled
            number = 1 if now is None else now.number + 1
            head = now.head if now is not None else None
            if rollback is not None:
                if now is None or now.entry(rollback) is None:
                    raise CheckpointNotFoundError(
                        f"{self.store.uri} has no checkpoint {rollback} to go back to; `objckpt ls` lists what there is."
                    )
                head = rollback
            version = Version(
                number=number,
                change="start" if rollback is None else "rollback",
                run=now.run if now is not None else secrets.token_hex(8),
                attempt=Attempt(number),
                launch=launch,
                nonce=secrets.token_hex(8),
                world_size=world_size,
                policy=policy,
                superseded=() if now is None else superseded(now, launch),
                head=head,
                kept=() if now is None else now.kept,
            )
            if self._won(version):
                log.debug("%s: attempt %d started by launch %s", self.store.uri, version.attempt, launch)
                return version

    def _admit(self, now: Version, launch: str, takeover: int | None) -> Version:
        """The newest version, if ``launch`` may start after it."""
        while launch in now.superseded and takeover != now.attempt:
            again = self.existing()  # a job that finished may just have cleared the list
            if again.number == now.number:
                raise FencedError(
                    f"{self.store.uri}: launch {launch!r} was superseded by {now.launch!r}, which is now attempt {now.attempt}. If it "
                    f"started again, the two would fence each other for ever. If that attempt is not wanted, stop it, then start "
                    f"this one with takeover={now.attempt}."
                )
            now = again
        return now

    def roll_forward(self, now: Version) -> Version:
        """Commit the newest attempt's complete saves that are newer than its newest commit, oldest first. Returns the newest version.

        Groups that a dead rank left unmerged are merged here. A save that is refused (its base is gone) or damaged is passed over:
        else no job could start here again.
        """
        for save in self._complete(now):
            try:
                outcome = self.commit(save, now.world_size, change="roll-forward")
            except FormatVersionError:
                raise
            except CorruptCheckpointError:
                log.exception(
                    "%s: save %s is complete but damaged, and is not committed", self.store.uri, save
                )
            else:
                log.info(
                    "%s: save %s was complete but not committed: %s", self.store.uri, save, outcome.value
                )
        return self.existing()

    def _complete(self, now: Version) -> list[Save]:
        """Saves of the newest attempt with a record of every rank, newer than its newest commit, by step."""
        ranks: dict[Save, set[Rank]] = {}
        newest = now.newest_commit()
        for found in self.store.list(records_prefix(now.attempt)):
            save, rank = save_of(found.key), rank_of(found.key)
            if save is not None and rank is not None and (newest is None or save.step > newest):
                ranks.setdefault(save, set()).add(rank)
        return sorted(s for s, found in ranks.items() if found >= set(range(now.world_size)))

    # -------------------------------------------------------------- commit

    def commit(
        self, save: Save, world_size: int, *, folder: int | None = None, change: str = "commit"
    ) -> Outcome:
        """Commit ``save`` if all its records exist, older complete saves of the attempt first.

        ``folder`` is the caller's own folder of records, the only one it merges above 256 ranks; None merges all.
        """
        index = self._index(save, world_size, folder)
        if index is None:
            return Outcome.INCOMPLETE
        if world_size > 1:
            self._pause(random.uniform(0, _COMMIT_WAIT))
        now, outcome = self.settled(save)
        if outcome is not None:
            return outcome
        for older in self._complete(now):
            if older < save:
                try:
                    index_of_older = self._index(older, world_size, None)
                    if index_of_older is not None:
                        self._append(index_of_older, change)
                except CorruptCheckpointError:
                    log.exception(
                        "%s: save %s is complete but damaged, and is not committed", self.store.uri, older
                    )
        return self._append(index, change)

    def settled(self, save: Save) -> tuple[Version, Outcome | None]:
        """The newest version and what it says of ``save``, told only if it is the highest in a list made after it was read.

        Else, after a freeze of a day between list and read, it may be another that a frozen peer wrote to a pruned number.
        """
        while True:
            now = self.existing()
            outcome = settled(now, save)
            if outcome is None or self._highest(now.number) == now.number:
                return now, outcome

    def _append(self, index: Index, change: str) -> Outcome:
        save, data = index.save, encode_index(index)
        if not self.store.create(index_key(save), data):
            raise CorruptCheckpointError(
                f"{self.store.uri}/{index_key(save)} exists with other content than its records give: two writers share attempt "
                f"{save.attempt}. Nothing was committed."
            )
        reference, metrics = _refer(index_key(save), data), _metrics(index.metadata)
        while True:
            now, outcome = self.settled(save)
            if outcome is not None:
                return outcome
            if any(now.entry(base) is None for base in index.bases):
                return Outcome.REFUSED
            entry = Entry(
                save,
                now.head,
                index.world_size,
                index.nbytes,
                index.created_at,
                reference,
                index.bases,
                metrics=metrics,
            )
            version = replace(
                now,
                number=now.number + 1,
                change=change,
                nonce=secrets.token_hex(8),
                head=save,
                kept=self._retain((*now.kept, entry), save, now.policy),
            )
            if self._won(version):
                return Outcome.COMMITTED

    def _index(self, save: Save, world_size: int, folder: int | None) -> Index | None:
        """The index of a save, a pure function of its records; None while some are missing."""
        count = groups(world_size)
        if count == 1:
            found = self._folder(save, 0, world_size)
            return None if found is None else _index_of(save, world_size, found)
        for group in range(count) if folder is None else (folder,):
            if (members := self._folder(save, group, world_size)) is not None:
                # A group record that exists is no reason to stop: its writer may have died before it looked at the others.
                run = members[0][1].run
                merged = GroupRecord(run, save, group, world_size, tuple(r for _, r in members))
                if not self.store.create(group_key(save, group), encode_group(merged)):
                    raise CorruptCheckpointError(
                        f"{self.store.uri}/{group_key(save, group)} exists with other content than its records give"
                    )
        present = {group_of(o.key) for o in self.store.list(groups_prefix(save))}
        if not present >= set(range(count)):
            return None

        def read(group: int, save: Save) -> tuple[Reference, tuple[RankRecord, ...]]:
            key = group_key(save, group)
            return self._read(
                key, None, lambda data: (_refer(key, data), decode_group(data, save, group).records)
            )

        try:
            parts = self._each(read, range(count), save)
        except StoreNotFoundError:
            return None  # listed, then deleted: the save is dead, as the newest version says
        return _index_of(save, world_size, [(ref, r) for ref, records in parts for r in records])

    def _folder(self, save: Save, group: int, world_size: int) -> list[tuple[Reference, RankRecord]] | None:
        """Reference and content of the records of one folder, by rank; None while some are missing."""
        first = group * GROUP_SIZE
        wanted = range(first, min(first + GROUP_SIZE, world_size))
        sizes = {rank_of(o.key): o.size for o in self.store.list(folder_prefix(save, group))}
        if not sizes.keys() >= set(wanted):
            return None

        def read(rank: int, save: Save) -> tuple[Reference, RankRecord]:
            key = record_key(save, Rank(rank))
            size = sizes[Rank(rank)]
            return self._read(
                key, size, lambda data: (_refer(key, data), decode_record(data, save, Rank(rank)))
            )

        try:
            return self._each(read, wanted, save)
        except StoreNotFoundError:
            return None  # listed, then deleted: the save is dead, as the newest version says

    # -------------------------------------------------------------- by hand

    def pin(self, save: Save, *, pinned: bool = True) -> Version:
        """Exempt a checkpoint from retention for good, or no longer. Disturbs no job. :class:`CheckpointNotFoundError`."""
        while True:
            now = self._listing(save)
            entry = now.entry(save)
            if entry is not None and entry.pinned == pinned:
                return now
            version = replace(
                now,
                number=now.number + 1,
                change="pin" if pinned else "unpin",
                nonce=secrets.token_hex(8),
                kept=tuple(replace(e, pinned=pinned) if e.save == save else e for e in now.kept),
            )
            if self._won(version):
                return version

    def rollback(self, save: Save) -> Version:
        """Make ``save`` what the next start resumes from: an attempt of no job, which fences what runs. Deletes nothing.

        Supersedes no launch: the job that was fenced by it may start again, from there. :class:`CheckpointNotFoundError`.
        """
        while True:
            now = self._listing(save)
            number = now.number + 1
            version = replace(
                now,
                number=number,
                change="rollback",
                attempt=Attempt(number),
                launch=None,
                nonce=secrets.token_hex(8),
                head=save,
            )
            if self._won(version):
                return version

    def _listing(self, save: Save) -> Version:
        """The newest version, which lists ``save``."""
        now = self.existing()
        if now.entry(save) is None:
            raise CheckpointNotFoundError(
                f"{self.store.uri} has no checkpoint {save} (any more); `objckpt ls` lists what there is."
            )
        return now

    # -------------------------------------------------------------- end

    def finish(self, attempt: Attempt) -> bool:
        """Say that the job of ``attempt`` has finished: clears the list of superseded launches. False if another attempt took over."""
        while True:
            now = self.existing()
            if now.attempt != attempt:
                return False
            if now.launch is None:
                return True
            version = replace(
                now,
                number=now.number + 1,
                change="finish",
                nonce=secrets.token_hex(8),
                launch=None,
                superseded=(),
            )
            if self._won(version):
                return True


def settled(now: Version, save: Save) -> Outcome | None:
    """What the newest version says of ``save``, None while it is still open."""
    if now.entry(save) is not None:
        return Outcome.COMMITTED  # even if another attempt has started since
    if now.attempt != save.attempt:
        return Outcome.FENCED
    newest = now.newest_commit()
    return Outcome.SUPERSEDED if newest is not None and newest >= save.step else None


def superseded(now: Version, launch: str) -> tuple[str, ...]:
    """The launches that may not start again once ``launch`` has started after ``now``."""
    gone: Iterable[str] = (*now.superseded, *(() if now.launch is None else (now.launch,)))
    return tuple(sorted({other for other in gone if other != launch}))


def _refer(key: str, data: bytes) -> Reference:
    return Reference(key, len(data), crc64nvme(data))


def _metrics(metadata: JSON) -> tuple[tuple[str, float], ...]:
    """The numbers at the top of a save's metadata, the first ``_METRICS`` of them."""
    if not isinstance(metadata, dict):
        return ()
    numbers = [
        (name, float(value))
        for name, value in metadata.items()
        if isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= _LARGEST
    ]
    return tuple(numbers[:_METRICS])


def _index_of(save: Save, world_size: int, found: list[tuple[Reference, RankRecord]]) -> Index:
    records = [record for _, record in found]
    first = records[0]
    for record in records:
        if record.run != first.run or record.world_size != world_size:
            raise CorruptCheckpointError(
                f"{record_key(save, record.rank)}: run {record.run} with {record.world_size} ranks, not {first.run} with {world_size}"
            )
    sizes = {o.key: o.size for r in records for o in r.objects}
    return Index(
        run=first.run,
        save=save,
        world_size=world_size,
        created_at=first.created_at,
        metadata=first.metadata,
        nbytes=sum(sizes.values()),
        bases=tuple(sorted({base for r in records for base in r.bases})),
        records=tuple(dict.fromkeys(ref for ref, _ in found)),
    )
