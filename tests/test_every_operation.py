"""Every operation of a save, with every fault at it: what is the latest afterwards is the old checkpoint or the new one, whole.

The store's calls and the spool's system calls of a save by two ranks are recorded, then each is met by each fault that it can meet. Then:
the latest restores bit for bit; the job goes on, or its next launch does; the next save works; after ``gc`` nothing is left but what the
newest version reaches.
"""

from __future__ import annotations

import errno
import itertools
import os
import random
import uuid
from functools import partial

import pytest
from protocol import ALL
from test_commit_interleavings import KEEP_ONE
from thread_job import (
    RANKS,
    Job,
    restored,
    tensors,
    threads_for_processes,  # noqa: F401 # a fixture that holds here too
)

from objckpt import retention
from objckpt.commit import Run
from objckpt.errors import CorruptCheckpointError, ObjckptError, StorePermissionError
from objckpt.manifest import Save, Step, index_key, save_of, version_key
from objckpt.retention import abort_uploads, reached, retain, survey, sweep
from objckpt.store import open_store
from objckpt.testing.faults import At, Crashed, Fault, FaultyStore, Nth, Rule, applies, faulty_spool
from objckpt.testing.servers import FakeGCS
from objckpt.testing.worlds import DictStore
from objckpt.uploader import loop

DAY = 86_400.0
#: Steps that are saved, and how many checkpoints are kept. The faults are in the last save; 30 retires 20, deletes 10 and prunes.
SCENARIOS = {"first": ((10,), ALL), "later": ((10, 20), ALL), "retiring": ((10, 20, 30), KEEP_ONE)}
START = "start"
WRITES = {"put", "create", "delete"}
#: Whether the save, if the job or its node lives on, is committed all the same: all but what says that trying again is no use.
MENDED = {fault: fault not in {Fault.FLIP, Fault.TRUNCATE} for fault in Fault}


class Ticking(DictStore):
    """Time goes on by a thousandth of a second with each change."""

    def put(self, key, data, *, crc64=None):
        self.now += 0.001
        super().put(key, data, crc64=crc64)

    def create(self, key, data):
        self.now += 0.001
        return super().create(key, data)


class Story:
    """One job (and those that come after it) over one store. Each rank's uploader has a :class:`FaultyStore` of its own, as long as it
    lives; ``rules`` are for one of them, by number of rank, or for rank 0's trainer while it starts (START).
    """

    def __init__(self, inner, cache, scenario, rules=None):
        self.inner, self.cache = inner, cache
        self.steps, self.policy = SCENARIOS[scenario]
        rules = rules or {}
        clock = (lambda: inner.now) if isinstance(inner, DictStore) else itertools.count().__next__
        self.faulty = {
            who: FaultyStore(inner, rules.get(who, ()), sleep=lambda _: None, clock=clock)
            for who in (*RANKS, START)
        }
        self.job = self.launch(faulty=True)
        self.buried = lambda: None  # called when a trainer has crashed in its start
        self.expected = []  # what the latest may be

    def launch(self, *, faulty=False):
        stores = {n: partial(self._store, n) if faulty else lambda: self.inner for n in RANKS}
        return Job(stores, self.cache, policy=self.policy, launch="job")

    def _store(self, number):
        """What a new process of a rank's uploader sees: the first that crashes is the last that meets a fault."""
        return self.inner if self.faulty[number].crashed else self.faulty[number]

    def passes(self, seconds):
        if isinstance(self.inner, DictStore):
            self.inner.now += seconds

    def start(self):
        try:
            self.job.start(self.faulty[START])
        except (ObjckptError, OSError):
            self.restart()
        except Crashed:
            self.buried()
            self.restart()

    def restart(self, *, node_lost=False):
        """The job's processes end at once; it is launched again."""
        self.job.end()
        if node_lost:
            self.job.lose_node()
        self.job = self.launch()
        self.job.start(self.inner)

    def save(self, step):
        """What the trainer was told of it: None, or an error. A trainer that crashes is not told."""
        self.passes(DAY)
        self.attempted = Save(self.job.version.attempt, Step(step))
        return self.job.save(step)

    def before(self):
        """The start, and all saves but the last."""
        if self.job.version is None:
            self.start()
        for step in self.steps[:-1]:
            assert self.save(step) is None
            assert self.job.told(self.attempted)
        self.expected = [self.attempted] if self.steps[:-1] else [None]

    def latest(self):
        """The latest checkpoint, after a look that all of it is what was saved."""
        found, data = restored(self.inner)
        assert data == (tensors(found) if found else {}), f"{found} is not what was saved"
        return found

    def goes_on(self):
        """The next save works, and another one that finds all else a day old; after gc nothing is left that is not reached."""
        for _ in range(2):
            assert self.save(self.attempted.step + 10) is None
            assert self.job.told(self.attempted)
            assert self.latest() == self.attempted
            for faulty in self.faulty.values():
                faulty.injector.deliver()
        self.job.end()
        self.collect()

    def collect(self):
        run = Run(self.inner, retain=retain)
        sweep(self.inner, survey(run, grace=0).garbage)
        for faulty in self.faulty.values():
            left = FaultyStore(self.inner, clock=lambda: float("inf"))
            left.torn = faulty.torn
            abort_uploads(left)
            assert left.torn == []
        version = run.existing()
        for entry in version.kept:
            assert restored(self.inner, entry.save) == (entry.save, tensors(entry.save))
        left = {o.key for o in self.inner.list("")}
        versions = {version_key(version.number), version_key(version.number - 1)}
        assert {k for k in left if save_of(k) is None} in (versions, {version_key(version.number)})
        assert {save_of(k) for k in left} - {None} == reached(version)
        for save in reached(version):
            assert len([k for k in left if save_of(k) == save]) == 5, "an index, two shards, two records"
            assert index_key(save) in left


