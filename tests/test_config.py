"""What ``objckpt.config`` promises: one place reads, the nearer word wins, wrong names and values are refused."""

from __future__ import annotations

import dataclasses
import json
import os
import pickle
import subprocess
import sys
import typing
from pathlib import Path

import pytest

from objckpt.config import Config, Tuning, launch_id, load, redact
from objckpt.errors import ConfigError
from objckpt.manifest import KeepBest, KeepEvery, KeepFor, KeepLast

URI = "s3://bucket/run"
SECRET = "hunter2"


@pytest.fixture(autouse=True)
def nothing_said(monkeypatch, tmp_path):
    """No variable, no file: each test says all that it wants."""
    for name in list(os.environ):
        if name.startswith(("OBJCKPT_", "SLURM_", "TORCHELASTIC_")):
            monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)


def toml(text: str, name: str = "objckpt.toml") -> Path:
    path = Path(name)
    path.write_text(text)
    return path


def test_defaults_are_those_of_the_design():
    config = load(uri=URI)
    assert config == Config(
        uri=URI,
        storage_options={},
        cache=None,
        interval=None,
        keep=(),
        slots=2,
        max_failed_saves=3,
        adopt_timeout=60.0,
        linger=900.0,
        exit_timeout=30.0,
        save_timeout=1800.0,
        agree_timeout=600.0,
        when_full="wait",
        launch=None,
        takeover=None,
        rng=True,
        tuning=Tuning(part_size=16 << 20, concurrency=16),
    )


def test_a_keyword_beats_the_environment_which_beats_the_file_which_beats_the_default(monkeypatch):
    toml('[checkpoint]\nuri = "s3://file/run"\nkeep = 4\ninterval = 40\n')
    assert (load().uri, load().keep, load().slots) == ("s3://file/run", (KeepLast(4),), 2)
    monkeypatch.setenv("OBJCKPT_URI", "s3://environment/run")
    monkeypatch.setenv("OBJCKPT_KEEP", "3")
    assert (load().uri, load().keep, load().interval) == ("s3://environment/run", (KeepLast(3),), 40)
    config = load(uri=URI, keep=2, interval=None)
    assert (config.uri, config.keep, config.interval) == (URI, (KeepLast(2),), 40)


def test_storage_options_are_taken_whole_from_the_nearest_place(monkeypatch):
    toml('[checkpoint]\nuri = "s3://b/r"\nstorage_options = {key = "file", anon = true}\n')
    assert load().storage_options == {"key": "file", "anon": True}
    monkeypatch.setenv("OBJCKPT_STORAGE_OPTIONS", '{"key": "variable"}')
    assert load().storage_options == {"key": "variable"}
    assert load(storage_options={}).storage_options == {}


def test_a_storage_option_that_cannot_reach_the_uploader_is_refused_and_not_shown():
    with pytest.raises(
        ConfigError, match=r"storage_options has 'token' as a object, which cannot be handed to the uploader"
    ):
        load(uri="gs://b/r", storage_options={"token": object()})


def test_the_caller_cannot_change_storage_options_afterwards():
    mine = {"key": "a"}
    config = load(uri=URI, storage_options=mine)
    mine["key"] = "b"
    assert config.storage_options == {"key": "a"}
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.uri = "s3://other/run"  # type: ignore[misc] # that it is frozen is what is tested


# Every field but uri and tuning: the text of its variable, its line in the file, the value that comes of both.
EVERY = {
    "storage_options": ('{"anon": true}', "{anon = true}", {"anon": True}),
    "cache": ("/nvme", '"/nvme"', Path("/nvme")),
    "interval": ("500", "500", 500),
    "keep": ("2", "2", (KeepLast(2),)),
    "slots": ("3", "3", 3),
    "max_failed_saves": ("1", "1", 1),
    "adopt_timeout": ("0", "0", 0.0),
    "linger": ("12.5", "12.5", 12.5),
    "exit_timeout": ("1e1", "1e1", 10.0),
    "save_timeout": ("7", "7", 7.0),
    "agree_timeout": ("7.5", "7.5", 7.5),
    "when_full": ("skip", '"skip"', "skip"),
    "launch": ("mine", '"mine"', "mine"),
    "takeover": ("41", "41", 41),
    "rng": ("off", "false", False),
}
TUNING = {"part_size": ("5242880", "5242880", 5 << 20), "concurrency": ("9", "9", 9)}


