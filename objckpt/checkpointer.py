"""Checkpointer: the one class that a training loop meets.

Invariants: ranks agree before anything starts, is staged, or is loaded, so they do the same or raise the same; ``save`` returns once the
state is in a slot and journalled, from where it is committed even if this process is killed; ``restore`` gives a state that was
committed, verified to the last byte, or raises; only ``restore`` and the first ``save`` start an attempt.
"""

from __future__ import annotations

import logging
import os
import secrets
import threading
import time
import weakref
from collections.abc import Callable, Mapping, MutableMapping
from concurrent.futures import Future
from functools import partial
from types import TracebackType
from typing import Any, Self

from objckpt import config
from objckpt.agreement import admit, all_done, check_arguments, describe, nothing_to_restore, one_uri
from objckpt.commit import Run
from objckpt.errors import (
    FENCED_EXIT_CODE,
    PREEMPTED_EXIT_CODE,
    ConfigError,
    CorruptCheckpointError,
    FencedError,
    ObjckptError,
    SaveFailedError,
    WorldError,
    end_fenced_processes_with_their_code,
)
from objckpt.local import LocalCopies
from objckpt.manifest import (
    BLOCK_SIZE,
    JSON,
    Attempt,
    Entry,
    Policy,
    Rank,
    RankRecord,
    Save,
    Step,
    Version,
    data_key,
    decode_version,
    encode_version,
)
from objckpt.plan import stored
from objckpt.preemption import Notices
from objckpt.reader import checkpoint_of, fill
from objckpt.retention import chosen, line, retain
from objckpt.saves import Checkpoint, Saves
from objckpt.spool import Spool, choose, roots, unhashed
from objckpt.staging import Stager, digest, estimate, names_of
from objckpt.state import TensorSpec, capture, prepare
from objckpt.store import open_store
from objckpt.world import Rule, current

log = logging.getLogger(__name__)

_FOLLOW_PERIOD = 1.0  # seconds between looks at what the other ranks told of saves
_CLOSE_POLL = 0.02  # seconds
_ADOPTION_SLICE = 5.0  # seconds after which ranks that adopt tell each other that they are still there
_END_TIMEOUT = 10.0  # for an uploader without work to end, in seconds

_active: weakref.ref[Checkpointer] | None = None


def _close_in_child() -> None:
    checkpointer = _active() if _active is not None else None
    if checkpointer is not None:
        checkpointer.forked = True


os.register_at_fork(after_in_child=_close_in_child)


