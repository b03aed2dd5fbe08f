"""Start, commit, roll-forward, retention and pruning, in every order of their store calls, or in many thousand.

The invariants are those of the explicit-state model that the protocol was designed with:

- I1 what the newest version lists has its index and all its records; I4 all data that these name is there, bases' too;
- I2 head is listed; a save that was acknowledged (COMMITTED) is in the run, or was dropped by retention later;
- I3 each version was made from the one before it: starts rise, commits rise within an attempt, nothing is dropped but by retention;
- I5 no two starts hold one attempt; a launch that was superseded before does not start;
- I7 once all ranks are through, no complete save of the newest attempt is left uncommitted;
- I9 who is told "fenced" has not been committed.

Each task is a thread that makes one store call at a time (``objckpt.testing.worlds``); a failure names its schedule.
"""

from __future__ import annotations

import functools
import itertools
import random
from dataclasses import replace

import pytest

from objckpt.commit import Outcome, Run
from objckpt.errors import FencedError
from objckpt.manifest import (
    MANIFEST_PREFIX,
    Attempt,
    KeepLast,
    Policy,
    Save,
    Step,
    Version,
    data_key,
    decode_index,
    decode_record,
    decode_version,
    index_key,
    rank_of,
    record_key,
    records_prefix,
    save_of,
    version_of,
)
from objckpt.retention import prune, reap, retain
from objckpt.testing.worlds import DictStore, Ended, World, durable, every_freeze, every_schedule, walk

LIMIT = 30_000
KEEP_ALL = Policy()
KEEP_ONE = Policy((KeepLast(1),), lag=0)


def S(attempt, step):
    return Save(Attempt(attempt), Step(step))


def run_of(store):
    return Run(store, retain=retain, pause=lambda _: None)


@pytest.fixture(autouse=True)
def one_call_at_a_time(monkeypatch):
    serial = staticmethod(lambda read, items, save: [read(item, save) for item in items])
    monkeypatch.setattr(Run, "_each", serial)


def old_run(world_size=1, policy=KEEP_ALL, steps=(10,)):
    """A run whose attempt 1, of launch "old", has committed ``steps``."""
    store = DictStore()
    run = run_of(store)
    version = run.start(launch="old", world_size=world_size, policy=policy)
    for step in steps:
        for rank in range(world_size):
            durable(store, version.run, S(1, step), rank, world_size)
        assert run.commit(S(1, step), world_size) is Outcome.COMMITTED
    return store, version.run


