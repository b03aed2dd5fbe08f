"""What the command line promises: it looks and changes nothing, but for gc; tables and JSON say the same, errors are one line."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from objckpt.cli import main
from objckpt.commit import Outcome, Run
from objckpt.errors import StorePermissionError
from objckpt.manifest import (
    BLOCK_SIZE,
    DataObject,
    KeepLast,
    Policy,
    Rank,
    RankRecord,
    Save,
    data_key,
    encode_record,
    encode_version,
    probe_key,
    record_key,
    version_key,
)
from objckpt.retention import GRACE, retain
from objckpt.shard import layout, whole
from objckpt.store import open_store
from objckpt.transfer import block_checksums

CREATED = 1_700_000_000.5
HOSTILE = "model.\x1b[2Jweight"


@pytest.fixture(autouse=True)
def nothing_said(monkeypatch, tmp_path):
    """No variable, no file: each test says all that it wants."""
    for name in list(os.environ):
        if name.startswith("OBJCKPT_"):
            monkeypatch.delenv(name)
    (tmp_path / "cwd").mkdir()
    monkeypatch.chdir(tmp_path / "cwd")


def write_save(store, version, step, world_size=1):
    """All that the ranks of a save write, and the commit."""
    save = Save(version.attempt, step)
    for rank in map(Rank, range(world_size)):
        image = layout(
            [
                whole(f"rank-{rank:05d}/own", "int64", (rank + 1,)),
                whole(HOSTILE if rank else "model.weight", "float32", (2, 3)),
            ],
            {},
        )
        content = image.header + bytes([rank]) * (image.size - len(image.header))
        key = data_key(save, rank)
        store.put(key, content)
        crcs = block_checksums(memoryview(content))
        record = RankRecord(
            run=version.run,
            save=save,
            rank=rank,
            world_size=world_size,
            created_at=CREATED,
            metadata={"loss": 1.5} if rank == 0 else None,
            bases=(),
            objects=(DataObject(key, image.size, BLOCK_SIZE, crcs),),
            pieces=image.pieces,
            values={
                "model": {"$": "module", "state": {"weight": {"$": "tensor", "name": "model.weight"}}},
                "lr": 0.25,
                "own": {"$": "per_rank"},
            }
            if rank == 0
            else None,
            rank_values={"objects": {"own": {"$": "loader", "state": {"n": 3}}}, "rng": None},
        )
        assert store.create(record_key(save, rank), encode_record(record))
    assert Run(store, retain=retain).commit(save, world_size) is Outcome.COMMITTED


def make_run(uri, **options):
    """Steps 10 and 20 by attempt 1; back to 10, from where attempt 4 makes 15 and 20; the first 20 is left aside."""
    store = open_store(uri, **options)
    run = Run(store, retain=retain)
    first = run.start(launch="one", world_size=1, policy=Policy())
    write_save(store, first, 10)
    write_save(store, first, 20)
    second = run.start(
        launch="two", world_size=2, policy=Policy((KeepLast(3),), lag=1), rollback=Save(first.attempt, 10)
    )
    write_save(store, second, 15, world_size=2)
    write_save(store, second, 20, world_size=2)
    newest = run.existing()
    entry = replace(newest.kept[0], pinned=True)
    number = newest.number + 1
    pinned = replace(newest, number=number, change="pin", kept=(entry, *newest.kept[1:]))
    assert store.create(version_key(number), encode_version(pinned))
    return run


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    path = tmp_path_factory.mktemp("run")
    make_run(f"file://{path}")
    return path


def call(capsys, *arguments):
    """Exit code, stdout and stderr of a command, run in this process."""
    try:
        code = main([str(a) for a in arguments])
    except SystemExit as ended:  # argparse
        code = ended.code
    out, err = capsys.readouterr()
    return code, out, err


def tree(path: Path) -> dict[str, tuple[bytes, int]]:
    return {str(p): (p.read_bytes(), p.stat().st_mtime_ns) for p in sorted(path.rglob("*")) if p.is_file()}


def document(capsys, *arguments):
    code, out, err = call(capsys, *arguments, "--json")
    assert (code, err) == (0, "")
    return json.loads(out)


def test_ls_json_is_the_whole_state_of_the_run(capsys, made):
    found = document(capsys, "ls", made)
    nbytes = [c.pop("nbytes") for c in found["checkpoints"]]
    shards = [p.stat().st_size for p in sorted(made.glob("data/*/*.safetensors"), key=lambda p: p.name)]
    assert nbytes == [shards[0], shards[1], shards[2] + shards[3], shards[4] + shards[5]]
    run = found.pop("run")
    assert len(run) == 16
    common = {"created_at": CREATED, "pinned": False, "bases": [], "metrics": {"loss": 1.5}}
    assert found == {
        "uri": f"file://{made}",
        "version": 7,
        "change": "pin",
        "attempt": 4,
        "launch": "two",
        "finished": False,
        "world_size": 2,
        "policy": {"keep": [{"rule": "last", "count": 3}], "lag": 1},
        "head": {"attempt": 4, "step": 20},
        "checkpoints": [
            common
            | {"step": 10, "attempt": 1, "world_size": 1, "parent": None}
            | {"head": False, "aside": False, "pinned": True},
            common
            | {"step": 20, "attempt": 1, "world_size": 1, "parent": {"attempt": 1, "step": 10}}
            | {"head": False, "aside": True},
            common
            | {"step": 15, "attempt": 4, "world_size": 2, "parent": {"attempt": 1, "step": 10}}
            | {"head": False, "aside": False},
            common
            | {"step": 20, "attempt": 4, "world_size": 2, "parent": {"attempt": 4, "step": 15}}
            | {"head": True, "aside": False},
        ],
    }


def test_ls_table_marks_head_aside_and_pinned(capsys, made):
    code, out, err = call(capsys, "ls", made)
    assert (code, err) == (0, "")
    run, attempt, *rows = out.splitlines()
    assert str(made) in run
    assert "attempt 4, launch two; 2 ranks; keeps 3 + 1; version 7 (pin)" in attempt
    words = [row.split() for row in rows]
    assert words[0] == ["step", "attempt", "ranks", "bytes", "created", "age", "parent", "notes"]
    assert [w[:3] for w in words[1:]] == [
        ["10", "1", "1"],
        ["20", "1", "1"],
        ["15", "4", "2"],
        ["20", "4", "2"],
    ]
    assert all("2023-11-14 22:13:20Z" in row for row in rows[1:])
    assert [row.split(" d  ")[1].split() for row in rows[1:]] == [
        ["none", "pinned"],
        ["10", "aside"],
        ["10", "(attempt", "1)"],
        ["15", "head"],
    ]


def test_a_run_without_checkpoints_and_a_finished_one_say_so(capsys, tmp_path):
    run = Run(open_store(f"file://{tmp_path}"), retain=retain)
    version = run.start(launch="one", world_size=1, policy=Policy())
    code, out, _ = call(capsys, "ls", tmp_path)
    assert code == 0
    assert "no checkpoint yet" in out
    assert "keeps all" in out
    assert run.finish(version.attempt)
    assert "attempt 1, finished; 1 rank;" in call(capsys, "ls", tmp_path)[1]
    assert document(capsys, "ls", tmp_path)["finished"] is True


def test_show_takes_what_a_restart_would_take_unless_told_whose(capsys, made):
    assert document(capsys, "show", made, 20)["checkpoint"]["attempt"] == 4
    assert document(capsys, "show", made, 20, "--attempt", 1)["checkpoint"]["attempt"] == 1
    code, _, err = call(capsys, "show", made, 15, "--attempt", 1)
    assert code == 1
    assert (
        "no checkpoint of step 15 by attempt 1; it has 10 (attempt 1), 20 (attempt 1), 15 (attempt 4)" in err
    )


def test_show_json_leads_to_the_bytes_of_every_tensor(capsys, made):
    found = document(capsys, "show", made, 20)
    assert [t["name"] for t in found["tensors"]] == [
        HOSTILE,
        "model.weight",
        "rank-00000/own",
        "rank-00001/own",
    ]
    for t in found["tensors"]:
        begin, end = t["range"]
        data = (made / t["object"]).read_bytes()[begin:end]
        assert data == bytes([t["rank"]]) * t["nbytes"]
    assert found["metadata"] == {"loss": 1.5}
    assert [r["rank"] for r in found["ranks"]] == [0, 1]
    assert found["records"][1]["size"] == (made / found["records"][1]["key"]).stat().st_size
    assert found["state"] == [
        {"name": "model", "kind": "module", "per_rank": False, "tensors": 1, "value": None},
        {"name": "lr", "kind": "float", "per_rank": False, "tensors": 0, "value": "0.25"},
        {"name": "own", "kind": "loader", "per_rank": True, "tensors": 0, "value": None},
    ]


def test_show_table_says_what_its_json_says(capsys, made):
    found = document(capsys, "show", made, 20)
    code, out, err = call(capsys, "show", made, 20)
    assert (code, err) == (0, "")
    for t in found["tensors"]:
        name = t["name"].replace("\x1b", "\\x1b")
        row = next(line for line in out.splitlines() if line.startswith(name + " "))
        assert row.split()[1] == t["dtype"]
        assert str(t["shape"]) in row
        assert row.endswith(f"{t['rank']}  {t['object']}")
    for word in (found["index"]["key"], found["records"][0]["crc64"], '{"loss": 1.5}', "loader, per rank"):
        assert word in out


def test_a_narrow_terminal_folds_and_cuts_nothing(capsys, made, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "70")
    out = call(capsys, "show", made, 20)[1]
    assert "…" not in out
    key = document(capsys, "show", made, 20)["tensors"][0]["object"]
    assert key not in out
    assert key.removeprefix("data/")[-12:] in out.replace("\n", "").replace(" ", "")


def test_no_name_from_the_bucket_moves_the_cursor(capsys, made):
    assert "\x1b" not in call(capsys, "show", made, 20)[1]


def test_looking_changes_nothing(capsys, made):
    before = tree(made)
    for arguments in (("ls", made), ("show", made, 20), ("show", made, 10, "--json")):
        assert call(capsys, *arguments)[0] == 0
    assert tree(made) == before


def test_what_cannot_be_done_is_one_line_and_code_1(capsys, made, tmp_path):
    (tmp_path / "empty").mkdir()
    damaged = tmp_path / "damaged"
    make_run(f"file://{damaged}")
    index = damaged / "index" / "000004-000000000020.json"
    index.write_bytes(index.read_bytes().replace(b"1.5", b"2.5"))
    for arguments, word in (
        (("ls", tmp_path / "empty"), "no run at"),
        (("show", made, 11), "no checkpoint of step 11"),
        (("show", damaged, 20), "is damaged"),
        (("ls", "S3:/x"), "no scheme"),
        (("ls", "nosuch://bucket/x"), "unknown scheme"),
        (("ls", "gopher"), "scheme"),
        (("ls", made, "-o", "key=x"), "storage_options"),
        (("ls", "s3://bucket/run", "-o", "deadline=soon"), "refuses one of the storage options deadline"),
        (("ls", "s3://bucket/run", "-o", "config_kwargs.nonsense=1"), "nonsense"),
        (("ls", "s3://bucket/run", "-o", "client_kwargs=x"), "client_kwargs"),
        (("ls", "s3://bucket/run", "-o", "nonsense=x"), "nonsense"),
        (("ls",), "no URI was given"),
    ):
        code, out, err = call(capsys, *arguments)
        assert (code, out) == (1, ""), arguments
        assert err.startswith("objckpt: "), arguments
        assert err.count("\n") == 1, arguments
        assert word in err, (arguments, err)


def test_wrong_usage_is_code_2_and_shows_no_secret(capsys, made):
    for arguments in (
        (),
        ("list", made),
        ("show", made),
        ("show", made, "newest"),
        ("ls", made, "--keep", "1"),
        ("ls", made, "-o", "hunter2"),
        ("ls", made, "-o", "=hunter2"),
        ("ls", made, "-o", "a..b=hunter2"),
        ("ls", made, "-o", "a=1", "-o", "a.b=hunter2"),
        ("ls", made, "-o", "a.b=1", "-o", "a=hunter2"),
    ):
        code, out, err = call(capsys, *arguments)
        assert (code, out) == (2, ""), arguments
        assert "usage: objckpt" in err
        assert "hunter2" not in err


def test_storage_options_nest_and_keep_texts(capsys, monkeypatch):
    given = {}

    def refuse(uri, **options):
        given.update(options)
        raise OSError("far enough")

    monkeypatch.setattr("objckpt.cli.run.open_store", refuse)
    arguments = [
        "key=0123", "secret=12345678", "anon=false", "deadline=1.5", "client_kwargs.region_name=eu-west-1",
        "client_kwargs.verify=false", "client_kwargs.aws_account_id=123456789012", "config_kwargs.s3.a=b=c",
        "config_kwargs.read_timeout=7", "profile=true",
    ]  # fmt: skip
    code, _, err = call(capsys, "ls", "s3://bucket/run", *(x for a in arguments for x in ("-o", a)))
    assert (code, err) == (1, "objckpt: far enough\n")
    assert given == {
        "key": "0123",
        "secret": "12345678",
        "anon": False,
        "deadline": 1.5,
        "profile": "true",
        "client_kwargs": {"region_name": "eu-west-1", "verify": False, "aws_account_id": "123456789012"},
        "config_kwargs": {"s3": {"a": "b=c"}, "read_timeout": 7},
    }


def test_environment_and_file_stand_in_for_the_uri(capsys, made, monkeypatch):
    Path("objckpt.toml").write_text(f'[checkpoint]\nuri = "file://{made}"\n')
    assert document(capsys, "show", 15)["checkpoint"]["step"] == 15
    monkeypatch.setenv("OBJCKPT_URI", f"{made}/nowhere")
    assert "nowhere" in call(capsys, "ls")[2]
    assert document(capsys, "ls", made)["head"] == {"attempt": 4, "step": 20}


def test_a_bucket_is_listed_with_options_on_the_command_line(capsys, weed, bucket_uri):
    make_run(bucket_uri, **weed.storage_options)
    options = [f"{name}={value}" for name, value in weed.storage_options.items()]
    options.append("client_kwargs.region_name=us-east-1")
    given = [x for option in options for x in ("-o", option)]
    found = document(capsys, "ls", bucket_uri, *given)
    assert found["uri"] == bucket_uri
    assert [c["step"] for c in found["checkpoints"]] == [10, 20, 15, 20]
    assert len(document(capsys, "show", bucket_uri, 15, *given)["tensors"]) == 4


# ------------------------------------------------------------------ gc

DAY = 86_400


@pytest.fixture
def littered(tmp_path):
    """Steps 10 and 20 were retired three days ago, 30 just now; and what else may lie there, all of it as old."""
    path = tmp_path / "littered"
    store = open_store(f"file://{path}")
    run = Run(store, retain=retain)
    version = run.start(launch="one", world_size=1, policy=Policy((KeepLast(1),), lag=0))
    for step in (10, 20, 30):
        write_save(store, version, step)
    store.put(data_key(Save(version.attempt, 25), 0), b"no record of it came")
    store.put(probe_key("0" * 24), b"first\n")
    store.put("data/notes.txt", b"theirs")
    (path / "data" / "\x1b[2J.txt").write_bytes(b"theirs")
    begin_upload(path, "old")
    begin_upload(path, "theirs", "notes/x")
    for file in path.rglob("*"):
        os.utime(file, times=(time.time() - 3 * DAY,) * 2)
    begin_upload(path, "young")
    write_save(store, version, 40)
    return path


def begin_upload(path, name, key="data/00/x"):
    """What a process that is killed while it writes a shard leaves in a directory."""
    (path / ".objckpt-incoming").mkdir(exist_ok=True)
    (path / ".objckpt-incoming" / f"{name}-{key.replace('/', '%2F')}").write_bytes(b"half")


def keys(path):
    return {str(p.relative_to(path)) for p in path.rglob("*") if p.is_file() and ".objckpt" not in str(p)}


def uploads(path):
    return {p.name.partition("-")[0] for p in (path / ".objckpt-incoming").iterdir()}


def test_gc_json_says_what_and_why_and_a_dry_run_says_the_same_and_changes_nothing(capsys, littered):
    before, sizes = tree(littered), {key: (littered / key).stat().st_size for key in keys(littered)}
    dry = document(capsys, "gc", littered, "--dry-run")
    assert tree(littered) == before
    by_step = {}
    for g in dry["garbage"]:
        assert g["size"] == sizes[g["key"]]
        by_step.setdefault((g["reason"], (g["save"] or {}).get("step")), []).append(
            g["key"].partition("/")[0]
        )
    assert by_step == {
        ("retired", 10): ["data", "records", "index"],
        ("retired", 20): ["data", "records", "index"],
        ("dead", 25): ["data"],
        ("probe", None): ["probe"],
        ("version", None): ["manifest"] * 3,
    }
    assert dry["spared"]["objects"] == 3
    assert dry["unknown"] == {"objects": 2, "nbytes": 12, "examples": ["data/\x1b[2J.txt", "data/notes.txt"]}
    assert (dry["dry_run"], dry["grace"], dry["uploads"], dry["version"]) == (True, 600.0, None, 5)

    done = document(capsys, "gc", littered)
    assert done == dry | {"dry_run": False, "uploads": 1}
    assert keys(littered) == sizes.keys() - {g["key"] for g in done["garbage"]}
    assert uploads(littered) == {"theirs", "young"}
    assert [c["step"] for c in document(capsys, "ls", littered)["checkpoints"]] == [40]
    assert document(capsys, "show", littered, 40)

    again = document(capsys, "gc", littered, "--grace", 0)
    assert {g["save"]["step"] for g in again["garbage"]} == {30}
    assert document(capsys, "gc", littered, "--grace", 0)["garbage"] == []
    assert "data/notes.txt" in keys(littered)


def test_gc_table_says_what_its_json_says(capsys, littered):
    dry = document(capsys, "gc", littered, "--dry-run")
    code, out, err = call(capsys, "gc", littered, "--dry-run")
    assert (code, err) == (0, "")
    rows = [row.split() for row in out.splitlines()]
    assert ["why", "step", "attempt", "objects", "bytes"] in rows
    assert [row[:4] for row in rows if row[0] in {"retired", "dead"}] == [
        ["retired", "10", "1", "3"],
        ["retired", "20", "1", "3"],
        ["dead", "25", "1", "1"],
    ]
    assert [row[:2] for row in rows if row[0] in {"probe", "version"}] == [["probe", "1"], ["version", "3"]]
    assert f"would delete {len(dry['garbage'])} objects, " in out
    assert "spared for readers: 3 objects, " in out
    assert (
        "left alone, as the names are none of objckpt's: 2 objects, 12 bytes, such as data/\\x1b[2J.txt"
        in out
    )
    out = call(capsys, "gc", littered)[1]
    assert f"\ndeleted {len(dry['garbage'])} objects, " in out
    assert "aborted 1 unfinished uploads" in out
    assert "nothing to delete" in call(capsys, "gc", littered)[1]


def test_gc_without_a_run_deletes_nothing(capsys, littered):
    """A URI that is cut too short, or too long."""
    before = tree(littered)
    for uri in (littered.parent, littered / "data"):
        code, out, err = call(capsys, "gc", uri, "--grace", 0)
        assert (code, out) == (1, "")
        assert "no run at" in err
    assert tree(littered) == before


def test_gc_that_may_not_delete_says_who_may(capsys, littered, monkeypatch):
    before = tree(littered)

    def refuse(*_arguments, **_keywords):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(Path, "unlink", refuse)
    code, out, err = call(capsys, "gc", littered)
    assert (code, out, err.count("\n")) == (1, "", 1)
    assert "11 objects that may be deleted" in err
    assert "Run gc under a role that may delete" in err
    assert tree(littered) == before


def test_gc_that_may_not_abort_uploads_says_so_after_the_rest(capsys, littered, monkeypatch):
    def refuse(*_arguments):
        raise StorePermissionError("AccessDenied")

    monkeypatch.setattr("objckpt.store.filesystem.FileStore.abort_uploads", refuse)
    code, out, err = call(capsys, "gc", littered)
    assert (code, out) == (1, "")
    assert "11 objects were deleted, but unfinished uploads" in err
    assert len(keys(littered)) == 3 + 3 + 2 + 2


def test_gc_aborts_no_upload_of_less_than_a_day_whatever_the_grace(capsys, littered):
    document(capsys, "gc", littered, "--grace", 4 * DAY)
    assert uploads(littered) == {"old", "theirs", "young"}
    document(capsys, "gc", littered, "--grace", 0)
    assert uploads(littered) == {"theirs", "young"}


def test_gc_takes_no_grace_that_is_none(capsys, littered):
    for grace in ("-1", "nan", "inf", "soon"):
        code, _, err = call(capsys, "gc", littered, f"--grace={grace}")
        assert (code, f"{grace!r} is no number of seconds" in err) == (2, True)


def test_the_help_tells_the_grace_that_there_is(capsys):
    assert f"else {GRACE:.0f}" in " ".join(call(capsys, "gc", "--help")[1].split())


# ------------------------------------------------------------------ as a process


def console_script(*arguments, **popen):
    """The command in a process of its own, as the console script runs it."""
    program = "import sys; from objckpt.cli import main; sys.exit(main())"
    return subprocess.Popen([sys.executable, "-c", program, *map(str, arguments)], **popen)


@pytest.mark.parametrize("kind", [(), ("--json",)])
def test_a_reader_that_has_seen_enough_is_no_error(made, kind):
    read, write = os.pipe()
    os.close(read)
    process = console_script("show", made, 20, *kind, stdout=write, stderr=subprocess.PIPE)
    os.close(write)
    _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (0, b"")


def test_names_that_the_terminal_cannot_spell_are_escaped(tmp_path):
    run = Run(open_store(f"file://{tmp_path}"), retain=retain)
    run.start(launch="größe", world_size=1, policy=Policy())
    env = os.environ | {"PYTHONIOENCODING": "ascii"}
    process = console_script("ls", tmp_path, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (0, b"")
    assert rb"gr\xf6\xdfe" in out
