"""What only GCS has: conditions by generation, compose trees, tokens that expire, CRC-32C on both sides.

``gcs`` is the faithful small server (XML API, credentials, checksums), ``fake`` is fake-gcs-server (compose only, no checks).
"""

from __future__ import annotations

import functools
import json
import random
import threading
import uuid

import pytest
import torch
from awscrt.checksums import crc64nvme
from gcs_server import GCSServer, RefusalError, Stored, Upload

import objckpt
from objckpt.errors import (
    CorruptCheckpointError,
    StoreError,
    StorePermissionError,
    StoreTransientError,
)
from objckpt.store import gcs_upload, open_store, read_all
from objckpt.store.retry import RetryPolicy
from objckpt.testing.servers import FakeGCS

PART = 5 << 20
DATA = random.Random(7).randbytes(2 * PART + 12_345)
SMALL = DATA[:10_000]


@pytest.fixture(scope="module")
def fake():
    with FakeGCS() as server:
        yield server


@pytest.fixture(scope="module")
def shared_gcs():
    with GCSServer() as server:
        yield server


@pytest.fixture
def gcs(shared_gcs):
    shared_gcs.asked.clear()
    shared_gcs.issued.clear()
    shared_gcs.uploads.clear()
    yield shared_gcs
    shared_gcs.fault = None
    shared_gcs.verifies = True
    shared_gcs.lifetime, shared_gcs.uses = 3600, 1 << 40


@pytest.fixture
def bucket(gcs):
    return gcs.make_bucket()


@pytest.fixture
def store(gcs, bucket):
    return open_store(f"gs://{bucket}/run", part_size=PART, **gcs.options(deadline=10))


@pytest.fixture
def left(gcs, bucket):
    """All that lies in the bucket, and the uploads that were not ended."""
    return lambda: (set(gcs.buckets[bucket]), list(gcs.uploads))


def composing(store):
    """The same store as if the server had no XML API."""
    store._session.has_xml = False
    return store


def once(matches, act):
    """A fault that happens to the first call that matches."""
    left = [act]

    def fault(call):
        if left and matches(call):
            left.pop()(call)

    return fault


def refuse(status, code, message=""):
    def act(call):
        raise RefusalError(status, code, message)

    return act


def lose(call):
    call.loses_answer = True


def is_insert(call):
    return call.path.startswith("/upload/")


def is_part(number):
    return lambda call: call.query.get("partNumber") == str(number)


def is_completion(call):
    return call.is_xml and call.method == "POST" and "uploadId" in call.query


def is_compose(call):
    return call.path.endswith("/compose")


def is_look(call):
    return call.method == "GET" and "/o/" in call.path and "alt" not in call.query


# --- create


def test_create_is_one_conditional_request_of_any_size(gcs, store):
    for data in (SMALL, DATA):
        gcs.asked.clear()
        assert store.create(f"v/{len(data)}", data) is True
        (asked,) = [call for call in gcs.asked if call.path != "/token"]
        assert asked.query == {"uploadType": "multipart", "ifGenerationMatch": "0"}
    assert read_all(store, f"v/{len(DATA)}") == DATA


def test_create_whose_answer_is_lost_is_found_out(gcs, store):
    gcs.fault = once(is_insert, lose)
    assert store.create("v/1", b"mine") is True
    gcs.fault = once(is_insert, lose)
    assert store.create("v/1", b"other") is False

    def unavailable_but_done(call):
        gcs.store(store.uri.split("/")[2], "run/v/2", b"mine")
        raise RefusalError(503, "backendError")

    gcs.fault = once(is_insert, unavailable_but_done)
    assert store.create("v/2", b"mine") is True
    assert read_all(store, "v/1") == b"mine"


def test_create_that_was_throttled_had_no_effect_and_is_tried_again(gcs, store):
    gcs.fault = once(is_insert, refuse(429, "rateLimitExceeded"))
    assert store.create("v/1", b"mine") is True
    assert [call.method for call in gcs.asked if call.path != "/token"] == ["POST", "POST"]


# --- put by the XML API


def test_parts_go_by_the_xml_api_where_there_is_one(gcs, store, left):
    store.put("k", DATA, crc64=crc64nvme(DATA))
    assert sorted(call.query["partNumber"] for call in gcs.asked if call.method == "PUT") == ["1", "2", "3"]
    assert not [call for call in gcs.asked if is_insert(call) or is_compose(call)]
    assert left() == ({"run/k"}, [])
    assert read_all(store, "k") == DATA


def test_a_put_that_fails_leaves_no_parts(gcs, store, left):
    gcs.fault = once(is_part(2), refuse(403, "AccessDenied"))
    with pytest.raises(StorePermissionError, match="AccessDenied"):
        store.put("k", DATA)
    assert left() == (set(), [])


