"""Start, commit, roll-forward, retention and pruning, in every order of their store calls, or in many thousand.

``stories`` says what is judged, and when.

Each task is a thread that makes one store call at a time (``objckpt.testing.worlds``); a failure names its schedule.
"""

from __future__ import annotations

import functools
import itertools
import random

import pytest
from stories import KEEP_ONE, S, Story, job, old_run, one_call_at_a_time, run_of

from objckpt.commit import Outcome
from objckpt.manifest import MANIFEST_PREFIX, Attempt, Save, Step, Version, save_of
from objckpt.retention import prune, reap
from objckpt.testing.orders import every_freeze, every_schedule, every_state, walk
from objckpt.testing.worlds import DictStore, World, durable

LIMIT = 30_000


@pytest.fixture(autouse=True)
def deterministic():
    with one_call_at_a_time():
        yield


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
    """Of two tasks of three calls each, all 20 orders end like those that were played."""
    orders = set()

    def look(store):
        return sum(o.size for o in store.list("k"))

    def play(choose, ends):
        store = DictStore()
        world = World(store, choose)
        for size, name in enumerate("ab", 1):
            world.task(name, lambda s, n=size: [look(s), s.put("k/1", bytes(n)), look(s)])
        ends.add(str(world.run()))
        orders.add(tuple(world.schedule))

    ends, states_ends, all_ends = set(), set(), set()
    few = every_schedule(lambda choose: play(choose, ends), 100)
    every_state(lambda choose: play(choose, states_ends), 100)
    for order in set(itertools.permutations("aaabbb")):
        left = iter(order)
        play(lambda waiting, left=left: next(left), all_ends)
    assert ends == states_ends == all_ends
    assert few < len(orders) == 20