def test_the_table_of_this_test_names_every_field():
    assert {"uri", "tuning", *EVERY} == {field.name for field in dataclasses.fields(Config)}
    assert set(TUNING) == {field.name for field in dataclasses.fields(Tuning)}


@pytest.mark.parametrize("name", EVERY)
def test_every_field_can_be_said_in_each_place(name, monkeypatch):
    text, line, value = EVERY[name]
    assert getattr(load(uri=URI, **{name: value}), name) == value
    toml(f'[checkpoint]\nuri = "{URI}"\n{name} = {line}\n')
    assert getattr(load(), name) == value
    toml("")
    monkeypatch.setenv(f"OBJCKPT_{name.upper()}", text)
    assert getattr(load(uri=URI), name) == value
    assert type(getattr(load(uri=URI), name)) is type(value)


@pytest.mark.parametrize("name", TUNING)
def test_tuning_can_be_said_in_each_place(name, monkeypatch):
    text, line, value = TUNING[name]
    toml(f'[checkpoint]\nuri = "{URI}"\n[checkpoint.tuning]\n{name} = {line}\n')
    assert getattr(load().tuning, name) == value
    monkeypatch.setenv(f"OBJCKPT_{name.upper()}", text)
    toml("")
    assert getattr(load(uri=URI).tuning, name) == value
    assert load(uri=URI, tuning=Tuning()).tuning == Tuning()


def test_an_unknown_keyword_names_the_nearest():
    with pytest.raises(ConfigError, match=r"unknown keyword intervall; .* keyword interval$"):
        load(uri=URI, intervall=5)


def test_an_unknown_variable_names_the_nearest(monkeypatch):
    monkeypatch.setenv("OBJCKPT_KEEPS", "3")
    with pytest.raises(ConfigError, match=r"unknown variable OBJCKPT_KEEPS; .* variable OBJCKPT_KEEP$"):
        load(uri=URI)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("[checkpoint]\nkep = 3\n", r"key kep under \[checkpoint\] .* key keep "),
        (
            "[checkpoint.tuning]\npartsize = 3\n",
            r"key partsize under \[checkpoint.tuning\] .* key part_size ",
        ),
        ("[chekpoint]\nkeep = 3\n", r"table \[chekpoint\] .* table \[checkpoint\]"),
        ("[checkpoint]\npart_size = 9999999\n", r"key part_size under \[checkpoint\]"),
        ("[checkpoint]\nuri = 's3://{}/{x}'\nxyz = 3\n", r"key xyz "),
    ],
)
def test_an_unknown_name_in_the_file_names_the_nearest(text, named):
    toml(text)
    with pytest.raises(ConfigError, match=named):
        load(uri=URI)


def test_without_a_uri_the_error_says_where_one_can_be_said():
    with pytest.raises(
        ConfigError, match=r"Checkpointer\('s3://bucket/run'\), set OBJCKPT_URI, .*objckpt.toml"
    ):
        load()


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ("s3://bucket/run/", URI),
        ("s3://bucket", "s3://bucket"),
        ("gs://b/r", "gs://b/r"),
        ("memory://", "memory://"),
        ("/nvme/run/", "file:///nvme/run"),
        ("file:///nvme/run", "file:///nvme/run"),
        ("/with space/ü", "file:///with space/ü"),
        (Path("/nvme/run"), "file:///nvme/run"),
    ],
)
def test_uris_are_kept_and_absolute_paths_become_file_uris(given, kept):
    assert load(uri=given).uri == kept
    assert load(uri=kept).uri == kept


