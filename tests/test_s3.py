"""The S3 store against a real server (SeaweedFS), and what it decides before it asks one."""

from __future__ import annotations

import random
import subprocess
import sys
import threading

import pytest
from awscrt.checksums import crc64nvme
from hypothesis import given
from hypothesis import strategies as st

from objckpt.errors import (
    ConfigError,
    CorruptCheckpointError,
    StoreNotFoundError,
    StorePermissionError,
)
from objckpt.store import open_store, read_all, s3_session, s3_upload
from objckpt.store.s3 import S3Store
from objckpt.store.s3_options import LARGEST_PART, MOST_PARTS, SMALLEST_PART, S3Options, part_size_for

MIB = 1 << 20
DATA = random.Random(7).randbytes(2 * SMALLEST_PART + 12_345)


@pytest.fixture
def store(weed, bucket_uri):
    return open_store(bucket_uri, **weed.storage_options, part_size=SMALLEST_PART, deadline=20)


@pytest.fixture
def leftovers(weed, bucket_uri):
    """What lies below the root by a client of its own: keys, and unfinished uploads."""

    def look():
        prefix = bucket_uri.removeprefix(f"s3://{weed.bucket}/")
        place = {"Bucket": weed.bucket, "Prefix": prefix}
        found = weed.client().list_objects_v2(**place).get("Contents", [])
        uploads = weed.client().list_multipart_uploads(**place).get("Uploads", [])
        return [entry["Key"] for entry in found], [entry["Key"] for entry in uploads]

    return look


# --- what the server verifies


def test_the_server_keeps_the_crc_of_the_whole_object(store):
    for key, data in (("one", DATA[:1000]), ("parts", DATA), ("none", b"")):
        store.put(key, data, crc64=crc64nvme(data))
        assert store.head(key).crc64 == crc64nvme(data)
        assert read_all(store, key) == data


def test_a_part_that_arrives_wrong_is_refused_and_leaves_nothing(store, leftovers, monkeypatch):
    wrong = DATA[SMALLEST_PART : 2 * SMALLEST_PART]

    def damaged(data, previous=0):
        return crc64nvme(data, previous) ^ (data == wrong)

    def completed_all_the_same(*_):
        raise AssertionError("the completion was asked for")

    monkeypatch.setattr(s3_upload, "crc64nvme", damaged)
    monkeypatch.setattr(s3_upload.MultipartUpload, "_complete", completed_all_the_same)
    with pytest.raises(CorruptCheckpointError, match="BadDigest"):
        store.put("k", DATA)
    assert leftovers() == ([], [])


def test_a_whole_that_arrives_wrong_is_refused_and_leaves_nothing(store, leftovers, monkeypatch):
    def combined(first, second, size):
        return 12345

    monkeypatch.setattr(s3_upload, "combine_crc64nvme", combined)
    with pytest.raises(CorruptCheckpointError, match="BadDigest"):
        store.put("k", DATA)
    assert leftovers() == ([], [])


def test_bytes_that_changed_since_they_were_staged_are_not_stored(store, leftovers):
    expected = crc64nvme(DATA)
    changed = bytearray(DATA)
    changed[SMALLEST_PART] ^= 1
    for size in (len(DATA), SMALLEST_PART + 1, 1000):
        data = memoryview(changed)[-size:]
        with pytest.raises(CorruptCheckpointError, match="Nothing was stored"):
            store.put("k", data, crc64=expected)
    assert leftovers() == ([], [])


def test_a_failed_upload_leaves_no_parts(store, leftovers, monkeypatch):
    request = s3_session.S3Session.request
    sent = []

    def refusing(self, method, key, *, query="", **rest):
        if "partNumber=3" in query:
            raise StorePermissionError("not this part")
        sent.append(query)
        return request(self, method, key, query=query, **rest)

    monkeypatch.setattr(s3_session.S3Session, "request", refusing)
    with pytest.raises(StorePermissionError, match="not this part"):
        store.put("k", DATA)
    assert sent, "a part was on its way when another one failed"
    assert leftovers() == ([], [])


