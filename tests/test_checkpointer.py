"""Checkpointer with a real uploader process, one rank, in a directory or on SeaweedFS."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest
import torch

import objckpt
from objckpt import errors
from objckpt.commit import Run
from objckpt.manifest import Policy, Rank, Save, data_key, encode_version, seal, version_key
from objckpt.retention import retain
from objckpt.saves import Saves
from objckpt.store import open_store, read_all


class Job:
    """A small model with dropout, AdamW and a schedule, whose losses depend on every random number."""

    def __init__(self, seed=0):
        torch.manual_seed(seed)
        self.model = torch.nn.Sequential(
            torch.nn.Linear(16, 16), torch.nn.Dropout(0.2), torch.nn.Linear(16, 1)
        )
        self.optim = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.sched = torch.optim.lr_scheduler.StepLR(self.optim, 3)
        self.state = {"model": self.model, "optim": self.optim, "sched": self.sched, "seen": 0}

    def step(self):
        loss = self.model(torch.randn(4, 16)).square().mean()
        self.optim.zero_grad()
        loss.backward()
        self.optim.step()
        self.sched.step()
        self.state["seen"] += 1
        return loss.item()

    def weights(self):
        return {name: tensor.clone() for name, tensor in self.model.state_dict().items()}


@pytest.fixture
def uri(tmp_path):
    return f"file://{tmp_path}/run"


@pytest.fixture
def opened(tmp_path):
    """Makes Checkpointers with a cache of their own, and closes them."""
    made = []

    def make(uri, **keywords):
        checkpointer = objckpt.Checkpointer(uri, cache=tmp_path / "cache", **keywords)
        made.append(checkpointer)
        return checkpointer

    yield make
    for checkpointer in made:
        checkpointer.close()


def runs(uri):
    return Run(open_store(uri), retain=retain)


def bytes_of(tensor):
    return bytes(tensor.contiguous().view(torch.uint8).numpy())


def assert_equal(a, b):
    assert a.keys() == b.keys()
    for name in a:
        assert torch.equal(a[name], b[name]), name


def train(checkpointer, job, until):
    last = checkpointer.restore(job.state)
    done = last.step if last else 0
    losses = {}
    while done < until and not checkpointer.preempted:
        losses[done] = job.step()
        done += 1
        if checkpointer.due(done, final=done == until):
            checkpointer.save(done, job.state)
    return losses


def test_a_resumed_run_has_the_losses_of_an_uninterrupted_one(uri, opened):
    reference = Job()
    expected = [reference.step() for _ in range(20)]
    with opened(uri, interval=4) as checkpointer:
        first = train(checkpointer, Job(), 10)
    with opened(uri, interval=4) as checkpointer:
        second = train(checkpointer, job := Job(seed=5), 20)
    assert min(second) == 10
    assert [*first.values(), *second.values()] == expected
    assert_equal(job.weights(), reference.weights())
    assert job.state["seen"] == 20


def test_the_future_is_the_committed_checkpoint(uri, opened):
    checkpointer = opened(uri)
    job = Job()
    assert checkpointer.restore(job.state) is None
    future = checkpointer.save(7, job.state, metadata={"loss": 1.5})
    found = future.result(timeout=30)
    assert found == checkpointer.latest() == objckpt.open(uri).latest()
    assert (found.step, found.attempt, found.world_size, found.metadata) == (7, 1, 1, {"loss": 1.5})
    assert checkpointer.checkpoints()[0].nbytes == found.nbytes > 0


def test_what_was_saved_does_not_depend_on_what_the_loop_does_next(uri, opened):
    checkpointer = opened(uri)
    job = Job()
    checkpointer.restore(job.state)
    before = job.weights()
    checkpointer.save(1, job.state)
    with torch.no_grad():
        for parameter in job.model.parameters():
            parameter.fill_(7)
    checkpointer.wait()
    loaded = objckpt.open(uri).load(1)
    assert_equal({k.removeprefix("model."): v for k, v in loaded.items() if k.startswith("model.")}, before)


def test_keep_leaves_the_newest_and_never_the_only_one(uri, opened):
    with opened(uri, interval=1, keep=3) as checkpointer:
        train(checkpointer, Job(), 8)
        checkpointer.wait()
        assert [c.step for c in checkpointer.checkpoints()] == [6, 7, 8]


def test_the_same_step_again_is_the_first_save(uri, opened, caplog):
    checkpointer = opened(uri)
    job = Job()
    checkpointer.restore(job.state)
    future = checkpointer.save(3, job.state)
    assert checkpointer.save(3, job.state) is future
    assert "saved before" in caplog.text


@pytest.mark.parametrize("step", [2, 3.5, -1, 10**12])
def test_a_step_that_cannot_be_is_refused_with_the_way_out(uri, opened, step):
    checkpointer = opened(uri)
    job = Job()
    checkpointer.restore(job.state)
    checkpointer.save(3, job.state).result(timeout=30)
    with pytest.raises(errors.ConfigError, match=r"restore\(state, step=|no number of optimizer steps"):
        checkpointer.save(step, job.state)
    assert [c.step for c in checkpointer.checkpoints()] == [3]


def test_a_save_without_restore_where_there_is_something_to_restore_fences_nobody(uri, opened):
    with opened(uri) as checkpointer:
        train(checkpointer, Job(), 2)
    before = runs(uri).existing()
    with pytest.raises(errors.ConfigError, match=r"restore\(\) was not called"):
        opened(uri).save(5, Job().state)
    assert runs(uri).existing() == before


def test_a_first_save_starts_a_fresh_run(uri, opened):
    assert opened(uri).save(5, Job().state).result(timeout=30).step == 5


def test_mismatches_are_listed_all_at_once_and_nothing_is_changed(uri, opened):
    with opened(uri) as checkpointer:
        train(checkpointer, Job(), 2)
    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(16, 8), torch.nn.Dropout(0.2), torch.nn.Linear(8, 1))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(errors.StateMismatchError) as caught:
        opened(uri).restore({"model": model, "extra": 1})
    for name in ("model.0.weight", "model.0.bias", "model.2.weight", "extra", "optim", "sched", "seen"):
        assert name in str(caught.value)
    assert_equal(model.state_dict(), before)


def damage(uri, key, at=-5):
    path = Path(uri.removeprefix("file://")) / key
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def test_a_damaged_newest_checkpoint_gives_way_to_the_older_loudly(uri, opened, tmp_path, caplog):
    with opened(uri, interval=2) as checkpointer:
        train(checkpointer, Job(), 6)
    damage(uri, data_key(Save(1, 6), Rank(0)))
    job = Job(seed=9)
    with opened(uri) as checkpointer:
        assert checkpointer.restore(job.state).step == 4
        assert "FALLING BACK" in caplog.text
        assert runs(uri).existing().change == "rollback"
        assert job.state["seen"] == 4
        assert checkpointer.save(5, job.state).result(timeout=30).step == 5
    assert [c.step for c in objckpt.open(uri).checkpoints()] == [2, 4, 6, 5], (
        "the damaged one is left for a look"
    )
    assert objckpt.open(uri).latest().step == 5


def test_a_damaged_checkpoint_asked_for_by_number_does_not_give_way(uri, opened):
    with opened(uri, interval=2) as checkpointer:
        train(checkpointer, Job(), 6)
    damage(uri, data_key(Save(1, 4), Rank(0)))
    with pytest.raises(errors.CorruptCheckpointError, match="block 0"):
        opened(uri).restore(Job().state, step=4)


def test_an_older_step_can_be_gone_back_to_and_fences_what_runs(uri, opened):
    with opened(uri, interval=2) as checkpointer:
        train(checkpointer, Job(), 6)
    job = Job(seed=1)
    checkpointer = opened(uri)
    assert checkpointer.restore(job.state, step=2).step == 2
    assert checkpointer.save(3, job.state).result(timeout=30).attempt > 1
    with pytest.raises(errors.CheckpointNotFoundError, match="it has 2, 3, 4, 6"):
        opened(uri).restore(job.state, step=5)


def test_a_record_of_a_newer_format_says_upgrade(uri, opened):
    with opened(uri) as checkpointer:
        train(checkpointer, Job(), 2)
    store = open_store(uri)
    version = runs(uri).existing()
    key = version_key(version.number + 1)
    store.create(key, seal(encode_version(version)[:-29].replace(b'"version":2', b'"version":3', 1)))
    with pytest.raises(errors.FormatVersionError, match="upgrade objckpt"):
        opened(uri).restore(Job().state)


def test_two_jobs_on_one_run_the_older_is_fenced(uri, opened):
    checkpointer = opened(uri, launch="older")
    job = Job()
    checkpointer.restore(job.state)
    checkpointer.save(1, job.state).result(timeout=30)
    runs(uri).start(launch="newer", world_size=1, policy=Policy())
    future = checkpointer.save(2, job.state)
    with pytest.raises(errors.FencedError, match="taken this run over"):
        future.result(timeout=30)
    with pytest.raises(errors.FencedError):
        checkpointer.save(3, job.state)
    assert checkpointer.exit_code == errors.FENCED_EXIT_CODE
    checkpointer.close()
    assert checkpointer.exit_code == errors.FENCED_EXIT_CODE
    assert [c.step for c in objckpt.open(uri).checkpoints()] == [1]
    with pytest.raises(errors.FencedError, match="takeover=3"):
        opened(uri, launch="older").restore(job.state)
    assert opened(uri, launch="older", takeover=3).restore(job.state).step == 1


def test_an_uncaught_fence_ends_the_process_with_its_own_code(uri, tmp_path):
    run = runs(uri)
    for launch in ("older", "newer"):
        run.start(launch=launch, world_size=1, policy=Policy())
    program = f"import objckpt; objckpt.Checkpointer({uri!r}, cache={str(tmp_path)!r}, launch='older').restore({{}})"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == errors.FENCED_EXIT_CODE == 77
    assert "FencedError" in done.stderr
    assert "takeover=2" in done.stderr


def test_a_restart_on_the_same_node_reads_nothing_from_the_bucket(uri, opened):
    """The bucket's copy is damaged, so that only the slot can have given these bytes."""
    checkpointer = opened(uri)
    job = Job()
    checkpointer.restore(job.state)
    job.step()
    checkpointer.save(1, job.state).result(timeout=30)
    checkpointer._saves.close(remove=False, timeout=20)  # as after a crash: the spool stays
    checkpointer._saves = None
    damage(uri, data_key(Save(1, 1), Rank(0)))
    again = Job(seed=4)
    assert opened(uri).restore(again.state).step == 1
    assert_equal(again.weights(), job.weights())


