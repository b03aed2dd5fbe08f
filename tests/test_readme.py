"""What the README says can be run is run, and what it points to is there."""

from __future__ import annotations

import ast
import functools
import os
import re
import subprocess
import sys
import textwrap
import tomllib
from pathlib import Path

import pytest

import objckpt
from objckpt import config
from objckpt.manifest import KeepLast

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
LINK = re.compile(r"\[([^\]]+)\]\(([^)\s]+)\)")
TEST = re.compile(r"`(test_\w+)`")

#: What the first block of the README does not define. It is told by the environment where to end, and when it is preempted.
STAND_INS = textwrap.dedent(
    """
    import os, signal
    import torch
    from torchdata.stateful_dataloader import StatefulDataLoader

    model = torch.nn.Linear(4, 1)
    optim = torch.optim.AdamW(model.parameters())
    sched = torch.optim.lr_scheduler.StepLR(optim, 100)
    loader = StatefulDataLoader(range(64), batch_size=4)
    max_steps = int(os.environ["MAX_STEPS"])
    preempted_after = int(os.environ["PREEMPTED_AFTER"])
    steps = 0

    def train_step():
        global steps
        loss = model(torch.randn(2, 4)).square().mean()
        optim.zero_grad()
        loss.backward()
        optim.step()
        sched.step()
        steps += 1
        if steps == preempted_after:
            os.kill(os.getpid(), signal.SIGTERM)
    """
)


def first_block(uri, cache):
    block = re.search(r"^```python\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)[1]
    for said, meant in (('"s3://acme-runs/llama-7b"', repr(uri)), ('"/local_nvme"', repr(str(cache)))):
        assert block.count(said) == 1
        block = block.replace(said, meant)
    return block


def run(tmp_path, uri, **said):
    program = STAND_INS + first_block(uri, tmp_path / "cache")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **{key: str(value) for key, value in said.items()}}
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    return done.returncode, done.stderr


def test_the_first_screen_saves_when_preempted_and_goes_on_where_it_was(tmp_path):
    uri = f"file://{tmp_path}/run"
    code, told = run(tmp_path, uri, MAX_STEPS=1200, PREEMPTED_AFTER=620)
    assert code == 75, told
    (whole, last) = objckpt.open(uri).checkpoints()
    assert whole.step == 500
    assert 620 <= last.step <= 620 + 101, "the notice is read some steps later at the most"
    code, told = run(tmp_path, uri, MAX_STEPS=1200, PREEMPTED_AFTER=-1)
    assert code == 0, told
    assert [c.step for c in objckpt.open(uri).checkpoints()] == [last.step, 1000, 1200]
    assert objckpt.open(uri).load()["optim.model.weight.step"].item() == 1200


@functools.cache
def defined(path):
    """Names of all functions in a Python file."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


def anchors(text):
    """What GitHub makes of the headings of a page."""
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", ["README.md", "CHANGELOG.md", "examples/README.md", "benchmarks/README.md"])
def test_every_link_leads_somewhere(page):
    text = (ROOT / page).read_text(encoding="utf-8")
    for shown, target in LINK.findall(text):
        path, _, anchor = target.partition("#")
        assert "://" not in target, f"{page} names a host: {target}"
        file = (ROOT / page).parent / path if path else ROOT / page
        assert file.exists(), f"{page}: {target} is not there"
        if anchor:
            assert anchor in anchors(file.read_text(encoding="utf-8")), f"{page}: no heading for {target}"
        named = TEST.fullmatch(shown)
        if named:
            assert named[1] in defined(file), f"{page}: {target} has no {named[1]}"


def test_every_sentence_under_what_is_guaranteed_names_its_test():
    section = re.search(r"^## What is guaranteed\n(.*?)^## ", README, re.MULTILINE | re.DOTALL)[1]
    bullets = re.split(r"^- ", section, flags=re.MULTILINE)[1:]
    assert len(bullets) > 10
    for bullet in bullets:
        for sentence in re.split(r"(?<=\.)\s+(?=[A-Z])", bullet.strip()):
            named = [TEST.fullmatch(shown) for shown, _ in LINK.findall(sentence)]
            assert any(named), f"no test is named: {sentence}"


def test_the_configuration_of_the_examples_is_one(monkeypatch):
    text = (ROOT / "examples" / "objckpt.toml").read_text(encoding="utf-8")
    for name in [n for n in os.environ if n.startswith("OBJCKPT_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("OBJCKPT_CONFIG", str(ROOT / "examples" / "objckpt.toml"))
    assert (config.load().uri, config.load().keep) == ("s3://acme-runs/llama-7b", (KeepLast(3),))
    fields = {name for name in config.Config.__dataclass_fields__ if name not in {"launch", "takeover"}}
    assert {
        n for n in fields if not re.search(rf"^(# )?\[?(checkpoint\.)?{n}\b", text, re.MULTILINE)
    } == set()
    # What is commented out are the defaults.
    for name, value in re.findall(r"^# (\w+) = ([^#\n]+)", text, re.MULTILINE):
        if name in fields:
            (said,) = tomllib.loads(f"{name} = {value}").values()
            assert config.Config.__dataclass_fields__[name].default == said, name
