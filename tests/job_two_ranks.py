"""A DDP job that the tests start under torchrun, kill, and start again. What it does is said by its environment."""

from __future__ import annotations

import json
import os
import signal

import torch
import torch.distributed as dist

import objckpt
from objckpt.staging import Stager

STEPS, INTERVAL = 10, 2
#: Of the job that is told of a preemption. Ranks tell each other of one within 200 steps, however short a step is.
STEPS_TO_NOTICE, INTERVAL_TO_NOTICE = 1000, 100


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    layers = torch.nn.Linear(32, 32), torch.nn.Dropout(0.2), torch.nn.Linear(32, 1)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Sequential(*layers))
    optim = torch.optim.AdamW(model.parameters(), lr=1e-2)
    torch.manual_seed(100 + rank)
    own = {"drawn": 0.0}
    state = {"model": model, "optim": optim, "own": objckpt.PerRank(own)}
    if os.environ.get("JOB_BREAK") == "structure" and rank == 1:
        state["extra"] = torch.zeros(3)
    log = open(f"{os.environ['JOB_LOG']}.{rank}", "a", buffering=1)  # noqa: SIM115, PTH123 # open until the end

    def note(**event: object) -> None:
        log.write(json.dumps(event) + "\n")

    broken = os.environ.get("JOB_BREAK", "")
    if broken == "stage" and rank == 1:
        fail_once(Stager, "stage", OSError(28, "No space left on device"))

    options = json.loads(os.environ["JOB_OPTIONS"])
    steps, interval = (STEPS_TO_NOTICE, INTERVAL_TO_NOTICE) if broken == "notice" else (STEPS, INTERVAL)
    kill_after = int(os.environ.get("JOB_KILL_AFTER", "0"))
    with objckpt.Checkpointer(
        os.environ["JOB_URI"], cache=os.environ["JOB_CACHE"], interval=interval, storage_options=options
    ) as checkpointer:
        last = checkpointer.restore(state)
        done = last.step if last else 0
        note(resumed=done, own=own["drawn"])
        while done < steps and not checkpointer.preempted:
            batch = torch.randn(8, 32)
            own["drawn"] += batch.sum().item()
            loss = model(batch).square().mean()
            optim.zero_grad()
            loss.backward()
            optim.step()
            done += 1
            note(step=done, loss=loss.item(), own=own["drawn"])
            if broken == "notice" and done == 3 and rank == 1:
                os.kill(os.getpid(), signal.SIGTERM)
            if checkpointer.due(done, final=done == steps):
                uploader = checkpointer._saves._uploader.pid
                if broken == "node" and done == kill_after:
                    os.kill(uploader, signal.SIGSTOP)
                future = checkpointer.save(done, state)
                note(saved=done)
                if broken == "stage":
                    note(outcome=str(future.exception(timeout=60)))
                if broken == "node":
                    if done < kill_after:
                        future.result(timeout=60)
                    else:
                        os.kill(uploader, signal.SIGKILL)
                if done == kill_after:
                    os.kill(os.getpid(), signal.SIGKILL)
        if broken != "stage":
            checkpointer.wait()
        note(exit_code=checkpointer.exit_code, failures=checkpointer._saves.failures)
        note(weights=model.module[0].weight.flatten().tolist())
    dist.destroy_process_group()


def fail_once(owner: type, name: str, error: Exception) -> None:
    real = getattr(owner, name)

    def failing(*arguments: object) -> object:
        setattr(owner, name, real)
        raise error

    setattr(owner, name, failing)


if __name__ == "__main__":
    main()
