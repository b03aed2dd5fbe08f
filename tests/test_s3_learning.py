"""What the S3 store learns from a refusal: another region, credentials that expired, checksums that the store does not know.

A scripted server refuses as AWS and the vendors do; each test looks at the requests that follow.
"""

from __future__ import annotations

import base64
import hashlib
import json
import logging
import sys
import textwrap
import threading

import pytest
from awscrt.checksums import crc64nvme
from s3_stores import ABSENT, COMPLETED, CREATED, amazon_at, one_reader_of_boto3s_files, store_at  # noqa: F401 # the fixture is for all tests here
from scripted_http import ScriptedServer, error_body, refuse, reply

from objckpt.errors import (
    CommitUnknownError,
    CorruptCheckpointError,
    StoreError,
    StorePermissionError,
    StoreTransientError,
    StoreUnsuitableError,
)
from objckpt.store.s3_options import SMALLEST_PART

DATA = bytes(range(256)) * 40
SIZE = len(DATA)
BIG = bytes(SMALLEST_PART) + b"tail"
PARTS = (BIG[:SMALLEST_PART], BIG[SMALLEST_PART:])
LISTED = reply(200, b"<ListBucketResult><IsTruncated>false</IsTruncated></ListBucketResult>")
DATE = "Tue, 01 Dec 2026 00:00:00 GMT"


def regions(server):
    return [headers["authorization"].split("/")[2] for _, _, headers, _ in server.asked]


def hosts(server):
    return [headers["host"] for _, _, headers, _ in server.asked]


def keys_used(server):
    return [
        headers["authorization"].partition("Credential=")[2].split("/")[0]
        for _, _, headers, _ in server.asked
    ]


def read(store):
    into = bytearray(SIZE)
    return bytes(into[: store.read("k", memoryview(into))])


# --- another region

HERE, THERE = "bucket.s3.amazonaws.com", "bucket.s3.eu-central-1.amazonaws.com"
MOVED = refuse(301, "PermanentRedirect", x_amz_bucket_region="eu-central-1")
MALFORMED = reply(
    400, b"<Error><Code>AuthorizationHeaderMalformed</Code><Region>eu-central-1</Region></Error>"
)
ILLEGAL = refuse(400, "IllegalLocationConstraintException", x_amz_bucket_region="eu-central-1")


@pytest.mark.parametrize("moved", [MOVED, MALFORMED, ILLEGAL], ids=["301", "400", "opt-in region"])
def test_a_bucket_in_another_region_is_followed_once_and_remembered_for_both_ways(moved, caplog):
    with ScriptedServer(moved, reply(200), reply(200), LISTED) as server:
        store = amazon_at(server)
        store.put("k", DATA)
        store.put("k", DATA)
        list(store.list(""))
    assert hosts(server) == [HERE, THERE, THERE, THERE]
    assert regions(server) == ["us-east-1"] + ["eu-central-1"] * 3
    assert server.asked[1][3] == DATA
    (said,) = [record.message for record in caplog.records if "following" in record.message]
    assert "in region eu-central-1, not us-east-1" in said
    assert "client_kwargs={'region_name': 'eu-central-1'}" in said


def test_a_control_call_follows_too():
    with ScriptedServer(MOVED, LISTED, LISTED) as server:
        store = amazon_at(server)
        list(store.list(""))
        list(store.list(""))
    assert hosts(server) == [HERE, THERE, THERE]


def test_a_refusal_without_a_body_is_asked_about():
    """A HEAD's answer says neither code nor region."""
    head = reply(200, length=SIZE, Last_Modified=DATE)
    with ScriptedServer(reply(400), MALFORMED, head) as server:
        assert amazon_at(server).head("k").size == SIZE
    assert server.methods() == ["HEAD", "GET", "HEAD"]
    assert hosts(server) == [HERE, HERE, THERE]


def test_a_create_in_another_region_is_created_there():
    with ScriptedServer(MOVED, reply(200)) as server:
        assert amazon_at(server).create("k", DATA) is True
    assert hosts(server) == [HERE, THERE]
    assert {headers["if-none-match"] for _, _, headers, _ in server.asked} == {"*"}


def test_an_upload_in_another_region_goes_on_there():
    bodies = {"POST": [CREATED, COMPLETED], "PUT": [reply(200)] * 2}

    def by_host(asked):
        (MOVED if asked.headers["host"] == HERE else bodies[asked.method].pop(0))(asked)

    with ScriptedServer(then=by_host) as server:
        amazon_at(server).put("k", BIG)
    assert bodies == {"POST": [], "PUT": []}
    # boto3 follows by itself, so the bytes' way is sent away once more, each part at most once.
    assert hosts(server).count(HERE) in {2, 3}
    assert hosts(server)[-1] == THERE


