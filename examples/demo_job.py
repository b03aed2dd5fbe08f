"""One launch of train_gpt.py under torchrun, and every process that comes of it.

Invariant: a process belongs to a job if and only if its environment holds the job's tag. Killing the launcher alone would
leave the workers training as orphans, and the uploaders are meant to outlive both. The demo calls this.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

TAG = "DEMO_JOB_TAG"
TRAIN = Path(__file__).with_name("train_gpt.py")
RANKS = 2
PATIENCE = 120.0  # seconds without the awaited event, until the demo gives up
POLL = 0.01  # seconds between two looks at a file or at /proc


class DemoError(Exception):
    """Something did not happen as promised."""


def processes(tag: str) -> Iterator[tuple[int, str]]:
    """Pid and command line of each living process with a tag that begins with `tag`. A zombie has no environment left."""
    needle = f"\0{TAG}={tag}".encode()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                environ = b"\0" + (entry / "environ").read_bytes()
                command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except OSError:  # it has ended, or is another user's
                continue
            if needle in environ:
                yield int(entry.name), command


def trains(command: str) -> bool:
    """Is it the launcher or a trainer (and not an uploader)?"""
    return TRAIN.name in command


def until(condition: Callable[[], object], what: str, patience: float = PATIENCE) -> None:
    """Look until `condition` is true."""
    deadline = time.monotonic() + patience
    while not condition():
        if time.monotonic() > deadline:
            raise DemoError(f"waited {patience:.0f} s in vain until {what}")
        time.sleep(POLL)


def kill_all(tag: str, which: Callable[[str], bool] = lambda _: True) -> int:
    """SIGKILL, again and again until none is left: one may be born while we look. Returns how many there were."""
    killed: set[int] = set()

    def gone() -> bool:
        victims = {pid for pid, command in processes(tag) if which(command)}
        for pid in victims:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        killed.update(victims)
        return not victims

    until(gone, f"the processes of {tag} were killed")
    return len(killed)


@dataclass
class Job:
    """A launch. What its ranks have logged so far: `losses` by step, and where `save` returned with its `stalls` in seconds."""

    tag: str
    directory: Path
    steps: int
    seed: int
    environment: Mapping[str, str]
    checkpoints: bool = True
    on_event: Callable[[Mapping[str, Any]], None] = lambda _: None

    resumed: dict[int, int] = field(default_factory=dict)  # rank -> step
    losses: dict[int, float] = field(default_factory=dict)
    saved: dict[int, set[int]] = field(default_factory=dict)  # step -> ranks
    stalls: list[float] = field(default_factory=list)
    _offset: int = 0

    @property
    def weights(self) -> Path:
        return self.directory / "weights.safetensors"

    @property
    def cache(self) -> Path:
        """The node's disk, as far as the job is concerned: a new one for each launch."""
        return self.directory / "cache"

    def start(self) -> Self:
        self.cache.mkdir(parents=True)
        launcher = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node",
            str(RANKS),
        ]
        trainer = [str(TRAIN), "--steps", str(self.steps), "--seed", str(self.seed)]
        trainer += ["--losses", str(self._log), "--out", str(self.weights)]
        trainer += [] if self.checkpoints else ["--no-checkpoint"]
        with self._output.open("wb") as output:
            self._process = subprocess.Popen(
                launcher + trainer,
                env={**self.environment, TAG: self.tag, "OBJCKPT_CACHE": str(self.cache)},
                cwd=self.directory,  # where no objckpt.toml lies
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,  # Ctrl-C is for the demo, which then ends the job
            )
        return self

    def wait_for_step(self, step: int) -> None:
        self._follow(lambda: bool(self.losses) and max(self.losses) >= step, f"step {step}")

    def wait_for_save(self, step: int) -> None:
        """`save` has returned on every rank."""
        self._follow(lambda: len(self.saved.get(step, ())) == RANKS, f"the save of step {step}")

    def finish(self) -> None:
        """Wait until the job has ended by itself: first the trainers, then their uploaders."""
        self.wait_for_step(self.steps)

        def ended() -> bool:
            code = self._process.poll()
            self._read()
            return code is not None

        until(ended, "the launcher ended")
        if self._process.returncode != 0:
            raise DemoError(f"torchrun ended with {self._process.returncode}.{self._tail()}")
        self.wait_until_gone()

    def wait_until_gone(self) -> None:
        until(lambda: not self.alive(), f"all processes of {self.tag} ended by themselves")

    def alive(self) -> dict[int, str]:
        return dict(processes(self.tag))

    def signal(self, signum: signal.Signals, which: Callable[[str], bool] = lambda _: True) -> None:
        """Send `signum` to the job's processes whose command line `which` picks."""
        for pid, command in processes(self.tag):
            if which(command):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signum)

    def kill(self, which: Callable[[str], bool] = lambda _: True) -> int:
        """SIGKILL all or some of the job's processes, and return when they are gone. Returns how many there were."""
        count = kill_all(self.tag, which)
        self._process.wait()
        self._read()
        return count

    @property
    def _log(self) -> Path:
        return self.directory / "losses.jsonl"

    @property
    def _output(self) -> Path:
        return self.directory / "output.txt"

    def _follow(self, condition: Callable[[], bool], what: str) -> None:
        def seen() -> bool:
            ended = self._process.poll() is not None  # before reading: what it wrote last must count
            self._read()
            if not condition() and ended:
                raise DemoError(f"{self.tag} ended before {what}")
            return condition()

        try:
            until(seen, what)
        except DemoError as error:
            raise DemoError(f"{error}.{self._tail()}") from None

    def _read(self) -> None:
        """Take in the lines that are new and whole."""
        if not self._log.exists():
            return
        with self._log.open("rb") as log:
            log.seek(self._offset)
            text = log.read()
        whole = text.rfind(b"\n") + 1
        self._offset += whole
        for line in text[:whole].splitlines():
            event = json.loads(line)
            if "loss" in event:
                self.losses[event["step"]] = event["loss"]
            elif "saved" in event:
                self.saved.setdefault(event["saved"], set()).add(event["rank"])
                self.stalls.append(event["stall"])
            else:
                self.resumed[event["rank"]] = event["resumed"]
            self.on_event(event)

    def _tail(self) -> str:
        return f"\nThe end of its output:\n{self._output.read_text(errors='replace')[-2000:]}"