class Checkpointer:
    """Saves and restores the state of a training job, for all its ranks together.

    ``uri`` says where; every other keyword is a field of :class:`objckpt.config.Config`, and may come from ``OBJCKPT_*`` or
    ``objckpt.toml`` instead. The constructor makes no request. Every rank makes one, and calls ``restore``, ``due``, ``save`` and
    ``close`` at the same steps.

    Raises :class:`ConfigError` for what cannot work, so with ``WORLD_SIZE`` above 1 and no process group.
    """

    def __init__(self, uri: str | None = None, **keywords: Any) -> None:
        global _active  # noqa: PLW0603 # one per process
        self._config = config.load(uri=uri, **keywords)
        if self._config.uri.startswith("memory:"):
            raise ConfigError(
                "memory:// lives in one process, and the uploader is another: use file:// or a bucket with a Checkpointer"
            )
        self._world = current()
        self._store = open_store(
            self._config.uri,
            part_size=self._config.tuning.part_size,
            connections=self._config.tuning.concurrency,
            **self._config.storage_options,
        )
        self._run = Run(self._store, retain=retain)
        self._launch = self._config.launch or f"random:{secrets.token_hex(8)}"
        self._stager = Stager(Rank(self._world.rank), self._world.size)
        self._version: Version | None = None
        self._saves: Saves | None = None
        self._nbytes = 0  # of the state of all ranks, as far as it was known when the attempt began
        self._last_step: int | None = None  # of a save or of the head that was restored
        self._restored = False
        self.closed = False
        self.forked = False
        self._followed = 0.0
        self._notices = Notices(self._world, self._config.agree_timeout)
        self._fenced = False
        self._busy = threading.Lock()
        end_fenced_processes_with_their_code()
        previous = _active() if _active is not None else None
        if previous is not None and not previous.closed and not previous.forked:
            log.warning("another Checkpointer is open in this process: it is closed now")
            previous.close()
        _active = weakref.ref(self)

    # -------------------------------------------------------------- with

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
            return
        try:
            if not self.closed and not self.forked:
                self._world.leave(f"{type(error).__name__}: {error}")
            self._end(self._config.exit_timeout, finished=False)
        except KeyboardInterrupt:
            log.warning("interrupted again: not waiting for the saves on their way; their uploader goes on")
        except Exception:  # whatever it is, it may not hide the exception that is on its way
            log.exception("closing after %s", kind)

    def close(self) -> None:
        """Wait until every save is committed or has failed, and say that the job has finished unless it was preempted."""
        self._end(self._config.save_timeout, finished=not self.preempted)

    def _end(self, timeout: float, *, finished: bool) -> None:
        global _active  # noqa: PLW0603 # one per process
        if self.closed or self.forked:
            return
        self.closed = True
        _active = None
        self._notices.close(settle=finished)
        if self._saves is None or self._version is None:
            if self._saves is not None:
                self._saves.close(remove=False, timeout=0)
            return
        saves, self._saves = self._saves, None
        wait, done = 0.0, False
        try:
            done = self._settle(saves, timeout) and finished and saves.fenced is None
            wait = min(timeout, _END_TIMEOUT)
            if done and self._world.rank == 0:
                self._finish(self._version.attempt)
        finally:
            self._fenced = saves.fenced is not None
            saves.close(remove=done, timeout=wait)

    def _finish(self, attempt: Attempt) -> None:
        try:
            self._run.finish(attempt)
        except (ObjckptError, OSError):
            log.exception(
                "it could not be noted that the job has finished: a superseded launch stays refused"
            )

    def _settle(self, saves: Saves, timeout: float) -> bool:
        """Wait for all futures, ``timeout`` seconds at most. False if some are open or failed."""
        deadline = time.monotonic() + timeout
        while saves.open() and time.monotonic() < deadline:
            try:
                saves.follow()
            except WorldError as error:
                log.warning("%s", error)
                if self._world.rank != 0:
                    return False
            left = max(0.0, deadline - time.monotonic())
            saves.wait(left if self._world.size == 1 else min(left, _CLOSE_POLL))
        for tracked in saves.open():
            log.warning("save %s is still on its way; its uploader goes on", tracked.save)
        return not saves.open() and saves.failures == 0

    # -------------------------------------------------------------- restore

    def restore(
        self, state: MutableMapping[str, Any], step: int | None = None, *, strict: bool = True
    ) -> Checkpoint | None:
        """Start an attempt and fill ``state`` from the newest complete checkpoint, or from that of ``step``. Called by every rank.

        None on a fresh run. A damaged newest checkpoint gives way to the next older good one, on all ranks together, with an error in
        the log; one asked for by number does not. Going back to an older ``step`` fences what still runs, and deletes nothing.

        Raises :class:`FencedError` if this launch was superseded, :class:`CheckpointNotFoundError` for a ``step`` that is not there,
        :class:`StateMismatchError` (all mismatches listed, nothing changed), :class:`CorruptCheckpointError`, :class:`StoreError`,
        :class:`SpoolError` if no place fits the slots.
        """
        if not self._busy.acquire(blocking=False):
            raise ConfigError("save() or restore() is at work in another thread: one at a time")
        try:
            return self._restore(state, step, strict=strict)
        finally:
            self._busy.release()

    def _restore(
        self, state: MutableMapping[str, Any], step: int | None, *, strict: bool
    ) -> Checkpoint | None:
        self._check_open()
        if self._version is not None:
            self.wait()
        version = self._begin(step, state)
        while version.head is not None:
            entry = version.entry(version.head)
            assert entry is not None  # decode_version has checked it
            try:
                checkpoint = self._load(entry, state, strict=strict)
            except CorruptCheckpointError as error:
                older = next((s for s in line(version.head, version.kept) if s != version.head), None)
                if step is not None or older is None:
                    raise
                log.error("checkpoint %s is damaged: FALLING BACK to %s. %s", version.head, older, error)  # noqa: TRY400 # once
                version = self._start(partial(_same, older))
                continue
            self._restored, self._last_step = True, checkpoint.step
            self._ready(max(checkpoint.nbytes, estimate(state)))
            log.info("restored step %d of attempt %d", checkpoint.step, checkpoint.attempt)
            return checkpoint
        self._restored = True
        self._ready(estimate(state))
        return None

    def _ready(self, nbytes: int) -> None:
        """Make the slots for this rank's part of a state of ``nbytes`` bytes now, so that the first save finds them warm."""
        assert self._saves is not None
        self._saves.release()
        problem: BaseException | None = None
        try:
            self._saves.make_slots(nbytes // self._world.size, touch=True)
        except (ObjckptError, OSError) as error:
            problem = error
        self._agree(problem)

    def _begin(self, step: int | None, state: Mapping[str, Any]) -> Version:
        """Adopt what lies on this node, then start; all ranks together (see design: start order)."""
        config = self._config

        def same(uris: list[str]) -> JSON:
            one_uri(uris)
            version = self._run.newest()
            return None if version is None else version.run

        run = self._world.decide(self._store.uri, same, config.agree_timeout)
        self._nbytes = estimate(state)
        if run is not None and self._saves is None:
            self._adopt(run)
        return self._start(lambda: None if step is None else self._find(step))

    def _adopt(self, run: str) -> None:
        """Finish what lies on each rank's node; nobody goes on before all have. A rank that takes long keeps the others in touch."""
        problem: BaseException | None = None
        left: list[str] | None = None
        saves: Saves | None = None
        try:
            saves = self._open_saves(run)
            saves.adopt(roots(self._config.cache, run))
        except (ObjckptError, OSError) as error:
            problem = error
        while True:
            if problem is None and saves is not None and left is None:
                try:
                    left = saves.adopted(_ADOPTION_SLICE)
                except ObjckptError as error:
                    problem = error
            if self._agree(problem, done=left is not None):
                break
        for text in left or ():
            log.warning("left by an earlier attempt on this node: %s", text)

    def _find(self, step: int) -> Save:
        return chosen(self._store.uri, self._run.existing(), step).save

    def _start(self, rollback: Callable[[], Save | None]) -> Version:
        """Rank 0 creates the start version; every rank takes up its attempt."""

        def create(_: list[Any]) -> JSON:
            self._run.prove()
            version = self._run.start(
                launch=self._launch,
                world_size=self._world.size,
                policy=Policy(self._config.keep, lag=0),  # no save refers to another one's objects yet
                takeover=self._config.takeover,
                rollback=rollback(),
            )
            return {"number": version.number, "content": encode_version(version).decode()}

        decided = self._world.decide(None, create, self._config.agree_timeout)
        version = decode_version(decided["content"].encode(), decided["number"])
        problem: BaseException | None = None
        try:
            saves = self._open_saves(version.run) if self._saves is None else self._saves
            saves.begin(version.attempt)
        except (ObjckptError, OSError) as error:
            problem = error
        self._agree(problem)
        self._version = version
        self._last_step = None if version.head is None else version.head.step
        self._notices.watch()
        return version

    def _open_saves(self, run: str) -> Saves:
        config = self._config
        nbytes = config.slots * (self._nbytes // self._world.size)
        spool = Spool.create(choose(roots(config.cache, run), nbytes))
        peek = None if self._world.size == 1 else self._peek
        self._saves = Saves(config, run, Rank(self._world.rank), spool, outcome=self._outcome, peek=peek)
        return self._saves

    def _agree(self, problem: BaseException | None, *, done: bool = True) -> bool:
        """Raise on every rank the first problem that a rank has. Returns whether all are ``done``."""
        return bool(self._decide({"problem": describe(problem), "done": done}, all_done, problem))

    def _decide(self, told: JSON, rule: Rule, problem: BaseException | None) -> Any:
        """What the ranks decide by ``rule``. A rank that has a ``problem`` of the kind told raises its own, whole."""
        try:
            return self._world.decide(told, rule, self._config.agree_timeout)
        except ObjckptError as error:
            if problem is not None and _is_of(type(error), problem):
                raise problem from error
            raise

    def _load(self, entry: Entry, state: MutableMapping[str, Any], *, strict: bool) -> Checkpoint:
        problem: BaseException | None = None
        try:
            contents = self._run.contents(entry)
            index, records = contents.index, contents.records
            own = records[self._world.rank] if index.world_size == self._world.size else None
            pieces = stored(records)
            names = names_of(self._world.rank, pieces)
            first = {name: pieces[stored_name][0][0] for name, stored_name in names.items()}
            specs = {name: TensorSpec(piece.dtype, piece.global_shape) for name, piece in first.items()}
            restoration = prepare(
                state,
                records[0].values,
                None if own is None else own.rank_values,
                specs,
                strict=strict,
                rng=self._config.rng,
            )
        except Exception as error:  # noqa: BLE001 # whatever it is, the other ranks must not wait for this one
            problem = error
        self._agree(problem)
        targets = {names[name]: tensor for name, tensor in restoration.targets.items()}
        try:
            with LocalCopies(roots(self._config.cache, index.run)) as local:
                fetched = fill(self._store, pieces, targets, self._config.tuning, local.read)
            log.debug("%d bytes came from the bucket", fetched)
        except Exception as error:  # noqa: BLE001 # likewise
            problem = error
        self._agree(problem)
        try:
            restoration.apply()
        except Exception as error:  # noqa: BLE001 # likewise
            problem = error
        self._agree(problem)
        return checkpoint_of(entry, index.metadata)

    # -------------------------------------------------------------- save

    def save(self, step: int, state: Mapping[str, Any], metadata: JSON = None) -> Future[Checkpoint]:
        """Save ``state`` as that of ``step`` optimizer steps done. Called by every rank; returns once the state is in a slot.

        The future's result is the committed checkpoint, or :class:`SaveFailedError` or :class:`FencedError`. The same step again gives
        the first future, with a warning. ``metadata`` (JSON, rank 0's) is shown by ``objckpt show``.

        Raises, on every rank alike: :class:`FencedError`; :class:`SaveFailedError` after ``max_failed_saves`` in a row;
        :class:`StateMismatchError` for a value that cannot be stored or ranks with different structures; :class:`ConfigError` for a step
        that does not rise; :class:`WorldError` naming ranks that did not come.
        """
        if not self._busy.acquire(blocking=False):
            raise ConfigError(
                "save() or restore() is at work in another thread, or below this signal handler: one at a time"
            )
        try:
            return self._save(step, state, metadata)
        finally:
            self._busy.release()

    def _save(self, step: int, state: Mapping[str, Any], metadata: JSON) -> Future[Checkpoint]:
        began = time.perf_counter()
        self._check_open()
        if self._version is None:
            self._first_save(state)
        assert self._version is not None
        assert self._saves is not None
        save = Save(self._version.attempt, Step(step))
        earlier = self._saves.future(save)
        if earlier is not None:
            log.warning("step %d was saved before: the first save's future is returned", step)
            return earlier
        self._follow()
        problem: BaseException | None = None
        size = 0
        slot = None
        try:
            check_arguments(step, metadata)
            captured = capture(state, rng=self._config.rng)
            shard = self._stager.plan(captured.leaves)
            image = self._stager.image(shard, self._version.run, save)
            size = image.size
            # Half the time that the others wait for this rank, so that they hear of it and do not give it up.
            slot = self._saves.slot(
                size, self._config.agree_timeout / 2 if self._config.when_full == "wait" else 0
            )
        except Exception as error:  # noqa: BLE001 # likewise: a state_dict of the user's may raise anything
            problem = error
        told: dict[str, JSON] = {
            "step": step,
            "problem": describe(problem),
            "structure": "" if problem is not None else digest(captured.leaves),
            "free": slot is not None,
            "nbytes": size,
            "failures": self._saves.failures,
            "fenced": self._saves.fenced,
        }
        decided = self._decide(told, partial(admit, self._last_step, self._config.max_failed_saves), problem)
        if not decided["stage"] or slot is None:
            return self._skipped(step)
        created_at, nbytes = decided["created_at"], decided["nbytes"]
        self._last_step = step
        checkpoint = Checkpoint(step, save.attempt, self._world.size, nbytes, created_at, metadata)
        rank = Rank(self._world.rank)
        record = RankRecord(
            run=self._version.run,
            save=save,
            rank=rank,
            world_size=self._world.size,
            created_at=created_at,
            metadata=metadata if rank == 0 else None,
            bases=(),
            objects=(unhashed(data_key(save, rank), size, BLOCK_SIZE),),
            pieces=image.pieces,
            values=captured.values if rank == 0 else None,
            rank_values=captured.rank_values,
        )
        try:
            self._stager.stage(slot, shard, image, captured.leaves)
            return self._saves.stage(slot, record, checkpoint, began)
        except (ObjckptError, OSError) as error:
            return self._saves.lost(
                checkpoint, error
            )  # the others have agreed to the step, so this rank goes on as they do

    def _first_save(self, state: Mapping[str, Any]) -> None:
        """Start without a restore: only where there is nothing to restore, and before anything that runs is fenced."""

        def empty(_: list[Any]) -> JSON:
            version = self._run.newest()
            nothing_to_restore(self._store.uri, None if version is None else version.head)
            return None

        self._world.decide(None, empty, self._config.agree_timeout)
        self._begin(None, state)
        assert self._saves is not None
        self._saves.release()

    @staticmethod
    def _skipped(step: int) -> Future[Checkpoint]:
        log.warning(
            "step %d was not saved: a rank has no free slot, since earlier saves are still being uploaded",
            step,
        )
        future: Future[Checkpoint] = Future()
        future.set_exception(SaveFailedError(f"step {step} was skipped: no slot was free on every rank"))
        return future

    def wait(self) -> None:
        """Wait until every save so far is committed. Raises the first failure among those that were open."""
        self._check_open()
        if self._saves is None:
            return
        opened = [t.future for t in self._saves.open()]
        self._settle(self._saves, self._config.save_timeout)
        for future in opened:
            if future.done():
                future.result()
            else:
                raise SaveFailedError(
                    f"not committed after {self._config.save_timeout:.0f} s; it may still become complete"
                )

    def latest(self) -> Checkpoint | None:
        """What a restart would resume from; None if there is none."""
        version = self._run.newest()
        entry = None if version is None or version.head is None else version.entry(version.head)
        return None if entry is None else checkpoint_of(entry, self._run.index(entry).metadata)

    def checkpoints(self) -> list[Checkpoint]:
        """All checkpoints, by attempt and step; their ``metadata`` is not read."""
        version = self._run.newest()
        return (
            [] if version is None else [checkpoint_of(e) for e in sorted(version.kept, key=lambda e: e.save)]
        )

    # -------------------------------------------------------------- what ranks tell each other of saves

    def _outcome(self, save: Save, told: JSON) -> None:
        if self._world.size > 1:
            try:
                self._world.post(f"save/{save}" if self._world.rank == 0 else f"failed/{save}", told)
            except RuntimeError as error:  # the group's store is gone: so are those who would ask
                log.debug("nobody can be told of save %s: %s", save, error)

    def _peek(self, save: Save) -> Any:
        return self._world.peek(f"failed/{save}" if self._world.rank == 0 else f"save/{save}")

    def _follow(self) -> None:
        if self._saves is not None:
            self._followed = time.monotonic()
            self._saves.follow()

    # -------------------------------------------------------------- due, preemption

    def due(self, step: int, *, final: bool = False) -> bool:
        """Whether to save now: the interval is full, a preemption is near, or it is the end. Every rank calls it once a step and gets
        the same answer. ``preempted`` changes only in here. :class:`FencedError` on all ranks once another attempt has taken over.
        """
        self._check_open()
        if time.monotonic() - self._followed > _FOLLOW_PERIOD:
            self._follow()
        before = self._notices.preempted
        self._notices.exchange(fenced=self._saves is not None and self._saves.fenced is not None, final=final)
        if self._notices.fenced:
            text = None if self._saves is None else self._saves.fenced
            raise FencedError(
                text or f"{self._store.uri}: another attempt has taken this run over. Stop this job"
            )
        if self.preempted and not before:
            log.warning(
                "a preemption was announced: saving, then ending with exit code %d", PREEMPTED_EXIT_CODE
            )
            if self._saves is not None:
                self._saves.hurry()
        interval = self._config.interval
        return final or self.preempted or (interval is not None and step % interval == 0)

    @property
    def preempted(self) -> bool:
        """Whether the job was told that its machine goes; the same on all ranks."""
        return self._notices.preempted

    @property
    def exit_code(self) -> int:
        """For ``SystemExit``: 0 finished, 75 preempted (run it again), 77 fenced (do not)."""
        if self._fenced or (self._saves is not None and self._saves.fenced is not None):
            return FENCED_EXIT_CODE
        return PREEMPTED_EXIT_CODE if self.preempted else 0

    def _check_open(self) -> None:
        if self.forked:
            raise ConfigError(
                "this process was forked from one with an open Checkpointer (a data-loader worker?): it cannot save or restore, the "
                "parent can"
            )
        if self.closed:
            raise ConfigError("this Checkpointer is closed: make a new one")


def _same(save: Save) -> Save | None:
    return save


def _is_of(agreed: type[ObjckptError], problem: BaseException) -> bool:
    """Whether a rank may raise its own error: all handle the same kind alike, as the fall-back to an older checkpoint does."""
    return type(problem) is agreed or not isinstance(problem, ObjckptError)
