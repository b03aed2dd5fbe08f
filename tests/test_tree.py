"""A run as files: what fsspec, pandas and safetensors see of it, and that no byte reaches them unverified."""

from __future__ import annotations

import json
import random
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import fsspec
import pandas as pd
import pytest
import safetensors
import safetensors.torch
import torch
from awscrt.checksums import crc64nvme
from golden import state_at

import objckpt
from objckpt import manifest
from objckpt.commit import Run
from objckpt.errors import (
    CheckpointNotFoundError,
    CorruptCheckpointError,
    FormatVersionError,
    StorePermissionError,
)
from objckpt.manifest import KeepLast, Policy, Rank, Save, Step
from objckpt.retention import retain
from objckpt.shard import layout, whole
from objckpt.store import open_store
from objckpt.testing.store_hooks import race
from objckpt.transfer import block_checksums
from objckpt.tree import FileTree

GOLDEN = Path(__file__).parent / "data" / "v1"
BLOCK = 1 << 10


@pytest.fixture
def root(tmp_path):
    """A copy of the golden run, to be damaged."""
    return str(shutil.copytree(GOLDEN / "run", tmp_path / "run"))


@pytest.fixture(params=["file", "s3"])
def place(request, root, bucket_uri):
    """URI and storage options of the same run, in a directory and in a bucket."""
    if request.param == "file":
        return f"objckpt+file://{root}", {}
    weed, client = request.getfixturevalue("weed"), request.getfixturevalue("weed_client")
    prefix = bucket_uri.removeprefix(f"s3://{weed.bucket}/")
    for path in Path(root).rglob("*.*"):
        if path.is_file():
            client.upload_file(str(path), weed.bucket, f"{prefix}/{path.relative_to(root)}")
    return f"objckpt+{bucket_uri}", dict(weed.storage_options)


@pytest.fixture
def seed():
    seed = random.SystemRandom().randrange(1 << 32)
    print(f"seed {seed}")  # noqa: T201 # how a failure is repeated
    return seed


def committed(uri, tensors, *, steps=(7,), policy=None, **options):
    """A run of one rank with the bytes ``tensors`` (uint8, by name) at each step, in small blocks."""
    run = Run(open_store(uri, **options), retain=retain)
    version = run.start(launch="tree", world_size=1, policy=policy or Policy())
    for step in steps:
        save = Save(version.attempt, Step(step))
        image = layout([whole(name, "uint8", (len(data),)) for name, data in tensors.items()], {})
        data = image.header + b"".join(tensors[piece.name] for piece in image.pieces)
        key = manifest.data_key(save, Rank(0))
        run.store.put(key, data)
        obj = manifest.DataObject(key, len(data), BLOCK, block_checksums(memoryview(data), BLOCK))
        record = manifest.RankRecord(
            version.run,
            save,
            Rank(0),
            1,
            1.5,
            None,
            (),
            (obj,),
            image.pieces,
            {},
            {"objects": {}, "rng": None},
        )
        run.store.create(manifest.record_key(save, Rank(0)), manifest.encode_record(record))
        run.commit(save, 1)
    return run


# --- what there is


def test_the_tree_is_what_the_newest_version_lists(root):
    fs = fsspec.filesystem("objckpt+file")
    (Path(root) / "data/00/000007-000000000099-r00000-00.safetensors").write_bytes(
        b"a save that was never committed"
    )
    assert [path.removeprefix(root) for path in fs.ls(root, detail=False)] == [
        "/checkpoints.json", "/step-2", "/step-3", "/step-4",
    ]  # fmt: skip
    assert [(e["name"], e["type"], e["attempt"]) for e in fs.ls(f"{root}/step-4")][:2] == [
        (f"{root}/step-4/info.json", "file", 4),
        (f"{root}/step-4/tensors.json", "file", 4),
    ]
    assert fs.glob(f"{root}/step-*/model/0.*") == [
        f"{root}/step-{step}/model/0.{name}.safetensors" for step in (2, 3, 4) for name in ("bias", "weight")
    ]
    Run(open_store(root), retain=retain).start(
        launch="golden",
        world_size=1,
        policy=Policy((KeepLast(1),), lag=0),
        rollback=Save(manifest.Attempt(1), Step(2)),
    )
    heads = pd.read_json(f"objckpt+file://{root}/checkpoints.json").set_index("path")["head"]
    assert heads.to_dict() == {"step-2": True, "step-3": False, "step-4": False}