def test_the_lost_answer_of_a_completion_is_found_out(gcs, store, left):
    gcs.fault = once(is_completion, lose)
    store.put("k", DATA)
    assert left() == ({"run/k"}, [])
    assert read_all(store, "k") == DATA


def test_an_upload_that_somebody_aborts_ends_in_an_error_that_says_so(gcs, store, left):
    gcs.fault = once(is_completion, lambda call: gcs.uploads.clear())
    with pytest.raises(StoreTransientError, match="aborted meanwhile"):
        store.put("k", DATA)
    assert left() == (set(), [])


def test_bytes_that_changed_since_they_were_staged_are_not_stored(store, left):
    expected = crc64nvme(DATA)
    changed = bytearray(DATA)
    changed[PART] ^= 1
    for way in (store, composing(store)):
        for size in (len(DATA), PART + 1, 1000):
            with pytest.raises(CorruptCheckpointError, match="Nothing was stored"):
                way.put("k", memoryview(changed)[-size:], crc64=expected)
    assert left() == (set(), [])


# --- a bit that changes on the way


@pytest.mark.parametrize("verifies", [True, False], ids=["server-compares", "client-compares"])
@pytest.mark.parametrize("way", ["put", "create", "xml", "compose"])
def test_a_bit_that_changes_on_the_way_is_seen_and_nothing_stays(gcs, store, left, way, verifies):
    gcs.verifies = verifies
    gcs.fault = once(is_part(2) if way == "xml" else is_insert, lambda call: call.flip())
    if way == "compose":
        composing(store)
    # Told by the store, or found in what it says that it has; never made visible from wrong parts.
    told = "received other bytes" if verifies else "the store (has|received)"
    with pytest.raises(CorruptCheckpointError, match=told):
        (store.create if way == "create" else store.put)("k", DATA if way in {"xml", "compose"} else SMALL)
    assert not [call for call in gcs.asked if is_completion(call) or is_compose(call)]
    assert left() == (set(), [])


@pytest.mark.parametrize("way", ["xml", "compose"])
def test_a_whole_that_is_not_what_the_parts_were_is_taken_away(gcs, bucket, store, left, way):
    def tamper(call):
        gcs.buckets[bucket]["run/k"] = Stored(b"other", 7, 0.0)

    def swap(call):
        # The sources in another order.
        call.body = json.dumps(
            json.loads(call.body) | {"sourceObjects": json.loads(call.body)["sourceObjects"][::-1]}
        ).encode()

    gcs.fault = once(is_look, tamper) if way == "xml" else once(is_compose, swap)
    with pytest.raises(CorruptCheckpointError, match="it was removed"):
        (store if way == "xml" else composing(store)).put("k", DATA)
    assert left() == (set(), [])


# --- put by compose


def put_in(store, parts, size=64):
    data = random.Random(parts).randbytes(size * parts - 1)
    gcs_upload.put_in_parts(
        gcs_upload.Job(
            store._session, store._retry, "run/k", "run/.objckpt-incoming/", memoryview(data), size, 8
        ),
        crc64nvme(data),
    )
    return data


@pytest.mark.parametrize("parts", [2, 32, 33, 65])
def test_parts_are_composed_in_a_tree(gcs, store, left, parts):
    data = put_in(composing(store), parts)
    assert read_all(store, "k") == data
    assert left() == ({"run/k"}, [])


def test_more_than_1024_parts_are_composed_on_a_real_server(fake):
    bucket = fake.make_bucket()
    store = open_store(f"gs://{bucket}/run", **fake.storage_options)
    data = put_in(store, 1_025)
    assert store._session.has_xml is False
    assert read_all(store, "k") == data
    assert [blob.name for blob in fake.client().list_blobs(bucket)] == ["run/k"]


@pytest.mark.parametrize("fails", [is_insert, is_compose], ids=["part", "compose"])
def test_a_composition_that_fails_leaves_no_temporaries(gcs, store, left, fails):
    gcs.fault = once(fails, refuse(403, "forbidden"))
    with pytest.raises(StorePermissionError):
        put_in(composing(store), 40)
    assert left() == (set(), [])


def test_the_lost_answer_of_a_composition_is_no_failure(gcs, store, left):
    gcs.fault = once(is_compose, lose)
    data = put_in(composing(store), 40)
    assert read_all(store, "k") == data
    assert left() == ({"run/k"}, [])


def test_temporaries_are_no_data_and_no_key_may_be_among_them(gcs, bucket, store):
    gcs.store(bucket, "run/.objckpt-incoming/x/0-00001", b"half")
    gcs.store(bucket, "run/data", b"whole")
    assert [info.key for info in store.list("")] == ["data"]
    for verb in (store.put, store.create):
        with pytest.raises(StoreError, match="composed"):
            verb(".objckpt-incoming/x", b"")