def test_a_store_that_only_signs_for_another_region_is_signed_for():
    with ScriptedServer(MALFORMED, reply(200)) as server:
        store_at(server).put("k", DATA)
    assert regions(server) == ["us-east-1", "eu-central-1"]


@pytest.mark.parametrize("where", [store_at, amazon_at])
def test_a_bucket_that_moves_in_circles_is_told_with_its_region(where):
    back = refuse(301, "PermanentRedirect", x_amz_bucket_region="us-east-1")
    steps = [MOVED, back] if where is amazon_at else [MOVED]
    with (
        ScriptedServer(*steps) as server,
        pytest.raises(StoreError, match="the bucket is in region") as caught,
    ):
        where(server).put("k", DATA)
    assert not isinstance(caught.value, StoreTransientError)


def test_a_region_that_is_no_region_is_not_followed():
    evil = refuse(301, "PermanentRedirect", x_amz_bucket_region="x.evil.example/")
    with ScriptedServer(evil) as server, pytest.raises(StoreError):
        amazon_at(server).put("k", DATA)


def test_threads_that_are_sent_away_together_follow_together():
    both = threading.Barrier(4)

    def moved(asked):
        asked.body()
        both.wait(5)
        asked.answer(301, error_body("PermanentRedirect"), x_amz_bucket_region="eu-central-1")

    with ScriptedServer(*[moved] * 4, *[reply(200)] * 4) as server:
        store = amazon_at(server)
        threads = [threading.Thread(target=store.put, args=(f"k{index}", DATA)) for index in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert sorted(hosts(server)) == sorted([HERE] * 4 + [THERE] * 4)


# --- credentials that expire

EXPIRED = refuse(400, "ExpiredToken", "The provided token has expired.")


@pytest.fixture
def provider(tmp_path, monkeypatch):
    """A profile whose credentials come from a program: new ones each time it is asked, which say that they last."""
    program = tmp_path / "provider.py"
    program.write_text(
        textwrap.dedent(
            f"""
            import json, pathlib
            count = pathlib.Path({str(tmp_path / "count")!r})
            number = int(count.read_text()) + 1 if count.exists() else 1
            count.write_text(str(number))
            print(json.dumps(dict(Version=1, AccessKeyId=f"id{{number}}", SecretAccessKey="x", SessionToken=f"t{{number}}",
                                  Expiration="2099-01-01T00:00:00Z")))
            """
        )
    )
    config = tmp_path / "config"
    config.write_text(f"[profile node]\ncredential_process = {sys.executable} {program}\n")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(config))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    return {"key": None, "secret": None, "profile": "node"}


def test_credentials_that_expire_in_the_middle_of_an_upload_are_renewed(provider):
    def part(asked):
        asked.body()
        expired = "Credential=id1/" in asked.headers["authorization"]
        asked.answer(400 if expired else 200, error_body("ExpiredToken") if expired else b"")

    with ScriptedServer(CREATED, *[part] * 4, COMPLETED) as server:
        store_at(server, **provider).put("k", BIG, crc64=crc64nvme(BIG))
    used = keys_used(server)
    assert used[0] == "id1"
    assert sorted(used[1:5]) == ["id1", "id1", "id2", "id2"]
    assert used[-1] == "id2"
    assert server.asked[-1][2]["x-amz-security-token"] == "t2"


@pytest.mark.parametrize(
    ("verb", "steps"),
    [
        (lambda store: store.create("k", DATA), [EXPIRED, reply(200)]),
        (read, [EXPIRED, reply(206, DATA, Content_Range=f"bytes 0-{SIZE - 1}/{SIZE}")]),
        (lambda store: list(store.list("")), [EXPIRED, LISTED]),
        (lambda store: store.head("k"), [reply(400), EXPIRED, reply(200, length=1, Last_Modified=DATE)]),
        (lambda store: store.delete(["k"]), [EXPIRED, reply(200, b"<DeleteResult/>")]),
    ],
    ids=["create", "read", "list", "head", "delete"],
)
def test_every_verb_goes_on_with_renewed_credentials(provider, verb, steps):
    with ScriptedServer(*steps) as server:
        verb(store_at(server, **provider))
    assert set(keys_used(server)[:-1]) == {"id1"}
    assert keys_used(server)[-1] == "id2"


def test_credentials_that_are_refused_when_they_are_new_are_given_up(provider):
    with ScriptedServer(then=EXPIRED) as server:
        store = store_at(server, **provider)
        for verb in (lambda: store.put("k", DATA), lambda: list(store.list(""))):
            with pytest.raises(StorePermissionError, match="have expired"):
                verb()
    assert keys_used(server) == ["id1", "id2", "id2"]