class Story:
    """One schedule: its world, what was true of the run after each change, and what the tasks were told."""

    def __init__(self, store, choose):
        self.store = store.copy()
        self.world = World(self.store, choose)
        self.world.effect = self.effect
        self.saves = {}
        self.launches = {}
        newest = self.newest()
        self.real = {newest.number: newest}

    def newest(self):
        numbers = [n for key in self.store.objects if (n := version_of(key))]
        number = max(numbers)
        return decode_version(self.store.read_whole(f"{MANIFEST_PREFIX}{number:020d}.json"), number)

    def effect(self, call):
        newest = self.newest()
        if newest.number not in self.real:
            self.follows(newest, self.real[max(self.real)])
            self.real[newest.number] = newest
        self.whole(newest)

    def whole(self, newest):
        there = self.store.objects.keys()
        for e in newest.kept:
            assert index_key(e.save) in there, f"I1 no index of {e.save}"
            for rank in range(e.world_size):
                assert record_key(e.save, rank) in there, f"I1 no record {rank} of {e.save}"
                for save in (e.save, *e.bases):
                    assert data_key(save, rank) in there, f"I4 no data of {save}, which {e.save} needs"
        assert newest.head is None or newest.entry(newest.head), "I2 head is not kept"

    def follows(self, new, old):
        before = {e.save for e in old.kept}
        added = [e for e in new.kept if e.save not in before]
        assert new.attempt >= old.attempt, "I3 an attempt came back"
        if new.change in {"start", "rollback"}:
            assert new.attempt == new.number, "I5 a start's attempt is its number"
            assert new.kept == old.kept, "I3 a start changed what is kept"
            assert new.launch not in old.superseded, f"I5 {new.launch} was superseded before"
            assert new.change == "rollback" or new.head == old.head, "I3 a start forgot the head"
        elif new.change in {"commit", "roll-forward"}:
            (entry,) = added
            assert new.attempt == old.attempt, "I3 a commit changed the attempt"
            assert entry.save.attempt == old.attempt, f"I3 {entry.save} is not of attempt {old.attempt}"
            newest = old.newest_commit()
            assert newest is None or newest < entry.save.step, "I3 commits out of order"
            assert new.head == entry.save, "I3 head is not what was committed last"
            assert before.issuperset(entry.bases), "I4 a base was not kept"
            listed = (*old.kept, replace(entry, parent=old.head))
            assert new.kept == retain(listed, entry.save, old.policy), "I3 not made from the version before"

    def start(self, name, *, launch=None, world_size=1, policy=KEEP_ALL, **more):
        self.launches[name] = launch or name

        def body(store):
            return run_of(store).start(launch=launch or name, world_size=world_size, policy=policy, **more)

        self.world.task(name, body)

    def commit(self, name, save, world_size=1):
        self.saves[name] = save
        self.world.task(name, lambda store: run_of(store).commit(save, world_size))

    def rank(self, name, saves, *, rank=0, world_size=1, run, bases=()):
        """An uploader: each save is made durable and committed; its result is that of the last, which refers to ``bases``."""
        self.saves[name] = saves[-1]

        def body(store):
            of_task = run_of(store)
            for save in saves:
                of_save = bases if save == saves[-1] else ()
                durable(store, run, save, rank, world_size, bases=of_save)
                outcome = of_task.commit(save, world_size)
            return outcome

        self.world.task(name, body)

    def play(self, *, settled=False):
        told = self.world.run()
        last = self.real[max(self.real)]
        assert last == self.newest()
        starts = [v for v in told.values() if not isinstance(v, Outcome) and hasattr(v, "nonce")]
        assert len({v.attempt for v in starts}) == len(starts), "I5 two starts hold one attempt"
        for version in starts:
            assert self.real.get(version.number) == version, "I5 a start that is not of the run"
        ever = {e.save for v in self.real.values() for e in v.kept}
        for name, save in self.saves.items():
            match told[name]:
                case Outcome.COMMITTED:
                    assert save in ever, f"I2 {save} was acknowledged and never in the run"
                    assert last.policy.keep or last.entry(save), f"I2 {save} is lost"
                case Outcome.FENCED:
                    assert save not in (ever if not last.policy.keep else {e.save for e in last.kept}), (
                        f"I9 {save} is committed, and was told fenced"
                    )
                    assert last.attempt != save.attempt, "I9 fenced by nobody"
                case other:
                    assert isinstance(other, Outcome | Ended), f"{name}: {other!r}"
        for name, error in told.items():
            if isinstance(error, FencedError):
                assert self.launches.get(name, name) in last.superseded, (
                    f"I9 {name} was refused, and is not superseded"
                )
            elif isinstance(error, Exception):
                raise error
        if settled:
            self.nothing_left(last)
        return told, last

    def nothing_left(self, last):
        """I7, and that what is kept can be read by who knows nothing but its index."""
        ranks = {}
        for key in self.store.objects:
            if key.startswith(records_prefix(last.attempt)) and (rank := rank_of(key)) is not None:
                ranks.setdefault(save_of(key), set()).add(rank)
        newest = last.newest_commit()
        for save, found in ranks.items():
            complete = len(found) == last.world_size
            assert not complete or (newest is not None and save.step <= newest), f"I7 {save} is left"
        for e in last.kept:
            index = decode_index(self.store.read_whole(index_key(e.save)), e.save)
            for rank, reference in enumerate(index.records):
                decode_record(self.store.read_whole(reference.key), e.save, rank)


def newest_started(told):
    return max((v for v in told.values() if isinstance(v, Version)), key=lambda v: v.number)


