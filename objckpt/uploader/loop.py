"""The uploader's loop: a plain function over spool, store and channel.

Invariants: shard, then record, then list-and-commit, in that order for each save, oldest first; the first pass over an image, at once
after staging, is the one whose checksums count; every step can be repeated by another process after a crash at any point, and finds or
makes the same bytes.

Run by ``python -m objckpt.uploader``; tests run it in a thread.
"""

from __future__ import annotations

import itertools
import logging
import random
import threading
import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from objckpt.commit import Outcome, Run
from objckpt.errors import (
    CommitUnknownError,
    CorruptCheckpointError,
    ObjckptError,
    SpoolError,
    StoreNotFoundError,
    StorePermissionError,
    StoreTransientError,
)
from objckpt.manifest import GROUP_SIZE, Attempt, DataObject, Rank, Save, Step, encode_record, record_key
from objckpt.retention import prune, reap, retain
from objckpt.spool import Journal, Spool, clear_earlier_boots, clear_unused, hashed, scan
from objckpt.store import ObjectStore, open_store
from objckpt.store.retry import successes
from objckpt.transfer import block_checksums, upload, verify, whole_checksum
from objckpt.uploader.channel import DESCRIPTORS, Channel, Message

log = logging.getLogger(__name__)

_FIRST_POLL, _LAST_POLL = 0.02, 2.0  # seconds between looks at the bucket
_FIRST_RETRY, _LAST_RETRY = 1.0, 30.0  # seconds between tries of a save that failed for the moment
_CLEAN_AGAIN = 3_600.0  # seconds until one who was not allowed to delete tries it again
_LOCK_POLL = 0.05  # seconds between looks whether another process has let a spool go
_PROGRESS_PERIOD = 1.0  # seconds between notes of how much was done


@dataclass(slots=True)
class _Pending:
    """A save on its way. ``since`` and ``retry_at`` in seconds of the monotonic clock."""

    save: Save
    since: float
    retry_at: float = 0.0
    tries: int = 0


@dataclass(slots=True)
class _Awaited:
    """Saves of another live uploader that had bytes to send when we first looked, and when it last got on (monotonic seconds)."""

    saves: set[str]
    progress: object
    moved: float = field(default_factory=time.monotonic)

    def goes_on(self, spool: Spool, timeout: float, failed: list[str]) -> bool:
        """Whether to wait on. What that uploader took up later is not waited for: its trainer may be alive, and save for ever."""
        self.saves &= spool.pending()
        now, progress = time.monotonic(), spool.progress()
        if progress != self.progress:
            self.progress, self.moved = progress, now
        if self.saves and now - self.moved >= timeout:
            failed.append(
                f"{spool.path}: its live uploader has not got on for {timeout:.0f} s; not waiting for it"
            )
            self.saves.clear()
        return bool(self.saves)


def serve(channel: Channel) -> None:
    """Do what the trainer at the other end of ``channel`` says, until it is gone and all that it left is done."""
    opened = channel.receive(None)
    if opened is None or opened["op"] != "open":
        return
    options: dict[str, Any] = opened["storage_options"]
    try:
        store = open_store(
            opened["uri"], part_size=opened["part_size"], connections=opened["concurrency"], **options
        )
    except (ObjckptError, OSError) as error:
        log.exception("the store cannot be opened")
        channel.send({"op": "broken", "error": f"{type(error).__name__}: {error}"})
        return
    _Uploader(channel, store, opened).run()