def test_every_size_is_that_of_the_bytes(place):
    uri, options = place
    fs, path = fsspec.url_to_fs(uri, **options)
    found = fs.find(path, detail=True)
    assert len(found) > 150
    for name, info in found.items():
        if "/step-" not in name or "/step-3/" in name:
            assert info["size"] == len(fs.cat_file(name)), name


def test_what_is_not_there_is_not_found(root):
    fs = fsspec.filesystem("objckpt+file")
    for path in (
        f"{root}/step-5", f"{root}/step-02", f"{root}/step-2/nothing", f"{root}/step-2/model/0", f"{root}/manifest",
        f"{root}/checkpoints.json/x", f"{root}/step-2/info.json/x", str(Path(root).parent), "/", "",
    ):  # fmt: skip
        assert not fs.exists(path), path
        for verb in (fs.ls, fs.info, fs.cat_file, fs.open):
            with pytest.raises(FileNotFoundError):
                verb(path)
    with pytest.raises(CheckpointNotFoundError, match=r"step-2, step-3, step-4"):
        fs.info(f"{root}/step-5")
    for verb in (fs.cat_file, fs.open):
        with pytest.raises(IsADirectoryError):
            verb(f"{root}/step-2")


def test_a_run_below_a_folder_that_is_named_like_a_checkpoint_is_found(root, tmp_path):
    moved = tmp_path / "step-1" / "step-2"
    moved.parent.mkdir()
    Path(root).rename(moved)
    fs = FileTree()
    assert fs.isdir(str(moved))
    assert fs.isfile(f"{moved}/step-2/info.json")
    assert not fs.exists(str(moved.parent))


def test_two_checkpoints_of_one_step_are_both_there(tmp_path):
    uri = f"file://{tmp_path}/run"
    committed(uri, {"a": b"first"}, steps=(1, 2))
    run = Run(open_store(uri), retain=retain)
    run.start(launch="tree", world_size=1, policy=Policy(), rollback=Save(manifest.Attempt(1), Step(1)))
    committed(uri, {"a": b"again"}, steps=(2,))
    fs = FileTree()
    assert [path.rpartition("/")[2] for path in fs.ls(f"{tmp_path}/run", detail=False)] == [
        "checkpoints.json", "step-1", "step-2.attempt-1", "step-2",
    ]  # fmt: skip
    assert b"again" in fs.cat_file(f"{tmp_path}/run/step-2/a.safetensors")
    assert b"first" in fs.cat_file(f"{tmp_path}/run/step-2.attempt-1/a.safetensors")


def test_the_records_of_hundreds_of_ranks_are_read():
    fs = FileTree()
    where = f"{GOLDEN}/groups/step-7"
    assert safetensors.torch.load(fs.cat_file(f"{where}/weight/257.safetensors"))["257"].shape == (2, 2)
    assert len(fs.ls(where)) == 3 + 258 + 3


def test_any_name_of_the_state_has_a_file_of_its_own(tmp_path):
    names = [
        "a/b.c",
        "a/b\\.c",
        "shards.x",
        "%73hards.x",
        "..x",
        "\\.\\..y",
        "[1].z",
        "*.z",
        "::.z",
        "ü.é",
        "a",
        "a.a",
        "end\\",
        ".",
        "é\n.\t",
    ]
    names += [
        "rank-00000/x",
        "rank-00000/y/z",
        "\\rank-00000.x",
        "info.json",
        "values.x",
        "step-1.x",
        "checkpoints\\.json.x",
    ]
    tensors = {name: f"bytes of {name}".encode() for name in names}
    committed(f"file://{tmp_path}/run", tensors)
    fs = FileTree()
    seen = set()
    for path in fs.find(f"{tmp_path}/run"):
        if (
            path.count("/") == str(tmp_path).count("/") + 4
            and path.endswith(".safetensors")
            and "/shards/" not in path
        ):
            (value,) = safetensors.torch.load(fs.cat_file(path)).values()
            seen.add(bytes(value.tolist()))
    assert seen == set(tensors.values())
    assert fs.isdir(f"{tmp_path}/run/step-7/shards")
    assert fs.isdir(f"{tmp_path}/run/step-7/step-1")