def everything(store, tell, *, check=lambda told, last: None, longest=None):
    """Every schedule of the story that ``tell`` sets up; ``check`` gets what the tasks were told and the last version."""

    def play(choose):
        story = Story(store, choose)
        tell(story)
        check(*story.play(settled=True))

    count = every_schedule(play, LIMIT, longest=longest)
    assert count > 5


def walks(store, tell, count, *, settled=True):
    """``count`` random schedules; a failure tells its seed."""
    first = random.randrange(10**9)
    for seed in range(first, first + count):
        story = Story(store, walk(seed))
        tell(story)
        try:
            story.play(settled=settled)
        except AssertionError as error:
            error.add_note(f"seed {seed}")
            raise


# ------------------------------------------------------------------ all orders


def test_of_two_starts_each_gets_its_own_attempt_or_is_refused():
    store, _ = old_run()

    def tell(story):
        story.start("X")
        story.start("Y")

    def check(told, last):
        assert last.attempt == newest_started(told).attempt
        assert last.head == S(1, 10)

    everything(store, tell, check=check)


def test_of_two_equal_starts_each_gets_its_own_attempt():
    """Same launch, same world: but for the nonce their versions would be equal, and each would take the other's for its own.

    Equal ids are a mistake that cannot be told from a restart: in an endless schedule each start overtakes the other's for ever.
    """
    store, _ = old_run()

    def tell(story):
        story.start("X", launch="same")
        story.start("Y", launch="same")

    everything(store, tell, longest=26)


def test_a_commit_and_a_start_meet_on_one_key():
    store, run = old_run()
    durable(store, run, S(1, 20))

    def tell(story):
        story.commit("rank", S(1, 20))
        story.start("new")

    def check(told, last):
        # The save was complete before the start looked: whoever of the two was first, it is in what the job resumes from.
        assert told["rank"] is Outcome.COMMITTED
        assert told["new"].head == last.head == S(1, 20)

    everything(store, tell, check=check)


def test_a_save_that_becomes_complete_while_another_job_starts_is_committed_or_fenced():
    store, run = old_run()

    def tell(story):
        story.rank("rank", [S(1, 20)], run=run)
        story.start("new")

    def check(told, last):
        assert last.head == (S(1, 20) if told["rank"] is Outcome.COMMITTED else S(1, 10)), told

    everything(store, tell, check=check)


def test_two_uploaders_of_one_rank_commit_a_save_once():
    store, run = old_run()
    durable(store, run, S(1, 20))

    def tell(story):
        story.commit("frozen", S(1, 20))
        story.commit("restarted", S(1, 20))

    def check(told, last):
        assert set(told.values()) == {Outcome.COMMITTED}
        assert [e.save.step for e in last.kept] == [10, 20]

    everything(store, tell, check=check)


def test_two_saves_are_committed_in_order_of_steps():
    store, run = old_run()
    durable(store, run, S(1, 20))
    durable(store, run, S(1, 30))

    def tell(story):
        story.commit("older", S(1, 20))
        story.commit("newer", S(1, 30))

    def check(told, last):
        assert set(told.values()) == {Outcome.COMMITTED}
        assert [e.save.step for e in last.kept] == [10, 20, 30]

    everything(store, tell, check=check)


def test_a_rollback_fences_a_commit_or_comes_after_it():
    store, run = old_run(steps=(10, 20))
    durable(store, run, S(1, 30))

    def tell(story):
        story.commit("rank", S(1, 30))
        story.start("new", rollback=S(1, 10))

    def check(told, last):
        assert last.head == S(1, 10)

    everything(store, tell, check=check)


def test_a_launch_that_a_rival_superseded_during_its_start_is_refused():
    """The rival's start may fall between this one's look at the list of superseded launches and its roll-forward."""
    store, _ = old_run()

    def tell(story):
        story.start("old")  # a requeue of the launch that runs: its id is not superseded yet
        story.start("rival")

    everything(store, tell)


# ------------------------------------------------------------------ frozen at any call


