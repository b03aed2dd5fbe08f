"""Stores over fsspec, beyond what the conformance suite asks of every store."""

from __future__ import annotations

import errno
import os
import random
import signal
import subprocess
import sys
import time
import tracemalloc
import uuid
from pathlib import Path

import pytest
from awscrt.checksums import crc64nvme

from objckpt.errors import (
    ConfigError,
    CorruptCheckpointError,
    StoreError,
    StoreNotFoundError,
    StorePermissionError,
    StoreUnsuitableError,
)
from objckpt.store import open_store, read_all
from objckpt.store.filesystem import open_filesystem
from objckpt.store.unsuitable import REASONS

INCOMING = ".objckpt-incoming"


@pytest.fixture
def root(tmp_path):
    return tmp_path / "run"


@pytest.fixture
def store(root):
    return open_store(f"file://{root}")


def keys(store, prefix="", start_after=""):
    return [info.key for info in store.list(prefix, start_after)]


def files(root):
    return {str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()}


def test_a_plain_path_and_a_file_uri_are_the_same_store(root):
    one, two, three = open_store(str(root)), open_store(f"file://{root}/"), open_store(f"local://{root}")
    assert one.uri == two.uri == three.uri == f"file://{root}"
    one.put("a", b"x")
    assert keys(two) == keys(three) == ["a"]


def test_a_root_is_made_by_the_first_write_and_not_before(store, root):
    assert keys(store) == []
    assert store.abort_uploads("", 0) == 0
    store.delete(["a"])
    with pytest.raises(StoreNotFoundError):
        store.head("a")
    assert not root.exists()
    assert store.create("a/b", b"x")
    assert files(root) == {"a/b"}


@pytest.mark.parametrize(
    ("scheme", "reason"),
    [
        ("sftp", "before its bytes are there"),
        ("ssh", "before its bytes are there"),
        ("ftp", "looks whether the key is there"),
        ("https", "only reads"),
        ("dir::file", "by its own URI"),
        ("simplecache::file", "by its own URI"),
        ("zip", "one writer"),
        ("objckpt+s3", "shows a run"),
        ("oss", "nobody has shown"),
    ],
)
def test_a_scheme_without_atomic_create_is_refused_with_the_reason(scheme, reason):
    with pytest.raises(StoreUnsuitableError, match=reason) as caught:
        open_filesystem(f"{scheme}://user:password@place/run", {})
    assert "create" in str(caught.value)
    assert "password" not in str(caught.value) + caught.value.uri


def test_what_is_refused_is_no_store_and_fsspec_knows_it():
    from fsspec import available_protocols

    assert set(REASONS) <= set(available_protocols())
    assert not {"file", "local", "memory", "s3", "gs", "abfs", "az", "abfss"} & set(REASONS)


@pytest.mark.parametrize("scheme", ["file", "local", "ftp"])
def test_fsspec_itself_offers_no_create_that_can_be_trusted(scheme):
    """If its default changes, the reasons in ``unsuitable`` want another look."""
    import inspect

    from fsspec import get_filesystem_class
    from fsspec.spec import AbstractFileSystem

    kind = get_filesystem_class(scheme)
    assert kind.pipe_file is AbstractFileSystem.pipe_file
    assert "self.exists(path)" in inspect.getsource(AbstractFileSystem.pipe_file)


def test_a_scheme_whose_package_is_missing_names_the_package(monkeypatch):
    monkeypatch.setattr("objckpt.store.filesystem.find_spec", lambda _name: None)
    with pytest.raises(ConfigError, match=r"objckpt\[azure\]"):
        open_store("abfs://container/run")


@pytest.mark.parametrize("uri", ["file://relative/run", "file:relative", "file://~/run", "local://x"])
def test_a_relative_path_is_refused(uri):
    with pytest.raises(ConfigError, match="absolute"):
        open_filesystem(uri, {})


@pytest.mark.parametrize("uri", ["memory://x", "file:///tmp/x"])
def test_an_option_that_would_be_ignored_is_refused(uri):
    with pytest.raises(ConfigError, match="endpoint_url, key"):
        open_filesystem(uri, {"key": "a", "endpoint_url": "http://127.0.0.1"})


# --- nothing leaves the root


def test_a_symbolic_link_does_not_lead_out_of_the_root(store, root, tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "secret").write_bytes(b"secret")
    store.put("inside", b"x")
    (root / "link").symlink_to(outside)
    (root / "file-link").symlink_to(outside / "secret")
    for verb in (
        lambda: store.put("link/new", b"x"),
        lambda: store.create("link/deep/new", b"x"),
        lambda: read_all(store, "link/secret"),
        lambda: store.head("link/secret"),
        lambda: store.delete(["link/secret"]),
        lambda: store.read("file-link", memoryview(bytearray(9))),
        lambda: store.create("file-link", b"secret"),
        lambda: store.head("file-link"),
    ):
        with pytest.raises(StoreError):
            verb()
    assert keys(store) == ["inside"]
    store.put("file-link", b"mine")
    assert files(outside) == {"secret"}
    assert (outside / "secret").read_bytes() == b"secret"
    assert read_all(store, "file-link") == b"mine"


