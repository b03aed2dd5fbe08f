"""Rules of retention, pins, rollbacks by hand, and `objckpt verify`, over runs that the real code wrote."""

from __future__ import annotations

import json

import pytest
from protocol import S, newest, run_of, saved, started

from objckpt.cli import main
from objckpt.commit import Outcome, settled
from objckpt.errors import CheckpointNotFoundError, FencedError
from objckpt.manifest import (
    Entry,
    KeepBest,
    KeepEvery,
    KeepFor,
    KeepLast,
    Policy,
    Reference,
    data_key,
    index_key,
    record_key,
    version_key,
)
from objckpt.retention import reap, retain
from objckpt.store import open_store
from objckpt.testing.worlds import DictStore

DAY = 86_400.0


def kept_by(rule, losses, *, every=DAY):
    """The steps 10, 20, ... that stay of a line with these losses, saved ``every`` seconds apart."""
    saves = [S(1, 10 * (n + 1)) for n in range(len(losses))]
    entries = tuple(
        Entry(
            s, p, 1, 1, every * n, Reference(index_key(s), 1, 1), metrics=() if v is None else (("loss", v),)
        )
        for n, (s, p, v) in enumerate(zip(saves, (None, *saves), losses, strict=False))
    )
    return [int(e.save.step) for e in retain(entries, saves[-1], Policy(rule, lag=0))]


def test_a_rule_keeps_what_it_says_along_the_line_of_head():
    losses = [3.0, 1.0, 2.0, 1.0, None, 9.0, 4.0]
    assert kept_by((KeepLast(2),), losses) == [60, 70]
    assert kept_by((KeepEvery(25),), losses) == [10, 30, 50, 70]  # of 0 to 24, 25 to 49, 50 to 74; and head
    assert kept_by((KeepBest("loss", 2),), losses) == [20, 40, 70]
    assert kept_by((KeepBest("loss", 1),), losses) == [40, 70]  # of equals the newer one
    assert kept_by((KeepBest("loss", 1, "max"),), losses) == [60, 70]
    assert kept_by((KeepBest("accuracy", 3),), losses) == [70]
    assert kept_by((KeepFor(2.0),), losses) == [50, 60, 70]


def test_what_any_rule_keeps_stays_and_a_clock_that_went_back_drops_nothing():
    losses = [3.0, 1.0, 2.0, 1.0, None, 9.0, 4.0]
    assert kept_by((KeepLast(2), KeepBest("loss"), KeepEvery(40)), losses) == [10, 40, 60, 70]
    assert kept_by((KeepFor(2.0),), losses, every=-DAY) == [10, 20, 30, 40, 50, 60, 70]


def test_the_best_by_its_metadata_outlives_the_newest_ones():
    store = DictStore()
    version = started(store, policy=Policy((KeepLast(1), KeepBest("loss")), lag=0))
    for step, loss in ((10, 5.0), (20, 1.0), (30, 3), (40, "none"), (50, True)):
        saved(store, version, step, metadata={"loss": loss, "note": "x"})
    assert [(int(e.save.step), e.metrics) for e in newest(store).kept] == [(20, (("loss", 1.0),)), (50, ())]
    reap(run_of(store), version.attempt, grace=0)
    assert run_of(store).contents(newest(store).kept[0]).index.metadata == {"loss": 1.0, "note": "x"}


# ------------------------------------------------------------------ by hand


def test_a_pin_outlives_every_policy_until_it_is_undone_and_disturbs_no_job():
    store = DictStore()
    version = started(store, policy=Policy((KeepLast(1),), lag=0))
    first = saved(store, version, 10)
    assert run_of(store).pin(first).attempt == version.attempt
    for step in (20, 30):
        saved(store, version, step)
    assert [int(e.save.step) for e in newest(store).kept] == [10, 30]
    number = newest(store).number
    assert run_of(store).pin(first).number == number  # nothing to do
    run_of(store).pin(first, pinned=False)
    saved(store, version, 40)
    assert [int(e.save.step) for e in newest(store).kept] == [40]
    with pytest.raises(CheckpointNotFoundError, match="any more"):
        run_of(store).pin(first)


def test_a_rollback_by_hand_fences_what_runs_and_its_launch_may_start_again_there():
    store = DictStore()
    version = started(store, "job")
    first, second = saved(store, version, 10), saved(store, version, 20)
    late = saved(store, version, 30, commit=False)
    after = run_of(store).rollback(first)
    assert (after.head, after.launch, after.superseded) == (first, None, ())
    assert run_of(store).commit(late, 1) is Outcome.FENCED
    again = started(store, "job")
    assert (again.head, again.attempt > after.attempt) == (first, True)
    assert {e.save for e in again.kept} == {
        first,
        second,
    }  # nothing was deleted, and `late` was not rolled forward
    assert settled(again, late) is Outcome.FENCED
    with pytest.raises(CheckpointNotFoundError):
        run_of(store).rollback(late)