def test_an_upload_that_somebody_aborts_ends_in_an_error_that_says_so(store, leftovers, monkeypatch):
    completing = s3_upload.MultipartUpload._complete

    def after_an_abort(self, upload_id, parts, crc64):
        self._abort(upload_id)
        completing(self, upload_id, parts, crc64)

    monkeypatch.setattr(s3_upload.MultipartUpload, "_complete", after_an_abort)
    with pytest.raises(Exception, match="aborted meanwhile"):
        store.put("k", DATA)
    assert leftovers() == ([], [])


def test_a_lost_bucket_is_told_from_a_lost_key(weed, bucket_uri, store):
    elsewhere = open_store("s3://objckpt-no-such-bucket/run", **weed.storage_options)
    for verb in (elsewhere.head, lambda key: elsewhere.put(key, b"x"), lambda key: elsewhere.put(key, DATA)):
        with pytest.raises(StoreNotFoundError, match="no bucket 'objckpt-no-such-bucket'"):
            verb("k")
    with pytest.raises(StoreNotFoundError, match="no such key"):
        store.head("k")


def test_threads_that_begin_together_make_one_client(weed, bucket_uri, monkeypatch):
    made = []
    making = s3_session.S3Session.__init__

    def counted(self, *args):
        made.append(1)
        making(self, *args)

    monkeypatch.setattr(s3_session.S3Session, "__init__", counted)
    store = open_store(bucket_uri, **weed.storage_options)
    barrier = threading.Barrier(8)
    threads = [threading.Thread(target=lambda: (barrier.wait(), store.put("k", b"x"))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert made == [1]
    assert read_all(store, "k") == b"x"


def test_an_endpoint_from_the_environment_is_used_like_one_that_is_given(weed, bucket_uri, monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", weed.endpoint_url)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", weed.key)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", weed.secret)
    store = open_store(bucket_uri)
    store.put("d/4/x", b"x")
    assert [info.key for info in store.list("", start_after="d/4")] == ["d/4/x"]
    store.delete(["d/4/x"])
    assert list(store.list("")) == []


# --- the size of parts


def test_parts_stay_as_they_are_until_there_would_be_too_many():
    assert part_size_for(0, 16 * MIB) == 16 * MIB
    assert part_size_for(MOST_PARTS * 16 * MIB, 16 * MIB) == 16 * MIB
    assert part_size_for(MOST_PARTS * 16 * MIB + 1, 16 * MIB) == 17 * MIB
    assert part_size_for(5 << 40, 16 * MIB) == 525 * MIB


@given(st.integers(0, MOST_PARTS * LARGEST_PART), st.integers(SMALLEST_PART, LARGEST_PART))
def test_there_are_never_more_parts_than_the_store_takes(size, preferred):
    part_size = part_size_for(size, preferred)
    assert preferred <= part_size <= LARGEST_PART
    assert -(-size // part_size) <= MOST_PARTS
    if part_size != preferred:
        assert part_size % MIB == 0
        assert -(-size // max(preferred, part_size - MIB)) > MOST_PARTS


# --- what is said of it


@pytest.mark.parametrize(
    ("uri", "named"),
    [
        ("s4://b", "s3://"),
        ("flie:///x", "file://"),
        ("memroy://x", "memory://"),
        ("gcss://b", "gcs://"),
        ("relative/path", "file:///"),
    ],
)
def test_an_unknown_scheme_is_refused_and_the_nearest_named(uri, named):
    with pytest.raises(ConfigError) as caught:
        open_store(uri)
    assert named in str(caught.value)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"sceret": "x"}, "secret"),
        ({"endpoint": "http://x"}, "endpoint_url"),
        ({"region_name": "x"}, "client_kwargs={'region_name': ...}"),
        ({"client_kwargs": {"verifyy": False}}, "verify"),
        ({"key": "only"}, "without secret"),
        ({"key": "k", "secret": "s", "anon": True}, "anon"),
        ({"endpoint_url": "http://user:hunter2@host"}, "endpoint_url"),
        ({"endpoint_url": "host:80"}, "endpoint_url"),
        ({"config_kwargs": {"retries": {"max_attempts": 3}}}, "deadline"),
        ({"part_size": 1}, "5 MiB"),
        ({"part_size": True}, "5 MiB"),
        ({"connections": 0}, "connections"),
        ({"deadline": 0}, "deadline"),
        ({"secret": "a", "key": "k", "client_kwargs": {"aws_secret_access_key": "hunter2"}}, "differ"),
    ],
)
def test_an_option_that_cannot_be_is_refused_with_what_to_say_instead(options, named):
    with pytest.raises(ConfigError) as caught:
        open_store("s3://bucket/run", **options)
    assert named in str(caught.value)
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize("options", [{"profile": "no-such-profile"}, {"config_kwargs": {"red_timeout": 1}}])
def test_an_option_that_boto3_refuses_is_told_at_the_first_verb(options):
    with pytest.raises(ConfigError, match="s3://bucket/run"):
        open_store("s3://bucket/run", **options).head("k")