# --- safetensors and pandas


def test_safetensors_opens_the_files_and_they_hold_what_was_saved(place):
    uri, options = place
    fs, path = fsspec.url_to_fs(uri, **options)
    reader = objckpt.open(uri.removeprefix("objckpt+"), **options)
    for step in (2, 3, 4):
        whole_state = reader.load(step)
        seen = 0
        for group in {name.partition(".")[0].partition("/")[0] for name in whole_state}:
            opened = safetensors.torch.load(fs.cat_file(f"{path}/step-{step}/{group}.safetensors"))
            for short, tensor in opened.items():
                name = next(n for n in (f"{group}.{short}", f"{group}/{short}", short) if n in whole_state)
                expected = whole_state[name]
                if expected.dtype == torch.complex128:
                    expected = torch.view_as_real(expected)
                assert (tensor.dtype, tensor.shape) == (expected.dtype, expected.shape)
                assert (
                    tensor.contiguous()
                    .view(-1)
                    .view(torch.uint8)
                    .equal(expected.contiguous().view(-1).view(torch.uint8))
                )
                seen += 1
        assert seen == len(whole_state) > 30


def test_a_model_loads_its_file(root):
    model = state_at(1, blank=True)["model"]
    with fsspec.open(f"objckpt+file://{root}/step-3/model.safetensors") as file:
        model.load_state_dict(safetensors.torch.load(file.read()))
    assert all(
        torch.equal(a, b)
        for a, b in zip(model.state_dict().values(), state_at(3)["model"].state_dict().values(), strict=True)
    )


def test_safe_open_maps_a_copy_that_fsspec_made(place, tmp_path):
    uri, options = place
    local = fsspec.open_local(
        f"simplecache::{uri}/step-3/optim.safetensors",
        simplecache={"cache_storage": str(tmp_path / "cache")},
        **{uri.partition("://")[0]: options},
    )
    with safetensors.safe_open(local, "pt") as file:
        assert file.metadata()["format"] == "pt"
        assert file.get_tensor("model.0.weight.exp_avg").equal(torch.arange(6.0).reshape(2, 3) / 8)


def test_pandas_opens_the_listings(place):
    uri, options = place
    table = pd.read_json(f"{uri}/checkpoints.json", storage_options=options or None)
    assert table["path"].tolist() == ["step-2", "step-3", "step-4"]
    assert table["head"].tolist() == [False, True, False]
    assert str(table["created_at"].dtype).startswith("datetime64")
    tensors = pd.read_json(f"{uri}/step-3/tensors.json", storage_options=options or None).set_index("name")
    assert tensors.loc["model.0.weight", "shape"] == [2, 3]
    assert tensors.loc["model.0.weight", "nbytes"] == 24


def test_the_values_and_the_metadata_are_json(root):
    fs = FileTree()
    assert json.loads(fs.cat_file(f"{root}/step-3/info.json"))["metadata"] == {"step": 3, "note": "golden é"}
    assert json.loads(fs.cat_file(f"{root}/step-3/values.json"))["sched"]["state"]["last_epoch"] == 3
    assert set(json.loads(fs.cat_file(f"{root}/step-3/rank-00000/values.json"))) == {"objects", "rng"}


def test_the_shards_are_the_objects_of_the_bucket(root):
    fs = FileTree()
    (shard,) = fs.ls(f"{root}/step-3/shards", detail=False)
    assert fs.cat_file(shard) == (Path(root) / "data/00" / Path(shard).name).read_bytes()


