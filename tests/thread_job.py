"""A job of two ranks in this process: slots, books, uploaders (in threads), commits and retention are real, only tensors are missing.

The ranks save one after the other, rank 1 first, and each is at rest before the next: the same calls in the same order each time.
"""

from __future__ import annotations

import contextlib
import logging
import random
import shutil
import socket
import threading
import time

import pytest
from protocol import ALL

from objckpt import commit, saves
from objckpt.commit import Run
from objckpt.config import Config
from objckpt.errors import ObjckptError, SpoolError
from objckpt.manifest import Rank, RankRecord, Save, Step, data_key
from objckpt.plan import reads, stored
from objckpt.retention import retain
from objckpt.saves import Checkpoint, Saves
from objckpt.shard import layout, whole
from objckpt.spool import Spool, roots, unhashed
from objckpt.testing.faults import Crashed
from objckpt.transfer import fetch
from objckpt.uploader import loop
from objckpt.uploader.channel import Channel

BLOCK = 1024
log = logging.getLogger(__name__)
RANKS = (1, 0)
_process = threading.local()


@pytest.fixture(autouse=True)
def threads_for_processes(monkeypatch):
    """Nothing waits longer than it must."""
    monkeypatch.setattr(saves, "UploaderProcess", UploaderThread)
    monkeypatch.setattr(saves, "_UNIT", 1 << 14)
    monkeypatch.setattr(commit, "_COMMIT_WAIT", 0.0)
    monkeypatch.setattr(loop, "open_store", lambda *_, **__: _process.uploader.store())
    monkeypatch.setattr(loop, "Spool", _Spool)
    monkeypatch.setattr(loop, "_Uploader", _Uploader)
    for name, seconds in (
        ("_FIRST_RETRY", 1e-4),
        ("_LAST_RETRY", 1e-3),
        ("_LOCK_POLL", 1e-3),
        ("_PROGRESS_PERIOD", 1e4),
    ):
        monkeypatch.setattr(loop, name, seconds)


class _Spool(Spool):
    """Closed by a crash, as the kernel does it for a process."""

    def __init__(self, path):
        super().__init__(path)
        _process.uploader.opened.append(self)


class _Uploader(loop._Uploader):
    def _delay(self):
        _process.uploader.rests(not self._todo and not self._adopting())
        return super()._delay()


class _End(Channel):
    received = 0

    def receive(self, timeout):
        message = super().receive(timeout)
        self.received += message is not None
        return message


class UploaderThread:
    """What ``Saves`` takes for its uploader's process."""

    pid = 0

    def __init__(self, _log_file, on_event):
        self.rank = on_event.__self__.thread_rank
        if not self.rank.alive:
            raise OSError("the node has no process any more")
        self.store = self.rank.store
        self.opened = []
        self._told = threading.Condition()
        self._sent = 0
        self._rests = self._over = False
        ours, theirs = socket.socketpair()
        self._channel, self._end = Channel(ours), _End(theirs)
        self._marked = threading.Event()

        def event(message):
            on_event(message)
            if message["op"] == "mark":
                self._marked.set()

        self._channel.listen(event)
        self._end.listen()
        self.thread = threading.Thread(target=self._live, name=f"uploader-{self.rank.number}", daemon=True)
        self.thread.start()

    def _live(self):
        _process.uploader = self
        try:
            loop.serve(self._end)
        except Crashed:
            self.rank.crashes += 1
            self._lose_descriptors()
            self.rank.buried()
        except (ObjckptError, OSError):  # what ends a process with a traceback
            log.exception("the uploader of rank %d ended", self.rank.number)
            self._lose_descriptors()
        finally:
            with self._told:
                self._over = True
                self._told.notify_all()
            self._end.close()

    def _lose_descriptors(self):
        for spool in self.opened:
            if spool.directory >= 0:
                spool.close()

    def rests(self, at_rest):
        with self._told:
            self._rests = at_rest and self._end.received == self._sent
            self._told.notify_all()

    def send(self, message, descriptors=()):
        with self._told:
            self._sent += 1
            self._rests = False
        return self._channel.send(message, descriptors)

    def wait(self, timeout):
        self.thread.join(timeout)
        return not self.thread.is_alive()

    def leave(self):
        self._channel.close()

    def rest(self):
        """Wait until it has nothing to do, and all that it told was heard. False if it ended instead."""
        with self._told:
            assert self._told.wait_for(lambda: self._rests or self._over, 20), "no rest"
            if not self._rests:
                return False
        self._marked.clear()
        return self._end.send({"op": "mark"}) and self._marked.wait(20)


class _Saves(Saves):
    def __init__(self, rank, *arguments, **keywords):
        self.thread_rank = rank
        super().__init__(*arguments, **keywords)


class ThreadRank:
    """One rank. ``make_store`` gives the store to each new process of its uploader; ``buried`` is called when one has crashed."""

    def __init__(self, number, make_store):
        self.number, self.store, self.buried = Rank(number), make_store, lambda: None
        self.alive = True
        self.crashes = 0
        self.saves = None
        self.futures = {}

    def rest(self):
        """Wait until nothing goes on any more, through all restarts of the uploader."""
        while True:
            uploader = self.saves._uploader
            if uploader.rest():
                return
            uploader.thread.join(20)
            with self.saves._changed:
                gone = self.saves._changed.wait_for(
                    lambda u=uploader: self.saves._uploader is not u or self.saves._broken is not None, 20
                )
            assert gone, "nobody heard of the uploader's end"
            if self.saves._broken is not None:
                return