def test_an_uploader_that_is_killed_is_started_again_and_commits(uri, opened, caplog):
    checkpointer = opened(uri)
    job = Job()
    checkpointer.restore(job.state)
    checkpointer.save(1, job.state).result(timeout=30)
    uploader = checkpointer._saves._uploader.pid
    os.kill(uploader, signal.SIGSTOP)
    future = checkpointer.save(2, job.state)
    os.kill(uploader, signal.SIGKILL)
    assert future.result(timeout=30).step == 2
    assert checkpointer._saves._uploader.pid != uploader
    assert "starting it again" in caplog.text


def test_what_is_meant_for_the_trainer_does_not_end_its_uploader(uri, opened):
    checkpointer = opened(uri)
    job = Job()
    checkpointer.restore(job.state)
    uploader = checkpointer._saves._uploader.pid
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
        os.kill(uploader, number)
    assert checkpointer.save(1, job.state).result(timeout=30).step == 1
    assert checkpointer._saves._uploader.pid == uploader
    assert os.getsid(uploader) == uploader, "a launcher's killpg does not reach it"


def test_an_uploader_that_dies_for_ever_fails_saves_and_does_not_hang(uri, opened):
    checkpointer = opened(uri)
    job = Job()
    checkpointer.restore(job.state)
    saves = checkpointer._saves
    changed = threading.Event()
    for _ in range(4):
        with saves._changed:
            uploader = saves._uploader.pid
        os.kill(uploader, signal.SIGKILL)
        with saves._changed:
            assert saves._changed.wait_for(
                lambda uploader=uploader: saves._broken or saves._uploader.pid != uploader, 30
            )
    changed.set()
    with pytest.raises(errors.SaveFailedError, match="died 4 times in a row"):
        checkpointer.save(1, job.state)


