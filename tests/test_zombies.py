"""What is left of an old attempt changes nothing that anyone resumes from, and ends: frozen and thawed, orphaned, or started at once.

Two ranks each, with their uploaders, on a real server; a proxy in front of it holds what is to be on its way when the freeze comes.
"""

from __future__ import annotations

import os
import signal

import pytest
from fork_server import ForkServer
from kills import LAUNCHER, RANKS, TRAINER, UPLOADER, Trial
from protocol import run_of

from objckpt.errors import FENCED_EXIT_CODE
from objckpt.manifest import save_of
from objckpt.store import read_all
from objckpt.testing.proxy import FaultProxy, Harm, Trouble

FENCED = [FENCED_EXIT_CODE] * 2


@pytest.fixture(scope="module")
def forks(tmp_path_factory):
    server = ForkServer(dict(os.environ), tmp_path_factory.mktemp("forks") / "log")
    yield server
    server.close()


@pytest.fixture
def trial(weed, forks, tmp_path):
    made = Trial(0, 0, 0, weed=weed, directory=tmp_path, forks=forks)
    made.width, made.interval, made.keep, made.nodes, made.launch_id = 256, 1, 2, [made.new_node()], None
    yield made
    for launch in made.launches:
        made.signal(launch, signal.SIGCONT)
    made.kill(lambda p: True)


def held(pattern, **more):
    """All such requests from now on stand still."""
    return Trouble(Harm.HOLD, b"^" + pattern, times=None, **more)


def commits(trial, launch, count):
    trial.until(lambda: len(launch.all("committed")) >= count, f"{count} commits of launch {launch.number}")


def ended(trial, launch):
    trial.until(lambda: None not in trial.codes(launch), f"the end of launch {launch.number}")
    return trial.codes(launch)


def reachable(trial):
    """The newest version, and every byte that it leads to."""
    version = run_of(trial.store).newest()
    kept = {e.save for e in version.kept}
    listed = [o for o in trial.store.list("") if save_of(o.key) in kept]
    return version, {o.key: bytes(read_all(trial.store, o.key, o.size)) for o in listed}


def leave_a_half_save(trial, weed):
    """For the next attempt to delete: a shard of rank 0 where that of rank 1 never came, and their node is gone."""
    with FaultProxy(weed.endpoint_url) as gate:
        launch = trial.start(0, options={**weed.storage_options, "endpoint_url": gate.url})
        commits(trial, launch, 1)
        gate.arm(held(rb"PUT \S+/data/01/", after=1 << 16))
        assert gate.held.wait(60)
        shards = [f"data/{rank:02}/" for rank in RANKS]
        trial.until(
            lambda: len({len(list(trial.store.list(prefix))) for prefix in shards}) == 2,
            "the shard of rank 0",
        )
        trial.kill(lambda p: True)
    trial.nodes = [trial.new_node()]


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("pattern", "passing"),
    [
        (rb"PUT \S+/data/", 1 << 20),
        (rb"PUT \S+/records/", 0),
        (rb"PUT \S+/manifest/", 0),
        (rb"POST \S+delete", 0),
    ],
    ids=["a shard", "a record", "a version", "a delete"],
)
def test_an_attempt_that_was_frozen_in_the_middle_of_a_request_is_fenced_and_changes_nothing(
    trial, weed, pattern, passing
):
    trial.width = 1400 if passing else 256  # then a rank's shard takes three parts
    if b"delete" in pattern:
        trial.interval = 50  # an uploader deletes between saves
        leave_a_half_save(trial, weed)
    with FaultProxy(weed.endpoint_url) as gate:
        options = {**weed.storage_options, "endpoint_url": gate.url}
        if b"delete" in pattern:
            gate.arm(held(pattern, nth=2))  # the first one is the start's probe
        zombie = trial.start(0, options=options)
        commits(trial, zombie, 1)
        if b"delete" not in pattern:
            gate.arm(held(pattern, after=passing))
        assert gate.held.wait(60), "the request came"
        trial.signal(zombie, signal.SIGSTOP)
        roles = [p.role for p in trial.processes()]
        assert sorted(roles) == [TRAINER, TRAINER, UPLOADER, UPLOADER]
        known = trial.known()

        trial.nodes = [trial.new_node()]
        replacement = trial.start(4 * trial.interval)
        assert ended(trial, replacement) == [0, 0], trial.tail()
        assert replacement.one(0, "resumed")["resumed"] >= known
        version, content = reachable(trial)
        assert version.head.attempt == replacement.one(0, "resumed")["attempt"]

        gate.release()
        trial.signal(zombie, signal.SIGCONT)
        assert ended(trial, zombie) == FENCED, trial.tail()
        trial.until(lambda: not trial.processes(), "the end of the zombie's uploaders")
    assert reachable(trial) == (version, content)
    trial.finish()
    assert not trial.report.failures


