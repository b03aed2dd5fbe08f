"""Real jobs: torchrun, two ranks over gloo, SeaweedFS, SIGKILL."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest
from job_two_ranks import STEPS_TO_NOTICE

import objckpt
from objckpt.commit import Run
from objckpt.manifest import Attempt, Rank, Save, Step, data_key
from objckpt.retention import retain
from objckpt.store import open_store

SCRIPT = Path(__file__).parent / "job_two_ranks.py"


class Launches:
    """Starts the job again and again, and knows every process of it, uploaders included, by a tag in their environment."""

    def __init__(self, uri, options, where):
        self.uri, self.options, self.where = uri, options, where
        self.tag = uuid.uuid4().hex
        self.count = 0

    def start(self, cache, **said):
        self.count += 1
        environment = {
            **os.environ,
            "JOB_TAG": self.tag,
            "JOB_URI": self.uri,
            "JOB_OPTIONS": json.dumps(self.options),
            "JOB_CACHE": str(cache),
            "JOB_LOG": str(self.where / f"launch-{self.count}"),
            "OMP_NUM_THREADS": "1",
            **{key: str(value) for key, value in said.items()},
        }
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
        output = (self.where / f"launch-{self.count}.out").open("wb")
        with output:
            return subprocess.Popen([*command, str(SCRIPT)], env=environment, stdout=output, stderr=output)

    def events(self, launch, rank=0):
        path = self.where / f"launch-{launch}.{rank}"
        lines = path.read_text().splitlines() if path.exists() else []
        return [json.loads(line) for line in lines]

    def output(self, launch):
        return (self.where / f"launch-{launch}.out").read_text()

    def processes(self):
        found = []
        for path in Path("/proc").glob("[0-9]*"):
            try:
                if f"JOB_TAG={self.tag}".encode() in (path / "environ").read_bytes():
                    found.append(int(path.name))
            except OSError:
                continue  # it ended meanwhile
        return found

    def kill_all(self):
        while pids := self.processes():
            for pid in pids:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue
            time.sleep(0.02)  # a killed process keeps its environment for a moment

    def until(self, condition, what, timeout=90):
        deadline = time.monotonic() + timeout
        while not condition():
            assert time.monotonic() < deadline, f"{what} did not come; {self.output(self.count)[-3000:]}"
            time.sleep(0.02)


@pytest.fixture
def launches(weed, bucket_uri, tmp_path):
    made = Launches(bucket_uri, weed.storage_options, tmp_path)
    yield made
    made.kill_all()


def steps(events, key="loss"):
    return {e["step"]: e[key] for e in events if "step" in e}


@pytest.mark.timeout(240)
def test_a_job_killed_in_two_ways_ends_with_the_losses_of_one_that_was_not(launches, tmp_path):
    """Launch 1 is the reference. Launch 2 loses its trainers right after a save; launch 3, on the same node, everything and the
    disk; launch 4 is on a fresh node.
    """
    launches.uri, uri = f"{launches.uri}-reference", launches.uri
    assert launches.start(tmp_path / "reference").wait(120) == 0, launches.output(1)
    reference = {rank: launches.events(1, rank) for rank in (0, 1)}
    launches.uri = uri
    reader = objckpt.open(uri, **launches.options)

    launches.start(tmp_path / "node", JOB_KILL_AFTER=4).wait(120)
    assert all({"saved": 4} in launches.events(2, rank) for rank in (0, 1))
    assert reader.wait_for(4, timeout=60).step == 4, "the uploaders of the dead trainers commit"

    job = launches.start(tmp_path / "node")
    launches.until(lambda: any(e.get("step") == 7 for e in launches.events(3)), "step 7")
    launches.kill_all()
    job.wait(30)
    shutil.rmtree(tmp_path / "node")
    committed = reader.latest().step

    assert launches.start(tmp_path / "fresh").wait(120) == 0, launches.output(4)
    for rank in (0, 1):
        assert launches.events(3, rank)[0]["resumed"] == 4
        last = launches.events(4, rank)
        resumed = last[0]["resumed"]
        # Step 6 may have been durable on both ranks and not yet committed: then the start rolled it forward.
        assert resumed == launches.events(4)[0]["resumed"] >= committed >= 4
        # What is a rank's own comes back to that rank.
        assert last[0]["own"] == steps(reference[rank], "own")[resumed]
        expected = steps(reference[rank])
        for launch in (2, 3, 4):
            for step, loss in steps(launches.events(launch, rank)).items():
                assert loss == expected[step], f"rank {rank}, launch {launch}, step {step}"
        assert last[-1] == reference[rank][-1], "final weights"
    launches.until(lambda: not launches.processes(), "the end of all processes", 30)
    versions = Run(open_store(uri, **launches.options), retain=retain)
    assert versions.existing().change == "finish"


@pytest.mark.timeout(120)
def test_ranks_with_different_structures_all_get_the_error(launches, tmp_path):
    assert launches.start(tmp_path / "cache", JOB_BREAK="structure").wait(90) != 0
    assert launches.output(1).count("StateMismatchError: rank 1 has other tensors than rank 0") >= 2
    assert objckpt.open(launches.uri, **launches.options).latest() is None


@pytest.mark.timeout(180)
def test_all_that_died_on_a_node_before_its_upload_is_adopted_by_the_next_start_there(launches, tmp_path):
    """Uploaders are stopped before the save and killed after it, with their trainers: its bytes lie in slots alone."""
    launches.start(tmp_path / "node", JOB_KILL_AFTER=4, JOB_BREAK="node").wait(120)
    assert all({"saved": 4} in launches.events(1, rank) for rank in (0, 1)), launches.output(1)
    launches.until(lambda: not launches.processes(), "the end of all processes", 30)
    assert objckpt.open(launches.uri, **launches.options).latest().step == 2
    assert launches.start(tmp_path / "node").wait(120) == 0, launches.output(2)
    assert [launches.events(2, rank)[0]["resumed"] for rank in (0, 1)] == [4, 4]


@pytest.mark.timeout(120)
def test_a_notice_to_one_rank_saves_at_the_same_step_on_all_and_ends_with_75(launches, tmp_path):
    assert launches.start(tmp_path / "cache", JOB_BREAK="notice").wait(100) == 0, launches.output(1)
    saved = [[e["saved"] for e in launches.events(1, rank) if "saved" in e] for rank in (0, 1)]
    assert saved[0] == saved[1]
    assert saved[0][-1] < STEPS_TO_NOTICE, "before the end"
    assert objckpt.open(launches.uri, **launches.options).latest().step == saved[0][-1]
    for rank in (0, 1):
        assert next(e["exit_code"] for e in launches.events(1, rank) if "exit_code" in e) == 75


@pytest.mark.timeout(120)
def test_a_rank_that_cannot_stage_fails_that_save_on_all_ranks_at_once_and_no_other(launches, tmp_path):
    """Its disk is full. ``save_timeout`` is half an hour; nobody waits for that."""
    assert launches.start(tmp_path / "cache", JOB_BREAK="stage").wait(100) == 0, launches.output(1)
    for rank in (0, 1):
        outcomes = [e["outcome"] for e in launches.events(1, rank) if "outcome" in e]
        assert "could not" in outcomes[0]
        assert "rank 1" in outcomes[0]
        assert "No space left" in outcomes[0]
        assert outcomes[1:] == ["None"] * 4
        assert next(e["failures"] for e in launches.events(1, rank) if "failures" in e) == 0
    assert [c.step for c in objckpt.open(launches.uri, **launches.options).checkpoints()] == [4, 6, 8, 10]


@pytest.mark.timeout(180)
def test_a_checkpoint_damaged_on_one_rank_gives_way_to_the_older_on_all(
    launches, tmp_path, weed_client, weed
):
    assert launches.start(tmp_path / "first").wait(100) == 0, launches.output(1)
    save = Save(Attempt(1), Step(10))
    key = f"{launches.uri.rpartition('/')[2]}/{data_key(save, Rank(1))}"
    body = bytearray(weed_client.get_object(Bucket=weed.bucket, Key=key)["Body"].read())
    body[-1] ^= 1
    weed_client.put_object(Bucket=weed.bucket, Key=key, Body=bytes(body))
    assert launches.start(tmp_path / "second").wait(100) == 0, launches.output(2)
    assert [launches.events(2, rank)[0]["resumed"] for rank in (0, 1)] == [8, 8]
    assert "FALLING BACK to" in launches.output(2)
    for rank in (0, 1):
        assert steps(launches.events(2, rank)) == {
            step: loss for step, loss in steps(launches.events(1, rank)).items() if step > 8
        }


def started(script, world_size, tmp_path):
    """Processes that run ``script`` as ranks of a group without a launcher; it is told where they meet, and its rank."""
    return [
        subprocess.Popen(
            [sys.executable, "-c", script, f"file://{tmp_path}/group", str(rank)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(world_size)
    ]


LEAVING = """
import datetime, os, sys, time
import torch.distributed as dist
from objckpt.errors import WorldError
from objckpt.world import current
dist.init_process_group("gloo", init_method=sys.argv[1], rank=int(sys.argv[2]), world_size=2)
world = current()
assert world.decide(dist.get_rank(), sum, 60) == 1
if dist.get_rank() == 1:
    world.leave("ZeroDivisionError: by zero")
    sys.stdin.read()
