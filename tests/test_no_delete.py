"""A trainer that may not delete saves, commits and retires as any other, says once who has to delete, and ``objckpt gc`` does it."""

from __future__ import annotations

import json
import logging
import threading
import uuid

import boto3
import pytest
from botocore.exceptions import ClientError
from protocol import Odd
from test_uploader import Trainer

from objckpt.cli import main
from objckpt.commit import Run
from objckpt.errors import StorePermissionError
from objckpt.manifest import KeepLast, Policy, Rank, data_key, save_of
from objckpt.retention import reap, retain
from objckpt.spool import root
from objckpt.store import open_store, read_all
from objckpt.uploader import loop

STEPS = (10, 20, 30, 40)


@pytest.fixture(autouse=True)
def no_grace(monkeypatch):
    """What is dropped may go at once: the test need not wait for ten minutes of a server's clock."""
    monkeypatch.setattr(loop, "reap", lambda run, attempt: reap(run, attempt, grace=0))


@pytest.fixture
def trainer_options(weed):
    return {**weed.storage_options, "key": weed.trainer_key, "secret": weed.trainer_secret}


@pytest.fixture
def admin(weed):
    """The command line's options of a role that may delete."""
    return options_of(weed.storage_options)


@pytest.fixture
def memory():
    return open_store(f"memory://{uuid.uuid4().hex}")


class Undeletable(Odd):
    """May not delete while ``denied``: all keys of a call are refused, or all but the first. ``asked`` are the calls."""

    def __init__(self, store, *, all_but=0):
        super().__init__(store)
        self.all_but, self.denied, self.asked = all_but, True, []

    def delete(self, keys):
        keys = [*keys]
        self.asked.append(keys)
        if self.denied:
            self.store.delete(keys[: self.all_but])
            raise StorePermissionError(f"{keys[self.all_but :]}: AccessDenied", key=keys[-1])
        self.store.delete(keys)


def job(store, where, keep=1):
    """An attempt of one rank, and its trainer with an uploader in a thread."""
    run = Run(store, retain=retain)
    run.prove()
    version = run.start(launch="a", world_size=1, policy=Policy((KeepLast(keep),) if keep else (), 0))
    return run, Trainer(store, root(where, version.run), version).begin()


def save_all(trainer, steps=STEPS):
    """Save and commit each step. All that the uploader told, in order."""
    told = []
    for slot, step in enumerate(steps):
        trainer.save(step, slot=slot % 2)
        while True:
            message = trainer.events.get(timeout=20)
            told.append(message)
            assert message["op"] not in {"failed", "delayed", "gone", "fenced"}, message
            if message["op"] == "committed":
                break
    return told


def end(trainer):
    """Close it; what it told until then."""
    trainer.channel.send({"op": "close", "remove": True})
    told = []
    while not told or told[-1]["op"] != "closed":
        told.append(trainer.events.get(timeout=20))
    trainer.join()
    return told


class Said:
    """What was logged, and what commands printed."""

    def __init__(self, caplog, capsys):
        self._caplog, self._capsys = caplog, capsys

    def warnings(self):
        return [r.getMessage() for r in self._caplog.records if r.levelno >= logging.WARNING]

    def call(self, *arguments):
        code = main([str(a) for a in arguments])
        out, err = self._capsys.readouterr()
        return code, out, err


@pytest.fixture
def said(caplog, capsys):
    return Said(caplog, capsys)


def options_of(options):
    return [part for name, value in options.items() for part in ("-o", f"{name}={value}")]


# ------------------------------------------------------------------ on a server


def test_the_server_tells_the_trainer_that_it_may_not_delete(weed, bucket_uri, trainer_options):
    """Or the tests below would prove nothing. Alone and in bulk; all else that a trainer does is allowed."""
    store = open_store(bucket_uri, **trainer_options, part_size=5 << 20)
    large = bytes(6 << 20)
    store.put("data/large", large)
    assert store.create("index/one", b"one")
    assert not store.create("index/one", b"two")
    with pytest.raises(StorePermissionError, match=r"2 of 2 keys were not deleted.*AccessDenied"):
        store.delete(["data/large", "index/one"])
    client = boto3.client(
        "s3",
        endpoint_url=weed.endpoint_url,
        region_name="us-east-1",
        aws_access_key_id=weed.trainer_key,
        aws_secret_access_key=weed.trainer_secret,
    )
    with pytest.raises(ClientError, match="AccessDenied"):
        client.delete_object(Bucket=weed.bucket, Key=f"{bucket_uri.rpartition('/')[2]}/index/one")
    assert [o.key for o in store.list("")] == ["data/large", "index/one"]
    assert read_all(store, "data/large") == large