@pytest.mark.timeout(120)
def test_of_two_jobs_started_at_the_same_instant_one_wins_and_the_other_is_fenced(trial):
    jobs = [trial.start(0, caches=[trial.new_node()]) for _ in range(2)]
    trial.until(lambda: any(None not in trial.codes(job) for job in jobs), "the end of one")
    loser, winner = sorted(jobs, key=lambda job: None in trial.codes(job))
    assert trial.codes(loser) == FENCED, trial.tail()
    commits(trial, winner, len(winner.all("committed")) + 4)
    assert trial.codes(winner) == [None, None]
    attempts = [set(job.all("attempt")) for job in (loser, winner)]
    assert len(attempts[1]) == 1
    assert max(attempts[0], default=0) < max(attempts[1]), "each of its own, the later one wins"
    assert {run_of(trial.store).newest().head.attempt} == attempts[1]
    trial.kill(lambda p: p.launch == winner.number)
    trial.finish()
    assert not trial.report.failures


@pytest.mark.timeout(180)
def test_two_schedulers_that_restart_their_jobs_do_not_fence_each_other_for_ever(trial):
    nodes = {launch: [trial.new_node()] for launch in ("one", "two")}

    def scheduled(launch, steps=0):
        return trial.start(steps, launch=launch, caches=nodes[launch])

    jobs = {launch: scheduled(launch) for launch in nodes}
    trial.until(lambda: any(None not in trial.codes(job) for job in jobs.values()), "the end of one")
    loser, winner = sorted(jobs, key=lambda launch: None in trial.codes(jobs[launch]))
    assert trial.codes(jobs[loser]) == FENCED
    attempt = jobs[winner].one(0, "resumed")["attempt"]
    for _ in range(3):
        assert ended(trial, scheduled(loser)) == FENCED, trial.tail()
        assert run_of(trial.store).newest().attempt == attempt, "it did not even start"
        assert trial.codes(jobs[winner]) == [None, None]
    commits(trial, jobs[winner], len(jobs[winner].all("committed")) + 2)

    trial.kill(lambda p: p.launch == jobs[winner].number)
    known = trial.known()
    again = scheduled(winner)
    commits(trial, again, 2)
    assert again.one(0, "resumed")["resumed"] >= known, "who won may start again"
    assert ended(trial, scheduled(loser)) == FENCED, trial.tail()
    trial.kill(lambda p: p.launch == again.number)
    assert ended(trial, scheduled(winner, 2)) == [0, 0], trial.tail()
    assert ended(trial, scheduled(loser, 2)) == [0, 0], "a job that has finished may be followed by any"
    trial.finish()
    assert not trial.report.failures


@pytest.mark.timeout(240)
def test_workers_that_outlive_their_torchrun_are_fenced_by_the_next_and_end(trial):
    """SIGUSR1 ends a launcher without a word to its workers. Their process group does not need it, so they train and save on."""
    orphaned = trial.start(0, torchrun=True, meeting=str(trial.directory / "meeting"))
    commits(trial, orphaned, 2)
    (launcher,) = [p for p in trial.processes() if p.role == LAUNCHER]
    assert trial.send(launcher, signal.SIGUSR1)
    assert ended(trial, orphaned) == [-signal.SIGUSR1]
    commits(trial, orphaned, len(orphaned.all("committed")) + 4)
    roles = [p.role for p in trial.processes()]
    assert sorted(roles) == [TRAINER, TRAINER, UPLOADER, UPLOADER], "orphans live and save"
    known = trial.known()

    # On the same node: their uploaders hold spools that are not to be waited for.
    successor = trial.start(0, torchrun=True)
    commits(trial, successor, 2)
    assert successor.one(0, "resumed")["resumed"] >= known
    trial.until(
        lambda: {p.launch for p in trial.processes()} == {successor.number},
        "the end of the orphans and their uploaders",
    )
    output = (trial.directory / f"output-{orphaned.number}").read_text()
    assert output.count("FencedError") >= 2, output
    trial.kill(lambda p: p.launch == successor.number)
    trial.until(lambda: None not in trial.codes(successor), "the end of the killed")
    trial.finish()
    assert not trial.report.failures
    assert not trial.processes()
