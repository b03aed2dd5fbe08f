"""What ``objckpt gc`` may delete in a run, and why; and that beside a job, a restore or another gc it deletes nothing that lives."""

from __future__ import annotations

import functools

import pytest
from protocol import S
from test_commit_interleavings import (
    KEEP_ONE,
    Story,
    everything,
    frozen,
    job,
    old_run,
    one_call_at_a_time,  # noqa: F401 # a fixture that holds here too
    walks,
)
from test_retention import Job

from objckpt.commit import Outcome, Run
from objckpt.errors import CheckpointNotFoundError, StorePermissionError
from objckpt.manifest import KeepLast, Policy, data_key, probe_key, version_key
from objckpt.retention import GRACE, LEFTOVER_LIFE, VERSION_LIFE, retain, survey, sweep
from objckpt.store import read_all
from objckpt.testing.orders import every_freeze
from objckpt.testing.worlds import DictStore, durable

KEEP_TWO = Policy((KeepLast(2),), lag=0)


def collect(store, **grace):
    """What ``objckpt gc`` does; what it found."""
    run = Run(store, retain=retain, pause=lambda _: None)
    found = survey(run, **grace)
    sweep(store, found.garbage)
    return found


def reasons(found):
    """Steps (or keys, of what belongs to no save) by reason."""
    by_reason = {}
    for g in found:
        by_reason.setdefault(g.reason.value, set()).add(g.save.step if g.save else g.key)
    return by_reason


def test_each_object_that_may_go_has_its_reason():
    job = Job(Policy((KeepLast(1),), lag=0))
    job.store.put(probe_key("0" * 24), b"first\n")
    for step in (10, 20):
        job.save(step)
    job.save(30, commit=False)  # an older attempt's, which the rollback leaves behind
    job.start(rollback=S(1, 20))
    job.store.put(data_key(S(4, 25), 0), b"a shard whose record never came")
    job.save(40)
    job.save(50, commit=False)
    job.store.now += 2 * LEFTOVER_LIFE
    job.save(60)  # commits 50 first
    job.save(70, commit=False)
    job.store.put(probe_key("1" * 24), b"first\n")
    before = dict(job.store.objects)
    found = survey(job.run, grace=0)
    assert job.store.objects == before, "a look deletes nothing"
    assert reasons(found.garbage) == {
        "retired": {10, 20, 40, 50},
        "orphaned": {30},
        "dead": {25},
        "version": {version_key(n) for n in range(1, 5)},
        "probe": {probe_key("0" * 24)},
    }
    assert all(len(before[g.key][0]) == g.size for g in found.garbage)
    assert (found.spared, found.unknown) == ((), ())
    sweep(job.store, found.garbage)
    assert job.store.objects.keys() == before.keys() - {g.key for g in found.garbage}
    assert job.there() == [60, 70]
    assert survey(job.run, grace=0).garbage == ()


def test_what_is_found_is_what_a_run_deletes_with_and_without_grace():
    for grace in (0.0, 90.0, GRACE, 10 * GRACE):
        job = Job(Policy((KeepLast(1),), lag=0))
        for step in range(10, 300, 10):
            job.save(step, after=60)
        before = job.store.objects.keys() | set()
        found = survey(job.run, grace=grace)
        assert collect(job.store, grace=grace) == found
        assert before - job.store.objects.keys() == {g.key for g in found.garbage}
        # A minute lies between two commits; step s was listed until s + 10 came.
        assert {g.save.step for g in found.spared} == {s for s in range(10, 290, 10) if (280 - s) * 6 < grace}
        assert {g.key for g in found.spared} <= job.store.objects.keys()


def test_a_key_that_is_not_exactly_one_of_ours_is_left_alone_and_counted():
    job = Job(Policy((KeepLast(1),), lag=0))
    for step in (10, 20):
        job.save(step)
    foreign = [
        "README.md", "data/00/000001-000000000010-r00000-00.safetensors.bak", "data/notes.txt", "manifest/latest",
        "index/000001-000000000010.json/x", "records/000001-000000000010/0000/r0.json", "probe/mine", "probe/abcdef01/x",
        "other/data/00/000001-000000000010-r00000-00.safetensors", "manifest/00000000000000000001.json.tmp",
    ]  # fmt: skip
    for key in foreign:
        job.store.put(key, b"theirs")
    job.store.now += 10 * LEFTOVER_LIFE
    job.save(30)
    found = collect(job.store, grace=0)
    assert reasons(found.garbage)["retired"] == {10, 20}
    assert sorted(o.key for o in found.unknown) == sorted(foreign)
    assert job.store.objects.keys() >= set(foreign)


