"""A store that takes conditions and heeds none (rclone): refused for writing, of use for reading."""

from __future__ import annotations

import uuid
from pathlib import Path

import pytest
import torch

import objckpt
from objckpt.commit import Run
from objckpt.errors import StoreUnsuitableError
from objckpt.retention import retain
from objckpt.store import open_store
from objckpt.testing.servers import Rclone

GOLDEN = Path(__file__).parent / "data" / "v1" / "run"


@pytest.fixture(scope="module")
def rclone():
    with Rclone() as server:
        yield server


@pytest.fixture
def uri(rclone):
    return f"s3://{rclone.bucket}/{uuid.uuid4().hex}"


@pytest.fixture
def written(rclone, uri):
    """The keys below the run, by another client."""

    def look():
        prefix = uri.removeprefix(f"s3://{rclone.bucket}/") + "/"
        found = rclone.client().list_objects_v2(Bucket=rclone.bucket, Prefix=prefix).get("Contents", [])
        return {entry["Key"].removeprefix(prefix) for entry in found}

    return look


@pytest.fixture
def copied(rclone, uri):
    """The golden run, copied there by another client."""
    prefix = uri.removeprefix(f"s3://{rclone.bucket}/")
    keys = set()
    for path in GOLDEN.rglob("*"):
        if path.is_file() and ".objckpt-incoming" not in path.parts:
            keys.add(str(path.relative_to(GOLDEN)))
            rclone.client().put_object(
                Bucket=rclone.bucket, Key=f"{prefix}/{path.relative_to(GOLDEN)}", Body=path.read_bytes()
            )
    return keys


def test_a_second_create_overwrites_there(rclone, uri):
    """The reason for all of this; if it ever fails, rclone has learned it, and the run need not be refused."""
    store = open_store(uri, **rclone.storage_options)
    assert store.create("k", b"first") is True
    assert store.create("k", b"second") is True


def test_a_run_is_refused_for_writing_with_the_reason(rclone, uri, written):
    with pytest.raises(StoreUnsuitableError, match="does not honour put-if-absent"):
        Run(open_store(uri, **rclone.storage_options), retain=retain).prove()
    assert written() == set()


def test_training_does_not_start_there_and_nothing_is_left_behind(rclone, uri, written, tmp_path):
    options = {"storage_options": rclone.storage_options, "cache": tmp_path / "cache"}
    with (
        pytest.raises(StoreUnsuitableError, match="does not write there"),
        objckpt.Checkpointer(uri, **options) as checkpointer,
    ):
        checkpointer.restore({"x": torch.zeros(3)})
    assert written() == set()


def test_a_run_that_was_copied_there_is_read_and_not_continued(rclone, uri, copied, written, tmp_path):
    reader = objckpt.open(uri, **rclone.storage_options)
    assert [checkpoint.step for checkpoint in reader.checkpoints()] == [2, 4, 3]
    assert reader.latest().step == 3
    loaded, expected = reader.load(), objckpt.open(f"file://{GOLDEN}").load()
    assert list(loaded) == list(expected)
    for name, tensor in expected.items():
        assert loaded[name].reshape(-1).view(torch.uint8).equal(tensor.reshape(-1).view(torch.uint8))
    options = {"storage_options": rclone.storage_options, "cache": tmp_path / "cache"}
    with (
        pytest.raises(StoreUnsuitableError),
        objckpt.Checkpointer(uri, launch="golden", **options) as checkpointer,
    ):
        checkpointer.restore({"x": torch.zeros(3)})
    assert written() == copied
