"""The saves of one rank between its slots and the bucket: the trainer's books on what its uploader does.

Invariants: a slot is handed out only when nothing in it is still on its way and it does not hold the newest durable image; each future is
resolved once, with what really happened; an uploader that dies is started again and finds its work in the journals.

Called by ``checkpointer``. Events come in a thread of the channel.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from objckpt.config import Config
from objckpt.errors import FencedError, ObjckptError, SaveFailedError, SpoolError, WorldError
from objckpt.manifest import JSON, Attempt, Rank, RankRecord, Save, Step
from objckpt.spool import Slot, Spool
from objckpt.uploader import UploaderProcess
from objckpt.uploader.channel import Message

log = logging.getLogger(__name__)

_RESTARTS = 3  # of an uploader that dies, in a row, before saves fail
_READY_TIMEOUT = 60.0  # seconds for a new uploader to take its spool
_HEADROOM = 1.02  # a slot is larger than the first image: states of loaders grow a little
_UNIT = 1 << 20
_FIRST_LOOK, _LAST_LOOK = 0.02, 1.0  # seconds between looks of a rank that waits for a future
_REMEMBERED = 100  # settled saves whose futures are kept, should a step be saved again


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A committed checkpoint. ``step`` counts optimizer steps done; ``nbytes`` is the size of its shards; ``created_at`` is in seconds
    since the epoch, at staging; ``metadata`` is what ``save`` was given.
    """

    step: int
    attempt: int
    world_size: int
    nbytes: int
    created_at: float
    metadata: JSON = None


class _Followed(Future[Checkpoint]):
    """The future of a save that other ranks take part in: whoever waits for it looks what they told."""

    def __init__(self, look: Callable[[], None]) -> None:
        super().__init__()
        self._look = look

    def result(self, timeout: float | None = None) -> Checkpoint:
        """See :class:`Future`."""
        self._follow(timeout)
        return super().result(0)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """See :class:`Future`."""
        self._follow(timeout)
        return super().exception(0)

    def _follow(self, timeout: float | None) -> None:
        deadline = None if timeout is None else time.monotonic() + timeout
        pause = _FIRST_LOOK
        while not self.done():
            self._look()
            left = pause if deadline is None else min(pause, deadline - time.monotonic())
            if left <= 0:
                break
            wait_for([self], left)
            pause = min(pause * 1.5, _LAST_LOOK)


@dataclass(slots=True, eq=False)
class _Tracked:
    """A save in this rank's books. ``staged`` in seconds of the monotonic clock."""

    save: Save
    slot: int
    checkpoint: Checkpoint
    stall: float
    nbytes: int
    future: Future[Checkpoint]
    staged: float = field(default_factory=time.monotonic)
    durable: bool = False
    upload: float = 0.0
    answered: bool = False

    def __post_init__(self) -> None:
        # What is on its way cannot be called back: a cancelled future would give its slot away while it is being read.
        self.future.set_running_or_notify_cancel()

    @property
    def settled(self) -> bool:
        """Nothing of it is on its way any more."""
        return self.durable or self.future.done()


