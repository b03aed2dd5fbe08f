"""Retention: what a version drops, and what may be deleted then.

The first part is the model's ``e_steps``: every sequence of events (stage, learn of a commit, commit, fail, restart, rollback to anything
listed) to a depth, here against the real ``retain`` and ``line``. The second deletes, in a store whose clock the test moves.
"""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from objckpt.commit import Outcome, Run
from objckpt.manifest import (
    MANIFEST_PREFIX,
    Attempt,
    Entry,
    KeepLast,
    Policy,
    Reference,
    Save,
    Step,
    data_key,
    decode_version,
    index_key,
    record_key,
    save_of,
    version_key,
    version_of,
)
from objckpt.retention import GRACE, VERSION_LIFE, line, prune, reap, retain
from objckpt.testing.worlds import DictStore, durable


def S(attempt, step):
    return Save(Attempt(attempt), Step(step))


def entry(save, parent=None, *, pinned=False, bases=()):
    return Entry(save, parent, 1, 1, 1.0, Reference(index_key(save), 1, 1), bases, pinned)


def chain(*saves):
    return tuple(entry(s, parent) for parent, s in zip((None, *saves), saves, strict=False))


# ------------------------------------------------------------------ every sequence of events


class Life:
    """Depth first over all sequences. ``found`` collects which of the model's three checks failed."""

    def __init__(self, keep, slots, *, lag, depth, rollbacks, drop=retain):
        self.policy, self.slots, self.drop = Policy((KeepLast(keep),), lag), slots, drop
        self.seen, self.found = set(), set()
        first, second, third = S(1, 10), S(1, 20), S(1, 30)
        kept = chain(first, second, third)
        parents = frozenset((e.save, e.parent) for e in kept)
        todo = [(depth, (kept, third, 1, 30, (), third, 0, parents, rollbacks))]
        while todo:
            left, state = todo.pop()
            if left and (left, state) not in self.seen:
                self.seen.add((left, state))
                todo += [(left - 1, after) for after in self.events(state)]

    def events(self, state):
        """The states that may follow. ``known``: the newest checkpoint that the rank knows to be committed, a save's base;
        ``unknown``: how many commits it has not heard of, whose slots are not free yet.
        """
        kept, head, attempt, step, flight, known, unknown, parents, rollbacks = state
        listed = [e.save for e in kept]
        if len(flight) + unknown < self.slots:
            staged = (*flight, (S(attempt, step + 10), known))
            yield kept, head, attempt, step + 10, staged, known, unknown, parents, rollbacks
        if known != head or unknown:
            yield kept, head, attempt, step, flight, head, 0, parents, rollbacks
        if flight:
            (save, base), rest = flight[0], flight[1:]
            yield kept, head, attempt, step, rest, known, unknown, parents, rollbacks  # it failed
            if base not in listed:
                self.found.add("E3 a commit is refused, its base has been retired")
            else:
                true = parents | {(save, head)}
                after = self.drop((*kept, entry(save, head, bases=(base,))), save, self.policy)
                self.check(after, save, true, {*listed, save})
                yield after, save, attempt, step, rest, known, unknown + 1, true, rollbacks
        for to in [head, *(s for s in listed if s != head and rollbacks)]:  # a restart, or a rollback
            self.check(kept, to, parents, set(listed))
            yield kept, to, attempt + 1, to.step, (), to, 0, parents, rollbacks - (to != head)

    def check(self, kept, head, parents, had):
        ancestors, save, parent = [], head, dict(parents)
        while save is not None:
            ancestors.append(save)
            save = parent[save]
        older = [*line(head, kept), None][1]
        listed = {e.save for e in kept}
        if older is not None and older not in ancestors:
            self.found.add("E1 a fallback goes to what a rollback left aside")
        newest = [s for s in ancestors if s in had][: self.policy.keep[0].count]
        if head not in listed or not listed.issuperset(newest):
            self.found.add("E2 one of the newest `keep` of the line of head was dropped")


@pytest.mark.parametrize("slots", [2, 3])
@pytest.mark.parametrize("keep", [1, 2])
@pytest.mark.parametrize("spare", [0, 1])
def test_every_sequence_of_events_keeps_the_line_of_head_and_the_bases(keep, slots, spare):
    life = Life(keep, slots, lag=slots - spare, depth=9, rollbacks=2)
    assert life.found == set()
    assert len(life.seen) > 1_000


def test_with_too_little_lag_a_commit_would_be_refused_for_its_base():
    assert Life(1, 3, lag=1, depth=7, rollbacks=2).found == {
        "E3 a commit is refused, its base has been retired"
    }


def newest_commits(kept, head, policy):
    """A rule that was given up: counting in the order of commits."""
    gone = {e.save for e in kept[: -(policy.keep[0].count + policy.lag)]} - {head}
    parents = {e.save: e.parent for e in kept}

    def standing(save):
        return standing(parents[save]) if save in gone else save

    return tuple(entry(e.save, standing(e.parent)) for e in kept if e.save not in gone)


