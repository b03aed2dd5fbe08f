"""Named bounds: what meets in one world, small enough that every state of it can be seen.

Each is a function that gives the store to begin with, what sets up the tasks of a :class:`~stories.Story`, and what is checked at the
end beside the invariants. A frozen or dead task is one that is not scheduled, so every bound has any number of them, for any length.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from stories import KEEP_ONE, S, Story, job, old_run, run_of

from objckpt.commit import Outcome
from objckpt.errors import CheckpointNotFoundError
from objckpt.manifest import Attempt, Save, Step, Version
from objckpt.retention import prune, reap, survey, sweep
from objckpt.testing.orders import Explored, every_state, walk
from objckpt.testing.worlds import Choose, DictStore, durable

Tell = Callable[[Story], None]
Check = Callable[[dict[str, Any], Version], None]


def anything(told: dict[str, Any], last: Version) -> None:
    """No more than the invariants."""


@dataclass(frozen=True)
class Bound:
    """With so many ``lost`` answers and ``late`` creates; a schedule is cut after ``longest`` calls; ``settled``: I7 holds at the end."""

    name: str
    says: str
    setting: Callable[[], tuple[DictStore, Tell, Check]]
    lost: int = 0
    late: int = 0
    longest: int | None = None
    settled: bool = True
    quick: bool = False

    def player(self) -> Callable[[Choose], None]:
        """Plays and judges one schedule."""
        store, tell, check = self.setting()

        def play(choose: Choose) -> None:
            story = Story(store, choose, lost=self.lost, late=self.late)
            tell(story)
            check(*story.play(settled=self.settled))

        return play

    def explore(self, limit: int = 2_000_000) -> Explored:
        """Every state."""
        return every_state(self.player(), limit, longest=self.longest)

    def sample(self, seed: int, count: int) -> None:
        """``count`` schedules drawn from ``seed``; a failure tells which."""
        play = self.player()
        for number in range(seed, seed + count):
            try:
                play(walk(number, self.longest))
            except Exception as error:
                error.add_note(f"bound {self.name}, schedule drawn from {number}")
                raise


BOUNDS: dict[str, Bound] = {}


def bound(**more: Any) -> Callable[[Callable[[], tuple[DictStore, Tell, Check]]], Bound]:
    def add(setting: Callable[[], tuple[DictStore, Tell, Check]]) -> Bound:
        name = setting.__name__.replace("_", "-")
        made = Bound(name, (setting.__doc__ or "").strip(), setting, **more)
        BOUNDS[name] = made
        return made

    return add


# ------------------------------------------------------------------ starts


@bound(lost=1, late=1, quick=True)
def two_starts():
    """Two jobs start at once."""
    store, _ = old_run()

    def tell(story):
        story.start("X")
        story.start("Y")

    def check(told, last):
        assert last.head == S(1, 10)

    return store, tell, check


@bound(lost=1, longest=30)
def two_equal_starts():
    """The same launch starts twice at once: each may overtake the other's for ever, but they never share an attempt."""
    store, _ = old_run()

    def tell(story):
        story.start("X", launch="same")
        story.start("Y", launch="same")

    return store, tell, anything


@bound(lost=1)
def three_starts():
    """The launch that runs is requeued while two rivals start."""
    store, _ = old_run()

    def tell(story):
        story.start("old")
        story.start("X")
        story.start("Y")

    return store, tell, anything


# ------------------------------------------------------------------ commits and starts


@bound(lost=1, late=1, quick=True)
def commit_and_start():
    """A save is complete; its commit and a rival start meet."""
    store, run = old_run()
    durable(store, run, S(1, 20))

    def tell(story):
        story.commit("rank", S(1, 20))
        story.start("new")

    def check(told, last):
        assert told["rank"] is Outcome.COMMITTED
        assert told["new"].head == last.head == S(1, 20)

    return store, tell, check