def test_a_journal_is_gone_before_its_slot_is_filled_again(uri, opened):
    """Else a trainer that dies in the middle of staging leaves a journal for an image that is half another one."""
    checkpointer = opened(uri)
    job = Job()
    checkpointer.restore(job.state)
    saves = checkpointer._saves
    for step in (1, 2):
        checkpointer.save(step, job.state).result(timeout=30)
    assert [j.save.step for j in saves._spool.journals()] == [1, 2]
    slot = saves.slot(1000, timeout=10)
    assert [(j.slot, j.save.step) for j in saves._spool.journals()] == [(1 - slot.number, 2)]
    checkpointer.save(3, job.state).result(timeout=30)
    assert [j.save.step for j in saves._spool.journals()] == [2, 3]


def test_without_a_free_slot_skip_says_so_and_wait_waits(uri, opened, caplog):
    checkpointer = opened(uri, when_full="skip")
    job = Job()
    checkpointer.restore(job.state)
    checkpointer.save(1, job.state).result(timeout=30)
    os.kill(checkpointer._saves._uploader.pid, signal.SIGSTOP)
    try:
        second = checkpointer.save(2, job.state)
        third = checkpointer.save(3, job.state)
        with pytest.raises(errors.SaveFailedError, match="skipped"):
            third.result(timeout=0)
        assert not second.done()
    finally:
        os.kill(checkpointer._saves._uploader.pid, signal.SIGCONT)
    assert second.result(timeout=30).step == 2
    assert checkpointer.save(4, job.state).result(timeout=30).step == 4
    assert "was not saved" in caplog.text


