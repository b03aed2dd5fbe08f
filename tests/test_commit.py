"""Start, commit, roll-forward, rollback and finish: what each caller is told, and what the run holds then.

Orders of store calls are the matter of ``test_commit_interleavings``, stores that lose answers that of ``test_commit_stores``.
"""

from __future__ import annotations

import itertools
import random
import threading
import uuid
from concurrent.futures import ThreadPoolExecutor

import pytest
from protocol import Odd, S, history, newest, run_of, saved, started

from objckpt.commit import Outcome, settled
from objckpt.errors import (
    CheckpointNotFoundError,
    CorruptCheckpointError,
    FencedError,
    FormatVersionError,
)
from objckpt.manifest import (
    GROUP_SIZE,
    Attempt,
    KeepLast,
    Policy,
    Save,
    Step,
    group_key,
    index_key,
    record_key,
    seal,
)
from objckpt.store import open_store, read_all
from objckpt.testing.worlds import DictStore, durable


@pytest.fixture
def store():
    return open_store(f"memory://{uuid.uuid4().hex}/run")


# ------------------------------------------------------------------ many ranks


@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
def test_whoever_is_last_commits(store, world_size):
    version = started(store, world_size=world_size)
    for number, order in enumerate(itertools.islice(itertools.permutations(range(world_size)), 6)):
        save = Save(version.attempt, Step(10 * number + 10))
        for rank in order:
            durable(store, version.run, save, rank, world_size)
            outcome = run_of(store).commit(save, world_size, folder=0)
            assert outcome is (Outcome.COMMITTED if rank == order[-1] else Outcome.INCOMPLETE)
        assert newest(store).head == save
    contents = run_of(store).contents(newest(store).kept[-1])
    assert [r.rank for r in contents.records] == list(range(world_size))
    assert contents.index.nbytes == sum(o.size for r in contents.records for o in r.objects)


@pytest.mark.parametrize("world_size", [2, 3, 8])
def test_ranks_at_once_commit_each_save_once(store, world_size):
    version = started(store, world_size=world_size)
    saves = [S(version.attempt, step) for step in (10, 20, 30)]
    barrier = threading.Barrier(world_size)

    def rank(number):
        run, outcomes = run_of(store), []
        for save in saves:
            barrier.wait(30)
            durable(store, version.run, save, number, world_size)
            outcomes.append(run.commit(save, world_size))
        return outcomes

    with ThreadPoolExecutor(world_size) as pool:
        told = list(pool.map(rank, range(world_size)))
    for of_save in zip(*told, strict=True):
        assert Outcome.COMMITTED in of_save
        assert set(of_save) <= {Outcome.COMMITTED, Outcome.INCOMPLETE}
    assert [v.change for v in history(store)] == ["start", "commit", "commit", "commit"]
    assert [e.save for e in newest(store).kept] == saves