else:
    began = time.monotonic()
    try:
        world.decide(None, len, 60)
    except WorldError as error:
        assert time.monotonic() - began < 30
        print(error, flush=True)
"""


@pytest.mark.timeout(120)
def test_ranks_hear_at_once_of_one_that_left(tmp_path):
    ranks = started(LEAVING, 2, tmp_path)
    try:
        assert (
            ranks[0].stdout.readline()
            == "rank 1 left the training loop with an error: ZeroDivisionError: by zero\n"
        )
    finally:
        for rank in ranks:
            rank.communicate(timeout=60)


WITHOUT_GLOO = """
import datetime, os, socket, sys
import torch.distributed as dist
from objckpt.errors import WorldError
from objckpt.world import current
rank = int(sys.argv[2])
dist.init_process_group("gloo", init_method=sys.argv[1], rank=rank, world_size=3)
world = current()
assert world.maximum([rank, 7 - rank], 20).result() == [2, 7]
begun = world.maximum([10 * rank], 20)
if rank == 1:
    assert begun.result() == [20]
    begun = world.maximum([100 * rank], 20)
    for name in os.listdir("/proc/self/fd"):
        try:
            with socket.socket(fileno=os.dup(int(name))) as connection:
                if connection.getpeername() and connection.family == socket.AF_INET:  # no listener
                    connection.shutdown(socket.SHUT_RDWR)
        except OSError:
            continue
    print(begun.result(), flush=True)
