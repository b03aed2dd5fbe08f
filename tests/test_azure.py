"""The Azure store beyond the conformance suite: answers that get lost, blocks, and a run on it, read as files."""

from __future__ import annotations

import random
import uuid

import fsspec
import pytest
from awscrt.checksums import crc64nvme
from test_conformance_fsspec import azurite  # noqa: F401 # a fixture

from objckpt.commit import Run
from objckpt.errors import CommitUnknownError, ConfigError, CorruptCheckpointError, StoreTransientError
from objckpt.manifest import KeepLast, Policy
from objckpt.retention import retain
from objckpt.store import open_store, read_all

pytest.importorskip("adlfs", reason="adlfs is not installed: pip install 'objckpt[azure]'")
OFFLINE = {"account_name": "nobody", "anon": True}


@pytest.fixture
def where(azurite):  # noqa: F811 # a fixture
    return f"abfs://{azurite.container}/{uuid.uuid4().hex}", {**azurite.storage_options, "deadline": 2}


@pytest.fixture
def store(where):
    return open_store(where[0], **where[1])


def test_a_misspelt_option_is_refused_and_the_nearest_named():
    with pytest.raises(ConfigError, match="did you mean 'account_key'"):
        open_store("abfs://container/run", account_name="nobody", acount_key="secret")
    with pytest.raises(ConfigError, match="needs a container"):
        open_store("abfs://", **OFFLINE)


def test_the_long_form_names_the_account():
    store = open_store("abfss://container@somebody.dfs.core.windows.net/a/run", anon=True)
    assert store.uri == "abfs://container/a/run"
    assert store._fs.account_name == "somebody"


def test_blocks_become_visible_only_if_all_of_them_had_the_checksum(store):
    data = random.Random(0).randbytes(70 << 20)
    with pytest.raises(CorruptCheckpointError, match="'shard'"):
        store.put("shard", data, crc64=crc64nvme(data) ^ 1)
    assert list(store.list("")) == []
    store.put("shard", data, crc64=crc64nvme(data))
    assert read_all(store, "shard") == data


def lost(store, monkeypatch, *, then=lambda: None):
    """The next request has its effect, and its answer gets lost."""
    from azure.core.exceptions import ServiceResponseError

    do, count = store._do, iter((True,))

    def once(key, request):
        answer = do(key, request)
        if next(count, False):
            then()
            raise StoreTransientError("lost", key=key) from ServiceResponseError("reset")
        return answer

    monkeypatch.setattr(store, "_do", once)


def test_a_create_whose_answer_was_lost_counts_as_won(store, monkeypatch):
    lost(store, monkeypatch)
    assert store.create("v/1", b"mine") is True
    lost(store, monkeypatch, then=lambda: store.put("v/2", b"theirs"))
    assert store.create("v/2", b"mine") is False


def test_a_create_without_answer_and_without_read_back_is_unknown(where, monkeypatch):
    store = open_store(where[0], **{**where[1], "deadline": 0.3})

    def gone(_key, _view, _offset):
        raise StoreTransientError("away")

    lost(store, monkeypatch)
    monkeypatch.setattr(store, "_read", gone)
    with pytest.raises(CommitUnknownError, match="v/1"):
        store.create("v/1", b"mine")


def test_folders_of_a_hierarchical_account_are_no_keys(store, where, azurite):  # noqa: F811 # a fixture
    store.put("data/a", b"x")
    prefix = where[0].rpartition("/")[2]
    azurite.client().upload_blob(f"{prefix}/data", b"", metadata={"hdi_isfolder": "true"})
    assert [info.key for info in store.list("")] == ["data/a"]


def test_a_run_lives_there_and_is_read_as_files(where):
    from test_tree import committed

    uri, options = where
    run = Run(open_store(uri, **options), retain=retain)
    run.prove()
    committed(uri, {"model.a": b"bytes"}, steps=(1, 2), policy=Policy((KeepLast(1),), lag=0), **options)
    with fsspec.open(f"objckpt+{uri}/step-2/model/a.safetensors", **options) as file:
        assert file.read().endswith(b"bytes")