@pytest.mark.parametrize("world_size", [300, 513])
def test_above_256_ranks_the_index_names_groups(world_size):
    store = DictStore()
    version = started(store, world_size=world_size)
    save = S(version.attempt, 10)
    ranks = list(range(world_size))
    seed = random.SystemRandom().randrange(1 << 32)
    random.Random(seed).shuffle(ranks)
    told = []
    for rank in ranks:
        durable(store, version.run, save, rank, world_size)
        told.append(run_of(store).commit(save, world_size, folder=rank // GROUP_SIZE))
    assert told == [Outcome.INCOMPLETE] * (world_size - 1) + [Outcome.COMMITTED], f"seed {seed}"
    contents = run_of(store).contents(newest(store).kept[0])
    groups = -(-world_size // GROUP_SIZE)
    assert [r.key for r in contents.index.records] == [group_key(save, g) for g in range(groups)]
    assert [r.rank for r in contents.records] == sorted(ranks)


def test_a_group_that_is_merged_already_is_no_reason_to_stop():
    """Its writer may have died before it looked at the others."""
    store, world_size = DictStore(), 300
    version = started(store, world_size=world_size)
    save = saved(store, version, 10, commit=False)
    run = run_of(store)
    assert run.commit(save, world_size, folder=1) is Outcome.INCOMPLETE
    store.delete([group_key(save, 1)])
    assert run.commit(save, world_size, folder=0) is Outcome.INCOMPLETE
    assert run.commit(save, world_size, folder=1) is Outcome.COMMITTED


@pytest.mark.parametrize("merged", [(), (0,), (1,), (0, 1)])
def test_a_start_merges_the_groups_that_dead_ranks_left(merged):
    store, world_size = DictStore(), 260
    version = started(store, world_size=world_size)
    save = saved(store, version, 10, commit=False)
    for group in merged:
        run_of(store)._index(save, world_size, group)
    assert started(store, "two").head == save


# ------------------------------------------------------------------ outcomes


def test_a_save_without_all_records_is_incomplete_and_a_later_one_supersedes_it(store):
    version = started(store, world_size=2)
    run, save = run_of(store), S(version.attempt, 10)
    durable(store, version.run, save, 0, 2)
    assert run.commit(save, 2) is Outcome.INCOMPLETE
    saved(store, version, 20)
    durable(store, version.run, save, 1, 2)
    assert run.commit(save, 2) is Outcome.SUPERSEDED
    assert settled(newest(store), save) is Outcome.SUPERSEDED
    assert [e.save.step for e in newest(store).kept] == [20]


def test_an_older_complete_save_is_committed_first(store):
    version = started(store)
    older = saved(store, version, 10, commit=False)
    newer = saved(store, version, 20)
    assert [e.save for e in newest(store).kept] == [older, newer]
    assert newest(store).entry(newer).parent == older
    assert run_of(store).commit(older, 1) is Outcome.COMMITTED


def test_an_older_save_that_is_damaged_does_not_stop_the_later_ones(store):
    version = started(store)
    older = saved(store, version, 10, commit=False)
    store.put(record_key(older, 0), b"{}")
    newer = saved(store, version, 20)
    assert [e.save for e in newest(store).kept] == [newer]


def test_a_commit_is_repeated_without_effect(store):
    version = started(store)
    save = saved(store, version, 10)
    assert run_of(store).commit(save, 1) is Outcome.COMMITTED
    assert len(history(store)) == 2


def test_a_zombie_is_fenced_by_the_start_of_its_replacement(store):
    version = started(store)
    kept = saved(store, version, 10)
    started(store, "two")
    zombie = saved(store, version, 20, commit=False)
    assert run_of(store).commit(zombie, 1) is Outcome.FENCED
    assert run_of(store).commit(kept, 1) is Outcome.COMMITTED  # even under another attempt
    assert newest(store).head == kept


def test_a_base_that_is_not_kept_is_refused(store):
    version = started(store, policy=Policy((KeepLast(1),), lag=0))
    base = saved(store, version, 10)
    fine = saved(store, version, 20, bases=(base,))
    assert newest(store).entry(fine).bases == (base,)
    late = saved(store, version, 30, commit=False, bases=(base,))
    assert run_of(store).commit(late, 1) is Outcome.REFUSED
    assert newest(store).head == fine
    after = started(store, "two")  # a roll-forward asks for the base too, and passes over it
    assert after.head == fine


def test_an_index_with_other_content_is_damage_and_nothing_is_committed(store):
    version = started(store)
    save = saved(store, version, 10, commit=False)
    store.put(index_key(save), b"{}\n")
    with pytest.raises(CorruptCheckpointError, match=str(save)):
        run_of(store).commit(save, 1)
    assert newest(store).kept == ()


def test_a_group_with_other_content_is_damage():
    store = DictStore()
    version = started(store, world_size=257)
    save = saved(store, version, 10, commit=False)
    store.put(group_key(save, 0), b"{}\n")
    with pytest.raises(CorruptCheckpointError, match=group_key(save, 0)):
        run_of(store).commit(save, 257)


def test_records_of_two_runs_or_worlds_are_no_save(store):
    version = started(store, world_size=2)
    for step, (run, world_size) in enumerate([("other", 2), (version.run, 3)], start=1):
        save = S(version.attempt, step)
        durable(store, version.run, save, 0, 2)
        durable(store, run, save, 1, world_size)
        with pytest.raises(CorruptCheckpointError, match=record_key(save, 1)):
            run_of(store).commit(save, 2)
    assert newest(store).kept == ()


def test_records_deleted_between_list_and_read_are_no_error(store):
    """A save that is dead may be deleted while a slow rank still looks at it; the newest version tells what became of it."""
    version = started(store)
    save = saved(store, version, 10, commit=False)
    saved(store, version, 20)

    class Deleting(Odd):
        def list(self, prefix, start_after=""):
            found = [*self.store.list(prefix, start_after)]
            if prefix.startswith("records/"):
                self.store.delete([record_key(S(version.attempt, 30), 0)])
            return iter(found)

    dead = saved(store, version, 30, commit=False)
    assert run_of(Deleting(store)).commit(dead, 1) is Outcome.INCOMPLETE
    assert run_of(store).commit(save, 1) is Outcome.COMMITTED
    saved(store, version, 30, commit=False)
    assert started(Deleting(store), "two").head == S(version.attempt, 20)


# ------------------------------------------------------------------ roll-forward


def test_complete_saves_are_rolled_forward_by_the_next_start_in_order(store):
    version = started(store, world_size=2)
    first = saved(store, version, 10)
    complete = [saved(store, version, step, commit=False) for step in (30, 20)]
    durable(store, version.run, S(version.attempt, 40), 0, 2)  # the other rank died
    after = started(store, "two", world_size=5)
    assert after.head == complete[0]
    assert [e.save.step for e in after.kept] == [10, 20, 30]
    assert [e.parent for e in after.kept] == [None, first, complete[1]]
    assert [v.change for v in history(store)] == ["start", "commit", "roll-forward", "roll-forward", "start"]
    assert [v.world_size for v in history(store)] == [2, 2, 2, 2, 5]


def test_only_the_newest_attempts_saves_newer_than_its_newest_commit_are_rolled_forward(store):
    version = started(store, policy=Policy((KeepLast(1),), lag=0))
    saved(store, version, 10)
    head = saved(store, version, 20)  # drops 10, whose records are still there
    second = started(store, "two", policy=Policy((KeepLast(1),), lag=0))
    saved(store, version, 30, commit=False)  # of an older attempt
    third = started(store, "three")
    assert (second.head, third.head) == (head, head)
    assert third.kept == second.kept


def test_a_damaged_save_is_not_rolled_forward_and_does_not_stop_the_start(store):
    version = started(store, world_size=2)
    damaged = saved(store, version, 10, commit=False)
    fine = saved(store, version, 20, commit=False)
    store.put(record_key(damaged, 1), b"\0" * 9)
    after = started(store, "two")
    assert [e.save for e in after.kept] == [fine]


def test_a_save_of_a_newer_objckpt_stops_the_start_of_an_older_one(store):
    """Else it would be left aside, and lost, by nothing but an old package on one machine."""
    version = started(store)
    save = saved(store, version, 10, commit=False)
    data = read_all(store, record_key(save, 0))
    store.put(record_key(save, 0), seal(data[:-29].replace(b'"version":2', b'"version":3')))
    with pytest.raises(FormatVersionError):
        started(store, "two")


# ------------------------------------------------------------------ start


def test_the_first_start_makes_the_run(store):
    assert run_of(store).newest() is None
    with pytest.raises(CheckpointNotFoundError, match="no version of a manifest"):
        newest(store)
    version = started(store)
    assert (version.number, version.attempt, version.head, version.kept) == (1, 1, None, ())
    assert newest(store) == version


def test_a_start_keeps_what_there_is_and_says_who_it_is(store):
    first = started(store)
    saved(store, first, 10)
    second = started(store, "two", world_size=4, policy=Policy((KeepLast(3),), lag=1))
    assert second.attempt == second.number == 3
    assert (second.run, second.head) == (first.run, S(1, 10))
    assert (second.launch, second.world_size, second.policy) == ("two", 4, Policy((KeepLast(3),), lag=1))
    assert second.superseded == ("one",)


def test_a_launch_may_start_again_until_another_one_has(store):
    assert [started(store, "one").attempt for _ in range(3)] == [1, 2, 3]
    started(store, "two")
    with pytest.raises(FencedError, match="takeover=4"):
        started(store, "one")
    assert started(store, "two").superseded == ("one",)


def test_takeover_names_the_attempt_it_supersedes_and_works_once(store):
    started(store, "one")
    rival = started(store, "two")
    for wrong in (1, rival.attempt + 1):
        with pytest.raises(FencedError):
            started(store, "one", takeover=wrong)
    back = started(store, "one", takeover=rival.attempt)
    assert back.superseded == ("two",)
    with pytest.raises(FencedError):
        started(store, "two")
    third = started(store, "three")
    with pytest.raises(FencedError, match=f"takeover={third.attempt}"):
        started(store, "one", takeover=rival.attempt)


def test_a_job_that_finished_leaves_the_run_to_everyone(store):
    started(store, "one")
    rival = started(store, "two")
    run = run_of(store)
    assert not run.finish(Attempt(1))
    assert run.finish(rival.attempt)
    assert run.finish(rival.attempt)  # said twice, done once
    last = newest(store)
    assert (last.change, last.launch, last.superseded) == ("finish", None, ())
    assert started(store, "one").superseded == ()
    assert not run.finish(rival.attempt)


def test_a_launch_is_refused_only_after_a_second_look(store):
    """The rival may have finished between the list and the read."""
    started(store, "one")
    rival = started(store, "two")

    class Finishing(Odd):
        done = False

        def read(self, key, into, offset=0):
            count = self.store.read(key, into, offset)
            if not self.done:
                self.done = run_of(self.store).finish(rival.attempt)
            return count

    assert started(Finishing(store), "one").superseded == ()


def test_a_rollback_fences_and_deletes_nothing(store):
    version = started(store)
    back, ahead = saved(store, version, 10), saved(store, version, 20)
    left = saved(store, version, 30, commit=False)
    after = started(store, "two", rollback=back)
    assert (after.change, after.head) == ("rollback", back)
    assert [e.save for e in after.kept] == [back, ahead]
    assert run_of(store).commit(left, 1) is Outcome.FENCED
    again = started(store, "two")
    assert again.head == back
    mine = saved(store, again, 11)
    assert newest(store).entry(mine).parent == back
    with pytest.raises(CheckpointNotFoundError, match=str(left)):
        started(store, "two", rollback=left)


def test_steps_of_two_attempts_do_not_mix(store):
    first = started(store)
    saved(store, first, 10)
    second = started(store, "two")
    head = saved(store, second, 20)
    assert newest(store).head == head
    assert [e.save.attempt for e in newest(store).kept] == [1, second.attempt]
