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

import objckpt
from objckpt.commit import Run
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
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", LEAVING, f"file://{tmp_path}/group", str(rank)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in (0, 1)
    ]
    try:
        assert (
            ranks[0].stdout.readline()
            == "rank 1 left the training loop with an error: ZeroDivisionError: by zero\n"
        )
    finally:
        for rank in ranks:
            rank.communicate(timeout=60)