def test_a_rollback_by_hand_does_not_free_a_launch_that_was_superseded_before():
    store = DictStore()
    save = saved(store, started(store, "old"), 10)
    started(store, "new")
    run_of(store).rollback(save)
    with pytest.raises(FencedError):
        started(store, "old")


# ------------------------------------------------------------------ the commands


@pytest.fixture
def run(tmp_path):
    store = open_store(f"file://{tmp_path}/run")
    version = started(store, "job")
    for step in (10, 20):
        saved(store, version, step, metadata={"loss": step / 10})
    return store, tmp_path / "run"


def call(capsys, *arguments):
    code = main([str(a) for a in arguments])
    return code, *capsys.readouterr()


def test_pin_and_rollback_say_what_is_true_now(capsys, run):
    store, path = run
    code, out, _ = call(capsys, "pin", path, 10)
    assert (code, "checkpoint 10 is pinned" in out) == (0, True)
    code, out, _ = call(capsys, "pin", path, 10, "--undo", "--json")
    assert (code, json.loads(out)["checkpoint"]["pinned"]) == (0, False)
    code, out, _ = call(capsys, "rollback", path, "--to", 10)
    assert code == 0
    assert "the next start resumes from step 10 (attempt 1); what still runs is fenced" in out
    assert "left aside: 20 (attempt 1)" in out
    assert newest(store).head == S(1, 10)
    code, out, err = call(capsys, "rollback", path, "--to", 15)
    assert (code, out) == (1, "")
    assert "no checkpoint of step 15" in err


@pytest.mark.parametrize("deep", [False, True])
def test_verify_says_good_of_a_good_run(capsys, run, deep):
    code, out, err = call(capsys, "verify", run[1], *(["--deep"] if deep else []))
    assert (code, err) == (0, "")
    assert out.count(" good") == 2
    code, out, _ = call(capsys, "verify", run[1], "--step", 20, "--json")
    found = json.loads(out)
    assert (code, found["good"], [c["step"] for c in found["checkpoints"]]) == (0, True, [20])


def test_verify_deep_finds_any_flipped_byte_of_any_object_and_names_the_checkpoint(capsys, run):
    path = run[1]
    save = S(1, 20)
    for key in (data_key(save, 0), record_key(save, 0), index_key(save)):
        honest = (path / key).read_bytes()
        for at in range(len(honest)):
            damaged = bytearray(honest)
            damaged[at] ^= 0x20
            (path / key).write_bytes(damaged)
            code, out, _ = call(capsys, "verify", path, "--deep", "--json")
            states = {c["step"]: bool(c["problems"]) for c in json.loads(out)["checkpoints"]}
            assert (code, states) == (1, {10: False, 20: True}), (key, at)
        (path / key).write_bytes(honest)
    code, out, _ = call(capsys, "verify", path, "--deep")
    assert code == 0
    (path / data_key(save, 0)).write_bytes(b"short")
    code, out, _ = call(capsys, "verify", path)
    assert (code, "DAMAGED" in out, "has 5 bytes, not" in out) == (1, True, True)
    (path / data_key(save, 0)).unlink()
    code, out, _ = call(capsys, "verify", path)
    assert (code, "is missing though a checkpoint names it" in out) == (1, True)


def test_a_damaged_version_is_refused_by_every_command(capsys, run):
    store, path = run
    key = version_key(newest(store).number)
    data = bytearray((path / key).read_bytes())
    data[len(data) // 2] ^= 1
    (path / key).write_bytes(data)
    for command in ("ls", "verify"):
        code, _, err = call(capsys, command, path)
        assert (code, "damaged" in err or "no valid record" in err) == (1, True)


# ------------------------------------------------------------------ damage on the way


class FlipsOnce(DictStore):
    """Flips one bit in the first read of each key."""

    def __init__(self, objects):
        super().__init__(objects)
        self.seen = set()

    def read(self, key, into, offset=0):
        count = super().read(key, into, offset)
        if count and key not in self.seen:
            into[count // 2] ^= 1
        self.seen.add(key)
        return count


def test_a_bit_that_flips_on_the_way_fails_neither_a_commit_nor_a_read():
    store = DictStore()
    version = started(store)
    save = saved(store, version, 10, commit=False)
    flips = FlipsOnce(store.objects)
    assert run_of(flips).commit(save, 1) is Outcome.COMMITTED
    entry = newest(flips).kept[0]
    assert run_of(FlipsOnce(flips.objects)).contents(entry).records[0].save == save