def test_credentials_expire_again_and_again(provider):
    with ScriptedServer(*[EXPIRED, reply(200)] * 2, EXPIRED, LISTED, EXPIRED, LISTED) as server:
        store = store_at(server, **provider)
        store.put("k", DATA)
        store.put("k", DATA)
        list(store.list(""))
        list(store.list(""))
    assert keys_used(server) == ["id1", "id2", "id2", "id3", "id3", "id4", "id4", "id5"]


def test_credentials_that_lie_renewed_in_the_file_are_read_again(tmp_path, monkeypatch):
    """Many clusters have a daemon that writes short-lived ones there, which boto3 reads once."""
    file = tmp_path / "credentials"
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(file))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    lines = "[node]\naws_access_key_id = {0}\naws_secret_access_key = x\naws_session_token = {0}\n"
    file.write_text(lines.format("id1"))

    def renewed_by_then(asked):
        asked.body()
        file.write_text(lines.format("id2"))
        asked.answer(400, error_body("ExpiredToken"))

    with ScriptedServer(reply(200), renewed_by_then, reply(200)) as server:
        store = store_at(server, key=None, secret=None, profile="node")
        store.put("k", DATA)
        store.put("k", DATA)
    assert keys_used(server) == ["id1", "id1", "id2"]


def test_credentials_that_were_given_are_not_asked_for_again():
    with ScriptedServer(EXPIRED, EXPIRED) as server:
        store = store_at(server, token="t")
        for verb in (lambda: store.put("k", DATA), lambda: list(store.list(""))):
            with pytest.raises(StorePermissionError, match="renew them") as caught:
                verb()
            assert caught.value.attempts == 1


def test_a_lost_create_whose_credentials_expire_stays_unknown_if_they_cannot_be_renewed():
    def lost(asked):
        asked.body()
        asked.connection.close()

    with ScriptedServer(lost, EXPIRED) as server, pytest.raises(CommitUnknownError):
        store_at(server, token="t").create("k", DATA)


# --- checksums that the store does not know

UNKNOWN = [
    refuse(501, "NotImplemented", "Header 'x-amz-checksum-algorithm' with value 'CRC64NVME' not implemented"),
    refuse(400, "InvalidRequest", "Checksum algorithm provided is unsupported."),
    refuse(
        400, "InvalidArgument", "Unsupported header 'x-amz-checksum-crc64nvme' received for this API call."
    ),
    reply(400, b"<Error><Code>Odd</Code><Message>unknown checksum</Message></Error>"),
    reply(501),
]
VENDORS = ["R2", "MinIO", "B2", "odd", "bare 501"]


def etag_of(data):
    return '"' + hashlib.md5(data).hexdigest() + '"'


def md5_of(data):
    return base64.b64encode(hashlib.md5(data).digest()).decode()


def has_crc(entry):
    _, _, headers, body = entry
    return (
        any(name.startswith(("x-amz-checksum-", "x-amz-mp-object")) for name in headers) or b"CRC64" in body
    )


@pytest.mark.parametrize("unknown", UNKNOWN, ids=VENDORS)
def test_a_store_that_does_not_know_our_checksums_gets_md5_from_then_on(unknown, caplog):
    confirmed = reply(200, ETag=etag_of(DATA))
    with ScriptedServer(unknown, confirmed, confirmed, reply(200)) as server:
        store = store_at(server)
        store.put("k", DATA, crc64=crc64nvme(DATA))
        store.put("k", DATA)
        assert store.create("k", DATA) is True
    assert [has_crc(entry) for entry in server.asked] == [True, False, False, False]
    assert {headers["content-md5"] for _, _, headers, _ in server.asked[1:]} == {md5_of(DATA)}
    assert len([record for record in caplog.records if record.levelno >= logging.WARNING]) == 1
    assert "does not know CRC-64/NVME" in caplog.text


@pytest.mark.parametrize("unknown", UNKNOWN, ids=VENDORS)
def test_an_upload_to_such_a_store_has_an_md5_for_each_part(unknown):
    def part(asked):
        asked.answer(200, ETag=etag_of(asked.body()))

    with ScriptedServer(unknown, CREATED, part, part, COMPLETED) as server:
        store_at(server).put("k", BIG, crc64=crc64nvme(BIG))
    assert [has_crc(entry) for entry in server.asked] == [True] + [False] * 4
    sent = {headers["content-md5"] for method, _, headers, _ in server.asked if method == "PUT"}
    assert sent == {md5_of(part) for part in PARTS}