def test_a_newer_attempts_saves_are_no_ones_to_delete():
    """A key of ours, but of an attempt that the newest version does not know: what its owner says is not here yet."""
    job = Job(Policy((KeepLast(1),), lag=0))
    job.save(10)
    durable(job.store, job.version.run, S(9, 5))
    found = collect(job.store, grace=0)
    assert (found.garbage, found.unknown) == ((), ())


def test_a_probe_is_left_to_a_start_that_may_still_need_it():
    """Deleted between its two creates, it would make the start refuse the store. What ``prove`` leaves is what gc knows."""

    class Kept(DictStore):
        def delete(self, keys):
            raise StorePermissionError("no")

    job = Job(Policy())
    kept = Kept(job.store.objects, job.store.now)
    kept.objects = job.store.objects
    Run(kept, retain=retain).prove()
    (left,) = (o.key for o in job.store.list("probe/"))
    job.save(10, after=LEFTOVER_LIFE)
    assert reasons(survey(job.run, grace=0).garbage) == {}
    job.save(20, after=1)
    assert reasons(survey(job.run, grace=2 * LEFTOVER_LIFE).garbage) == {}
    assert left in reasons(survey(job.run, grace=0).garbage)["probe"]


def test_a_grace_of_more_than_a_day_holds_for_versions_too():
    job = Job(Policy((KeepLast(1),), lag=0))
    for step in range(10, 60, 10):
        job.save(step, after=VERSION_LIFE)
    long = survey(job.run, grace=3 * VERSION_LIFE)
    assert reasons(long.garbage)["version"] == {version_key(n) for n in (1, 2)}
    assert reasons(survey(job.run).garbage)["version"] == {version_key(n) for n in (1, 2, 3, 4)}


def test_a_version_that_is_pruned_while_a_long_grace_asks_for_it_is_no_error():
    job = Job(Policy((KeepLast(1),), lag=0))
    for step in (10, 20, 30):
        job.save(step)

    class Pruned(DictStore):
        def read(self, key, into, offset=0):
            if key == version_key(1):
                self.delete([key])  # by another gc, just before
            return super().read(key, into, offset)

    found = collect(Pruned(job.store.objects, job.store.now), grace=2 * VERSION_LIFE)
    assert (found.garbage, {g.save.step for g in found.spared}) == ((), {10, 20})


def test_only_the_clock_of_the_store_counts(monkeypatch):
    """A machine's clock that runs wild changes nothing: that of the store stands still here."""
    monkeypatch.setattr("time.time", lambda: 1e12)
    job = Job(Policy((KeepLast(1),), lag=0))
    job.store.put(probe_key("0" * 24), b"first\n")
    for step in (10, 20, 30):
        job.save(step)
    assert survey(job.run).garbage == ()
    assert {g.save.step for g in survey(job.run).spared} == {10, 20}


def test_a_place_without_a_run_is_an_error_and_nothing_is_deleted():
    store = DictStore()
    store.put(data_key(S(1, 10), 0), b"of a run whose manifest lies elsewhere")
    with pytest.raises(CheckpointNotFoundError, match="no run at"):
        collect(store, grace=0)
    assert len(store.objects) == 1


def test_a_deletion_that_is_refused_says_what_stayed():
    class Kept(DictStore):
        def delete(self, keys):
            raise StorePermissionError("AccessDenied", key="x")

    job = Job(Policy((KeepLast(1),), lag=0))
    for step in (10, 20):
        job.save(step)
    with pytest.raises(
        StorePermissionError, match=r"3 objects that may be deleted \(\d+ bytes, data/00/.*AccessDenied"
    ):
        collect(Kept(job.store.objects, job.store.now), grace=0)