def test_counting_by_commits_would_drop_what_a_rollback_went_back_to():
    found = Life(2, 2, lag=0, depth=7, rollbacks=1, drop=newest_commits).found
    assert "E2 one of the newest `keep` of the line of head was dropped" in found


# ------------------------------------------------------------------ retain


def test_keep_and_lag_count_along_the_line_of_parents():
    saves = [S(1, s) for s in range(10, 80, 10)]
    kept = retain(chain(*saves), saves[-1], Policy((KeepLast(2),), lag=1))
    assert [e.save for e in kept] == saves[-3:]
    assert [e.parent for e in kept] == [None, *saves[-3:-1]]
    assert retain(chain(*saves), saves[-1], Policy()) == chain(*saves)


def test_children_take_over_the_parent_of_what_is_dropped():
    a, b, c, d = (S(1, s) for s in (10, 20, 30, 40))
    kept = (entry(a, pinned=True), entry(b, a), entry(c, b), entry(d, c))
    after = retain(kept, d, Policy((KeepLast(1),), lag=0))
    assert [(e.save, e.parent) for e in after] == [(a, None), (d, a)]


def test_a_pinned_checkpoint_is_never_dropped():
    saves = [S(1, 10), S(1, 20), S(1, 30)]
    aside = entry(S(2, 40), S(1, 10), pinned=True)
    kept = (entry(saves[0], pinned=True), *chain(*saves)[1:], aside)
    for _ in range(3):
        head = Save(saves[-1].attempt, Step(saves[-1].step + 10))
        kept = retain((*kept, entry(head, saves[-1])), head, Policy((KeepLast(1),), lag=0))
        saves.append(head)
    assert [e.save for e in kept] == [S(1, 10), S(2, 40), head]


def test_what_a_rollback_left_aside_goes_when_the_new_branch_has_enough():
    back, aside = S(1, 10), S(1, 20)
    kept, policy = chain(back, aside), Policy((KeepLast(2),), lag=0)
    first, second, third = S(3, 11), S(3, 12), S(3, 13)
    kept = retain((*kept, entry(first, back)), first, policy)
    assert [e.save for e in kept] == [back, aside, first]
    kept = retain((*kept, entry(second, first)), second, policy)
    assert [e.save for e in kept] == [first, second]
    assert [e.save for e in retain((*kept, entry(third, second)), third, policy)] == [second, third]


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_head_pins_and_parents_hold_for_any_tree(data):
    kept = []
    for number in range(data.draw(st.integers(1, 8))):
        parent = data.draw(st.sampled_from([None, *(e.save for e in kept)]))
        attempt = data.draw(st.integers(1, 3))
        kept.append(entry(S(attempt, 10 * number), parent, pinned=data.draw(st.booleans())))
    head = data.draw(st.sampled_from(kept)).save
    policy = Policy((KeepLast(last := data.draw(st.integers(1, 3))),), data.draw(st.integers(0, 2)))
    after = retain(tuple(kept), head, policy)
    listed = {e.save for e in after}
    assert head in listed
    assert listed >= {e.save for e in kept if e.pinned}
    assert all(e.parent is None or e.parent in listed for e in after)
    assert line(head, after) == [s for s in line(head, tuple(kept)) if s in listed]
    assert line(head, after)[: last + policy.lag] == line(head, tuple(kept))[: last + policy.lag]
    assert retain(after, head, policy) == after


# ------------------------------------------------------------------ deleting


class Job:
    """One job of one rank after the other, each commit a minute after the last."""

    def __init__(self, policy):
        self.store, self.policy = DictStore(now=1_000.0), policy
        self.run = Run(self.store, retain=retain, pause=lambda _: None)
        self.start()

    def start(self, **more):
        name = f"job-{self.store.now}"
        self.version = self.run.start(launch=name, world_size=1, policy=self.policy, **more)
        return self.version

    def save(self, step, *, commit=True, after=60.0, bases=()):
        self.store.now += after
        save = Save(self.version.attempt, Step(step))
        durable(self.store, self.version.run, save, bases=bases)
        if commit:
            assert self.run.commit(save, 1) is Outcome.COMMITTED
        return save

    def there(self):
        """Steps of which anything is left; of each, all of it must be."""
        keys = {}
        for key in self.store.objects:
            if (save := save_of(key)) is not None:
                keys.setdefault(save, set()).add(key)
        for save, found in keys.items():
            assert found >= {data_key(save, 0), record_key(save, 0)}, f"half of {save} is left"
        return sorted(s.step for s in keys)


def test_what_was_dropped_stays_readable_for_the_grace():
    job = Job(Policy((KeepLast(1),), lag=0))
    for step in (10, 20, 30):
        job.save(step)
    assert reap(job.run, job.version.attempt) == []
    job.save(40, after=GRACE - 61)
    assert reap(job.run, job.version.attempt) == []  # 10 was listed until 20 came, which is GRACE - 1 s ago
    assert job.there() == [10, 20, 30, 40]
    job.save(50, after=2)
    deleted = reap(job.run, job.version.attempt)
    assert {save_of(key).step for key in deleted} == {10}
    assert job.there() == [20, 30, 40, 50]
    job.save(60, after=GRACE + 1)
    assert reap(job.run, job.version.attempt)
    assert job.there() == [50, 60]  # 50 was listed until just now


