"""Trainers, uploaders and whole nodes are killed at random instants, again and again, and what a restart finds is judged.

A trial is one run: two ranks on one node or two, killed and started again until it has had its kills, then trained to an end, and
compared with a reference that nobody killed. What it draws is a function of seed and number; instants scale with what the cycle takes on
this machine. Used by ``test_kills`` (a slice) and ``soak`` (as many as you like).
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import time
import uuid
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import kill_job
from protocol import history, run_of

import objckpt
from objckpt.manifest import save_of
from objckpt.retention import survey, sweep
from objckpt.store import open_store

RANKS = range(kill_job.RANKS)
PATIENCE = 90.0  # seconds until something that must happen counts as a hang
#: Where an instant lies, how often it is drawn there, and how long that takes until it was measured, in seconds.
PHASES = {"start": (3, 1.0), "stage": (2, 0.02), "cycle": (6, 0.4), "close": (2, 0.4)}
#: Who is hit by a kill that ends a launch, and how often. "rank" is one rank's trainer and uploader.
VICTIMS = {"all": 8, "trainers": 6, "rank": 3, "trainer": 2, "trainers and an uploader": 3}
TRAINER, UPLOADER, LAUNCHER = "trainer", "uploader", "launcher"


@dataclass
class Report:
    """What adds up over trials."""

    trials: int = 0
    launches: int = 0
    kills: Counter = field(default_factory=Counter)  # by who was hit
    instants: Counter = field(default_factory=Counter)  # kills by phase
    torchrun: int = 0  # kills under a real torchrun
    resumed: int = 0
    committed: int = 0
    rolled_forward: int = 0
    adopted: int = 0
    unheard: int = 0  # commits of which no trainer had heard when it died
    repeated: int = 0
    losses: int = 0
    corrupt: int = 0
    processes: int = 0
    orphans: int = 0
    seconds: float = 0.0
    failures: list[str] = field(default_factory=list)

    def add(self, other):
        for name in self.__dataclass_fields__:
            mine, value = getattr(self, name), getattr(other, name)
            if isinstance(mine, Counter):
                mine.update(value)
            else:
                setattr(self, name, mine + value)

    @classmethod
    def of(cls, document):
        known = {name: document[name] for name in cls.__dataclass_fields__}
        return cls(**{n: Counter(v) if isinstance(v, dict) else v for n, v in known.items()})

    def document(self):
        return {
            n: dict(v) if isinstance(v := getattr(self, n), Counter) else v for n in self.__dataclass_fields__
        }


@dataclass(frozen=True)
class Process:
    pid: int
    role: str
    rank: int | None  # None for a launcher
    launch: int


class TrialError(Exception):
    """A trial cannot go on."""


class Launch:
    """One start of the job, and what its ranks have noted so far."""

    def __init__(self, number, log):
        self.number = number
        self.log = log
        self.began = time.monotonic()
        self.pids = {}
        self.launcher = None
        self._offsets = dict.fromkeys(RANKS, 0)
        self.events = {rank: [] for rank in RANKS}

    def read(self, rank):
        """All whole lines so far."""
        try:
            with Path(f"{self.log}.{rank}").open("rb") as file:
                file.seek(self._offsets[rank])
                text = file.read()
        except FileNotFoundError:
            return self.events[rank]
        whole = text.rfind(b"\n") + 1
        self._offsets[rank] += whole
        self.events[rank] += map(json.loads, text[:whole].splitlines())
        return self.events[rank]

    def all(self, name):
        """Values of the events of that name, of all ranks."""
        return [e[name] for rank in RANKS for e in self.read(rank) if name in e]

    def one(self, rank, name):
        return next((e for e in self.read(rank) if name in e), None)


class Trial:
    def __init__(self, seed, number, kills, *, weed, directory, forks, torchrun=False):
        self.name = f"seed {seed}, trial {number}{' under torchrun' if torchrun else ''}"
        self.chance = random.Random(f"{seed}/{number}/{torchrun}")
        self.wanted = kills
        self.weed = weed
        self.forks = forks
        self.torchrun = torchrun
        self.tag = f"trial-{number}-{uuid.uuid4().hex}"
        self.directory = directory / self.tag
        self.directory.mkdir()
        self.report = Report(trials=1)
        self.launches = []
        self.spans = {phase: [span] for phase, (_, span) in PHASES.items()}
        chance = self.chance
        self.width = chance.choice([32, 256, 256, 512, 1400])
        self.interval = chance.choice([1, 2, 5])
        self.keep = chance.choice([2, 3, 3, None]) if self.width < 500 else 2
        self.nodes = [self.new_node() for _ in range(1 if torchrun else chance.choice([1, 2]))]
        self.launch_id = chance.choice([None, "job"])
        self.uri = f"s3://{weed.bucket}/{self.tag}"
        self.store = open_store(self.uri, **weed.storage_options)

    def new_node(self):
        return str(self.directory / f"node-{uuid.uuid4().hex[:8]}")

    def fail(self, text):
        self.report.failures.append(f"{self.name}, launch {len(self.launches)}: {text}")

    def run(self):
        began = time.monotonic()
        try:
            while self.report.kills.total() < self.wanted:
                self.attack()
            self.finish()
        except TrialError as error:
            self.fail(str(error))
        finally:
            self.kill(lambda p: True)
            self.report.launches = len(self.launches)
            self.report.seconds = round(time.monotonic() - began, 1)
            if self.torchrun:
                self.report.torchrun = self.report.kills.total()
        if not self.report.failures:
            shutil.rmtree(self.directory)
        return self.report

    # ---------------------------------------------------------- processes

    def processes(self):
        forked = {pid: (rank, n.number) for n in self.launches for rank, pid in n.pids.items()}
        numbers = (int(path.name) for path in Path("/proc").glob("[0-9]*"))
        return [found for pid in numbers if (found := self.look(pid, forked.get(pid)))]

    def look(self, pid, forked):
        """The process of that number, if it is ours; ``forked`` is rank and launch of a rank that once had it."""
        path = Path(f"/proc/{pid}")
        try:
            if forked and self.forks.ended(pid) is None:  # else its number may be another's
                return Process(pid, TRAINER, *forked) if (path / "cmdline").read_bytes() else None
            environment = (path / "environ").read_bytes()
            command = (path / "cmdline").read_bytes()
        except OSError:
            return None  # it ended meanwhile, or is another user's
        said = dict(line.partition(b"=")[::2] for line in environment.split(b"\0"))
        tag, _, number = said.get(b"KILL_LAUNCH", b"").decode().rpartition("/")
        if tag != self.tag:
            return None
        if b"objckpt.uploader" in command:
            return Process(pid, UPLOADER, int(said[b"RANK"]), int(number))
        if b"RANK" not in said:
            return Process(pid, LAUNCHER, None, int(number))
        return Process(pid, TRAINER, int(said[b"RANK"]), int(number))

    def send(self, process, which):
        """False if it has ended. Its number is not trusted: another's it may be by now."""
        try:
            descriptor = os.pidfd_open(process.pid)
        except ProcessLookupError:
            return False
        try:
            forked = (process.rank, process.launch)
            same = self.look(
                process.pid,
                forked if process.pid in self.launches[process.launch - 1].pids.values() else None,
            )
            if same != process:
                return False
            signal.pidfd_send_signal(descriptor, which)
        except ProcessLookupError:
            return False
        finally:
            os.close(descriptor)
        return True

    def kill(self, which):
        """SIGKILL until none of them is left: one may be born while we look. Returns how many there were."""
        killed = set()
        deadline = time.monotonic() + PATIENCE
        while victims := [p for p in self.processes() if which(p)]:
            self.chance.shuffle(victims)
            killed.update(victim.pid for victim in victims if self.send(victim, signal.SIGKILL))
            if time.monotonic() > deadline:
                raise TrialError(f"processes cannot be killed: {victims}")
        return len(killed)

    def until(self, condition, what, patience=PATIENCE):
        deadline = time.monotonic() + patience
        while not (value := condition()):
            if time.monotonic() > deadline:
                raise TrialError(f"{what} did not come within {patience:.0f} s. {self.tail()}")
            time.sleep(0.001)
        return value

    def tail(self):
        outputs = sorted(self.directory.glob(f"output-{len(self.launches)}*"))
        logs = sorted(self.directory.glob("node-*/*/*/*/a*/uploader.log"), key=os.path.getmtime)[-2:]
        return "".join(f"\n{p.name}: {p.read_text(errors='replace')[-1500:]}" for p in outputs + logs)

    # ---------------------------------------------------------- launches

    def start(self, steps, *, reference=False, **said):
        """Launch it; ``said`` is told to the job instead of what holds for the trial."""
        launch = Launch(len(self.launches) + 1, self.directory / f"launch-{len(self.launches) + 1}")
        told = {
            "uri": self.uri,
            "options": self.weed.storage_options,
            "caches": self.nodes,
            "interval": self.interval,
            "keep": self.keep,
            "launch": self.launch_id,
            "width": self.width,
            "steps": steps,
            "log": str(launch.log),
            "reference": reference,
            **said,
        }
        marks = {"KILL_LAUNCH": f"{self.tag}/{launch.number}", "LOCAL_WORLD_SIZE": str(len(RANKS))}
        output = self.directory / f"output-{launch.number}"
        self.launches.append(launch)
        if said.get("torchrun", self.torchrun) and not reference:
            command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
            with output.open("wb") as file:
                launch.launcher = subprocess.Popen(
                    [*command, str(len(RANKS)), kill_job.__file__],
                    env={**os.environ, **marks, "KILL_JOB": json.dumps(told), "OMP_NUM_THREADS": "1"},
                    stdin=subprocess.DEVNULL,
                    stdout=file,
                    stderr=file,
                    start_new_session=True,
                )
            return launch
        for rank in RANKS:
            job = json.dumps(
                {"meeting": str(self.directory / f"meeting-{launch.number}"), **told, "rank": rank}
            )
            launch.pids[rank] = self.forks.fork(
                {**marks, "KILL_JOB": job, "RANK": str(rank)}, f"{output}.{rank}"
            )
        return launch

    def signal(self, launch, which):
        """Send it to all processes of a launch."""
        for process in self.processes():
            if process.launch == launch.number:
                self.send(process, which)

    def codes(self, launch):
        """Exit codes by rank (of the launcher, under torchrun); None while it runs."""
        if launch.launcher is not None:
            return [launch.launcher.poll()]
        return [self.forks.ended(pid) for pid in launch.pids.values()]

    def attack(self):
        """One launch, and the kills that end it."""
        chance = self.chance
        if self.launches and chance.random() < 0.3:
            self.until(lambda: not self.processes(), "the end of what an earlier launch left")
        head = self.head()
        known = self.known()
        phase = chance.choices(list(PHASES), [weight for weight, _ in PHASES.values()])[0]
        steps = self.interval * chance.randint(1, 3) if phase == "close" else 0
        launch = self.start(steps)
        try:
            if phase != "start" and chance.random() < 0.3:
                victims = chance.choice([[rank] for rank in RANKS] + [list(RANKS)])
                self.await_instant(launch, chance.choice(["stage", "cycle"]))
                self.hit(launch, "uploaders", phase, lambda p: p.role == UPLOADER and p.rank in victims)
                if chance.random() < 0.5 and not steps:
                    heard = len(launch.all("committed"))
                    self.until(
                        lambda: len(launch.all("committed")) > heard, "a commit after an uploader was killed"
                    )
            self.await_instant(launch, phase)
            self.shoot(launch, phase)
        finally:
            self.kill(lambda p: p.role != UPLOADER and p.launch == launch.number)
            self.until(lambda: None not in self.codes(launch), "the end of the killed", 30)
        self.lose_nodes()
        self.judge(launch, known, head)

    def shoot(self, launch, phase):
        chance = self.chance
        who = chance.choices(list(VICTIMS), list(VICTIMS.values()))[0]
        rank = chance.choice(RANKS)
        hit = {
            "all": lambda p: True,
            "trainers": lambda p: p.role == TRAINER,
            "rank": lambda p: p.rank == rank,
            "trainer": lambda p: p.role == TRAINER and p.rank == rank,
            "trainers and an uploader": lambda p: p.role == TRAINER or p.rank == rank,
        }[who]
        self.hit(launch, who, phase, hit)
        if who in ("rank", "trainer") and phase != "start" and chance.random() < 0.3:
            # The other rank hears of it by itself, as gloo does, and ends with an error or the close that it was in.
            self.until(lambda: None not in self.codes(launch), "the end of the other rank", PATIENCE)

    def hit(self, launch, who, phase, which):
        if self.kill(lambda p: p.launch == launch.number and which(p)):
            self.report.kills[who] += 1
            self.report.instants[phase] += 1

    def await_instant(self, launch, phase):
        """Until a random moment of that phase, measured from what a rank noted."""
        chance = self.chance
        rank = chance.choice(RANKS)
        span = statistics.median(self.spans[phase][-20:])
        delay = chance.uniform(0, 1.25 * span)
        if phase == "start":
            at = launch.began + delay * (4 if self.torchrun else 1)
        else:
            name = "closing" if phase == "close" else "saving"
            nth = 1 if phase == "close" else chance.randint(1, 3)
            at = (
                self.until(lambda: self.nth(launch, rank, name, nth), f"{name} number {nth} of rank {rank}")
                + delay
            )
        while (left := at - time.monotonic()) > 0:
            time.sleep(left)

    def nth(self, launch, rank, name, nth):
        """When the n-th event of that name came; of the last, if the launch has ended; None so far."""
        times = [e["t"] for e in launch.read(rank) if name in e]
        if len(times) >= nth:
            return times[nth - 1]
        codes = self.codes(launch)
        if None in codes:
            return None
        times = [e["t"] for e in launch.read(rank) if name in e]
        if not times or any(codes):
            raise TrialError(f"it ended by itself with {codes}. {self.tail()}")
        return times[-1]

    def lose_nodes(self):
        """Some nodes are gone with their disks, and ranks may come up on another's."""
        for number, node in enumerate(self.nodes):
            if self.chance.random() < 0.35:
                self.kill(lambda p, n=number: len(self.nodes) == 1 or self.on(p, n))
                shutil.rmtree(node, ignore_errors=True)
                self.nodes[number] = self.new_node()
        if self.chance.random() < 0.3:
            self.nodes.reverse()

    def on(self, process, number):
        """Whether an uploader works on that node: its spool lies there."""
        try:
            files = [str(path.readlink()) for path in Path(f"/proc/{process.pid}/fd").iterdir()]
        except OSError:
            return False  # it ended meanwhile
        return any(file.startswith(self.nodes[number]) for file in files)

    # ---------------------------------------------------------- judging

    def head(self):
        version = run_of(self.store).newest()
        return 0 if version is None or version.head is None else version.head.step

    def known(self):
        """The newest step that a trainer was told to be committed."""
        return max((step for launch in self.launches for step in launch.all("committed")), default=0)

    def judge(self, launch, known, head):
        """Whether it resumed from the newest that was committed, and from nothing that was not saved."""
        restored = [e for rank in RANKS if (e := launch.one(rank, "resumed")) is not None]
        for rank in RANKS:
            events = launch.read(rank)
            for phase, first, second in (
                ("stage", "saving", "saved"),
                ("cycle", "saving", "committed"),
                ("close", "closing", "closed"),
            ):
                began = {e[first]: e["t"] for e in events if first in e}
                self.spans[phase] += [
                    e["t"] - began[e[second]] for e in events if second in e and e[second] in began
                ]
        self.spans["start"] += [e["t"] - launch.began for e in restored]
        if not restored:
            return
        resumed = {e["resumed"] for e in restored}
        step = restored[0]["resumed"]
        if len(resumed) != 1:
            self.report.losses += 1
            self.fail(f"ranks resumed from different steps: {resumed}")
        if step < known or step < head:
            self.report.losses += 1
            self.fail(f"resumed from {step}, though {max(known, head)} was committed before")
        if step:
            self.report.resumed += 1
            source = next(
                (n for n in self.launches if restored[0]["of"] in n.all("attempt") and n is not launch), None
            )
            saved = [
                source is not None and any(e.get("saving") == step for e in source.read(rank))
                for rank in RANKS
            ]
            if not all(saved):
                self.report.losses += 1
                self.fail(
                    f"resumed from step {step} of attempt {restored[0]['of']}, which not all ranks saved: {saved}"
                )
        before = [e for n in self.launches[: launch.number - 1] for e in n.all("step")[-1:]]
        self.report.repeated += max(0, before[-1] - step) if before else 0

    def finish(self):
        """A launch that nobody kills; then nothing may be left but what was committed, and all must be the reference's."""
        known, head = self.known(), self.head()
        last = self.start(2 * self.interval)
        self.until(lambda: None not in self.codes(last), "the end of the last launch")
        if any(self.codes(last)):
            raise TrialError(f"the last launch ended with {self.codes(last)}. {self.tail()}")
        self.judge(last, known, head)
        try:
            self.until(lambda: not self.processes(), "the end of all processes", 60)
        except TrialError as error:
            self.report.processes += len(self.processes())
            self.fail(f"left over: {self.processes()}. {error}")
        left = [p for node in self.nodes for p in Path(node).glob("*/*/*/*")]
        if left:
            self.fail(f"left on the disk: {left}")
        self.look_back()
        self.look_for_orphans()
        self.compare()

    def look_back(self):
        """At all versions there ever were."""
        versions = history(self.store)
        self.report.rolled_forward += sum(v.change == "roll-forward" for v in versions)
        committed = {e.save for v in versions for e in v.kept}
        self.report.committed += len(committed)
        texts = {
            text.partition(":")[0] for n in self.launches for text in n.all("adopted") if "fenced" not in text
        }
        self.report.adopted += len(texts)
        heard = set()
        for launch in self.launches:
            for attempt in launch.all("attempt")[:1]:
                heard |= {(attempt, step) for step in launch.all("committed")}
        have = {(save.attempt, save.step) for save in committed}
        self.report.unheard += len(have - heard)
        if heard - have:
            self.report.losses += len(heard - have)
            self.fail(f"trainers heard of commits that no version lists: {sorted(heard - have)}")
        heads = [v.head.step for v in versions if v.head is not None]
        if heads != sorted(heads):
            self.report.losses += 1
            self.fail(f"the head went back: {heads}")

    def look_for_orphans(self):
        run = run_of(self.store)
        sweep(self.store, survey(run, grace=0).garbage)
        kept = {e.save for e in run.existing().kept}
        orphans = [
            o.key
            for o in self.store.list("")
            if save_of(o.key) not in kept and not o.key.startswith(("manifest/", "probe/"))
        ]
        # Probes and versions are a day's: what is not young is garbage, and gc says so.
        orphans += [g.key for g in survey(run, grace=0).garbage]
        self.report.orphans += len(orphans)
        if orphans:
            self.fail(f"orphans after gc: {orphans}")
        reader = objckpt.open(self.uri, **self.weed.storage_options)
        for checkpoint in reader.checkpoints():
            try:
                reader.load(checkpoint.step)
            except objckpt.ObjckptError as error:
                self.report.corrupt += 1
                self.fail(f"{checkpoint} cannot be loaded: {error!r}")

    @cached_property
    def expected(self):
        """Of each rank: loss of each step, and digest of the state after it if it is a step of saves."""
        steps = max(step for launch in self.launches for step in launch.all("step"))
        launch = self.start(steps, reference=True)
        self.until(lambda: None not in self.codes(launch), "the end of the reference", 300)
        if any(self.codes(launch)):
            raise TrialError(f"the reference ended with {self.codes(launch)}. {self.tail()}")
        self.launches.remove(launch)
        return [json.loads(Path(f"{launch.log}.{rank}").read_text()) for rank in RANKS]

    def compare(self):
        for rank in RANKS:
            wrong = defaultdict(list)
            for launch in self.launches:
                restored = launch.one(rank, "resumed")
                done = restored["resumed"] if restored else 0
                if done and restored["digest"] != self.expected[rank][done - 1][1]:
                    wrong[launch.number].append(f"restored state of step {done}")
                wrong[launch.number] += [
                    f"loss of step {e['step']}"
                    for e in launch.read(rank)
                    if "step" in e and e["loss"] != self.expected[rank][e["step"] - 1][0]
                ]
            for number, what in wrong.items():
                if what:
                    self.report.corrupt += 1
                    self.fail(f"launch {number}, rank {rank}: not the reference's: {what[:3]}")