def test_a_plain_fsspec_user_loads_no_torch(root):
    program = f"""
import sys, fsspec
with fsspec.open("objckpt+file://{root}/step-3/model.safetensors") as file:
    assert len(file.read()) > 300
print([name for name in ("torch", "numpy", "boto3", "google") if name in sys.modules])
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout == "[]\n"


# --- bytes


def test_ranges_are_those_of_a_slice(tmp_path, seed):
    draw = random.Random(seed)
    committed(
        f"file://{tmp_path}/run",
        {f"m.{n}": draw.randbytes(size) for n, size in enumerate((0, 1, 5_000, 1_024, 77, 9_999))},
    )
    fs = FileTree()
    path = f"{tmp_path}/run/step-7/m.safetensors"
    data = fs.cat_file(path)
    assert len(safetensors.torch.load(data)) == 6
    marks = [
        None,
        0,
        len(data),
        len(data) + 10,
        -1,
        -len(data) - 5,
        *(draw.randrange(-len(data), len(data)) for _ in range(20)),
    ]
    pairs = [(start, end) for start in marks for end in marks]
    for start, end in draw.sample(pairs, 150):
        assert fs.cat_file(path, start, end) == data[start:end], (start, end)
    assert fs.cat_ranges([path] * len(pairs), [s for s, _ in pairs], [e for _, e in pairs]) == [
        data[s:e] for s, e in pairs
    ]
    with fs.open(path, block_size=draw.randrange(1, 3_000)) as file:
        for _ in range(50):
            at, size = draw.randrange(len(data)), draw.randrange(2_000)
            file.seek(at)
            assert file.read(size) == data[at : at + size]


def test_ranges_in_one_block_read_it_once(tmp_path, monkeypatch):
    tensors = {f"m.{n:02d}": bytes([n]) * 8 for n in range(20)}
    committed(f"file://{tmp_path}/run", tensors)
    fs = FileTree()
    paths = [f"{tmp_path}/run/step-7/m/{n:02d}.safetensors" for n in range(20)]
    fs.info(paths[0])
    store = fs._runs[f"{tmp_path}/run"].store
    reads = []
    read = store.read
    monkeypatch.setattr(store, "read", lambda key, *rest: reads.append(key) or read(key, *rest))
    found = fs.cat_ranges(paths, -8, None)
    assert found == list(tensors.values())
    assert sum(key.startswith("data/") for key in reads) <= 2


def test_a_flipped_bit_is_never_handed_out(tmp_path):
    committed(f"file://{tmp_path}/run", {"m.a": bytes(5 * BLOCK), "m.b": bytes(10)})
    (shard,) = (tmp_path / "run/data/00").iterdir()
    data = bytearray(shard.read_bytes())
    data[2 * BLOCK + 7] ^= 1
    shard.write_bytes(data)
    fs = FileTree()
    folder = f"{tmp_path}/run/step-7"
    for path in ("m.safetensors", "m/a.safetensors", f"shards/{shard.name}"):
        with pytest.raises(CorruptCheckpointError, match="damaged"):
            fs.cat_file(f"{folder}/{path}")
        with fs.open(f"{folder}/{path}") as file, pytest.raises(CorruptCheckpointError):
            file.read()
    # The range asked for is whole; the block that it lies in is not.
    path = f"{folder}/shards/{shard.name}"
    with pytest.raises(CorruptCheckpointError):
        fs.cat_file(path, 3 * BLOCK - 1, 3 * BLOCK)
    good, bad, missing = fs.cat_ranges(
        [path, path, f"{folder}/none"], [0, 2 * BLOCK, 0], [BLOCK, 2 * BLOCK + 1, 1]
    )
    assert good == bytes(data[:BLOCK])
    assert isinstance(bad, CorruptCheckpointError)
    assert isinstance(missing, FileNotFoundError)
    with pytest.raises(CorruptCheckpointError):
        fs.cat_ranges([path, path], [0, 2 * BLOCK], [1, 2 * BLOCK + 1], on_error="raise")


def test_a_tensor_that_a_newer_objckpt_wrote_is_refused(tmp_path, monkeypatch):
    run = committed(f"file://{tmp_path}/run", {"a": b"x"})
    contents = run.contents
    monkeypatch.setattr(Run, "contents", lambda _self, entry: _with(contents(entry), dtype="float4"))
    with pytest.raises(FormatVersionError, match="float4"):
        FileTree().ls(f"{tmp_path}/run/step-7")
    monkeypatch.setattr(Run, "contents", lambda _self, entry: _with(contents(entry), dtype="float32"))
    with pytest.raises(CorruptCheckpointError, match="1 bytes"):
        FileTree().ls(f"{tmp_path}/run/step-7")


def _with(contents, **changes):
    (record,) = contents.records
    (piece,) = record.pieces
    return replace(contents, records=(replace(record, pieces=(replace(piece, **changes),)),))


def test_a_checkpoint_dropped_while_it_is_read_is_told_as_such(tmp_path):
    uri = f"file://{tmp_path}/run"
    run = committed(uri, {"a": bytes(3 * BLOCK)}, steps=(1, 2), policy=Policy((KeepLast(1),), lag=0))
    committed(uri, {"a": bytes(BLOCK)}, steps=(5,), policy=Policy((KeepLast(2),), lag=0))
    fs = FileTree()
    path = f"{tmp_path}/run/step-2/a.safetensors"
    with fs.open(path, block_size=BLOCK) as file:
        file.read(1)
        committed(uri, {"a": b"x"}, steps=(9,), policy=Policy((KeepLast(1),), lag=0))
        run.store.delete([o.key for o in run.store.list("data/") if "000000000002" in o.key])
        with pytest.raises(CheckpointNotFoundError, match="step 2 was dropped"):
            file.read()
    assert not fs.exists(path)


def test_threads_share_a_tree(root):
    fs = FileTree(skip_instance_cache=True)
    expected = FileTree().cat(FileTree().find(f"{root}/step-3"))
    found = race(8, lambda _: fs.cat(fs.find(f"{root}/step-3")))
    assert found == [expected] * 8


# --- nothing is written


def test_nothing_can_be_written(root, tmp_path):
    fs, path = FileTree(), f"{root}/step-3/info.json"
    before = {p: crc64nvme(p.read_bytes()) for p in Path(root).rglob("*") if p.is_file()}
    (tmp_path / "local").write_bytes(b"x")
    verbs = {
        "open wb": lambda: fs.open(path, "wb"), "open ab": lambda: fs.open(path, "ab"), "open xb": lambda: fs.open(path, "xb"),
        "open w": lambda: fs.open(path, "w"), "open r+b": lambda: fs.open(path, "r+b"),
        "fsspec.open": lambda: fsspec.open(f"objckpt+file://{root}/new", "wb").open(),
        "to_csv": lambda: pd.DataFrame({"a": [1]}).to_csv(f"objckpt+file://{root}/new.csv"),
        "put": lambda: fs.put(str(tmp_path / "local"), path), "copy": lambda: fs.copy(path, path + "2"),
    }  # fmt: skip
    for name in ["mkdir", "makedirs", "makedir", "mkdirs", "rmdir", "rm", "rm_file", "delete", "touch"]:
        verbs[name] = lambda name=name: getattr(fs, name)(path)
    for name in [
        "pipe_file",
        "write_bytes",
        "write_text",
        "put_file",
        "upload",
        "cp_file",
        "cp",
        "mv",
        "move",
        "rename",
    ]:
        verbs[name] = lambda name=name: getattr(fs, name)(path, path)
    verbs["pipe"] = lambda: fs.pipe({path: b"x"})
    for name, verb in verbs.items():
        with pytest.raises(StorePermissionError, match="read-only"):
            verb()
            pytest.fail(name)
    assert {p: crc64nvme(p.read_bytes()) for p in Path(root).rglob("*") if p.is_file()} == before