def test_an_endpoint_without_the_xml_api_is_asked_once():
    with FakeGCS() as server:
        store = open_store(f"gs://{server.bucket}/run", part_size=PART, **server.storage_options)
        asked = []
        exchange = store._session._pool.exchange
        store._session._pool.exchange = lambda request: asked.append(request.target) or exchange(request)
        for key in "ab":
            store.put(key, DATA)
            assert read_all(store, key) == DATA
        assert store.abort_uploads("", -5) == 0
    assert [target for target in asked if target.endswith("uploads")] == [f"/{server.bucket}/run/a?uploads"]


# --- orphans


def test_uploads_beyond_a_page_are_aborted(gcs, bucket, store):
    for index in range(1_003):
        gcs.uploads[uuid.uuid4().hex] = Upload(bucket, f"run/d/{index:04d}", began=0)
    gcs.uploads["young"] = Upload(bucket, "run/d/0001", began=4e9)
    gcs.uploads["other"] = Upload(bucket, "run/e", began=0)
    assert store.abort_uploads("d/", 3600) == 1_003
    assert sorted(gcs.uploads) == ["other", "young"]


def test_temporaries_count_as_one_upload_that_began_with_the_first(gcs, bucket, store):
    for upload, number, created in (("a", 1, 0.0), ("a", 2, 4e9), ("b", 1, 4e9)):
        key = f"run/.objckpt-incoming/{upload}/0-{number:05d}"
        about = {"objckpt-upload-of": f"run/d/{upload}"}
        gcs.buckets[bucket][key] = Stored(b"x", 7, created, about)
    assert store.abort_uploads("e/", 3600) == 0
    assert store.abort_uploads("d/", 3600) == 1
    assert set(gcs.buckets[bucket]) == {"run/.objckpt-incoming/b/0-00001"}


# --- tokens


def test_a_token_that_the_store_refuses_is_replaced_once(gcs, store):
    store.put("a", SMALL)
    assert gcs.issued == {"writer": 1}
    for verb in (
        lambda: store.put("a", SMALL),
        lambda: store.create("b", SMALL),
        lambda: read_all(store, "a", len(SMALL)),
        lambda: store.head("a"),
        lambda: list(store.list("")),
        lambda: store.delete(["b"]),
        lambda: store.abort_uploads("", 3600),
    ):
        gcs.tokens.clear()
        gcs.issued.clear()
        verb()
        assert gcs.issued == {"writer": 1}


def test_a_token_that_stays_refused_is_told_and_not_tried_again(gcs, store):
    gcs.uses = 0
    for verb in (lambda: store.put("a", SMALL), lambda: store.head("a")):
        gcs.asked.clear()
        with pytest.raises(StorePermissionError, match="GOOGLE_APPLICATION_CREDENTIALS"):
            verb()
        assert len([call for call in gcs.asked if call.path != "/token"]) == 2


def test_tokens_that_run_out_in_the_middle_of_an_upload_are_replaced(gcs, store):
    gcs.uses = 2
    store.put("k", DATA, crc64=crc64nvme(DATA))
    assert gcs.issued["writer"] >= 3
    assert read_all(store, "k") == DATA


def test_a_token_that_says_when_it_ends_is_replaced_before(gcs, store):
    gcs.lifetime = 1
    refused = []
    gcs.fault = lambda call: refused.append(call) if call.headers["Authorization"] is None else None
    store.put("k", SMALL)
    store.put("k", SMALL)
    assert gcs.issued["writer"] == 2
    assert not refused


def test_threads_share_one_token(gcs, store):
    barrier = threading.Barrier(8)

    def work(index):
        barrier.wait()
        store.put(f"{index}", SMALL)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert gcs.issued == {"writer": 1}