@bound(lost=1, late=1)
def save_and_start():
    """A save becomes complete while a rival starts."""
    store, run = old_run()

    def tell(story):
        story.rank("rank", [S(1, 20)], run=run)
        story.start("new")

    def check(told, last):
        assert last.head == (S(1, 20) if told["rank"] is Outcome.COMMITTED else S(1, 10)), told

    return store, tell, check


@bound()
def save_and_two_starts():
    """A save becomes complete while two rivals start: whoever comes too late for it leaves it alone."""
    store, run = old_run()

    def tell(story):
        story.rank("rank", [S(1, 20)], run=run)
        story.start("X")
        story.start("Y")

    return store, tell, anything


@bound(lost=1)
def two_saves_and_start():
    """One rank, two overlapping saves, and a rival start."""
    store, run = old_run()

    def tell(story):
        story.rank("older", [S(1, 20)], run=run)
        story.rank("newer", [S(1, 30)], run=run)
        story.start("new")

    return store, tell, anything


@bound(lost=1)
def two_ranks_two_saves():
    """Two ranks, two overlapping saves."""
    store, run = old_run(world_size=2)

    def tell(story):
        for rank in range(2):
            story.rank(f"rank{rank}", [S(1, 20), S(1, 30)], rank=rank, world_size=2, run=run)

    def check(told, last):
        assert last.head == S(1, 30)

    return store, tell, check


@bound()
def two_ranks_two_saves_and_start():
    """Two ranks, two overlapping saves, and a rival start."""
    store, run = old_run(world_size=2)

    def tell(story):
        for rank in range(2):
            story.rank(f"rank{rank}", [S(1, 20), S(1, 30)], rank=rank, world_size=2, run=run)
        story.start("new", world_size=2)

    return store, tell, anything


@bound()
def three_ranks():
    """Three ranks, one save."""
    store, run = old_run(world_size=3)

    def tell(story):
        for rank in range(3):
            story.rank(f"rank{rank}", [S(1, 20)], rank=rank, world_size=3, run=run)

    def check(told, last):
        assert last.head == S(1, 20)

    return store, tell, check


@bound(lost=1, quick=True)
def uploader_started_again():
    """Two uploaders of one rank, the first frozen or dead; the save is its rank's last."""
    store, run = old_run()

    def tell(story):
        story.rank("frozen", [S(1, 20)], run=run)
        story.rank("again", [S(1, 20), S(1, 30)], run=run)

    def check(told, last):
        assert last.head == S(1, 30)

    return store, tell, check


@bound()
def rank_fails_a_save():
    """Of two ranks the second never makes the first save durable: it is passed by, whoever is first at the next."""
    store, run = old_run(world_size=2)

    def tell(story):
        story.rank("rank0", [S(1, 20), S(1, 30)], rank=0, world_size=2, run=run)
        story.rank("rank1", [S(1, 30)], rank=1, world_size=2, run=run)

    def check(told, last):
        assert [e.save.step for e in last.kept] == [10, 30]

    return store, tell, check


# ------------------------------------------------------------------ by hand


@bound(lost=1, quick=True)
def rollback_and_commit():
    """A job goes back to an older checkpoint while the one that it fences commits."""
    store, run = old_run(steps=(10, 20))
    durable(store, run, S(1, 30))

    def tell(story):
        story.commit("rank", S(1, 30))
        story.start("new", rollback=S(1, 10))

    def check(told, last):
        assert last.head == S(1, 10)

    return store, tell, check


@bound(lost=1, longest=45, settled=False)
def hand_and_start():
    """A rollback by hand, a pin, a commit, and a start that rolls forward."""
    store, run = old_run(steps=(10, 20))
    durable(store, run, S(1, 30))

    def tell(story):
        story.commit("rank", S(1, 30))
        story.start("new")
        story.world.task("hand", lambda s: run_of(s).rollback(S(1, 10)))

    return store, tell, anything