def test_an_upload_whose_parts_or_completion_are_refused_goes_on_without():
    def part(asked):
        body = asked.body()
        if "x-amz-checksum-crc64nvme" in asked.headers:
            asked.answer(400, error_body("InvalidRequest", "checksum"))
        else:
            asked.answer(200, ETag=etag_of(body))

    with ScriptedServer(CREATED, *[part] * 4, COMPLETED) as server:
        store_at(server).put("k", BIG)
    with ScriptedServer(CREATED, reply(200), reply(200), UNKNOWN[0], COMPLETED) as server:
        store_at(server).put("k", BIG)
    assert [has_crc(entry) for entry in server.asked[-2:]] == [True, False]


HELD = [
    reply(200, length=SIZE, Last_Modified=DATE),
    reply(206, DATA, Content_Range=f"bytes 0-{SIZE - 1}/{SIZE}"),
]
OTHER = [HELD[0], reply(206, DATA[:-1] + b"!", Content_Range=f"bytes 0-{SIZE - 1}/{SIZE}")]


def test_what_such_a_store_does_not_confirm_is_read_back():
    with ScriptedServer(UNKNOWN[0], reply(200, ETag='"encrypted"'), *HELD) as server:
        store_at(server).put("k", DATA)
    with (
        ScriptedServer(UNKNOWN[0], reply(200, ETag='"encrypted"'), *OTHER) as server,
        pytest.raises(CorruptCheckpointError, match="gives other bytes back"),
    ):
        store_at(server).put("k", DATA)


def test_parts_that_such_a_store_does_not_confirm_are_read_back():
    whole = [
        reply(200, length=len(BIG), Last_Modified=DATE),
        reply(206, BIG, Content_Range=f"bytes 0-{len(BIG) - 1}/{len(BIG)}"),
    ]
    wrong = [whole[0], reply(206, BIG[:-1] + b"!", Content_Range=f"bytes 0-{len(BIG) - 1}/{len(BIG)}")]
    before = [UNKNOWN[0], CREATED, reply(200), reply(200), COMPLETED]
    with ScriptedServer(*before, *whole) as server:
        store_at(server).put("k", BIG)
    with ScriptedServer(*before, *wrong) as server, pytest.raises(CorruptCheckpointError):
        store_at(server).put("k", BIG)


def test_checksums_that_are_not_the_reason_are_taken_up_again(caplog):
    refused = refuse(400, "InvalidRequest", "no such day")
    with ScriptedServer(refused, refused, reply(200), refused) as server:
        store = store_at(server)
        with pytest.raises(StoreError, match="no such day"):
            store.put("k", DATA)
        store.put("k", DATA)
        with pytest.raises(StoreError, match="no such day"):
            store.put("k", DATA)
    assert [has_crc(entry) for entry in server.asked] == [True, False, True, True]
    assert "does not know" not in caplog.text


def test_amazon_never_goes_without():
    with ScriptedServer(UNKNOWN[1]) as server, pytest.raises(StoreError, match="unsupported"):
        amazon_at(server).put("k", DATA)


def test_a_store_without_conditions_is_told_at_create():
    no = refuse(501, "NotImplemented", "A header you provided implies functionality that is not implemented")
    for where, steps in ((store_at, [no, no]), (amazon_at, [no])):
        with (
            ScriptedServer(*steps) as server,
            pytest.raises(StoreUnsuitableError, match=r"If-None-Match.*Use a store with conditional writes"),
        ):
            where(server).create("k", DATA)


# --- what vendors say of a key that is taken, or is not


@pytest.mark.parametrize("status", [304, 409, 412])
def test_a_key_that_is_taken_is_told_in_any_dialect(status):
    taken = reply(status, error_body("X") if status != 304 else b"")
    there = reply(206, b"other", Content_Range="bytes 0-4/5")
    with ScriptedServer(taken, there, there) as server:
        assert store_at(server).create("k", DATA) is False


def test_a_create_that_meets_a_delete_and_is_told_404_is_tried_again():
    with ScriptedServer(ABSENT, ABSENT, reply(200)) as server:
        assert store_at(server).create("k", DATA) is True
    assert server.methods() == ["PUT", "GET", "PUT"]


def test_the_steady_state_is_one_request_a_put_and_three_and_its_parts_an_upload():
    for where in (store_at, amazon_at):
        with ScriptedServer(reply(200), reply(200), CREATED, reply(200), reply(200), COMPLETED) as server:
            store = where(server)
            store.put("k", DATA)
            store.create("k", DATA)
            store.put("k", BIG)
        assert server.methods() == ["PUT", "PUT", "POST", "PUT", "PUT", "POST"]
        assert [has_crc(entry) for entry in server.asked] == [True] * 6
        assert json.dumps([target for _, target, _, _ in server.asked]).count("partNumber") == 2