@pytest.mark.parametrize(
    ("uri", "said"),
    [
        ("bucket/run", "say s3://bucket/run for a bucket, or an absolute path"),
        ("s3:/bucket/run", "say s3://bucket/run for a bucket"),
        ("s3://", "names no place"),
        ("file://nvme/run", "say file:///nvme/run"),
        ("/", "names no place"),
        (7, "must be a URI"),
        (f"user:{SECRET}@host/run", r"say s3://user:\*\*\*@host/run"),
    ],
)
def test_a_uri_that_cannot_work_is_refused_with_what_would(uri, said):
    with pytest.raises(ConfigError, match=said) as raised:
        load(uri=uri)
    assert SECRET not in str(raised.value)


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("keep", 1, "damaged, there is no older one to fall back to; say 2 or more"),
        ("keep", 0, "at least 2, not 0"),
        ("keep", True, "at least 2, not True"),
        ("keep", KeepLast(1), "damaged, there is no older one"),
        ("keep", [], "has no rules"),
        ("keep", "newest:3", "last:5, every:1000, .*, not 'newest:3'"),
        ("keep", [KeepLast(2), 5], "must be a number of checkpoints"),
        ("keep", KeepEvery(0), "at least 1, not 0"),
        ("keep", KeepBest("loss", 1, "least"), "say 'min' or 'max'"),
        ("keep", KeepFor(0), "days above 0, not 0"),
        ("interval", 0, "at least 1, not 0"),
        ("interval", "500", "at least 1, not '500'"),
        ("interval", 2.0, "at least 1, not 2.0"),
        ("slots", 1, "at least 2, not 1: the newest committed one"),
        ("max_failed_saves", 0, "at least 1"),
        ("adopt_timeout", -1, "not negative"),
        ("linger", float("inf"), "not infinite"),
        ("linger", float("nan"), "not infinite"),
        ("exit_timeout", "30", "number of seconds"),
        ("save_timeout", 0, "more than 0"),
        ("agree_timeout", 0.0, "more than 0"),
        ("when_full", "drop", "'wait' or 'skip', not 'drop'"),
        ("launch", " ", "not empty"),
        ("launch", "a\nb", "printable"),
        ("takeover", -1, "at least 0"),
        ("rng", 1, "true or false, not 1"),
        ("cache", 7, "path of a directory"),
        ("tuning", {"part_size": 1}, "objckpt.Tuning"),
        ("storage_options", "key=1", "table of names"),
        ("storage_options", {1: 2}, "table of names"),
    ],
)
def test_a_value_that_cannot_work_is_refused_with_the_reason(name, value, said):
    with pytest.raises(ConfigError, match=f"^keyword {name}: {name} .*{said}"):
        load(uri=URI, **{name: value})


@pytest.mark.parametrize(
    ("variable", "text"),
    [
        ("OBJCKPT_INTERVAL", "often"),
        ("OBJCKPT_INTERVAL", "1_000"),
        ("OBJCKPT_LINGER", "15 min"),
        ("OBJCKPT_RNG", "maybe"),
        ("OBJCKPT_KEEP", "1"),
        ("OBJCKPT_PART_SIZE", "1024"),
    ],
)
def test_an_error_names_the_variable_that_holds_the_wrong_value(variable, text, monkeypatch):
    monkeypatch.setenv(variable, text)
    with pytest.raises(ConfigError, match=f"^{variable}: "):
        load(uri=URI)


def test_an_error_names_the_file_that_holds_the_wrong_value():
    toml(f'[checkpoint]\nuri = "{URI}"\ninterval = "500"\n')
    with pytest.raises(ConfigError, match=r"^objckpt.toml: interval .* not '500'"):
        load()


@pytest.mark.parametrize(
    ("values", "said"), [({"part_size": 1 << 20}, "5242880"), ({"concurrency": 0}, "from 1")]
)
def test_tuning_checks_itself(values, said):
    with pytest.raises(ConfigError, match=said):
        Tuning(**values)


def test_an_empty_variable_was_not_said(monkeypatch):
    monkeypatch.setenv("OBJCKPT_KEEP", "")
    monkeypatch.setenv("OBJCKPT_CONFIG", "")
    assert load(uri=URI).keep == ()


def test_the_file_is_the_one_that_the_variable_names(monkeypatch):
    toml('[checkpoint]\nuri = "s3://here/run"\n')
    monkeypatch.setenv("OBJCKPT_CONFIG", str(toml('[checkpoint]\nuri = "s3://there/run"\n', "other.toml")))
    assert load().uri == "s3://there/run"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "does not exist"),
        ("uri = ", "is not TOML"),
        ("checkpoint = 3", "must be a table"),
        ("\udcff", "is not TOML"),
    ],
)
def test_a_file_that_cannot_be_used_is_named(text, said, monkeypatch):
    if text is not None:
        Path("mine.toml").write_bytes(text.encode("utf-8", "surrogateescape"))
    monkeypatch.setenv("OBJCKPT_CONFIG", "mine.toml")
    with pytest.raises(ConfigError, match=f"mine.toml.*{said}"):
        load(uri=URI)


