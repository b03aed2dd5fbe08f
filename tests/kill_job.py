"""The job that the kills are aimed at: a small model, AdamW, DDP over gloo, and a save as often as a slot is free.

Run by torchrun, or forked off ``fork_server``; ``KILL_JOB`` says in JSON what to do. It appends what happens to a file of its own, one
line each, in one ``write``: what stands there was true before the process could be killed.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import xxhash

import objckpt

RANKS = 2


class Events:
    """Appends to a file that outlives this process. Times are of the monotonic clock, which all processes share."""

    def __init__(self, path):
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def __call__(self, **event):
        os.write(self._file, json.dumps({"t": time.monotonic(), **event}).encode() + b"\n")


class Adopted(logging.Handler):
    """Notes what an adoption finished."""

    def __init__(self, note):
        super().__init__()
        self.note = note

    def emit(self, record):
        if "earlier attempt was finished" in record.msg:
            self.note(adopted=str(record.args[0]))


class Training:
    """A step is a function of the state alone, bit for bit: parameters, moments, this rank's own, and its random numbers."""

    def __init__(self, rank, width):
        torch.manual_seed(0)
        layers = torch.nn.Linear(width, width), torch.nn.Dropout(0.2), torch.nn.Linear(width, 1)
        self.model = torch.nn.parallel.DistributedDataParallel(torch.nn.Sequential(*layers))
        self.optim = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        torch.manual_seed(100 + rank)
        self.width = width
        self.own = {"drawn": 0.0, "steps": 0}
        self.state = {"model": self.model, "optim": self.optim, "own": objckpt.PerRank(self.own)}

    def step(self):
        batch = torch.randn(4, self.width)
        loss = self.model(batch).square().mean()
        self.optim.zero_grad()
        loss.backward()
        self.optim.step()
        self.own["drawn"] += batch[0, 0].item()
        self.own["steps"] += 1
        return loss.item().hex()

    def digest(self):
        """Of every bit that is saved."""
        found = xxhash.xxh3_64()
        for parameter in self.model.parameters():
            moments = self.optim.state[parameter]
            for tensor in (parameter.detach(), *(moments[name] for name in sorted(moments))):
                found.update(tensor.numpy())
        found.update(json.dumps([self.own["drawn"].hex(), self.own["steps"]]).encode())
        found.update(torch.get_rng_state().numpy())
        return found.hexdigest()


def reference(told, rank):
    """Without a Checkpointer: loss and digest of every step, in one file."""
    training = Training(rank, told["width"])
    lines = []
    for step in range(1, told["steps"] + 1):
        loss = training.step()
        lines.append([loss, training.digest() if step % told["interval"] == 0 else None])
    Path(f"{told['log']}.{rank}").write_text(json.dumps(lines))


def train(told, rank):
    note = Events(f"{told['log']}.{rank}")
    note(pid=os.getpid())
    logging.getLogger("objckpt").setLevel(logging.INFO)
    logging.getLogger("objckpt").addHandler(Adopted(note))
    training = Training(rank, told["width"])
    caches = told["caches"]
    with objckpt.Checkpointer(
        told["uri"],
        cache=caches[rank % len(caches)],
        interval=told["interval"],
        keep=told["keep"],
        storage_options=told["options"],
        launch=told["launch"],
        tuning=objckpt.Tuning(part_size=5 << 20, concurrency=4),
        agree_timeout=30,
        adopt_timeout=20,
        save_timeout=60,
        exit_timeout=2,
        linger=30,
    ) as checkpointer:
        last = checkpointer.restore(training.state)
        done = last.step if last else 0
        note(
            resumed=done,
            of=last.attempt if last else 0,
            attempt=checkpointer._version.attempt,
            digest=training.digest() if last else None,
        )
        end = done + told["steps"] if told["steps"] else None
        while done != end and not checkpointer.preempted:
            loss = training.step()
            done += 1
            note(step=done, loss=loss)
            if checkpointer.due(done, final=done == end):
                note(saving=done)
                future = checkpointer.save(done, training.state)
                note(saved=done)
                future.add_done_callback(partial(_resolved, note, done))
        note(closing=done)
    note(closed=done, exit_code=checkpointer.exit_code)
    dist.destroy_process_group()
    sys.exit(checkpointer.exit_code)


def _resolved(note, step, future):
    error = future.exception()
    if error is None:
        note(committed=future.result().step)
    else:
        note(failed=step, error=repr(error))


def main():
    told = json.loads(os.environ["KILL_JOB"])
    torch.set_num_threads(1)
    if "meeting" in told:  # else the launcher holds the store, and the ranks do not outlive it
        store = dist.FileStore(told["meeting"], RANKS)
        rank = told["rank"] if "rank" in told else int(os.environ["RANK"])
        dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
    else:
        dist.init_process_group("gloo")
    (reference if told.get("reference") else train)(told, dist.get_rank())


if __name__ == "__main__":
    main()