def recorded(inner, cache, scenario):
    """The calls of the last save, by the number of rank, each with its number among that rank's."""
    story = Story(inner, cache, scenario)
    story.before()
    seen = {n: len(story.faulty[n].calls) for n in RANKS}
    assert story.save(story.steps[-1]) is None
    assert story.job.told(story.attempted)
    assert story.latest() == story.attempted
    calls = [
        (n, number, call)
        for n in RANKS
        for number, call in enumerate(story.faulty[n].calls[:], 1)
        if number > seen[n]
    ]
    story.goes_on()
    return calls


# ------------------------------------------------------------------ the store


def denied():
    return StorePermissionError("faulty://: 403 AccessDenied")


#: Name of a fault: the fault, its error, and after a crash: whether the uploader is started again, or the job, on this node or another.
KINDS = {
    "fails before": (Fault.FAIL_BEFORE, None, None),
    "is denied": (Fault.FAIL_BEFORE, denied, None),
    "fails after": (Fault.FAIL_AFTER, None, None),
    "is denied after": (Fault.FAIL_AFTER, denied, None),
    "loses its answer": (Fault.LOSE_ANSWER, None, None),
    "is throttled": (Fault.THROTTLE, None, None),
    "hangs": (Fault.HANG, None, None),
    "is cut short": (Fault.TRUNCATE, None, None),
    "flips a bit": (Fault.FLIP, None, None),
    "is torn": (Fault.TEAR, None, None),
    "comes again later": (Fault.DUPLICATE, None, None),
    "is torn by a crash": (Fault.TEAR, Crashed, "uploader"),
    **{
        f"crashes {when}, {again} again": (fault, None, again)
        for when, fault in (("before", Fault.CRASH_BEFORE), ("after", Fault.CRASH_AFTER))
        for again in ("uploader", "job", "node")
    },
}


def rules(number, call, kind):
    """The schedule that has ``kind`` at a call; none if the call cannot meet it, or it would be another kind's."""
    fault, error, _ = KINDS[kind]
    changes = call.verb in WRITES
    if not applies(fault, call.verb) or (fault in {Fault.FAIL_AFTER, Fault.LOSE_ANSWER} and not changes):
        return ()
    if fault is Fault.CRASH_AFTER and not changes:
        return ()  # it is the next one's CRASH_BEFORE
    when = Nth(number, times=3) if fault is Fault.THROTTLE else At(number)
    return (Rule(fault, when, error=error, bit=number),)


def play(inner, cache, scenario, kind, *, number, rank, schedule):
    """One save with a fault, and what follows."""
    fault, error, again = KINDS[kind]
    story = Story(inner, cache, scenario, {rank: schedule})
    if again in {"job", "node"}:
        for n in RANKS:
            story.job.ranks[n].buried = lambda: setattr(story.job.ranks[rank], "alive", False)
    story.before()
    story.save(story.steps[-1])
    save = story.attempted
    allowed = {*story.expected, save}
    hits = story.faulty[rank].injector.hits
    assert [n for n, _ in hits][:1] == [number], "the fault was not met"
    assert story.faulty[rank].crashed == (again is not None)
    latest = story.latest()
    assert latest in allowed
    assert latest == save or not story.job.told(save), "a rank was told that it is committed"
    if again in {"job", "node"}:
        story.restart(node_lost=again == "node")
        latest = story.latest()
        assert latest in allowed
    if MENDED[fault] and error is not denied and again != "node":
        assert latest == save
    story.goes_on()