def frozen(store, tell, name):
    def play(choose):
        story = Story(store, choose)
        tell(story)
        story.play()

    calls = every_freeze(play, name)
    assert calls >= 5


def job(store, *, step, steps=1, deletes=True):
    """A replacement: starts, saves, commits, deletes what is dropped without any grace, and prunes all old versions."""
    run = run_of(store)
    version = run.start(launch="new", world_size=1, policy=KEEP_ONE)
    for number in range(steps):
        save = Save(version.attempt, Step(step + number))
        durable(store, version.run, save)
        run.commit(save, 1)
        if deletes:
            reap(run, version.attempt, grace=0)
            prune(run, life=0)
    return version


def test_a_zombie_frozen_at_any_call_of_a_commit_does_no_harm():
    store, run = old_run(policy=KEEP_ONE)

    def tell(story):
        story.rank("zombie", [S(1, 20), S(1, 30)], run=run)
        story.world.task("new", functools.partial(job, step=50, steps=2))

    frozen(store, tell, "zombie")


def test_a_zombie_frozen_at_any_call_of_a_start_does_no_harm():
    store, run = old_run(policy=KEEP_ONE)
    durable(store, run, S(1, 20))

    def tell(story):
        story.start("zombie")
        story.world.task("new", functools.partial(job, step=50, steps=2))

    frozen(store, tell, "zombie")


def test_a_zombie_frozen_at_any_call_of_deleting_deletes_nothing_that_lives():
    store, run = old_run(policy=KEEP_ONE, steps=(10, 20, 30))
    durable(store, run, S(1, 40))  # complete, not committed: the new job rolls it forward

    def tell(story):
        story.world.task("zombie", lambda store: reap(run_of(store), Attempt(1), grace=0))
        story.world.task("new", functools.partial(job, step=50, steps=2, deletes=False))

    frozen(store, tell, "zombie")


def test_an_offline_deleter_frozen_at_any_call_deletes_nothing_that_lives():
    store, run = old_run(policy=KEEP_ONE, steps=(10, 20, 30))
    durable(store, run, S(1, 40))

    def tell(story):
        story.world.task("gc", lambda store: reap(run_of(store), grace=0))
        story.world.task("new", functools.partial(job, step=50, steps=2))

    frozen(store, tell, "gc")


def test_a_save_is_refused_once_its_base_is_dropped_however_deleting_goes_on():
    store, run = old_run(policy=KEEP_ONE)

    def tell(story):
        story.rank("zombie", [S(1, 20), S(1, 30)], run=run, bases=(S(1, 10),))
        story.world.task("new", functools.partial(job, step=50))

    frozen(store, tell, "zombie")
    walks(store, tell, 60, settled=False)


def turns(*steps):
    """An order by hand: (task, the call before which it stops, as a verb and how its key begins; None: it runs to its end)."""
    todo = list(steps)

    def choose(waiting):
        while True:
            name, stop = todo[0]
            call = waiting.get(name)
            assert call or not stop, f"{name} has ended without {stop}"
            if call and not (stop and call.verb == stop[0] and call.keys[0].startswith(stop[1])):
                return name
            todo.pop(0)

    return choose


def test_a_version_that_a_zombie_wrote_to_a_pruned_number_acknowledges_nothing():
    """Two uploaders of one save, both frozen for a day: one lands in a pruned number, the other had listed that number before."""
    store, run = old_run()
    durable(store, run, S(1, 20))

    def tell(story):
        story.commit("writes", S(1, 20))
        story.commit("reads", S(1, 20))
        story.start("new", rollback=S(1, 10))
        story.world.task("job", prune_after_commit)

    def prune_after_commit(store):
        of_job = run_of(store)
        version = of_job.existing()
        save = Save(version.attempt, Step(40))
        durable(store, version.run, save)
        of_job.commit(save, 1)
        return prune(of_job, life=0)

    story = Story(
        store,
        turns(
            ("writes", ("create", MANIFEST_PREFIX)),  # it is about to make version 3
            ("new", None),  # which the start makes
            ("reads", ("read", MANIFEST_PREFIX)),  # has seen that 3 is the highest
            ("job", None),  # makes 4, prunes 3
            ("writes", ("list", MANIFEST_PREFIX)),  # makes another version 3
            ("reads", None),
            ("writes", None),
        ),
    )
    tell(story)
    told, last = story.play()
    assert told["reads"] is told["writes"] is Outcome.FENCED
    assert last.entry(S(1, 20)) is None