def test_unfinished_files_have_no_key(store, root):
    store.put("inner/a", b"x")
    open_store(f"file://{root}/inner").put("b", b"x")
    assert (root / "inner" / INCOMING).is_dir()
    (root / "inner" / INCOMING / "half").write_bytes(b"x")
    assert keys(store) == ["inner/a", "inner/b"]
    with pytest.raises(StoreError, match="unfinished"):
        store.put(f"inner/{INCOMING}/half", b"x")


def test_names_that_no_key_can_have_are_not_listed(store, root):
    store.put("a/b", b"x")
    (root / "a" / os.fsdecode(b"\xff")).write_bytes(b"x")
    os.mkfifo(root / "a" / "fifo")
    assert keys(store) == ["a/b"]
    with pytest.raises(StoreNotFoundError):
        store.head("a/fifo")


# --- whole or not at all


class Recorder:
    """Notes the system calls that make a write durable, in their order."""

    def __init__(self, monkeypatch, root):
        self.calls = []
        for name in ("fsync", "replace", "link"):
            monkeypatch.setattr(os, name, self._noting(name, getattr(os, name), root))

    def _noting(self, name, real, root):
        def noting(*args, **kwargs):
            where = str(Path(f"/proc/self/fd/{args[0]}").readlink()) if name == "fsync" else str(args[1])
            self.calls.append(
                (name, "temporary" if INCOMING + "/" in where else os.path.relpath(where, root))
            )
            return real(*args, **kwargs)

        return noting


@pytest.mark.parametrize(("verb", "call"), [("put", "replace"), ("create", "link")])
def test_bytes_are_on_disk_before_the_name_and_the_name_before_the_return(
    store, root, monkeypatch, verb, call
):
    store.put("a/0", b"x")
    recorder = Recorder(monkeypatch, root)
    getattr(store, verb)("a/b/c", b"x")
    named = recorder.calls.index((call, "a/b/c"))
    assert ("fsync", "temporary") in recorder.calls[:named]
    assert recorder.calls[named + 1 :] == [("fsync", "a/b"), ("fsync", "a"), ("fsync", ".")]


def test_create_that_finds_its_own_bytes_returns_when_their_name_is_on_disk(store, root, monkeypatch):
    (root / "a").mkdir(parents=True)
    (root / "a" / "b").write_bytes(b"equal")
    recorder = Recorder(monkeypatch, root)
    assert store.create("a/b", b"equal")
    assert recorder.calls[-2:] == [("fsync", "a"), ("fsync", ".")]


def test_a_put_killed_before_its_end_leaves_an_orphan_that_is_aborted(store, root):
    program = """
import os, stat, sys, time
from objckpt.store import open_store
def stop(descriptor):
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        print("here", flush=True)
        time.sleep(600)
os.fsync = stop
open_store(sys.argv[1]).put("data/a b", b"x" * 1000)
"""
    root.mkdir()
    with subprocess.Popen([sys.executable, "-c", program, store.uri], stdout=subprocess.PIPE) as child:
        assert child.stdout.readline() == b"here\n"
        assert keys(store) == []
        child.send_signal(signal.SIGKILL)
    assert keys(store) == []
    (orphan,) = (root / INCOMING).iterdir()
    assert orphan.stat().st_size == 1000
    assert store.abort_uploads("", 60) == 0
    assert store.abort_uploads("data/b", -1) == 0
    assert orphan.exists()
    old = time.time() - 100
    os.utime(orphan, (old, old))
    assert store.abort_uploads("data/a ", 60) == 1
    assert files(root) == set()


@pytest.mark.parametrize("verb", ["put", "create"])
def test_a_full_disk_leaves_nothing_behind(store, root, monkeypatch, verb):
    store.put("a", b"x")

    def full(_descriptor, _data):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(StoreError, match="free some space") as caught:
        getattr(store, verb)("b", b"x")
    assert caught.value.key == "b"
    assert files(root) == {"a"}


def test_the_checksum_is_that_of_the_file_and_not_of_the_buffer(store, root, monkeypatch):
    data = random.Random(0).randbytes(3_000_000)
    write = os.write

    def flip(descriptor, view):
        return write(descriptor, bytes([view[0] ^ 1]) + bytes(view[1:]))

    monkeypatch.setattr(os, "write", flip)
    with pytest.raises(CorruptCheckpointError, match="'shard'"):
        store.put("shard", data, crc64=crc64nvme(data))
    assert files(root) == set()