def problems(cases):
    """Plays each; the failures by name, so that one does not hide the others."""
    failed = {}
    for name, one in cases.items():
        try:
            one()
        except (AssertionError, ObjckptError) as error:
            failed[name] = f"{type(error).__name__}: {error}"
    return failed


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_every_call_to_the_store_with_every_fault(tmp_path, scenario, kind):
    calls = recorded(Ticking(), tmp_path / "clean", scenario)
    assert {call.verb for _, _, call in calls} >= {"put", "create", "list", "read"}
    cases = {
        f"{call} ({number} of rank {rank})": partial(
            play,
            Ticking(),
            tmp_path / f"{rank}-{number}",
            scenario,
            kind,
            number=number,
            rank=rank,
            schedule=schedule,
        )
        for rank, number, call in calls
        if (schedule := rules(number, call, kind))
    }
    assert cases
    assert problems(cases) == {}


def second_start(inner, cache, schedule=()):
    """A job whose node is lost when all records of its second save are there and nobody has committed it; then the start of the next
    one, with faults. The story, with the second save as the one attempted.
    """
    crash = Rule(Fault.CRASH_BEFORE, keys="index/*20.json")
    story = Story(inner, cache, "later", {0: (crash,), START: schedule})
    story.job.ranks[0].buried = lambda: setattr(story.job.ranks[0], "alive", False)
    faulty, story.faulty[START] = story.faulty[START], FaultyStore(inner)
    story.before()
    story.faulty[START] = faulty
    story.save(20)
    assert story.faulty[0].crashed
    assert story.latest() == story.expected[0]
    story.job.end()
    story.job.lose_node()
    story.job = story.launch()
    story.start()
    return story


@pytest.mark.parametrize("kind", [k for k in KINDS if KINDS[k][2] in {None, "uploader"}])
def test_every_call_of_a_start_that_rolls_forward_with_every_fault(tmp_path, kind):
    _, _, again = KINDS[kind]

    def one(number, schedule):
        story = second_start(Ticking(), tmp_path / str(number), schedule)
        assert [n for n, _ in story.faulty[START].injector.hits][:1] == [number]
        assert story.faulty[START].crashed == (again is not None)
        # It was complete, and who starts again finds it so.
        assert story.latest() == story.attempted
        story.goes_on()

    clean = second_start(Ticking(), tmp_path / "clean")
    calls = list(enumerate(clean.faulty[START].calls, 1))
    assert {"probe", "index", "manifest", "records"} <= {c.keys[0].partition("/")[0] for _, c in calls}
    clean.goes_on()
    cases = {
        f"{call} ({number})": partial(one, number, schedule)
        for number, call in calls
        if (schedule := rules(number, call, kind))
    }
    assert problems(cases) == {}


@pytest.mark.parametrize("times", [1, 3])
@pytest.mark.parametrize("fault", [Fault.FLIP, Fault.TRUNCATE])
def test_every_read_of_a_restore_that_brings_other_bytes_gives_an_error_or_the_right_ones(
    tmp_path, fault, times
):
    """Once, it may be mended by another read; three times in a row, it is told."""
    inner = Ticking()
    story = Story(inner, tmp_path, "first")
    story.start()
    story.save(10)
    story.job.end()
    clean = FaultyStore(inner)
    assert restored(clean) == (story.attempted, tensors(story.attempted))
    reads = sum(call.verb == "read" for call in clean.calls)
    assert reads >= 1 + 1 + 2 + 4
    told = 0
    for nth, bit in itertools.product(range(1, reads + 1), range(20)):
        faulty = FaultyStore(inner, [Rule(fault, Nth(nth, times), bit=bit)])
        try:
            assert restored(faulty) == (story.attempted, tensors(story.attempted)), f"read {nth}, bit {bit}"
        except CorruptCheckpointError:
            told += 1
        assert faulty.injector.hits
    assert times == 1 or told


# ------------------------------------------------------------------ the spool


def no_space():
    return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


#: As above; after a crash: whether the rest of the job lives on, as far as it can without the process that is gone.
SYSTEM_KINDS = {
    "has no space": (Fault.FAIL_BEFORE, no_space, None),
    "fails after": (Fault.FAIL_AFTER, None, None),
    "is torn": (Fault.TEAR, no_space, None),
    "is cut short": (Fault.TRUNCATE, None, None),
    "flips a bit": (Fault.FLIP, None, None),
    **{
        f"crashes {when}, {gone} gone": (fault, error, gone)
        for when, fault, error in (
            ("before", Fault.CRASH_BEFORE, None),
            ("after", Fault.CRASH_AFTER, None),
            ("in the middle", Fault.TEAR, Crashed),
        )
        for gone in ("process", "job")
    },
}


