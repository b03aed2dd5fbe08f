"""The protocol over stores that lose answers, ignore conditions or are damaged, and over SeaweedFS with real threads."""

from __future__ import annotations

import itertools
import threading
import uuid
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
from protocol import ALL, Odd, S, history, newest, run_of, saved, started

from objckpt.commit import Outcome
from objckpt.errors import (
    CommitUnknownError,
    CorruptCheckpointError,
    StorePermissionError,
    StoreTransientError,
    StoreUnsuitableError,
)
from objckpt.manifest import (
    MANIFEST_PREFIX,
    Attempt,
    Save,
    Step,
    encode_version,
    group_key,
    index_key,
    record_key,
    version_key,
)
from objckpt.store import open_store, read_all
from objckpt.testing.worlds import DictStore, durable


@pytest.fixture
def store():
    return open_store(f"memory://{uuid.uuid4().hex}/run")


# ------------------------------------------------------------------ stores


def test_a_store_that_ignores_the_condition_is_refused(store):
    class Overwriting(Odd):
        def create(self, key, data):
            self.store.put(key, data)
            return True

    with pytest.raises(StoreUnsuitableError, match="put-if-absent"):
        run_of(Overwriting(store)).prove()


def test_a_store_that_refuses_everything_is_refused(store):
    class Full(Odd):
        def create(self, key, data):
            return False

    with pytest.raises(StoreUnsuitableError):
        run_of(Full(store)).prove()


def test_a_good_store_is_proved_and_left_clean_if_deleting_is_allowed(store):
    run_of(store).prove()
    assert [*store.list("")] == []

    class Kept(Odd):
        def delete(self, keys):
            raise StorePermissionError("no")

    run_of(Kept(store)).prove()
    assert len([*store.list("probe/")]) == 1


class Silent(Odd):
    """Creates below ``prefix`` have their effect, or none, and no answer, as often as ``times`` says."""

    def __init__(self, store, prefix, *, effect, times=1):
        super().__init__(store)
        self.prefix, self.effect, self.times = prefix, effect, times

    def create(self, key, data):
        if not key.startswith(self.prefix) or self.times == 0:
            return self.store.create(key, data)
        self.times -= 1
        if self.effect:
            self.store.create(key, data)
        raise CommitUnknownError(key)


@pytest.mark.parametrize("effect", [True, False])
@pytest.mark.parametrize("prefix", [MANIFEST_PREFIX, "index/"])
def test_after_a_create_without_answer_a_retry_neither_loses_nor_doubles(store, prefix, effect):
    version = started(store)
    save = saved(store, version, 10, commit=False)
    odd = Silent(store, prefix, effect=effect)
    run = run_of(odd)
    with pytest.raises(CommitUnknownError):
        run.commit(save, 1)
    assert run.commit(save, 1) is Outcome.COMMITTED
    assert [v.change for v in history(store)] == ["start", "commit"]
    assert [e.save for e in newest(store).kept] == [save]


@pytest.mark.parametrize("effect", [True, False])
def test_after_a_start_without_answer_a_retry_starts(store, effect):
    started(store, "zero")
    odd = Silent(store, MANIFEST_PREFIX, effect=effect)
    with pytest.raises(CommitUnknownError):
        started(odd, "one")
    again = started(odd, "one")
    assert newest(store) == again
    assert again.superseded == ("zero",)


def test_an_equal_answer_that_was_lost_counts_as_won(store):
    """``create`` says True to who finds its own bytes: the nonce makes them its own."""
    version = started(store)
    save = saved(store, version, 10, commit=False)

    class Twice(Odd):
        def create(self, key, data):
            self.store.create(key, data)
            return self.store.create(key, data)  # the client's retry, after the first answer was lost

    assert run_of(Twice(store)).commit(save, 1) is Outcome.COMMITTED
    assert started(Twice(store), "two").head == save
    assert [v.change for v in history(store)] == ["start", "commit", "start"]


def test_two_equal_starts_do_not_take_each_other_for_themselves(store):
    """Same launch, same world, same moment: only the nonce tells the two versions apart."""
    started(store)
    inner = []

    class Racing(Odd):
        def create(self, key, data):
            if key.startswith(MANIFEST_PREFIX) and not inner:
                inner.append(started(self.store))
            return self.store.create(key, data)

    outer = started(Racing(store))
    assert (inner[0].attempt, outer.attempt) == (2, 3)


def overtake(store, attempts):
    """Starts of other jobs, made by hand so that they roll nothing forward; then all versions but the newest are pruned."""
    for number in attempts:
        now = newest(store)
        later = replace(now, number=number, change="start", attempt=Attempt(number), nonce=f"n{number}")
        assert store.create(version_key(number), encode_version(later))
        store.delete([version_key(now.number)])


class Overtaken(Odd):
    """Just before version 2 is created, the run goes on to version 4, and what is older is pruned: the number 2 is free again."""

    done = False

    def create(self, key, data):
        if key == version_key(2) and not self.done:
            self.done = True
            overtake(self.store, [2, 3, 4])
        return self.store.create(key, data)


def test_a_won_commit_that_is_not_the_highest_in_a_later_list_does_not_count(store):
    version = started(store)
    save = saved(store, version, 10, commit=False)
    assert run_of(Overtaken(store)).commit(save, 1) is Outcome.FENCED
    assert [v.number for v in history(store)] == [2, 4]  # its version lies there, and nobody believes it
    assert newest(store).kept == ()


def test_a_won_start_that_is_not_the_highest_in_a_later_list_does_not_count(store):
    started(store)
    assert started(Overtaken(store), "two").attempt == 5