def test_a_directory_for_a_file_is_named(monkeypatch, tmp_path):
    monkeypatch.setenv("OBJCKPT_CONFIG", str(tmp_path))
    with pytest.raises(ConfigError, match="cannot be read"):
        load(uri=URI)


def test_no_secret_in_repr_or_error(monkeypatch):
    config = load(uri=f"sftp://me:{SECRET}@host/run", storage_options={"secret": SECRET})
    assert SECRET not in repr(config)
    assert "me:***@host/run" in repr(config)
    assert "'secret': ***" in repr(config)
    assert config.storage_options["secret"] == SECRET
    monkeypatch.setenv("OBJCKPT_STORAGE_OPTIONS", f'{{"secret": "{SECRET}"')
    with pytest.raises(ConfigError, match=r"OBJCKPT_STORAGE_OPTIONS.*not JSON") as raised:
        load(uri=URI)
    assert SECRET not in str(raised.value)
    assert raised.value.__cause__ is None


@pytest.mark.parametrize(
    ("uri", "shown"),
    [
        ("s3://bucket/a@b", "s3://bucket/a@b"),
        ("abfs://container@account/run", "abfs://container@account/run"),
        ("s3://ID:a/b+c@bucket/run", "s3://ID:***@bucket/run"),
        ("http://me:pass:w@rd@host/run", "http://me:***@host/run"),
    ],
)
def test_redact_hides_passwords_only(uri, shown):
    assert redact(uri) == shown


def test_a_config_travels_to_another_process():
    config = load(uri=URI, storage_options={"key": "a"}, cache="/nvme")
    assert pickle.loads(pickle.dumps(config)) == config
    assert json.loads(json.dumps(dict(config.storage_options))) == {"key": "a"}


@pytest.mark.parametrize(
    ("environ", "launch"),
    [
        ({}, None),
        ({"TORCHELASTIC_RUN_ID": "none"}, None),
        ({"TORCHELASTIC_RUN_ID": "abc"}, "torchelastic:abc"),
        ({"SLURM_JOB_ID": "7", "SLURM_CLUSTER_NAME": "c1", "TORCHELASTIC_RUN_ID": "abc"}, "slurm:c1:7"),
        ({"SLURM_JOB_ID": "7"}, "slurm::7"),
        ({"OBJCKPT_LAUNCH": "uid", "SLURM_JOB_ID": "7"}, "uid"),
    ],
)
def test_the_launch_is_what_a_restart_keeps(environ, launch, monkeypatch):
    assert launch_id(environ) == launch
    for name, text in environ.items():
        monkeypatch.setenv(name, text)
    assert load(uri=URI).launch == launch
    assert load(uri=URI, launch="by hand").launch == "by hand"


def test_the_annotations_are_types():
    assert typing.get_type_hints(Config)["interval"] == int | None


def test_reading_the_configuration_loads_no_torch():
    code = "import sys, objckpt.config; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(("ranks", "share"), [("1", 8), ("2", 4), ("3", 2), ("100", 1), ("", 8), ("two", 8)])
def test_the_connections_of_a_node_are_shared_by_its_ranks(monkeypatch, ranks, share):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
    assert load(uri="s3://bucket/run", tuning=Tuning(concurrency=8)).tuning.concurrency == share


def test_rules_of_retention_compose_and_the_newest_two_always_stay(monkeypatch):
    rules = (KeepLast(5), KeepEvery(1000), KeepBest("loss", 3), KeepBest("accuracy", 1, "max"), KeepFor(7.5))
    assert load(uri=URI, keep=rules).keep == rules
    monkeypatch.setenv("OBJCKPT_KEEP", "last:5, every:1000, best:loss:3, best:accuracy:1:max, for:7.5")
    assert load(uri=URI).keep == rules
    assert load(uri=URI, keep=KeepFor(7)).keep == (KeepLast(2), KeepFor(7))
