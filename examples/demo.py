"""Train, be killed, resume, and end where a run without interruption ends: the same losses and weights, bit for bit.

    make demo                    # starts a SeaweedFS as the bucket, s3://
    make demo STORE=gcs          # starts a fake-gcs-server as the bucket, gs://
    make demo URI=s3://mine/tmp  # uses your bucket; how to reach it is read from OBJCKPT_STORAGE_OPTIONS or objckpt.toml

Exit status 0 only if everything held. It ends no process that it did not start, and leaves none behind.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import secrets
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from demo_job import RANKS, DemoError, Job, kill_all, processes, trains, until
from demo_view import Row, View
from rich.markup import escape
from rich.table import Table

import objckpt
import objckpt.config
from objckpt.testing.servers import FakeGCS, SeaweedFS

STEPS = 150
EPOCH = 50  # steps, for 2 ranks: train_gpt.EPOCH // (2 * train_gpt.BATCH)
INTERVAL = 10  # steps between two saves
SERVERS = {"s3": ("s3", SeaweedFS), "gcs": ("gs", FakeGCS)}  # scheme and server of each kind of store


@dataclass
class Demo:
    """The bucket, the work directory, and what has been seen so far."""

    uri: str
    storage_options: dict[str, Any]
    directory: Path
    nonce: str
    seed: int
    view: View
    jobs: list[Job] = field(default_factory=list)
    promises: dict[str, bool] = field(default_factory=dict)
    kills: int = 0
    resumes: int = 0
    repeated: int = 0

    def start(self, name: str, *, checkpoints: bool = True) -> tuple[Job, Row]:
        """Launch the job on a fresh node: of the launches before, only the bucket is left."""
        row = self.view.row(name)
        number = len(self.jobs)
        job = Job(
            tag=f"{self.nonce}-{number}",
            directory=self.directory / f"node-{number}",
            steps=STEPS,
            seed=self.seed,
            environment=self._environment(),
            checkpoints=checkpoints,
            on_event=row.take,
        )
        self.view.doing(f"{name}: two ranks are starting")
        job.start()
        self.jobs.append(job)
        return job, row

    def newest(self) -> int:
        """The step of the newest complete checkpoint, as any reader sees it; 0 if there is none."""
        try:
            checkpoint = objckpt.open(self.uri, **self.storage_options).latest()
        except objckpt.CheckpointNotFoundError:
            return 0
        return checkpoint.step if checkpoint else 0

    def promise(self, what: str, held: object) -> None:
        self.promises[what] = bool(held) and self.promises.get(what, True)
        if not held:
            self.view.say(f"[bold red]did not hold:[/] {what}")

    def _environment(self) -> dict[str, str]:
        # What the user configured for other jobs is not for these; nor is the scheduler, if the demo runs under one.
        foreign = ("OBJCKPT_", "SLURM_", "TORCHELASTIC_")
        mine = {name: text for name, text in os.environ.items() if not name.startswith(foreign)}
        return mine | {
            "OBJCKPT_URI": self.uri,
            "OBJCKPT_STORAGE_OPTIONS": json.dumps(self.storage_options),
            "OBJCKPT_INTERVAL": str(INTERVAL),
            "OBJCKPT_KEEP": "3",
            "GLOO_SOCKET_IFNAME": "lo",
            "OMP_NUM_THREADS": "1",
        }


def run_reference(demo: Demo) -> Job:
    """The run without interruption, and without a line of objckpt: what all others are measured against."""
    job, _ = demo.start("reference", checkpoints=False)
    job.wait_for_step(1)
    demo.view.doing("reference: training without interruption, saving nothing")
    job.finish()
    demo.view.say(
        f"The reference has done its {STEPS} steps over {STEPS // EPOCH} epochs, and never saved anything."
    )
    return job


def run_and_kill(demo: Demo, at: int, reason: str, delay: float) -> None:
    """Kill every process of the job at a random moment after step `at`, and take its disk away."""
    number = len(demo.jobs)
    expected = demo.newest()
    job, row = demo.start(f"launch {number}")
    job.wait_for_step(1)
    check_resumed(demo, job, expected)
    demo.view.doing(f"launch {number}: will be killed {reason}, at step {at}")
    job.wait_for_step(at)
    time.sleep(delay)  # so that the kill falls anywhere in a step, or in a save
    victims = job.kill()
    shutil.rmtree(job.cache)
    demo.kills += 1
    last = max(job.losses)
    row.kill(f"killed after step {last}")
    demo.view.say(
        f"[red]SIGKILL[/] {reason}, after step {last}, to all {victims} processes of launch {number}; its disk is gone. "
        f"The bucket has step {demo.newest()}."
    )


def run_and_orphan(demo: Demo, at: int) -> int:
    """Kill the trainers right after `save` returned, and see the uploaders finish. Returns the step that was saved.

    The uploaders are frozen from before the save until the trainers are dead, so that nothing can have been sent earlier.
    """
    number = len(demo.jobs)
    expected = demo.newest()
    job, row = demo.start(f"launch {number}")
    job.wait_for_step(1)
    check_resumed(demo, job, expected)
    demo.view.doing(
        f"launch {number}: its trainers will be killed right after the save of step {at} has returned"
    )
    job.wait_for_save(at - INTERVAL)
    job.signal(signal.SIGSTOP, trains)
    until(lambda: demo.newest() == at - INTERVAL, f"step {at - INTERVAL} was committed")
    job.signal(signal.SIGSTOP, lambda command: not trains(command))
    job.signal(signal.SIGCONT, trains)
    job.wait_for_save(at)
    victims = job.kill(trains)
    demo.kills += 1
    uploaders = len(job.alive())
    row.kill(f"killed after save {at}")
    demo.promise("no save was sent before the trainers died", demo.newest() == at - INTERVAL)
    demo.view.say(
        f"[red]SIGKILL[/] right after `save({at})` returned, to the {victims} processes of launch {number} that train; "
        f"its {uploaders} uploaders live. The bucket has step {demo.newest()}."
    )
    demo.view.doing(f"launch {number}: its uploaders go on without it")
    job.signal(signal.SIGCONT)
    until(lambda: demo.newest() == at, f"the uploaders committed step {at}")
    job.wait_until_gone()
    demo.promise("the uploaders committed the save of dead trainers", uploaders and demo.newest() == at)
    demo.view.say(f"The uploaders have committed step {at} and ended.")
    shutil.rmtree(job.cache)
    return at


def run_to_the_end(demo: Demo, resume_from: int) -> Job:
    number = len(demo.jobs)
    job, _ = demo.start(f"launch {number}")
    job.wait_for_step(1)
    check_resumed(demo, job, resume_from)
    exactly = set(job.resumed.values()) == {resume_from}
    demo.promise("the job resumed from exactly the step of the dead trainers", exactly)
    demo.view.doing(f"launch {number}: training to the end")
    job.finish()
    demo.promise("the last step was committed", demo.newest() == STEPS)
    demo.view.say(
        f"Launch {number} has finished, and so have its uploaders. The bucket has step {demo.newest()}."
    )
    return job


def check_resumed(demo: Demo, job: Job, committed: int) -> None:
    """A start completes a save that lies in the bucket whole but not committed, so it may find a newer step."""
    before = demo.jobs[1:-1]  # without the reference and itself
    reached = max(before[-1].losses) if before else 0
    resumed = min(job.resumed.values())
    demo.promise("all ranks of a start resumed from the same step", set(job.resumed.values()) == {resumed})
    newest = committed <= resumed <= reached and resumed % INTERVAL == 0
    demo.promise("each start resumed from the newest complete checkpoint", newest)
    if before:
        demo.resumes += resumed > 0
        demo.repeated += reached - resumed
        step = f"step {resumed}" if resumed else "the beginning, for nothing was complete"
        demo.view.say(f"[green]Resumed[/] on a fresh node from {step}.")


def compare(demo: Demo, reference: Job, last: Job) -> None:
    """The losses of every launch, and the final weights, against the reference."""
    launches = demo.jobs[1:]
    same = [loss == reference.losses.get(step) for job in launches for step, loss in job.losses.items()]
    demo.promise(f"all {len(same)} losses of all launches equal the reference bit for bit", all(same))
    steps = set().union(*(job.losses for job in launches))
    demo.promise(
        "together the launches did every step", steps == set(reference.losses) == set(range(1, STEPS + 1))
    )
    demo.promise(
        "the final weights equal the reference bit for bit",
        last.weights.read_bytes() == reference.weights.read_bytes(),
    )


def sweep(demo: Demo) -> None:
    """No process of the demo is left; what should have ended by itself is ended, and told."""
    left = dict(processes(demo.nonce))
    demo.promise("no process is left", not left)
    for command in left.values():
        demo.view.say(f"[bold red]left behind:[/] {escape(command[:120])}")


def report(demo: Demo, seconds: float) -> Table:
    stalls = [stall for job in demo.jobs for stall in job.stalls]
    kept = list(objckpt.open(demo.uri, **demo.storage_options).checkpoints())
    size = max(checkpoint.nbytes for checkpoint in kept) / 1e6
    table = Table(
        title=f"{STEPS} steps on 2 ranks, seed {demo.seed}, {seconds:.0f} s",
        title_justify="left",
        show_header=False,
    )
    table.add_row("kills", f"{demo.kills} by SIGKILL")
    table.add_row("resumes", f"{demo.resumes}, each on a fresh node")
    table.add_row("steps repeated", f"{demo.repeated} (a save every {INTERVAL})")
    table.add_row("checkpoints", f"{len(stalls) // RANKS} saved, {len(kept)} kept, {size:.2f} MB each")
    table.add_row(
        "stall per save", f"median {1e3 * statistics.median(stalls):.1f} ms, worst {1e3 * max(stalls):.1f} ms"
    )
    table.add_section()
    for what, held in demo.promises.items():
        table.add_row("[green]✓ held[/]" if held else "[bold red]✗ broken[/]", what)
    return table


@contextlib.contextmanager
def bucket(uri: str | None, store: str, nonce: str, view: View) -> Iterator[tuple[str, dict[str, Any]]]:
    """The run's URI and its storage options. Without a URI, of a server for that kind of ``store``."""
    if uri:
        config = objckpt.config.load(uri=f"{uri.rstrip('/')}/objckpt-demo-{nonce}")
        view.say(
            f"The bucket: {escape(objckpt.config.redact(config.uri))}, which is left for you to look at."
        )
        yield config.uri, dict(config.storage_options)
        return
    scheme, kind = SERVERS[store]
    view.doing(f"{kind.title} is starting")
    with kind() as server:
        view.say(f"The bucket: a {kind.title} at {server.endpoint_url}, whose data go with it.")
        yield f"{scheme}://{server.bucket}/demo", server.storage_options