class Job:
    """One launch of the job on one node, whose local tier is ``cache``. ``stores`` has a ``make_store`` for each rank.

    ``store`` is what rank 0's trainer starts with.
    """

    def __init__(self, stores, cache, *, policy=ALL, launch="job"):
        self.cache, self.policy, self.launch = cache, policy, launch
        self.ranks = {n: ThreadRank(n, stores[n]) for n in RANKS}
        self.board = {}
        self.version = None

    def config(self):
        return Config(
            uri="dict://",
            cache=self.cache,
            save_timeout=20.0,
            linger=20.0,
            adopt_timeout=5.0,
        )

    def start(self, store, rollback=None):
        """Adopt what lies on the node, then start."""
        run = Run(store, retain=retain, pause=lambda _: None)
        now = run.newest()
        if now is not None:
            for rank in self.ranks.values():
                self._open(rank, now.run)
                rank.saves.adopt(roots(self.cache, now.run))
                self.left = rank.saves.adopted(20)
                assert self.left is not None
        run.prove()
        self.version = run.start(launch=self.launch, world_size=2, policy=self.policy, rollback=rollback)
        for rank in self.ranks.values():
            if rank.saves is None:
                self._open(rank, self.version.run)
            rank.saves.begin(self.version.attempt)
            rank.saves.make_slots(4 * BLOCK, touch=False)
            rank.saves.release()
            rank.rest()
        return self.version

    def _open(self, rank, run):
        spool = Spool.create(roots(self.cache, run)[0])

        def post(save, told):
            self.board[f"{'save' if rank.number == 0 else 'failed'}/{save}"] = told

        def peek(save):
            return self.board.get(f"{'failed' if rank.number == 0 else 'save'}/{save}")

        rank.saves = _Saves(rank, self.config(), run, rank.number, spool, outcome=post, peek=peek)

    def save(self, step):
        """Save on all ranks, then wait until nothing goes on. What a trainer is told in between: None, or the error that refused it."""
        save = Save(self.version.attempt, Step(step))
        images = {n: image(save, n) for n in RANKS}
        try:
            slots = {n: self.ranks[n].saves.slot(images[n][0].size, 20) for n in RANKS}
        except (SpoolError, OSError) as error:
            return error
        for n, rank in self.ranks.items():
            laid, data = images[n]
            slots[n].view[: laid.size] = data
            record = RankRecord(
                self.version.run, save, rank.number, 2, float(step), None, (),
                (unhashed(data_key(save, rank.number), laid.size, BLOCK),), laid.pieces, {}, None,
            )  # fmt: skip
            checkpoint = Checkpoint(step, save.attempt, 2, 0, float(step))
            try:
                rank.futures[save] = rank.saves.stage(slots[n], record, checkpoint, time.perf_counter())
            except (SpoolError, OSError) as error:
                rank.futures[save] = rank.saves.lost(checkpoint, error)
            rank.rest()
        for rank in self.ranks.values():
            rank.rest()
            rank.saves.follow()
        return None

    def told(self, save):
        """Whether every rank's future says committed."""
        futures = [rank.futures.get(save) for rank in self.ranks.values()]
        return all(f is not None and f.done() and f.exception() is None for f in futures)

    def end(self):
        """The trainers are gone, as by SIGKILL; wait for what their uploaders still do."""
        for rank in self.ranks.values():
            rank.alive = False
            if rank.saves is None:
                continue
            uploader = rank.saves._uploader
            with rank.saves._changed:
                rank.saves._closed = True
            uploader.leave()
            uploader.thread.join(20)
            assert not uploader.thread.is_alive(), "the uploader did not end"
            for slot in rank.saves._slots:
                with contextlib.suppress(OSError):
                    slot.close()
                # Thousands of jobs live in this process, and no tensor views their slots.
                slot.view.release()
                slot._map.close()
            with contextlib.suppress(OSError):
                rank.saves._spool.close()

    def lose_node(self):
        """The node's disk goes with it."""
        shutil.rmtree(self.cache, ignore_errors=True)


# ------------------------------------------------------------------ what is saved, and what comes back


#: Of each rank: a tensor that all share, and its own.
SHAPES = {"half-{}": ("float32", (300,)), "rank-{:05d}/own": ("uint8", (777,))}


def tensors(save):
    """Bytes by name, drawn from the save."""
    return {
        part.name: random.Random(f"{save} {part.name}").randbytes(part.nbytes)
        for n in RANKS
        for part in parts(n)
    }


def parts(rank):
    return [whole(name.format(rank), dtype, shape) for name, (dtype, shape) in SHAPES.items()]


def image(save, rank):
    """The layout of a rank's shard, and its bytes."""
    laid = layout(parts(rank), {"save": str(save)})
    data = bytearray(laid.size)
    data[: len(laid.header)] = laid.header
    saved = tensors(save)
    for piece in laid.pieces:
        data[piece.begin : piece.end] = saved[piece.name]
    return laid, bytes(data)


def restored(store, save=None):
    """The save that a restart would resume from (or ``save``), and all its tensors' bytes."""
    run = Run(store, retain=retain)
    version = run.existing()
    entry = version.entry(save or version.head) if version.head else None
    if entry is None:
        return None, {}
    pieces = stored(run.contents(entry).records)
    found = {name: bytearray(piece.end - piece.begin) for name, ((piece, _),) in pieces.items()}
    memory = {name: memoryview(data) for name, data in found.items()}
    fetch(store, reads(pieces, found), memory, part_size=2 * BLOCK, concurrency=2)
    return entry.save, {name: bytes(data) for name, data in found.items()}
