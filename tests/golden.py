"""The state in the golden runs, and how they were written: each once, by the version that froze its format.

``python tests/golden.py DIRECTORY`` writes one; what is in ``tests/data`` is never written again.
"""

from __future__ import annotations

import collections
import json
import math
import sys
import tempfile
from pathlib import Path

import torch
from awscrt.checksums import crc64nvme

import objckpt
from objckpt import manifest
from objckpt.commit import Run
from objckpt.manifest import Attempt, Policy, Rank, Save, Step
from objckpt.retention import retain
from objckpt.shard import DTYPES, layout, whole
from objckpt.state import tensor_memory
from objckpt.store import open_store

STEPS = (2, 4, 3)  # the last one by an attempt that went back to 2
GROUP_RANKS = 258


class Opaque:
    """Anything with state_dict and load_state_dict."""

    def __init__(self, value):
        self.value = value

    def state_dict(self):
        return {"value": self.value, 3: [torch.tensor(self.value), None]}

    def load_state_dict(self, state):
        assert state[3][0].item() == state["value"]
        self.value = state["value"]


def state_at(step, *, blank=False):
    """What the run held after ``step`` steps: no number of it is drawn, so that it is the same in every version of torch."""
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
    optim = torch.optim.AdamW(model.parameters(), lr=0.5 if blank else 0.25 / step)
    sched = torch.optim.lr_scheduler.StepLR(optim, 5)
    generator = torch.Generator().manual_seed(0 if blank else step)
    state = {
        "model": model,
        "optim": optim,
        "sched": sched,
        "generator": generator,
        "opaque": Opaque(0 if blank else step),
        "own": objckpt.PerRank({"seen": 0 if blank else step}),
        "tensors": {},
        "values": {},
    }
    if blank:
        return state
    with torch.no_grad():
        for number, tensor in enumerate(model.state_dict().values()):
            tensor.copy_(torch.arange(tensor.numel()).reshape(tensor.shape) + 100 * number + step)
        for number, parameter in enumerate(model.parameters()):
            values = torch.arange(parameter.numel(), dtype=torch.float32).reshape(parameter.shape)
            optim.state[parameter] = {
                "step": torch.tensor(float(step)),
                "exp_avg": values / 8 + number,
                "exp_avg_sq": values / 16 + step,
            }
    sched.last_epoch = step
    state["tensors"] = {
        name: torch.arange(24, dtype=torch.int64).add(step).to(torch.uint8).view(getattr(torch, name))
        if name != "bool"
        else torch.tensor([True, False, True])
        for name in DTYPES
        if name != "complex128"
    }
    state["tensors"] |= {
        "complex128": torch.tensor([complex(step, -1), complex(0.0, 0.5)], dtype=torch.complex128),
        "0-d": torch.tensor(step, dtype=torch.int64),
        "empty": torch.empty(0, 3),
        "transposed": torch.arange(6.0).reshape(2, 3).t() + step,
    }
    state["values"] = {
        "none": None,
        "bools": [True, False],
        "ints": [0, -1, 2**53 + step, -(2**200)],
        "floats": [0.1, -0.0, math.inf, -math.inf, 5e-324],
        "nan": math.nan,
        "text": "näive \U0001f600 \x00",
        "bytes": b"\x00\xff",
        "complex": complex(1, -0.0),
        "tuple": (1, ("a", ())),
        "set": {3, 1, 2},
        "frozenset": frozenset({"x"}),
        "range": range(1, 10, 3),
        "slice": slice(None, 4, 2),
        "ordered": collections.OrderedDict([("b", 1), ("a", 2)]),
        "counter": collections.Counter({5: 2}),
        "default": collections.defaultdict(list, {"k": [1]}),
        "deque": collections.deque([1, 2], maxlen=5),
        "keys": {1: "int", (2, "t"): "tuple", None: "none", "$": "dollar", "a.b": "dot"},
        "dtype": torch.bfloat16,
        "size": torch.Size([2, 3]),
        "device": torch.device("cpu"),
    }
    return state


def write_run(uri):
    """One rank: steps 2 and 4, then back to 2 and on to 3."""
    for step, back_to in zip(STEPS, (None, None, 2), strict=True):
        with tempfile.TemporaryDirectory() as cache:
            checkpointer = objckpt.Checkpointer(uri, cache=cache, launch="golden", keep=9)
            checkpointer.restore(state_at(1), step=back_to)
            checkpointer.save(step, state_at(step), metadata={"step": step, "note": "golden é"})
            checkpointer.close()


def write_groups(uri):
    """A checkpoint of more ranks than one folder of records holds; all but two ranks wrote nothing."""
    store = open_store(uri)
    run = Run(store, retain=retain)
    version = run.start(launch="golden", world_size=GROUP_RANKS, policy=Policy())
    save = Save(version.attempt, Step(7))
    for rank in range(GROUP_RANKS):
        objects, pieces = (), ()
        if rank in (0, GROUP_RANKS - 1):
            image = layout([whole(f"weight.{rank}", "int32", (2, 2))], {"format": "objckpt"})
            data = image.header + bytes(range(rank % 200, rank % 200 + 16))
            key = manifest.data_key(save, Rank(rank))
            store.put(key, data)
            objects = (manifest.DataObject(key, len(data), manifest.BLOCK_SIZE, (crc64nvme(data),)),)
            pieces = image.pieces
        record = manifest.RankRecord(
            version.run,
            save,
            Rank(rank),
            GROUP_RANKS,
            1.5,
            None,
            (),
            objects,
            pieces,
            {} if rank == 0 else None,
            None,
        )
        store.create(manifest.record_key(save, Rank(rank)), manifest.encode_record(record))
    run.commit(save, GROUP_RANKS)
    # Readers need the group records alone, and these folders are many small files.
    store.delete([o.key for o in store.list(f"records/{save}/0")])


def contents(uri):
    """Every tensor of every checkpoint, by step: dtype, shape and bytes in hex."""
    reader = objckpt.open(uri)
    return {
        str(c.step): {
            name: [str(t.dtype).removeprefix("torch."), list(t.shape), tensor_memory(t).tobytes().hex()]
            for name, t in reader.load(c.step).items()
            if not name.startswith("rank-00000/rng")
        }
        for c in reader.checkpoints()
    }


def main():
    where = Path(sys.argv[1]).resolve()
    if where.exists():
        raise SystemExit(f"{where} exists: a golden run is written once")
    write_run(f"file://{where}/run")
    write_groups(f"file://{where}/groups")
    expected = {name: contents(f"file://{where}/{name}") for name in ("run", "groups")}
    (where / "expected.json").write_text(json.dumps(expected, indent=1, sort_keys=True) + "\n")
    assert Attempt(1)


if __name__ == "__main__":
    main()