else:
    assert begun.result() == [20]
    print(world.maximum([100 * rank], 20).result(), flush=True)
for step in range(5):
    assert world.maximum([step + rank], 20).result() == [step + 2]
print("agreed", flush=True)
if rank == 2:
    os._exit(0)
try:
    world.maximum([0], 4).result()
except WorldError as error:
    print(error, flush=True)
os._exit(0)
"""


@pytest.mark.timeout(120)
def test_ranks_agree_through_the_store_once_gloo_is_dead(tmp_path):
    """One rank's gloo connections are cut in the middle of a reduction, which some ranks may have finished."""
    ranks = started(WITHOUT_GLOO, 3, tmp_path)
    said = [rank.communicate(timeout=100) for rank in ranks]
    for rank, (out, err) in enumerate(said):
        assert out.startswith("[200]\nagreed\n"), f"rank {rank}: {err[-3000:]}"
    assert any("gloo failed; ranks agree through the process group's store" in err for _, err in said)
    for out, _ in said[:2]:
        assert "rank(s) 2 did not come to an agreement of all 3 ranks" in out


ONE_SIDED = """
import os, sys
import torch.distributed as dist
from objckpt.world import current

class Failing:
    def wait(self):
        raise RuntimeError("as if a connection had broken after the others had read it")

rank = int(sys.argv[2])
dist.init_process_group("gloo", init_method=sys.argv[1], rank=rank, world_size=2)
world = current()
begun = world.maximum([5 + rank], 12)
if rank == 1:
    begun._work.wait()
    begun._work = Failing()
print(begun.result(), world.maximum([50 + rank], 12).result(), flush=True)
os._exit(0)
"""


@pytest.mark.timeout(120)
def test_a_rank_that_alone_missed_what_gloo_told_the_others_hears_it_through_the_store(tmp_path):
    """The others are at the next reduction by then; they give to the store what they gave to the one before, too."""
    for rank in started(ONE_SIDED, 2, tmp_path):
        out, err = rank.communicate(timeout=100)
        assert out == "[6] [51]\n", err[-3000:]