def recorded_system(cache, scenario):
    """The spools' system calls by number: those of the start, and those of the last save."""
    with faulty_spool() as injector:
        story = Story(Ticking(), cache, scenario)
        story.start()
        started = len(injector.calls)
        story.before()
        seen = len(injector.calls)
        assert story.save(story.steps[-1]) is None
        calls = list(enumerate(injector.calls, 1))
        story.goes_on()
    return calls[:started], calls[seen:]


def play_system(cache, scenario, kind, number):
    """One save with a fault of the system below a spool, and what follows."""
    fault, error, gone = SYSTEM_KINDS[kind]
    with faulty_spool([Rule(fault, At(number), error=error, bit=number)]) as injector:
        story = Story(Ticking(), cache, scenario)

        def buried():
            """An uploader has crashed."""
            if gone == "job":
                for rank in story.job.ranks.values():
                    rank.alive = False
            injector.crashed = False

        for rank in story.job.ranks.values():
            rank.buried = buried
        story.buried = buried
        story.before()
        try:
            story.save(story.steps[-1])
        except Crashed:  # the trainer's; its uploader finishes what was journalled, unless it crashes with it
            injector.crashed = gone == "job"
            story.job.end()
            injector.crashed = False
        save = story.attempted
        allowed = {*story.expected, save}
        assert [n for n, _ in injector.hits] == [number], "the fault was not met"
        latest = story.latest()
        assert latest in allowed
        assert latest == save or not story.job.told(save), "a rank was told that it is committed"
        if not all(rank.alive for rank in story.job.ranks.values()):
            uploaders = sum(rank.crashes for rank in story.job.ranks.values())
            journalled = all(save in rank.futures for rank in story.job.ranks.values())
            story.restart()
            latest = story.latest()
            assert latest in allowed
            if uploaders and journalled:
                assert latest == save, "it was in the slots of every rank"
        elif gone == "process":
            assert latest == save, "the uploader was started again"
        story.goes_on()


@pytest.mark.parametrize("kind", SYSTEM_KINDS)
@pytest.mark.parametrize("when", ["start", "retiring"])
def test_every_system_call_of_the_spool_with_every_fault(tmp_path, when, kind):
    scenario = "first" if when == "start" else when  # its calls are those of a first save, and more
    of_start, of_save = recorded_system(tmp_path / "clean", scenario)
    calls = of_start if when == "start" else of_save
    assert {call.verb for _, call in calls} >= {"open", "fstat" if when != "start" else "posix_fallocate"}
    cases = {
        f"{call} ({number})": partial(play_system, tmp_path / str(number), scenario, kind, number)
        for number, call in calls
        if applies(SYSTEM_KINDS[kind][0], call.verb)
    }
    assert cases or when == "start"
    assert problems(cases) == {}


# ------------------------------------------------------------------ real servers


@pytest.fixture(scope="module")
def fake_gcs():
    with FakeGCS() as server:
        yield server


@pytest.mark.parametrize("server", ["weed", "fake_gcs"])
def test_a_sample_of_calls_and_faults_over_a_real_server(request, tmp_path, monkeypatch, server):
    """Drawn with a seed that a failure names."""
    place = request.getfixturevalue(server)
    # Nothing here gets old.
    monkeypatch.setattr(loop, "reap", partial(retention.reap, grace=0.0))
    monkeypatch.setattr(loop, "prune", partial(retention.prune, life=0.0))
    monkeypatch.setattr(retention, "VERSION_LIFE", 0.0)
    monkeypatch.setattr(retention, "LEFTOVER_LIFE", -3600.0)

    def make():
        scheme = "s3" if server == "weed" else "gs"
        return open_store(f"{scheme}://{place.bucket}/{uuid.uuid4().hex}", **place.storage_options)

    seed = random.SystemRandom().randrange(10**6)
    draw = random.Random(seed)
    calls = recorded(make(), tmp_path / "clean", "retiring")
    assert {"put", "create", "read", "list", "delete"} == {call.verb for _, _, call in calls}
    every = [
        (kind, rank, number, call, schedule)
        for kind in KINDS
        for rank, number, call in calls
        if (schedule := rules(number, call, kind))
    ]
    cases = {
        f"{call} ({number} of rank {rank}) {kind}": partial(
            play,
            make(),
            tmp_path / f"{rank}-{number}-{kind}",
            "retiring",
            kind,
            number=number,
            rank=rank,
            schedule=schedule,
        )
        for kind, rank, number, call, schedule in draw.sample(every, 16)
    }
    assert problems(cases) == {}, f"seed {seed}"