def test_short_writes_and_reads_go_on(store, monkeypatch):
    write, preadv = os.write, os.preadv
    monkeypatch.setattr(os, "write", lambda descriptor, view: write(descriptor, view[:7]))
    monkeypatch.setattr(os, "preadv", lambda descriptor, views, at: preadv(descriptor, [views[0][:5]], at))
    data = bytes(range(100))
    store.put("a", data, crc64=crc64nvme(data))
    assert read_all(store, "a") == data
    assert store.create("a", data)


def test_neither_put_nor_read_copies_the_bytes(store):
    size = 32 << 20
    data = memoryview(bytearray(size))
    into = memoryview(bytearray(size))
    crc = crc64nvme(data)
    store.put("warm", b"x")
    tracemalloc.start()
    try:
        store.put("large", data, crc64=crc)
        assert store.read("large", into) == size
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 4 << 20
    assert into == data


# --- create


@pytest.mark.parametrize("code", [errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS])
def test_a_mount_without_hard_links_is_refused_with_the_reason(store, root, monkeypatch, code):
    def no_links(*_args, **_kwargs):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "link", no_links)
    with pytest.raises(StoreUnsuitableError, match="hard links") as caught:
        store.create("v/1", b"x")
    assert os.strerror(code) in str(caught.value)
    assert files(root) == set()


def test_a_directory_that_may_not_be_written_is_told_as_such(store, monkeypatch):
    def denied(*_args, **_kwargs):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(os, "link", denied)
    with pytest.raises(StorePermissionError, match="mode"):
        store.create("v/1", b"x")


def test_a_link_whose_answer_was_lost_counts_as_won(store, monkeypatch):
    link = os.link

    def lose_the_answer(*args, **kwargs):
        link(*args, **kwargs)
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST))

    monkeypatch.setattr(os, "link", lose_the_answer)
    assert store.create("v/1", b"mine")


@pytest.mark.parametrize("verb", ["put", "create"])
@pytest.mark.parametrize(
    ("first", "second"), [("a", "a/b"), ("a/b", "a"), ("a/b", "a/b/c/d"), ("a/b/c", "a/b")]
)
def test_a_key_and_a_key_below_it_exclude_each_other(store, root, verb, first, second):
    store.put(first, b"first")
    with pytest.raises(StoreError, match="use another key") as caught:
        getattr(store, verb)(second, b"second")
    assert caught.value.key == second
    assert files(root) == {first}
    assert read_all(store, first) == b"first"


@pytest.mark.parametrize(("verb", "call"), [("put", "replace"), ("create", "link")])
def test_a_write_whose_directory_a_delete_removes_meanwhile_is_not_lost(store, root, monkeypatch, verb, call):
    real, removed = getattr(os, call), []

    def remove_first(*args, **kwargs):
        if not removed:
            removed.extend([(root / "a" / "b").rmdir(), (root / "a").rmdir()])
        return real(*args, **kwargs)

    monkeypatch.setattr(os, call, remove_first)
    getattr(store, verb)("a/b/c", b"x")
    assert removed
    assert files(root) == {"a/b/c"}


def test_delete_leaves_no_empty_directories(store, root):
    store.put("a/b/c/1", b"x")
    store.put("a/2", b"x")
    store.delete(["a/b/c/1"])
    assert not (root / "a" / "b").exists()
    store.delete(["a/2"])
    assert {path.name for path in root.iterdir()} == {INCOMING}


def test_list_opens_no_directory_that_cannot_hold_such_a_key(store, root, monkeypatch):
    for key in ("a/1", "b/1/x", "b/2/x", "b/3/x", "bb/1", "c/1"):
        store.put(key, b"x")
    opened = []
    scandir = os.scandir
    monkeypatch.setattr(
        os, "scandir", lambda path: opened.append(os.path.relpath(path, root)) or scandir(path)
    )
    assert keys(store, "b/", start_after="b/2") == ["b/2/x", "b/3/x"]
    assert opened == [".", "b", "b/2", "b/3"]


# --- memory


def test_stores_of_one_memory_uri_share_their_objects():
    uri = f"memory://{uuid.uuid4().hex}"
    one, two, other = open_store(uri), open_store(uri + "/"), open_store(uri + "x")
    assert one.create("a", b"x")
    assert not two.create("a", b"y")
    assert keys(two) == ["a"]
    assert keys(other) == []
    one.delete(["a"])


def test_memory_keeps_what_the_buffer_held():
    store = open_store(f"memory://{uuid.uuid4().hex}")
    buffer = bytearray(b"then")
    store.put("put", buffer)
    store.create("created", memoryview(buffer))
    buffer[:] = b"now!"
    assert read_all(store, "put") == read_all(store, "created") == b"then"
    store.delete(["put", "created"])


def test_memory_refuses_a_key_below_an_object():
    store = open_store(f"memory://{uuid.uuid4().hex}")
    store.put("a", b"x")
    for verb in (store.put, store.create):
        with pytest.raises(StoreError, match="use another"):
            verb("a/b", b"x")
    store.delete(["a"])