def test_a_deleter_that_reads_what_a_zombie_wrote_to_a_pruned_number_looks_again():
    store, run = old_run(policy=KEEP_ONE)
    durable(store, run, S(1, 20))

    def tell(story):
        story.commit("writes", S(1, 20))
        story.start("new", policy=KEEP_ONE, rollback=S(1, 10))
        story.world.task("gc", lambda store: reap(run_of(store), grace=0))
        story.start("newer", policy=KEEP_ONE)
        story.world.task("pruner", lambda store: prune(run_of(store), life=0))

    story = Story(
        store,
        turns(
            ("writes", ("create", MANIFEST_PREFIX)),  # it is about to make version 3, which drops 10
            ("new", None),  # which the rollback to 10 makes
            ("gc", ("read", MANIFEST_PREFIX)),  # has seen that 3 is the highest
            ("newer", None),  # makes 4
            ("pruner", None),
            ("writes", ("list", MANIFEST_PREFIX)),  # makes another version 3
            ("gc", None),
            ("writes", None),
        ),
    )
    tell(story)
    told, last = story.play()
    assert told["writes"] is Outcome.FENCED
    assert last.head == S(1, 10)
    assert {save_of(key) for key in told["gc"]} == {S(1, 20)}


# ------------------------------------------------------------------ walks


def test_two_ranks_two_saves_and_a_start():
    store, run = old_run(world_size=2)

    def tell(story):
        for rank in range(2):
            story.rank(f"rank{rank}", [S(1, 20), S(1, 30)], rank=rank, world_size=2, run=run)
        story.start("new", world_size=2)

    walks(store, tell, 100)


def test_three_ranks_and_an_uploader_that_was_started_again():
    store, run = old_run(world_size=3)

    def tell(story):
        for rank in range(3):
            story.rank(f"rank{rank}", [S(1, 20)], rank=rank, world_size=3, run=run)
        story.rank("again", [S(1, 20), S(1, 30)], rank=0, world_size=3, run=run)

    walks(store, tell, 100)


def test_zombies_rival_starts_retention_and_pruning():
    """What the model checked file by file, in one world: two zombies, two rivals, a deleter without grace, a pruner without a day."""
    store, run = old_run(policy=KEEP_ONE)
    durable(store, run, S(1, 20))

    def tell(story):
        story.commit("zombie", S(1, 20))
        story.rank("uploader", [S(1, 20), S(1, 30)], run=run)
        story.start("X", policy=KEEP_ONE)
        story.world.task("new", functools.partial(job, step=50, steps=2))
        story.world.task("gc", lambda store: reap(run_of(store), grace=0))
        story.world.task("pruner", lambda store: prune(run_of(store), life=0))

    walks(store, tell, 100, settled=False)


def test_the_orders_that_are_left_out_make_no_difference():
    """Of two starts, every order (12,242) and those of ``every_schedule`` (14) end alike; here, for a quicker pair of tasks."""
    orders = set()

    def play(choose, ends):
        store = DictStore()
        world = World(store, choose)
        for name in "ab":
            world.task(
                name,
                lambda s, n=name: [len([*s.list("k")]), s.create("k/1", n.encode()), len([*s.list("k")])],
            )
        ends.add(str(world.run()))
        orders.add(tuple(world.schedule))

    ends, all_ends = set(), set()
    few = every_schedule(lambda choose: play(choose, ends), 100)
    for order in set(itertools.permutations("aaabbb")):
        left = iter(order)
        play(lambda waiting, left=left: next(left), all_ends)
    assert ends == all_ends
    assert few < len(orders) == 20