def test_the_index_of_a_save_goes_last():
    """So that who goes on after an interrupted gc still sees that it was a checkpoint."""
    job = Job(Policy((KeepLast(1),), lag=0))
    for step in (10, 20):
        job.save(step)
    keys = [g.key for g in survey(job.run, grace=0).garbage]
    assert [key.partition("/")[0] for key in keys] == ["data", "records", "index"]


# ------------------------------------------------------------------ beside a job


def gc(store):
    return collect(store, grace=0)


@pytest.fixture
def no_life(monkeypatch):
    """Every version but the highest may be pruned."""
    monkeypatch.setattr("objckpt.retention.VERSION_LIFE", 0.0)


def test_a_gc_beside_a_commit_in_every_order(no_life):
    store, run = old_run(policy=KEEP_ONE, steps=(10, 20))
    durable(store, run, S(1, 30))

    def tell(story):
        story.commit("rank", S(1, 30))
        story.world.task("gc", gc)

    def check(told, last):
        assert told["rank"] is Outcome.COMMITTED
        assert not isinstance(told["gc"], BaseException), told["gc"]
        assert {10} <= {g.save.step for g in told["gc"].garbage if g.save} <= {10, 20}
        assert last.head == S(1, 30)

    everything(store, tell, check=check)


def test_a_gc_beside_a_rollback_in_every_order(no_life):
    store, _ = old_run(policy=KEEP_TWO, steps=(10, 20, 30))

    def tell(story):
        story.start("new", policy=KEEP_TWO, rollback=S(1, 20))
        story.world.task("gc", gc)

    def check(told, last):
        assert last.head == told["new"].head == S(1, 20)
        assert [e.save.step for e in last.kept] == [20, 30], "what a rollback leaves aside is kept for now"
        assert {g.save.step for g in told["gc"].garbage if g.save} == {10}

    everything(store, tell, check=check)


@pytest.mark.parametrize("who", ["gc", "new", "zombie"])
def test_whoever_is_frozen_at_any_call_gc_deletes_nothing_that_lives(no_life, who):
    """A gc, a job that starts, saves, commits and deletes, and a zombie: one of them stops before each of its calls."""
    store, run = old_run(policy=KEEP_ONE, steps=(10, 20))
    durable(store, run, S(1, 40))

    def tell(story):
        story.world.task("gc", gc)
        story.world.task("new", functools.partial(job, step=50, steps=2))
        story.rank("zombie", [S(1, 60), S(1, 70)], run=run)

    frozen(store, tell, who)


def test_two_gcs_at_once_delete_nothing_that_lives(no_life):
    store, run = old_run(policy=KEEP_ONE, steps=(10, 20))
    durable(store, run, S(1, 30))

    def tell(story):
        story.world.task("gc", gc)
        story.world.task("another", gc)
        story.rank("rank", [S(1, 30), S(1, 40)], run=run)
        story.start("new", policy=KEEP_ONE)

    walks(store, tell, 150, settled=False)


def test_a_restore_reads_what_it_resolved_though_it_is_retired_and_collected_meanwhile():
    """The reader is frozen before each of its calls while a commit retires what it reads and a gc follows at once."""
    store, run = old_run(policy=KEEP_ONE, steps=(10, 20))
    store.now += 2 * GRACE
    durable(store, run, S(1, 30))

    def restore(store):
        of_task = Run(store, retain=retain)
        version = of_task.existing()
        contents = of_task.contents(version.entry(version.head))
        return [read_all(store, o.key, o.size) for record in contents.records for o in record.objects]

    def commit_then_gc(store):
        assert Run(store, retain=retain).commit(S(1, 30), 1) is Outcome.COMMITTED
        return collect(store)  # with the grace that readers are promised

    def play(choose):
        story = Story(store, choose)
        story.world.task("reader", restore)
        story.world.task("job", commit_then_gc)
        told, _ = story.play()
        assert {g.save.step for g in told["job"].garbage} == {10}
        assert told["reader"] in ([f"{S(1, step)} of rank 0".encode()] for step in (20, 30)), told

    assert every_freeze(play, "reader") >= 5
