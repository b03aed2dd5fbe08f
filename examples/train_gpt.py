"""A byte-level GPT that learns Python from the standard library, on one rank or many.

    OBJCKPT_URI=s3://bucket/run torchrun --nproc-per-node 2 examples/train_gpt.py

Kill it at any time and start it again: it goes on from the newest complete checkpoint, and the losses are those that
it would have had. An `objckpt.toml` does as well as the variables. The demo runs this file.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, OneCycleLR
from torch.utils.data import Dataset, DistributedSampler
from torchdata.stateful_dataloader import StatefulDataLoader

import objckpt

VOCABULARY, CONTEXT, WIDTH, HEADS, LAYERS, DROPOUT = 256, 64, 64, 4, 2, 0.1
BATCH, EPOCH = 8, 800  # windows per rank and step; windows per epoch, over all ranks


class Windows(Dataset[Tensor]):
    """The first bytes of the standard library's modules, sorted by name: rows of CONTEXT + 1 bytes, shape (EPOCH,)."""

    def __init__(self) -> None:
        text = bytearray()
        for path in sorted(Path(os.__file__).parent.glob("*.py")):
            text += path.read_bytes()
            if len(text) > EPOCH * CONTEXT:
                break
        self.text = torch.frombuffer(text, dtype=torch.uint8)

    def __len__(self) -> int:
        return EPOCH

    def __getitem__(self, index: int) -> Tensor:
        return self.text[index * CONTEXT : (index + 1) * CONTEXT + 1].long()


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(DROPOUT)

    def forward(self, x: Tensor) -> Tensor:  # (batch, time, WIDTH), as its result
        q, k, v = (
            part.unflatten(-1, (HEADS, -1)).transpose(1, 2)
            for part in self.qkv(self.norm1(x)).chunk(3, dim=-1)
        )
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.dropout(self.out(y.transpose(1, 2).flatten(2)))
        return x + self.dropout(self.down(functional.gelu(self.up(self.norm2(x)))))


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        for table in (self.tokens, self.places):
            nn.init.normal_(table.weight, std=0.02)
        self.head.weight = self.tokens.weight  # tied

    def forward(self, rows: Tensor) -> Tensor:  # (batch, CONTEXT + 1) bytes -> the mean loss
        x = self.tokens(rows[:, :-1]) + self.places.weight
        logits = self.head(self.norm(self.blocks(x)))
        return functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())


def endless(loader: StatefulDataLoader[Tensor], state: dict[str, Any]) -> Iterator[Tensor]:
    """The batches of one epoch after the other, each in an order of its own; begins within an epoch after a restore."""
    while True:
        loader.sampler.set_epoch(state["epoch"])
        yield from loader
        state["epoch"] += 1


def train_step(model: nn.Module, optim: Optimizer, sched: LRScheduler, rows: Tensor) -> float:
    """One step of all ranks together; the mean of their losses."""
    loss = model(rows)
    optim.zero_grad()
    loss.backward()
    optim.step()
    sched.step()
    mean = loss.detach()
    if dist.is_initialized():
        dist.all_reduce(mean)
        mean /= dist.get_world_size()
    return mean.item()


class NoCheckpoints(contextlib.AbstractContextManager["NoCheckpoints"]):
    """Stands in for a Checkpointer that has nothing to restore and never anything to save."""

    preempted, exit_code = False, 0

    def __exit__(self, *_: object) -> None:
        pass

    def restore(self, _: object) -> None:
        return None

    def due(self, *_: int, **__: bool) -> bool:
        return False


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Train a small GPT. OBJCKPT_URI or objckpt.toml says where to save."
    )
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--losses", type=Path, help="append each event to this file, a line of JSON")
    parser.add_argument("--out", type=Path, help="write the final weights to this safetensors file (rank 0)")
    parser.add_argument("--no-checkpoint", action="store_true", help="resume from nothing, save nothing")
    options = parser.parse_args()
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    log = options.losses.open("a") if options.losses else None

    def note(**event: object) -> None:
        if log is not None:
            print(json.dumps(event), file=log, flush=True)  # the kernel has it: SIGKILL takes nothing back

    torch.set_num_threads(1)
    torch.manual_seed(options.seed)
    gpt = model = GPT()
    if world > 1:
        dist.init_process_group("gloo")
        model = DistributedDataParallel(gpt)
    torch.manual_seed(options.seed + 1 + rank)  # each rank drops out differently
    windows = Windows()
    sampler = DistributedSampler(windows, world, rank, seed=options.seed)
    loader = StatefulDataLoader(windows, BATCH, sampler=sampler, drop_last=True)
    optim = torch.optim.AdamW(model.parameters(), weight_decay=0.1)
    sched = OneCycleLR(optim, max_lr=3e-3, total_steps=options.steps)

    state = {"model": model, "optim": optim, "sched": sched, "loader": objckpt.PerRank(loader), "epoch": 0}
    with NoCheckpoints() if options.no_checkpoint else objckpt.Checkpointer() as ckpt:
        last = ckpt.restore(state)
        done = last.step if last else 0
        note(resumed=done, rank=rank)
        batches = endless(loader, state)
        while done < options.steps and not ckpt.preempted:
            loss = train_step(model, optim, sched, next(batches))
            done += 1
            if rank == 0:
                note(step=done, loss=loss, epoch=state["epoch"])
            if ckpt.due(done, final=done == options.steps):
                begun = time.perf_counter()
                ckpt.save(done, state)
                note(saved=done, rank=rank, stall=time.perf_counter() - begun)

    if options.out and rank == 0 and done == options.steps:
        safetensors.torch.save_model(gpt, str(options.out))
    if world > 1:
        dist.destroy_process_group()
    raise SystemExit(ckpt.exit_code)


if __name__ == "__main__":
    main()