@pytest.mark.parametrize("uri", ["s3://", "s3:///run", "s3://key:hunter2@bucket/run"])
def test_a_uri_that_cannot_be_is_refused(uri):
    with pytest.raises(ConfigError) as caught:
        open_store(uri)
    assert "hunter2" not in str(caught.value)


def test_the_uri_is_the_same_with_and_without_slashes():
    for uri in ("s3://bucket/a/b", "s3://bucket/a/b/", "s3a://bucket//a/b//"):
        assert open_store(uri).uri == "s3://bucket/a/b"
    assert open_store("s3://bucket/").uri == open_store("s3://bucket").uri == "s3://bucket"


def test_s3fs_names_are_taken():
    options = S3Options.from_storage_options(
        {
            "username": "k",
            "password": "hunter2",
            "token": "hunter3",
            "use_ssl": False,
            "client_kwargs": {"region_name": "eu-west-1", "endpoint_url": "http://127.0.0.1:9"},
            "config_kwargs": {"read_timeout": 3},
        }
    )
    assert (options.key, options.secret, options.endpoint_url) == ("k", "hunter2", "http://127.0.0.1:9")
    assert "hunter" not in repr(options) + repr(S3Store("s3://bucket", options))


def test_a_bucket_of_amazons_is_found_where_boto3_would_look():
    for options, expected in (
        ({"client_kwargs": {"region_name": "eu-west-1"}}, "https://bucket.s3.eu-west-1.amazonaws.com"),
        (
            {"client_kwargs": {"region_name": "eu-west-1"}, "use_ssl": False},
            "http://bucket.s3.eu-west-1.amazonaws.com",
        ),
        ({"endpoint_url": "http://127.0.0.1:9/base"}, "http://127.0.0.1:9/base/bucket"),
        (
            {
                "endpoint_url": "http://127.0.0.1.nip:9",
                "config_kwargs": {"s3": {"addressing_style": "virtual"}},
            },
            "http://bucket.127.0.0.1.nip:9",
        ),
    ):
        session = S3Store(
            "s3://bucket", S3Options.from_storage_options({"key": "k", "secret": "s", **options})
        )._session
        way = session._way
        assert f"{way.pool.endpoint.scheme}://{way.pool.endpoint.authority}{way.base_path}" == expected


def test_a_store_is_cheap_to_make():
    program = """
import sys
from objckpt.store import open_store
open_store("s3://bucket/run", key="k", secret="s")
print(sorted({"boto3", "botocore", "torch", "fsspec"} & set(sys.modules)))
"""
    found = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    assert found.stdout.strip() == "[]"