def test_nothing_that_a_kept_checkpoint_refers_to_is_deleted():
    job = Job(Policy((KeepLast(1),), lag=1))
    base = job.save(10)
    job.save(20, bases=(base,))
    job.save(30, bases=())
    job.save(40, after=10 * GRACE)
    reap(job.run, job.version.attempt, grace=0)
    assert job.there() == [30, 40]

    job = Job(Policy((KeepLast(1),), lag=1))
    base = job.save(10)
    head = job.save(20, bases=(base,))
    job.save(30, bases=(head,))
    assert [e.save.step for e in job.run.existing().kept] == [20, 30]
    reap(job.run, job.version.attempt, grace=0)
    assert job.there() == [10, 20, 30]  # 20 refers to 10
    job.save(40, bases=(head,))
    reap(job.run, job.version.attempt, grace=0)
    assert job.there() == [20, 30, 40]  # 30 and 40 refer to 20


def test_dead_saves_go_and_those_in_flight_stay():
    job = Job(Policy((KeepLast(1),), lag=0))
    job.save(10, commit=False)
    store, save = job.store, S(1, 15)
    store.put(data_key(save, 0), b"a shard whose record never came")
    assert reap(job.run, job.version.attempt, grace=0) == []  # no commit yet: all may be in flight
    store.delete([record_key(S(1, 10), 0)])  # so that 20 does not commit it
    job.save(20)
    job.save(30, commit=False)
    assert {save_of(k).step for k in reap(job.run, job.version.attempt, grace=0)} == {10, 15}
    assert job.there() == [20, 30]


def test_a_deleter_spares_newer_attempts_and_its_own_saves_in_flight():
    job = Job(Policy((KeepLast(1),), lag=0))
    job.save(10)
    durable(job.store, job.version.run, S(1, 20))
    old = job.version.attempt
    job.start(rollback=S(1, 10))
    job.save(30, commit=False)
    assert (
        reap(job.run, old, grace=0) == []
    )  # its own 20 is newer than its newest commit, 30 is of a newer attempt
    assert {save_of(k).step for k in reap(job.run, grace=0)} == {20}
    assert job.there() == [10, 30]


def test_a_deleter_that_read_an_old_version_looks_again():
    job = Job(Policy((KeepLast(1),), lag=0))
    job.save(10)
    old = job.run.existing()

    class Late(DictStore):
        """A save is committed just after the newest version was read."""

        done = False

        def read(self, key, into, offset=0):
            count = super().read(key, into, offset)
            if not self.done and key.startswith(MANIFEST_PREFIX):
                self.done = True
                job.save(20)
                self.objects = job.store.objects
            return count

    late = Late(job.store.objects, job.store.now)
    deleted = reap(Run(late, retain=retain), job.version.attempt, grace=0)
    assert {save_of(key) for key in deleted} == {old.head}


def test_versions_are_pruned_in_ascending_order_once_their_successors_are_old():
    class Recording(DictStore):
        def __init__(self):
            super().__init__()
            self.deleted = []

        def delete(self, keys):
            keys = [*keys]
            self.deleted.append(keys)
            super().delete(keys)

    job = Job(Policy((KeepLast(1),), lag=0))
    job.store = Recording()
    job.run = Run(job.store, retain=retain, pause=lambda _: None)
    job.start()
    for step in range(1, 6):
        job.save(step, after=VERSION_LIFE / 2)
    # Versions 1 to 6 were made at 0, 0.5, 1 ... 2.5 days; 1 to 3 were replaced by 4, at 1.5 days, or before.
    assert prune(job.run) == 3
    assert job.store.deleted == [[version_key(n)] for n in (1, 2, 3)]
    assert prune(job.run) == 0
    job.save(6, after=8 * VERSION_LIFE)
    assert prune(job.run) == 2
    left = [version_of(o.key) for o in job.store.list(MANIFEST_PREFIX)]
    assert left == [
        6,
        7,
    ]  # 6 is a week old, and was the newest until a moment ago: a reader may be about to read it
    assert job.run.existing().number == 7


def test_pruning_an_empty_place_does_nothing():
    assert prune(Run(DictStore(), retain=retain)) == 0


def test_old_versions_that_are_left_can_always_be_read_for_the_grace():
    job = Job(Policy((KeepLast(2),), lag=0))
    for step in range(1, 40):
        job.save(step, after=VERSION_LIFE / 3)
        reap(job.run, job.version.attempt)
        prune(job.run)
    numbers = [version_of(o.key) for o in job.store.list(MANIFEST_PREFIX)]
    assert len(numbers) in {4, 5}
    assert all(b - a == 1 for a, b in itertools.pairwise(numbers))
    for number in numbers:
        decode_version(job.store.read_whole(version_key(number)), number)
    assert job.there() == [37, 38, 39]