@bound(lost=1)
def pin_and_retention():
    """A checkpoint is pinned while retention drops it: it stays, or the pin is refused."""
    store, run = old_run(policy=KEEP_ONE)
    durable(store, run, S(1, 20))

    def pin(store):
        try:
            return run_of(store).pin(S(1, 10)).number
        except CheckpointNotFoundError:
            return None

    def tell(story):
        story.commit("rank", S(1, 20))
        story.world.task("pin", pin)
        story.world.task("gc", lambda s: reap(run_of(s), Attempt(1), grace=0))

    def check(told, last):
        assert (last.entry(S(1, 10)) is not None) == (told["pin"] is not None)

    return store, tell, check


@bound(lost=1, quick=True)
def finish_and_start():
    """A job ends and releases the run while another starts, and its own launch is requeued."""
    store, _ = old_run()

    def tell(story):
        story.world.task("end", lambda s: run_of(s).finish(Attempt(1)))
        story.start("new")

    return store, tell, anything


# ------------------------------------------------------------------ deleting


@bound(settled=False)
def frozen_reaper():
    """A deleter of the first attempt, frozen anywhere, while a replacement rolls forward, saves and deletes."""
    store, run = old_run(policy=KEEP_ONE, steps=(10, 20))
    durable(store, run, S(1, 30))

    def tell(story):
        story.world.task("zombie", lambda s: reap(run_of(s), Attempt(1), grace=0))
        story.world.task("new", functools.partial(job, step=50, deletes=False))

    return store, tell, anything


@bound(settled=False)
def frozen_gc():
    """`objckpt gc` without grace, frozen anywhere, while a replacement starts, saves and deletes."""
    store, run = old_run(policy=KEEP_ONE, steps=(10, 20))
    durable(store, run, S(1, 30))

    def gc(store):
        found = survey(run_of(store), grace=0)
        sweep(store, found.garbage)

    def tell(story):
        story.world.task("gc", gc)
        story.world.task("new", functools.partial(job, step=50))

    return store, tell, anything


@bound(settled=False)
def frozen_zombie():
    """An uploader frozen anywhere in a save and its commit while a replacement starts, saves, deletes and prunes without any grace."""
    store, run = old_run(policy=KEEP_ONE)

    def tell(story):
        story.rank("zombie", [S(1, 20)], run=run)
        story.world.task("new", functools.partial(job, step=50))

    return store, tell, anything


@bound(settled=False)
def base_and_retention():
    """A save refers to another one's data, which a replacement drops and deletes meanwhile."""
    store, run = old_run(policy=KEEP_ONE)
    durable(store, run, S(1, 20), bases=(S(1, 10),))

    def tell(story):
        story.commit("zombie", S(1, 20))
        story.commit("other", S(1, 20))
        story.world.task("new", functools.partial(job, step=50))

    return store, tell, anything


def _prune_after_commit(store):
    of_job = run_of(store)
    version = of_job.existing()
    save = Save(version.attempt, Step(40))
    durable(store, version.run, save)
    of_job.commit(save, 1)
    return prune(of_job, life=0)


@bound(late=1, settled=False)
def pruned_number():
    """Two uploaders of one save frozen for more than a day: one may write a number that was pruned, the other may read it."""
    store, run = old_run()
    durable(store, run, S(1, 20))

    def tell(story):
        story.commit("writes", S(1, 20))
        story.commit("reads", S(1, 20))
        story.start("new", rollback=S(1, 10))
        story.world.task("job", _prune_after_commit)

    return store, tell, anything


@bound(settled=False)
def deleter_and_pruned_number():
    """A deleter may read a version that a zombie wrote to a pruned number, in whose light what lives is dead."""
    store, run = old_run(policy=KEEP_ONE)
    durable(store, run, S(1, 20))

    def rivals(store):
        try:
            run_of(store).start(launch="new", world_size=1, policy=KEEP_ONE, rollback=S(1, 10))
            run_of(store).start(launch="newer", world_size=1, policy=KEEP_ONE, rollback=S(1, 10))
        except CheckpointNotFoundError:
            return None  # the zombie was first, and its commit has dropped it
        return prune(run_of(store), life=0)

    def tell(story):
        story.commit("writes", S(1, 20))
        story.world.task("gc", lambda s: reap(run_of(s), grace=0))
        story.world.task("rivals", rivals)

    return store, tell, anything