def test_threads_whose_token_is_refused_fetch_one_new_one(gcs, store):
    store.put("k", SMALL)
    gcs.issued.clear()
    gcs.tokens.clear()
    refused = threading.Barrier(4)

    def all_together(call):
        # Each thread has sent the old token before the first of them is told of it.
        if call.headers["Authorization"].removeprefix("Bearer ") not in gcs.tokens:
            refused.wait(10)

    gcs.fault = all_together
    threads = [threading.Thread(target=store.put, args=(f"{index}", SMALL)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert gcs.issued == {"writer": 1}


def test_a_key_file_a_dict_and_googles_own_search_log_in(gcs, bucket, tmp_path, monkeypatch):
    options = gcs.options()
    file = tmp_path / "key.json"
    file.write_text(json.dumps(options["token"]))
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(file))
    for token in (str(file), options["token"], None):
        open_store(f"gs://{bucket}", **options | {"token": token}).put("k", SMALL)
    from google.oauth2.service_account import Credentials

    credentials = Credentials.from_service_account_file(str(file))
    store = open_store(f"gs://{bucket}", **options | {"token": credentials})
    store.put("k", SMALL)
    assert store.head("k").size == len(SMALL)


def test_no_credentials_at_all_are_told_with_the_ways_to_give_them(gcs, bucket, monkeypatch, tmp_path):
    monkeypatch.setenv("CLOUDSDK_CONFIG", str(tmp_path))
    monkeypatch.setenv("NO_GCE_CHECK", "true")
    monkeypatch.delenv("GOOGLE_APPLICATION_CREDENTIALS", raising=False)
    with pytest.raises(StorePermissionError, match="gcloud auth"):
        open_store(f"gs://{bucket}", endpoint_url=gcs.url).head("k")


# --- the network


def test_an_emulator_named_by_the_environment_is_used_without_credentials(fake, monkeypatch):
    for host in (fake.endpoint_url, fake.endpoint_url.removeprefix("http://")):
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", host)
        store = open_store(f"gs://{fake.make_bucket()}/run")
        assert store.create("k", SMALL) is True
        assert read_all(store, "k") == SMALL
        assert [info.key for info in store.list("")] == ["k"]


def test_an_endpoint_that_is_given_goes_before_the_environment(fake, monkeypatch):
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", "http://127.0.0.1:9")
    store = open_store(f"gs://{fake.make_bucket()}/run", **fake.storage_options)
    store.put("k", SMALL)
    assert store.head("k").size == len(SMALL)


def test_the_client_asks_nothing_on_its_own_account(gcs, bucket, store):
    put_in(composing(store), 40)
    store.head("k")
    assert [info.key for info in store.list("")] == ["k"]
    assert not [call for call in gcs.asked if call.path.rstrip("/") == f"/storage/v1/b/{bucket}"]


@pytest.mark.parametrize(
    ("status", "code"), [(503, "backendError"), (429, "rateLimitExceeded"), (403, "userRateLimitExceeded")]
)
def test_a_burst_of_throttling_ends_in_success(gcs, store, status, code):
    store._retry = RetryPolicy(deadline=10, first_wait=0.01)
    verbs = [
        lambda: store.put("k", SMALL),
        lambda: store.create("c", SMALL),
        lambda: read_all(store, "k", len(SMALL)),
        lambda: store.head("k"),
        lambda: list(store.list("")),
        lambda: store.delete(["c"]),
    ]
    if status == 403:
        del verbs[2]  # a download is refused in plain text, without a reason
    for verb in verbs:
        burst = iter(range(3))

        def fault(call, burst=burst):
            if next(burst, None) is not None:
                raise RefusalError(status, code)

        gcs.fault = fault
        verb()
        assert next(burst, None) is None


def test_a_refusal_is_not_tried_again(gcs, store):
    gcs.fault = refuse(403, "forbidden", "no access")
    for verb in (
        lambda: store.put("k", SMALL),
        lambda: store.create("k", SMALL),
        lambda: store.read("k", memoryview(bytearray(4))),
        lambda: store.head("k"),
        lambda: list(store.list("")),
        lambda: store.abort_uploads("", 0),
    ):
        gcs.asked.clear()
        with pytest.raises(StorePermissionError, match="no access") as caught:
            verb()
        assert caught.value.attempts == 1
        assert len([call for call in gcs.asked if call.path != "/token"]) == 1


def test_keys_that_were_not_deleted_are_told_and_the_others_are_gone(gcs, bucket, store):
    for key in "abc":
        gcs.store(bucket, f"run/{key}", b"x")
    gcs.fault = once(lambda call: call.path.endswith("b"), refuse(403, "forbidden"))
    with pytest.raises(StorePermissionError, match=r"1 of 3 keys were not deleted .*run/b"):
        store.delete("abc")
    assert set(gcs.buckets[bucket]) == {"run/b"}


# --- the whole of it


@pytest.mark.parametrize("way", ["options", "environment"])
def test_a_checkpointer_saves_and_restores_on_gcs(fake, tmp_path, monkeypatch, way):
    uri = f"gs://{fake.make_bucket()}/run"
    options = fake.storage_options
    if way == "environment":
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", fake.endpoint_url)
        options = {}
    tuning = objckpt.Tuning(part_size=PART, concurrency=2)
    weights = torch.arange(3 * PART // 4, dtype=torch.float32)
    opened = functools.partial(objckpt.Checkpointer, uri, tuning=tuning, storage_options=options)
    with opened(cache=str(tmp_path / "node")) as checkpointer:
        assert checkpointer.restore({"w": torch.zeros_like(weights)}) is None
        assert checkpointer.save(7, {"w": weights}).result(60).step == 7
    assert torch.equal(objckpt.open(uri, **options).load()["w"], weights)
    found = {"w": torch.zeros_like(weights)}
    with opened(cache=str(tmp_path / "another node")) as checkpointer:
        assert checkpointer.restore(found).step == 7
    assert torch.equal(found["w"], weights)