class Saves:
    """Slots, uploader and futures of one rank.

    ``outcome`` is called, in any thread, with what the other ranks should hear of a save: on rank 0 what became of it, elsewhere that
    it failed here. ``peek`` tells what was heard of it from them, None so far; it is None where there are no others.
    """

    def __init__(
        self,
        config: Config,
        run: str,
        rank: Rank,
        spool: Spool,
        *,
        outcome: Callable[[Save, JSON], None],
        peek: Callable[[Save], Any] | None,
    ) -> None:
        self._config = config
        self._run = run
        self._rank = rank
        self._spool = spool
        self._outcome = outcome
        self._changed = threading.Condition()
        self._slots: list[Slot] = []
        self._touching: threading.Thread | None = None
        self._ended = threading.Event()
        self._tracked: dict[Save, _Tracked] = {}
        self._answers: deque[tuple[_Tracked, Checkpoint | ObjckptError]] = deque()
        self._adopting: Message | None = None
        self._adopted: Message | None = None
        self._attempt: Attempt | None = None
        self._ready = False
        self._closed = False
        self._peek = peek
        self._deaths = 0
        self._broken: str | None = None
        self.fenced: str | None = None
        self.failures = 0
        self._uploader = self._launch()

    # -------------------------------------------------------------- the uploader

    def _launch(self) -> UploaderProcess:
        with open(self._spool.log_file(), "wb") as file:  # noqa: PTH123 # a descriptor, not a path
            uploader = UploaderProcess(file.fileno(), self._event)
        uploader.send(
            {
                "op": "open",
                "uri": self._config.uri,
                "storage_options": dict(self._config.storage_options),
                "part_size": self._config.tuning.part_size,
                "concurrency": self._config.tuning.concurrency,
                "run": self._run,
                "rank": self._rank,
                "linger": self._config.linger,
                "save_timeout": self._config.save_timeout,
            }
        )
        return uploader

    def _relaunch(self) -> None:
        """Start the uploader again: it repeats what the journals say."""
        with self._changed:
            if self._closed or self._broken is not None:
                return
            self._deaths += 1
            if self._deaths > _RESTARTS:
                self._break(
                    f"the uploader died {self._deaths} times in a row; its log is {self._spool.path}/uploader.log"
                )
                return
            log.error(
                "the uploader of rank %d died; starting it again (its log: %s/uploader.log)",
                self._rank,
                self._spool.path,
            )
            self._uploader.wait(_READY_TIMEOUT)  # its end of the socket closes a moment before it does
            try:
                self._uploader = self._launch()
            except OSError as error:  # no memory for a process, or somebody removed the spool
                self._break(f"the uploader died and cannot be started again: {error}")
                return
            if self._adopting is not None:
                self._uploader.send(self._adopting)
            if self._attempt is not None:
                path = self._spool.where()  # the dead one may not have come to say that it published it
                self._uploader.send({"op": "spool", "path": str(path), "attempt": self._attempt})
                self._lend(self._slots)
            # No journal tells of those whose slots were given away since.
            for tracked in self._tracked.values():
                if self._rank == 0 and tracked.durable and not tracked.answered:
                    self._uploader.send({"op": "look", "save": [tracked.save.attempt, tracked.save.step]})

    def _break(self, reason: str) -> None:
        self._broken = reason
        for tracked in self._tracked.values():
            self._fail(tracked, SaveFailedError(f"save {tracked.save}: {reason}"))

    def adopt(self, roots: list[Path]) -> None:
        """Begin to finish what earlier uploaders left below ``roots``; :meth:`adopted` tells how it ended."""
        with self._changed:
            self._adopting = {
                "op": "adopt",
                "roots": [str(path) for path in roots],
                "timeout": self._config.adopt_timeout,
            }
            self._uploader.send(self._adopting)

    def adopted(self, timeout: float) -> list[str] | None:
        """What could not be adopted; None if it still goes on after ``timeout`` seconds. :class:`SpoolError` if the uploader cannot."""
        with self._changed:
            self._changed.wait_for(lambda: self._adopted is not None or self._broken is not None, timeout)
            if self._broken is not None:
                raise SpoolError(f"what earlier attempts left on this node was not adopted: {self._broken}")
            if self._adopted is None:
                return None
            for text in self._adopted["finished"]:
                log.info("a save of an earlier attempt was finished on this node: %s", text)
            return list(self._adopted["failed"])

    def begin(self, attempt: Attempt) -> None:
        """From now on, saves are those of ``attempt``."""
        with self._changed:
            first = self._attempt is None
            self._attempt = attempt
        if not first:
            self._uploader.send({"op": "attempt", "attempt": attempt})
            return
        self._uploader.send({"op": "spool", "path": str(self._spool.path), "attempt": attempt})
        with self._changed:
            self._changed.wait_for(lambda: self._ready or self._broken is not None, _READY_TIMEOUT)
            if not self._ready:
                raise SpoolError(
                    f"the uploader did not take its spool {self._spool.path}: {self._broken or 'no answer'}; see uploader.log there"
                )

    def release(self) -> None:
        """The spools that were adopted are needed no more."""
        self._uploader.send({"op": "release"})

    def hurry(self) -> None:
        """A preemption is near: newest save first, nothing else."""
        self._uploader.send({"op": "hurry"})

    # -------------------------------------------------------------- slots

    def make_slots(self, nbytes: int, *, touch: bool) -> None:
        """Make the slots, each for an image of ``nbytes`` bytes, unless they are there. :class:`SpoolError` if no place has room.

        ``touch``: make their pages resident in a thread, so that the first save costs what a later one does.
        """
        if self._slots:
            return
        self._slots = self._spool.make_slots(
            self._config.slots, _capacity(nbytes), anywhere=self._config.cache is None
        )
        self._lend(self._slots)
        if touch:
            slots = list(self._slots)
            self._touching = threading.Thread(
                target=lambda: all(slot.touch(self._ended) for slot in slots),
                name="objckpt-touch",
                daemon=True,
            )
            self._touching.start()

    def _lend(self, slots: list[Slot]) -> None:
        """Slots without a name are reached through the uploader's own descriptors, also once this process is gone."""
        lent = [slot for slot in slots if slot.in_memory]
        if lent:
            message = {"op": "slots", "numbers": [slot.number for slot in lent]}
            self._uploader.send(message, [slot.descriptor for slot in lent])

    def slot(self, nbytes: int, timeout: float) -> Slot | None:
        """A slot that may be filled with ``nbytes`` bytes; None if none is free after ``timeout`` seconds."""
        self.make_slots(nbytes, touch=False)
        with self._changed:
            if not self._changed.wait_for(lambda: self._free() is not None, timeout):
                return None
            number = self._free()
            assert number is not None
            for tracked in [t for t in self._tracked.values() if t.slot == number]:
                self._spool.forget(tracked.save)
                tracked.slot = -1
            slot = self._slots[number]
            slot.check()
            if slot.capacity < nbytes:
                slot = self._slots[number] = self._spool.replace_slot(slot, _capacity(nbytes))
                self._lend([slot])
        return slot

    def _free(self) -> int | None:
        """An unused slot, else one whose save failed, else the one with the oldest durable image but the newest."""
        if self._broken is not None:
            raise SaveFailedError(self._broken)
        holders = {t.slot: t for t in sorted(self._tracked.values(), key=lambda t: t.save) if t.slot >= 0}
        unused = [s.number for s in self._slots if s.number not in holders]
        failed = [n for n, t in holders.items() if t.future.done() and not t.durable]
        durable = [n for n, t in holders.items() if t.durable]
        free = [*unused, *failed, *durable[:-1]]
        return free[0] if free else None

    def stage(
        self, slot: Slot, record: RankRecord, checkpoint: Checkpoint, began: float
    ) -> Future[Checkpoint]:
        """The slot is filled: journal it and hand it over. ``began`` is when ``save`` was called, by ``time.perf_counter``."""
        self._spool.write_journal(slot.number, record)
        nbytes = sum(o.size for o in record.objects)
        future: Future[Checkpoint] = Future() if self._peek is None else _Followed(self.follow)
        tracked = _Tracked(record.save, slot.number, checkpoint, time.perf_counter() - began, nbytes, future)
        self._track(tracked)
        self._uploader.send({"op": "save", "save": [record.save.attempt, record.save.step]})
        return tracked.future

    def lost(self, checkpoint: Checkpoint, error: Exception) -> Future[Checkpoint]:
        """Note that this rank could not stage a save that all ranks had agreed on: it will never be complete."""
        save = Save(Attempt(checkpoint.attempt), Step(checkpoint.step))
        tracked = _Tracked(save, -1, checkpoint, 0.0, 0, Future())
        self._track(tracked)
        with self._changed:
            self._fail(
                tracked, SaveFailedError(f"save {save} could not be staged on rank {self._rank}: {error}")
            )
        self._outcome(save, {"error": f"rank {self._rank} could not stage it: {error}"})
        self._answer()
        return tracked.future

    def _track(self, tracked: _Tracked) -> None:
        with self._changed:
            self._tracked[tracked.save] = tracked
            for old in [t for t in self._tracked.values() if t.slot < 0 and t.future.done()][:-_REMEMBERED]:
                del self._tracked[old.save]

    # -------------------------------------------------------------- outcomes

    def _event(self, message: Message) -> None:
        op = message["op"]
        if op == "gone":
            self._relaunch()
            self._answer()
            return
        told: JSON = None
        with self._changed:
            tracked = self._tracked.get(_save(message["save"])) if "save" in message else None
            earlier = tracked is not None and tracked.answered
            match op:
                case "adopted":
                    self._adopted, self._adopting = message, None
                case "spool":
                    self._spool.path = Path(message["path"])
                    self._ready = True
                case "broken":
                    self._break(message["error"])
                case "undeleted":
                    log.warning("%s", message["error"])
                case "delayed":
                    log.warning("save %s is delayed: %s", message["save"], message["error"])
                case "closed":
                    self._closed = True
                case "durable" if tracked is not None:
                    tracked.durable, tracked.upload = True, message["seconds"]
                    self._deaths = 0
                    if self._rank != 0:
                        self.failures = 0
                case "committed" if tracked is not None:
                    self._commit(tracked)
                    told = {} if self._rank == 0 else None
                case "failed" if tracked is not None and tracked.durable and self._rank != 0:
                    # Whoever finds all records commits it, and rank 0 looks.
                    log.warning("save %s: rank 0 goes on with it alone: %s", tracked.save, message["error"])
                case "failed" if tracked is not None:
                    told = {"error": message["error"]}
                    self._fail(tracked, _not_committed(tracked.save, told))
                case "fenced" if tracked is not None:
                    self._fence(tracked)
                    told = {"fenced": True} if self._rank == 0 else None
        if tracked is not None and told is not None and not earlier:
            self._outcome(tracked.save, told)  # asks the network, so not under the lock
        self._answer()

    def _answer(self) -> None:
        """Resolve the futures of what was decided. Not under the lock: it runs callbacks, which may wait for those who wait for us."""
        while self._answers:
            try:
                tracked, answer = self._answers.popleft()
            except IndexError:  # another thread was faster
                break
            if isinstance(answer, Checkpoint):
                tracked.future.set_result(answer)
            else:
                tracked.future.set_exception(answer)
        with self._changed:
            self._changed.notify_all()

    def _decide(self, tracked: _Tracked, answer: Checkpoint | ObjckptError) -> bool:
        """Under the lock: what the future will say, once. ``_answer`` is to follow."""
        if tracked.answered:
            return False
        tracked.answered = True
        self._answers.append((tracked, answer))
        return True

    def _commit(self, tracked: _Tracked) -> None:
        if not self._decide(tracked, tracked.checkpoint):
            return
        self.failures = 0
        rate = tracked.nbytes / tracked.upload / 1e9 if tracked.upload else 0.0
        if self._rank == 0:
            log.info(
                "step %d committed: %d bytes in all, stall %.3f s, rank 0 uploaded %d bytes in %.3f s (%.2f GB/s)",
                tracked.save.step,
                tracked.checkpoint.nbytes,
                tracked.stall,
                tracked.nbytes,
                tracked.upload,
                rate,
            )

    def _fail(self, tracked: _Tracked, error: ObjckptError) -> None:
        if self._decide(tracked, error):
            self.failures += 1
            log.error("%s", error)

    def _fence(self, tracked: _Tracked) -> None:
        self.fenced = (
            f"{self._config.uri}: another attempt has taken this run over, so step {tracked.save.step} was not committed. Stop this "
            f"job; what was committed before is safe, and `objckpt ls` shows who took over"
        )
        if self._decide(tracked, FencedError(self.fenced)):
            log.error("%s", self.fenced)

    def follow(self) -> None:
        """Look what the other ranks have told of the open saves. :class:`WorldError` if they cannot be asked."""
        if self._peek is None:
            return
        for tracked in self.open():
            try:
                told = self._peek(tracked.save)
            except RuntimeError as error:  # the group's store is gone
                raise WorldError(
                    f"the other ranks cannot be asked any more what became of the saves: {error}"
                ) from error
            with self._changed:
                if told is not None:
                    self._hear(tracked, told)
                elif self._rank != 0 and time.monotonic() - tracked.staged > self._config.save_timeout:
                    text = f"nothing was heard of it for {self._config.save_timeout:.0f} s"
                    self._fail(tracked, SaveFailedError(f"save {tracked.save}: {text}"))
            if told is not None and self._rank == 0:
                self._outcome(tracked.save, told)  # the others listen to rank 0
        self._answer()

    def _hear(self, tracked: _Tracked, told: dict[str, Any]) -> None:
        if told.get("fenced"):
            self._fence(tracked)
        elif "error" in told:
            self._fail(tracked, _not_committed(tracked.save, told))
        else:
            self._commit(tracked)

    def open(self) -> list[_Tracked]:
        """Saves whose future is not done, by step."""
        with self._changed:
            return sorted((t for t in self._tracked.values() if not t.future.done()), key=lambda t: t.save)

    def future(self, save: Save) -> Future[Checkpoint] | None:
        """The future of a save of this process."""
        tracked = self._tracked.get(save)
        return None if tracked is None else tracked.future

    def wait(self, timeout: float) -> bool:
        """Until an event has come, or ``timeout`` seconds. True when no save is open."""
        with self._changed:
            return self._changed.wait_for(
                lambda: all(t.future.done() for t in self._tracked.values()), timeout
            )

    def close(self, *, remove: bool, timeout: float) -> None:
        """Let the uploader end when it is done, ``remove`` its spool if all is; wait ``timeout`` seconds, then leave it to itself."""
        with self._changed:
            self._closed = True
        self._ended.set()
        if self._touching is not None:
            self._touching.join()  # else it would take pages again that are given back below
        self._uploader.send({"op": "close", "remove": remove})
        if not self._uploader.wait(timeout):
            self._uploader.leave()
        removed = not self._spool.path.exists()
        for slot in self._slots:
            if removed:
                slot.discard()
            slot.close()
        if self._ready:
            self._spool.close()
        else:
            self._spool.remove()  # no start came of it, so nothing lies in it


def _not_committed(save: Save, told: dict[str, Any]) -> SaveFailedError:
    return SaveFailedError(f"save {save} was not committed: {told['error']}")


def _capacity(nbytes: int) -> int:
    return max(1, -(-int(nbytes * _HEADROOM) // _UNIT)) * _UNIT


def _save(pair: list[int]) -> Save:
    return Save(Attempt(pair[0]), Step(pair[1]))