def test_too_many_failed_saves_in_a_row_stop_the_training(uri, opened, monkeypatch):
    checkpointer = opened(uri, max_failed_saves=2)
    job = Job()
    checkpointer.restore(job.state)
    checkpointer._saves.failures = 1
    checkpointer.save(1, job.state).result(timeout=30)
    assert checkpointer._saves.failures == 0, "a commit begins a new row"
    checkpointer._saves.failures = 2
    with pytest.raises(errors.SaveFailedError, match="max_failed_saves=2"):
        checkpointer.save(2, job.state)


def test_a_value_that_cannot_be_stored_is_named_and_the_next_save_works(uri, opened):
    checkpointer = opened(uri)
    job = Job()
    checkpointer.restore(job.state)
    with pytest.raises(errors.StateMismatchError, match="callback"):
        checkpointer.save(1, {**job.state, "callback": lambda: None})
    assert checkpointer.save(1, job.state).result(timeout=30).step == 1


def test_a_preemption_notice_saves_and_ends_with_75(uri, opened, monkeypatch):
    hurried = []
    real = Saves.hurry
    monkeypatch.setattr(Saves, "hurry", lambda self: (hurried.append(1), real(self)))
    job = Job()
    before = signal.getsignal(signal.SIGTERM)
    with opened(uri, interval=100) as checkpointer:
        checkpointer.restore(job.state)
        done = 0
        while done < 50 and not checkpointer.preempted:
            job.step()
            done += 1
            if done == 7:
                os.kill(os.getpid(), signal.SIGTERM)
            if checkpointer.due(done, final=done == 50):
                checkpointer.save(done, job.state)
    assert checkpointer.exit_code == errors.PREEMPTED_EXIT_CODE == 75
    assert objckpt.open(uri).latest().step == done <= 8
    assert hurried == [1]
    assert runs(uri).existing().launch is not None, "not finished"
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_job_that_finished_clears_the_superseded(uri, opened):
    runs(uri).start(launch="first", world_size=1, policy=Policy())
    with opened(uri, launch="second") as checkpointer:
        train(checkpointer, Job(), 1)
    version = runs(uri).existing()
    assert (version.change, version.launch, version.superseded) == ("finish", None, ())


def test_an_exception_in_the_block_is_not_masked_and_the_save_is_committed(uri, opened):
    job = Job()
    with pytest.raises(ZeroDivisionError), opened(uri) as checkpointer:
        checkpointer.restore(job.state)
        checkpointer.save(1, job.state)
        raise ZeroDivisionError
    assert objckpt.open(uri).latest().step == 1
    assert runs(uri).existing().launch is not None


def test_opening_another_closes_the_first(uri, opened, tmp_path):
    first = opened(uri)
    first.restore(Job().state)
    opened(f"file://{tmp_path}/other")
    with pytest.raises(errors.ConfigError, match="closed"):
        first.save(1, Job().state)


def test_a_forked_child_cannot_save(uri, opened):
    checkpointer = opened(uri)
    job = Job()
    checkpointer.restore(job.state)
    readable, writable = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            checkpointer.save(1, job.state)
        except BaseException as error:
            os.write(writable, str(error).encode())
        os._exit(0)
    os.waitpid(child, 0)
    assert b"forked" in os.read(readable, 1000)
    os.close(readable)
    os.close(writable)
    assert checkpointer.save(1, job.state).result(timeout=30).step == 1


def test_memory_is_refused_with_the_reason():
    with pytest.raises(errors.ConfigError, match="one process"):
        objckpt.Checkpointer("memory://run")