def test_a_trainer_without_the_right_to_delete_retires_and_gc_deletes(
    bucket_uri, trainer_options, admin, tmp_path, said
):
    run, trainer = job(open_store(bucket_uri, **trainer_options), tmp_path)
    told = save_all(trainer) + end(trainer)
    assert [e.save.step for e in run.existing().kept] == [40]
    everything = [o.key for o in run.store.list("")]
    assert {save.step for key in everything if (save := save_of(key))} == set(STEPS), "nothing was deleted"
    (warning,) = said.warnings()
    for word in (run.existing().run, "may be deleted", "data/", f"`objckpt gc {bucket_uri}`"):
        assert word in warning
    assert [m["error"] for m in told if m["op"] == "undeleted"] == [warning]

    own = options_of(trainer_options)
    code, out, err = said.call("gc", bucket_uri, "--grace", 0, *own)
    assert (code, out) == (1, "")
    assert "Run gc under a role that may delete" in err
    assert err.count("\n") == 1
    code, out, _ = said.call("gc", bucket_uri, "--grace", 0, "--dry-run", "--json", *own)
    garbage = [g["key"] for g in json.loads(out)["garbage"]]
    assert code == 0
    assert {save_of(key).step for key in garbage} == {10, 20, 30}
    assert [o.key for o in run.store.list("")] == everything
    code, out, _ = said.call("gc", bucket_uri, "--grace", 0, "--json", *admin)
    assert (code, [g["key"] for g in json.loads(out)["garbage"]]) == (0, garbage)
    assert {o.key for o in run.store.list("")} == {*everything} - {*garbage}
    entry = run.existing().entry(run.existing().head)
    assert read_all(run.store, data_key(entry.save, Rank(0)))
    assert run.contents(entry)


def test_a_whole_job_runs_without_the_right_to_delete_and_resumes(bucket_uri, trainer_options, tmp_path):
    import torch

    import objckpt

    model = torch.nn.Linear(3, 2)
    state = {"model": model, "n": 0}
    for number in range(2):
        cache = tmp_path / str(number)
        with objckpt.Checkpointer(bucket_uri, cache=cache, keep=2, storage_options=trainer_options) as ckpt:
            last = ckpt.restore(state)
            first = last.step if last else 0
            assert first == state["n"] == 3 * number
            for step in range(first + 1, first + 4):
                state["n"] = step
                ckpt.save(step, state).result(60)
    found = objckpt.open(bucket_uri, **trainer_options)
    assert found.latest().step == 6
    store = open_store(bucket_uri, **trainer_options)
    assert len([*store.list("probe/")]) == 2, "each start leaves its probe to gc"


# ------------------------------------------------------------------ in memory


@pytest.mark.parametrize("all_but", [0, 1])
def test_it_is_said_once_and_tried_once(memory, tmp_path, said, all_but):
    store = Undeletable(memory, all_but=all_but)
    run, trainer = job(store, tmp_path)
    store.asked.clear()
    save_all(trainer)
    trainer.die()
    assert [e.save.step for e in run.existing().kept] == [40]
    assert len(store.asked) == 1
    assert len(said.warnings()) == 1


def test_each_uploader_says_it_for_itself(memory, tmp_path, said):
    store = Undeletable(memory)
    for number in range(2):
        _, trainer = job(store, tmp_path / str(number))
        save_all(trainer)
        trainer.die()
    assert len(said.warnings()) == 2


def test_it_is_tried_again_after_an_hour_and_then_deletes(memory, tmp_path, said, monkeypatch):
    """Credentials may have expired for a moment only; a zero hour here."""
    monkeypatch.setattr(loop, "_CLEAN_AGAIN", 0.0)
    store = Undeletable(memory)
    run, trainer = job(store, tmp_path)
    save_all(trainer)
    store.denied = False
    save_all(trainer, (50,))
    trainer.die()
    assert len(store.asked) > 2
    assert len(said.warnings()) == 1
    assert {save.step for o in run.store.list("") if (save := save_of(o.key))} == {50}


def test_what_may_not_be_pruned_is_said_too(memory, tmp_path, said, monkeypatch):
    """Nothing is retired, so the first thing to delete is an old version."""
    from objckpt.retention import prune

    monkeypatch.setattr(loop, "prune", lambda run: prune(run, life=0))
    run, trainer = job(Undeletable(memory), tmp_path, keep=None)
    save_all(trainer)
    trainer.die()
    (warning,) = said.warnings()
    assert "manifest/00000000000000000001.json" in warning
    assert len(run.existing().kept) == 4


def test_a_save_is_told_committed_before_anything_is_deleted(memory, tmp_path):
    """So neither a refused nor a slow delete holds a save's future up."""
    going, go = threading.Event(), threading.Event()

    class Slow(Undeletable):
        def delete(self, keys):
            going.set()
            assert go.wait(20)
            super().delete(keys)

    store = Slow(memory)
    version = Run(store, retain=retain).start(launch="a", world_size=1, policy=Policy((KeepLast(1),), lag=0))
    trainer = Trainer(store, root(tmp_path, version.run), version).begin()
    save_all(trainer, (10, 20))  # 20 retires 10
    assert going.wait(20)
    go.set()
    save_all(trainer, (30,))
    trainer.die()