def test_a_won_finish_that_is_not_the_highest_in_a_later_list_does_not_count(store):
    version = started(store)
    assert run_of(Overtaken(store)).finish(version.attempt) is False


def test_a_version_pruned_between_list_and_read_is_looked_for_again(store):
    version = started(store)

    class Pruning(Odd):
        done = False

        def read(self, key, into, offset=0):
            if not self.done:
                self.done = True
                overtake(self.store, [2])
            return self.store.read(key, into, offset)

    assert run_of(Pruning(store)).existing().number == version.number + 1


def test_a_store_that_lists_in_any_order_and_ignores_the_start_key_will_do(store):
    class Unordered(Odd):
        def list(self, prefix, start_after=""):
            return iter([*self.store.list(prefix)][::-1])

    odd = Unordered(store)
    first = started(odd, world_size=3)
    saved(odd, first, 10)
    saved(odd, first, 20, commit=False)
    assert started(odd, "two").head == S(1, 20)


def test_looking_again_costs_one_request(store):
    version = started(store)
    saved(store, version, 10)
    calls = []

    class Counting(Odd):
        def __getattr__(self, name):
            calls.append(name)
            return getattr(self.store, name)

    run = run_of(Counting(store))
    entry = run.existing().kept[0]
    calls.clear()
    assert run.existing().kept[0] is entry
    assert calls == ["list"]


def test_errors_of_the_store_pass_through(store):
    version = started(store)
    save = saved(store, version, 10, commit=False)

    class Away(Odd):
        def list(self, prefix, start_after=""):
            raise StoreTransientError("away", key=prefix)

    with pytest.raises(StoreTransientError):
        run_of(Away(store)).commit(save, 1)
    assert run_of(store).commit(save, 1) is Outcome.COMMITTED


# ------------------------------------------------------------------ damage at reading


def flip(store, key, at=-3):
    data = bytearray(read_all(store, key))
    data[at] ^= 1
    store.put(key, data)


@pytest.mark.parametrize("world_size", [2, 257])
@pytest.mark.parametrize("damage", ["flip", "cut", "gone", "more"])
@pytest.mark.parametrize("what", ["index", "record"])
def test_a_damaged_index_or_record_is_told_with_its_key(what, damage, world_size):
    store = DictStore()
    version = started(store, world_size=world_size)
    save = saved(store, version, 10)
    records = record_key(save, 1) if world_size == 2 else group_key(save, 1)
    key = index_key(save) if what == "index" else records
    data = read_all(store, key)
    match damage:
        case "flip":
            flip(store, key)
        case "cut":
            store.put(key, data[:-1])
        case "more":
            store.put(key, data + b" ")
        case "gone":
            store.delete([key])
    run = run_of(store)
    with pytest.raises(CorruptCheckpointError, match=key):
        run.contents(run.existing().kept[0])


@pytest.mark.parametrize("data", [b"", b"{}", b"[]", b"\xff\xfe\x00", b"[" * 100_000])
def test_a_damaged_newest_version_is_told_and_never_passed_over(store, data):
    """An older version may list what has been deleted since."""
    started(store)
    started(store)
    store.put(version_key(2), data)
    with pytest.raises(CorruptCheckpointError, match=version_key(2)):
        newest(store)
    with pytest.raises(CorruptCheckpointError):
        started(store, "two")


# ------------------------------------------------------------------ a server, and real threads


def test_jobs_that_race_on_a_server_keep_the_invariants(weed, bucket_uri):
    """Two jobs of two ranks each; all four race starts and commits, 20 times."""
    rounds, world_size = 20, 2
    stores = [open_store(bucket_uri, **weed.storage_options) for _ in range(4)]
    told = []

    def job(number):
        barrier = threading.Barrier(world_size)
        box = {}

        def rank(of_rank):
            run = run_of(stores[2 * number + of_rank])
            for turn in range(rounds // 2):
                if of_rank == 0:
                    # A new launch each time, as if by two supervisors without a stable id: they fence each other without end.
                    box["version"] = run.start(launch=f"{number}-{turn}", world_size=world_size, policy=ALL)
                barrier.wait(60)
                version = box["version"]
                head = version.head.step if version.head else 0
                save = Save(version.attempt, Step(head + 1))
                durable(run.store, version.run, save, of_rank, world_size)
                told.append((version, save, run.commit(save, world_size)))
                barrier.wait(60)

        with ThreadPoolExecutor(world_size) as pool:
            for future in [pool.submit(rank, r) for r in range(world_size)]:
                future.result()

    with ThreadPoolExecutor(2) as pool:
        for future in [pool.submit(job, number) for number in range(2)]:
            future.result()
    versions = history(stores[0])
    assert [v.number for v in versions] == list(range(1, len(versions) + 1))
    starts = {v.attempt for v, _, _ in told}
    assert len(starts) == rounds
    assert all(versions[a - 1].attempt == a for a in starts)
    for before, after in itertools.pairwise(versions):
        assert after.attempt >= before.attempt
        assert {e.save for e in before.kept} <= {e.save for e in after.kept}
    kept = {e.save for e in versions[-1].kept}
    assert kept
    for _, save, outcome in told:
        assert outcome in {Outcome.COMMITTED, Outcome.INCOMPLETE, Outcome.FENCED}
        assert outcome is not Outcome.COMMITTED or save in kept
        assert outcome is not Outcome.FENCED or save not in kept
    for entry in versions[-1].kept:
        assert len(run_of(stores[0]).contents(entry).records) == world_size