def test_several_ranks_without_a_process_group_are_refused(uri, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(errors.ConfigError, match="init_process_group"):
        objckpt.Checkpointer(uri)


def test_keep_1_is_refused_with_the_reason(uri):
    with pytest.raises(errors.ConfigError, match="fall back"):
        objckpt.Checkpointer(uri, keep=1)


def test_a_typo_in_the_scheme_names_the_nearest():
    with pytest.raises(errors.ConfigError, match="s3://"):
        objckpt.Checkpointer("s4://bucket/run").restore({})


def test_a_reader_never_starts_an_attempt(uri, opened):
    with pytest.raises(errors.CheckpointNotFoundError, match="no run"):
        objckpt.open(uri).latest()
    with opened(uri) as checkpointer:
        train(checkpointer, Job(), 2)
    before = runs(uri).existing().number
    reader = objckpt.open(uri)
    reader.latest()
    reader.checkpoints()
    reader.load()
    assert reader.wait_for(1, timeout=5).step == 2
    with pytest.raises(TimeoutError):
        reader.wait_for(3, timeout=0)
    assert runs(uri).existing().number == before


# ------------------------------------------------------------------ on a real server

KILLED = textwrap.dedent(
    """
    import json, os, signal, sys
    sys.path.insert(0, os.environ["TESTS"])
    import objckpt
    from test_checkpointer import Job
    job = Job()
    checkpointer = objckpt.Checkpointer(
        os.environ["RUN"], cache=os.environ["CACHE"], storage_options=json.loads(os.environ["WEED"])
    )
    assert checkpointer.restore(job.state) is None
    for step in (1, 2, 3):
        job.step()
        future = checkpointer.save(step, job.state)
        if step < 3:
            future.result(timeout=60)
    os.kill(os.getpid(), signal.SIGKILL)
    """
)


def test_sigkill_right_after_save_still_commits(weed, bucket_uri, tmp_path):
    environment = {
        **os.environ,
        "TESTS": str(Path(__file__).parent),
        "RUN": bucket_uri,
        "CACHE": str(tmp_path / "cache"),
        "WEED": json.dumps(weed.storage_options),
    }
    done = subprocess.run([sys.executable, "-c", KILLED], env=environment, check=False, timeout=120)
    assert done.returncode == -signal.SIGKILL
    assert objckpt.open(bucket_uri, **weed.storage_options).wait_for(3, timeout=60).step == 3
    reference = Job()
    losses = [reference.step() for _ in range(6)]
    job = Job(seed=2)
    with objckpt.Checkpointer(
        bucket_uri, cache=tmp_path / "elsewhere", storage_options=weed.storage_options
    ) as checkpointer:
        assert checkpointer.restore(job.state).step == 3
        assert [job.step() for _ in range(3)] == losses[3:]


def test_secrets_are_in_no_argument_environment_log_or_record(weed, bucket_uri, tmp_path, caplog):
    caplog.set_level(logging.DEBUG, logger="objckpt")
    secret = weed.storage_options["secret"]
    job = Job()
    checkpointer = objckpt.Checkpointer(
        bucket_uri, cache=tmp_path / "cache", storage_options=weed.storage_options
    )
    checkpointer.restore(job.state)
    checkpointer.save(1, job.state).result(timeout=60)
    process = Path(f"/proc/{checkpointer._saves._uploader.pid}")
    assert secret not in (process / "cmdline").read_text()
    assert secret not in (process / "environ").read_text()
    files = [path for path in (tmp_path / "cache").rglob("*") if path.is_file()]
    assert any(path.name == "uploader.log" for path in files)
    for path in files:
        assert secret.encode() not in path.read_bytes(), path
    store = open_store(bucket_uri, **weed.storage_options)
    for found in store.list(""):
        assert secret.encode() not in read_all(store, found.key), found.key
    assert secret not in caplog.text
    assert secret not in repr(checkpointer._config)
    checkpointer.close()


def test_a_missing_bucket_and_a_missing_permission_are_clear(weed, bucket_uri, tmp_path):
    options = weed.storage_options
    with pytest.raises(errors.StoreNotFoundError, match="bucket"):
        objckpt.Checkpointer("s3://no-such-bucket/run", cache=tmp_path, storage_options=options).restore({})
    readonly = {**options, "key": weed.readonly_key, "secret": weed.readonly_secret}
    with pytest.raises(errors.StorePermissionError):
        objckpt.Checkpointer(bucket_uri, cache=tmp_path, storage_options=readonly).restore({})
    assert not list(open_store(bucket_uri, **options).list(""))


def test_no_uploader_outlives_a_closed_checkpointer(uri, tmp_path):
    job = Job()
    with objckpt.Checkpointer(uri, cache=tmp_path / "cache") as checkpointer:
        checkpointer.restore(job.state)
        checkpointer.save(1, job.state)
        pid = checkpointer._saves._uploader.pid
    deadline = time.monotonic() + 10
    while (state := _state(pid)) not in ("", "Z") and time.monotonic() < deadline:
        time.sleep(0.01)
    assert state in ("", "Z")
    assert not list((tmp_path / "cache").rglob("slot-*")), "a finished job leaves no slots"


def _state(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return ""