def play(demo: Demo) -> None:
    chance = random.Random(demo.seed)
    reference = run_reference(demo)
    run_and_kill(demo, chance.randint(25, 42), "at random", chance.random() / 10)
    run_and_kill(demo, EPOCH - chance.randint(0, 1), "beside an epoch's end", chance.random() / 20)
    run_and_kill(demo, chance.randint(65, 95), "at random", chance.random() / 10)
    saved = run_and_orphan(demo, chance.choice([110, 120]))
    last = run_to_the_end(demo, saved)
    demo.view.doing("comparing")
    compare(demo, reference, last)


def run(uri: str | None, store: str, seed: int) -> int:
    """The whole demo, and its exit status."""
    begun = time.monotonic()
    nonce = secrets.token_hex(4)
    view = View(STEPS, EPOCH)
    with contextlib.ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="objckpt-demo-")))
        stack.callback(kill_all, nonce)  # whatever happens, before the directory goes
        stack.enter_context(view)
        view.say(f"Seed {seed}: repeat this demo with --seed {seed}.")
        demo = Demo(*stack.enter_context(bucket(uri, store, nonce, view)), directory, nonce, seed, view)
        try:
            play(demo)
        except DemoError as error:
            view.say(f"[bold red]The demo failed:[/] {escape(str(error))}")
            return 1
        sweep(demo)
        table = report(demo, time.monotonic() - begun)
    held = all(demo.promises.values())
    view.console.print(table)
    view.console.print("[bold green]Everything held.[/]" if held else "[bold red]Not everything held.[/]")
    return 0 if held else 1


def main() -> int:
    parser = argparse.ArgumentParser(description="Train, kill, resume, compare.")
    parser.add_argument("--uri", help="a place of your own, s3://bucket/tmp say; else a server is started")
    parser.add_argument(
        "--store", choices=SERVERS, default="s3", help="which: SeaweedFS for s3, fake-gcs-server for gcs"
    )
    parser.add_argument("--seed", type=int, default=secrets.randbelow(1000), help="of training and kills")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that what was started is ended then, too
    try:
        return run(options.uri, options.store, options.seed)
    except KeyboardInterrupt:
        print("Interrupted. What was started has been ended.")
        return 130


if __name__ == "__main__":
    sys.exit(main())