class _Uploader:
    def __init__(self, channel: Channel, store: ObjectStore, opened: Message) -> None:
        self._channel = channel
        self._store = store
        self._run = Run(store, retain=retain)
        self._id: str = opened["run"]
        self._rank = Rank(opened["rank"])
        self._linger: float = opened["linger"]
        self._save_timeout: float = opened["save_timeout"]
        self._spool: Spool | None = None
        self._attempt = Attempt(0)
        self._todo: deque[_Pending] = deque()
        self._newest: Save | None = None  # of those that the trainer told of, or that a journal did
        self._uncommitted: dict[Save, float] = {}  # rank 0: durable saves, and since when
        self._poll = _FIRST_POLL
        self._adopted: list[Spool] = []
        self._adoption: threading.Thread | None = None
        self._released = False
        self._gone_since: float | None = None
        self._closing = False
        self._remove = False
        self._hurry = False
        self._fenced = False
        self._clean_at = 0.0  # monotonic: before, nothing is deleted
        self._told_undeleted = False
        self._ended = threading.Event()

    # -------------------------------------------------------------- the loop

    def run(self) -> None:
        """Until closed, or the trainer is gone and nothing is left to do."""
        threading.Thread(target=self._note_progress, name="progress", daemon=True).start()
        try:
            self._work()
        finally:
            self._ended.set()
        self._channel.send({"op": "closed"})

    def _work(self) -> None:
        while not self._finished():
            message = self._channel.receive(self._delay())
            while message is not None:
                self._handle(message)
                message = self._channel.receive(0)
            if self._released and not self._adopting():
                while self._adopted:
                    self._adopted.pop().remove()
            now = time.monotonic()
            if self._todo and self._todo[0].retry_at <= now:
                self._advance(self._todo[0])
            elif self._uncommitted and not self._todo:
                self._look()
        if self._spool is not None:
            if self._remove and not self._todo:
                self._spool.remove()
            else:
                self._spool.close()

    def _note_progress(self) -> None:
        """For the start of another attempt on this node, which waits as long as this one gets on."""
        noted = successes()
        while not self._ended.wait(_PROGRESS_PERIOD):
            if successes() == noted:
                continue
            noted = successes()
            for spool in (self._spool, *self._adopted):
                if spool is not None:
                    try:
                        spool.write_progress(noted)
                    except (SpoolError, OSError) as error:  # removed or closed meanwhile, or its disk is full
                        log.debug("progress is not noted: %s", error)

    def _finished(self) -> bool:
        if self._adopting():
            return False
        if self._gone_since is not None:
            late = time.monotonic() - self._gone_since > self._linger
            return late or not self._todo  # whoever writes the last record of a save commits it
        return self._closing and not self._todo and not self._uncommitted

    def _adopting(self) -> bool:
        return self._adoption is not None and self._adoption.is_alive()

    def _delay(self) -> float | None:
        if self._todo:
            return max(0.0, self._todo[0].retry_at - time.monotonic())
        if self._adopting():
            return _LOCK_POLL
        if self._uncommitted:
            self._poll = min(self._poll * 1.5, _LAST_POLL)
            return self._poll * random.uniform(0.5, 1.0)
        return None

    def _handle(self, message: Message) -> None:
        match message["op"]:
            case "adopt":
                roots = [Path(path) for path in message["roots"]]
                self._adoption = threading.Thread(
                    target=self._adopt, args=(roots, message["timeout"]), name="adoption"
                )
                self._adoption.start()
            case "release":
                self._released = True
            case "spool":
                self._take(Path(message["path"]), Attempt(message["attempt"]))
            case "slots":
                assert self._spool is not None  # the trainer makes slots after it was told of the spool
                for number, descriptor in zip(message["numbers"], message[DESCRIPTORS], strict=True):
                    self._spool.lend(number, descriptor)
            case "attempt":
                self._attempt = Attempt(message["attempt"])
            case "save":
                save = self._newest = _save(message["save"])
                if all(pending.save != save for pending in self._todo):  # else the journal was found before
                    add = self._todo.appendleft if self._hurry else self._todo.append
                    add(_Pending(save, time.monotonic()))
            case "look":
                self._uncommitted.setdefault(_save(message["save"]), time.monotonic())
            case "hurry":
                self._hurry = True
                self._todo = deque(sorted(self._todo, key=lambda p: p.save, reverse=True))
            case "close":
                self._closing, self._remove = True, bool(message["remove"])
            case "gone":
                self._gone_since = time.monotonic()
                self._find_untold()
            case other:
                log.error("message %r is unknown", other)

    def _take(self, path: Path, attempt: Attempt) -> None:
        """Own the trainer's spool: a fresh one, or that of an uploader of ours that died."""
        self._spool = Spool(path)
        self._attempt = attempt
        while not self._spool.lock():
            time.sleep(_LOCK_POLL)  # an uploader of ours that is about to be reaped
        if path.name.startswith("."):
            self._spool.publish(attempt, self._rank)
        for journal in self._spool.journals():
            self._newest = journal.save
            self._todo.append(_Pending(journal.save, time.monotonic()))
        self._tell("spool", path=str(self._spool.path))

    def _find_untold(self) -> None:
        """Take up saves that the trainer journalled but did not come to tell of before it died."""
        if self._spool is not None:
            for journal in self._spool.journals():
                if self._newest is None or journal.save > self._newest:
                    self._todo.append(_Pending(journal.save, time.monotonic()))

    def _tell(self, op: str, save: Save | None = None, **fields: object) -> None:
        if save is not None:
            fields["save"] = [save.attempt, save.step]
        self._channel.send({"op": op, **fields})

    # -------------------------------------------------------------- one save

    def _advance(self, pending: _Pending) -> None:
        """Try to bring one save to the bucket, and to commit it."""
        spool, save = self._spool, pending.save
        assert spool is not None  # the trainer sends the spool before any save
        if self._fenced:
            self._todo.popleft()
            self._tell("fenced", save)
            return
        try:
            outcome = self._push(spool, spool.journal(save), tell=True)
        except (StoreTransientError, CommitUnknownError) as error:
            self._postpone(pending, error)
        except (ObjckptError, OSError) as error:
            log.exception("save %s failed", save)
            self._todo.popleft()
            self._tell("failed", save, error=f"{type(error).__name__}: {error}")
        else:
            self._todo.popleft()
            self._settle(save, outcome)

    def _postpone(self, pending: _Pending, error: ObjckptError) -> None:
        now = time.monotonic()
        limit = self._save_timeout if self._gone_since is None else self._linger
        if now - pending.since > limit:
            self._todo.popleft()
            self._tell("failed", pending.save, error=f"not durable after {limit:.0f} s: {error}")
            return
        pending.tries += 1
        wait = min(_FIRST_RETRY * 2 ** (pending.tries - 1), _LAST_RETRY) * random.uniform(0.5, 1.0)
        pending.retry_at = now + wait
        log.warning("save %s: %s; again in %.1f s", pending.save, error, wait)
        self._tell("delayed", pending.save, error=str(error))

    def _push(self, spool: Spool, journal: Journal, *, tell: bool) -> Outcome:
        """Hash, shard, record, list-and-commit. Each step is done again or found done."""
        save, record = journal.save, journal.record
        began = time.monotonic()
        crcs = spool.checksums(save)
        resumed = crcs is not None
        # Unmapped when the last view goes, not by close(): a traceback on its way may hold one.
        data = memoryview(spool.image(journal))
        if crcs is None:
            crcs = block_checksums(data, record.objects[0].block_size)
            # The trainer may have given the save up (its deadline, a peer's failure) and the slot away while we read it.
            if not spool.holds(save):
                raise SpoolError(
                    f"slot {journal.slot} of {spool.path} was given to another save before {save} was uploaded"
                )
            spool.write_checksums(save, crcs)
        if len(crcs) != len(record.objects[0].crc64):
            raise CorruptCheckpointError(
                f"{spool.path}: {len(crcs)} checksums for save {save}, not {len(record.objects[0].crc64)}"
            )
        record = hashed(journal, crcs)
        (obj,) = record.objects
        if not (resumed and (spool.durable(save) or self._there(obj))):
            verify(obj, 0, data, f"slot {journal.slot} of {spool.path}")
            upload(self._store, obj, data)
        if not self._store.create(record_key(save, record.rank), encode_record(record)):
            raise CorruptCheckpointError(
                f"{self._store.uri}/{record_key(save, record.rank)} exists with other content: two jobs share attempt {save.attempt} "
                f"(equal launch ids?). Nothing was committed."
            )
        spool.mark_durable(save)
        seconds = time.monotonic() - began
        if tell:
            self._tell("durable", save, seconds=seconds, nbytes=obj.size)
            self._release_older(spool, save)
        log.info("save %s: %d bytes durable after %.3f s", save, obj.size, seconds)
        return self._run.commit(save, record.world_size, folder=record.rank // GROUP_SIZE)

    def _there(self, obj: DataObject) -> bool:
        """Whether a shard was uploaded before, as far as the store can vouch for it."""
        try:
            info = self._store.head(obj.key)
        except StoreNotFoundError:
            return False
        return info.size == obj.size and info.crc64 == whole_checksum(obj)

    @staticmethod
    def _release_older(spool: Spool, save: Save) -> None:
        """All but the newest slot go back to the kernel: its cache counts against a container's memory."""
        for journal in spool.journals():
            if journal.save < save:
                spool.release_pages(journal.slot)

    def _settle(self, save: Save, outcome: Outcome) -> None:
        """Tell the trainer how a durable save ended, or go on watching it if we are the one who does."""
        match outcome:
            case Outcome.COMMITTED:
                self._tell("committed", save)
                self._clean()
            case Outcome.INCOMPLETE:
                if self._rank == 0:
                    self._uncommitted[save] = time.monotonic()
                    self._poll = _FIRST_POLL
            case Outcome.FENCED:
                self._fenced = True
                self._tell("fenced", save)
            case Outcome.SUPERSEDED | Outcome.REFUSED:
                self._tell(
                    "failed",
                    save,
                    error=f"{outcome.value}: a later save was committed first, or its base is gone",
                )

    def _look(self) -> None:
        """Rank 0: are the other ranks' records there, or has a peer committed?"""
        for save, since in list(self._uncommitted.items()):
            try:
                version, outcome = self._run.settled(save)
                if outcome is None:
                    outcome = self._run.commit(save, version.world_size, folder=0)
            except (StoreTransientError, CommitUnknownError) as error:
                log.warning("save %s: %s; looking again", save, error)
                outcome = Outcome.INCOMPLETE
            except (ObjckptError, OSError) as error:
                log.exception("save %s failed", save)
                del self._uncommitted[save]
                self._tell("failed", save, error=f"{type(error).__name__}: {error}")
                continue
            if outcome is not Outcome.INCOMPLETE:
                del self._uncommitted[save]
                self._settle(save, outcome)
            elif time.monotonic() - since > self._save_timeout:
                del self._uncommitted[save]
                self._tell(
                    "failed",
                    save,
                    error=f"not every rank's record was there after {self._save_timeout:.0f} s",
                )

    def _clean(self) -> None:
        """Rank 0, between saves: delete what no version reaches. Never delays a save, never fails one."""
        if (
            self._rank != 0
            or self._todo
            or self._hurry
            or self._gone_since is not None
            or time.monotonic() < self._clean_at
        ):
            return
        try:
            deleted = reap(self._run, self._attempt)
            prune(self._run)
        except StorePermissionError as error:
            self._leave_to_gc(error)
        except (ObjckptError, OSError):
            log.exception("retention could not delete; the next commit tries again")
        else:
            if deleted:
                log.info("deleted %d objects that no version reaches", len(deleted))

    def _leave_to_gc(self, error: StorePermissionError) -> None:
        """The credentials may save and not delete: said once, and tried again rarely, as they may also have expired for a moment."""
        self._clean_at = time.monotonic() + _CLEAN_AGAIN
        if self._told_undeleted:
            log.info("still not allowed to delete: %s", error)
            return
        self._told_undeleted = True
        text = (
            f"run {self._id}: checkpoints are saved and retired, but what was retired stays in the bucket: {error}. Run "
            f"`objckpt gc {self._store.uri}` from time to time, under a role that may delete"
        )
        log.warning("%s", text)
        self._tell("undeleted", error=text)

    # -------------------------------------------------------------- adoption

    def _adopt(self, roots: list[Path], timeout: float) -> None:
        """Finish what earlier uploaders of this run left on this node; wait for those that are alive, as long as they get on."""
        finished: list[str] = []
        failed: list[str] = []
        try:
            self._adopt_all(roots, timeout, finished, failed)
            for where in roots:
                clear_unused(where)
                clear_earlier_boots(where)
        except OSError as error:  # told, or the start would wait for the answer for ever
            log.exception("adoption below %s ended early", ", ".join(map(str, roots)))
            failed.append(str(error))
        self._tell("adopted", finished=finished, failed=failed)

    def _adopt_all(self, roots: list[Path], timeout: float, finished: list[str], failed: list[str]) -> None:
        waiting: dict[Path, _Awaited] = {}
        while True:
            busy = False
            ours = {spool.path for spool in self._adopted}
            for spool in itertools.chain.from_iterable(map(scan, roots)):
                if spool.path in ours:
                    spool.close()
                    continue
                if not spool.lock():
                    awaited = waiting.setdefault(spool.path, _Awaited(spool.pending(), spool.progress()))
                    busy |= awaited.goes_on(spool, timeout, failed)
                    spool.close()
                    continue
                self._adopted.append(spool)
                for journal in spool.journals():
                    self._finish(spool, journal, finished, failed)
            if not busy:
                break
            time.sleep(_LOCK_POLL)

    def _finish(self, spool: Spool, journal: Journal, finished: list[str], failed: list[str]) -> None:
        save = journal.save
        if journal.record.run != self._id:
            return
        try:
            outcome = self._push(spool, journal, tell=False)
        except (ObjckptError, OSError) as error:
            log.exception("adopted save %s could not be finished", save)
            failed.append(f"{save}: {type(error).__name__}: {error}")
        else:
            log.info("adopted save %s of rank %d: %s", save, journal.record.rank, outcome.value)
            finished.append(f"{save}: {outcome.value}")


def _save(pair: list[int]) -> Save:
    return Save(Attempt(pair[0]), Step(pair[1]))
