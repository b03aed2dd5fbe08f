"""What the S3 store makes of writes that got half an answer: ``create``, and uploads in parts.

Each test names the guarantee; requests are checked as the server saw them.
"""

from __future__ import annotations

import base64
import threading

import pytest
from awscrt.checksums import crc64nvme
from s3_stores import (  # noqa: F401 # the fixture is for all tests here
    ABSENT,
    BIG,
    COMPLETED,
    CRC,
    CREATED,
    DATA,
    KEY,
    SIZE,
    one_reader_of_boto3s_files,
    partial,
    store_at,
)
from scripted_http import ScriptedServer, drop, error_body, refuse, reply

from objckpt.errors import CommitUnknownError, StorePermissionError, StoreTransientError
from objckpt.store.s3_options import SMALLEST_PART

BIG_CRC = base64.b64encode(crc64nvme(BIG).to_bytes(8, "big")).decode()
GONE = refuse(404, "NoSuchUpload")


def found(crc=CRC, size=SIZE):
    rest = {} if crc is None else {"x_amz_checksum_crc64nvme": crc}
    return reply(200, b"", length=size, Last_Modified="Tue, 01 Dec 2026 00:00:00 GMT", **rest)


# --- create


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        ([reply(200)], True),
        ([refuse(412, "PreconditionFailed"), partial(DATA, 0, SIZE)], True),
        (
            [
                refuse(412, "PreconditionFailed"),
                partial(DATA[:-1] + b"!", 0, SIZE),
                partial(DATA[:-1] + b"!", 0, SIZE),
            ],
            False,
        ),
        (
            [
                refuse(412, "PreconditionFailed"),
                partial(DATA[:-1], 0, SIZE - 1),
                partial(DATA[:-1], 0, SIZE - 1),
            ],
            False,
        ),
        (
            [
                refuse(412, "PreconditionFailed"),
                partial(DATA + b"!", 0, SIZE + 1),
                partial(DATA + b"!", 0, SIZE + 1),
            ],
            False,
        ),
        ([refuse(412, "PreconditionFailed"), partial(b"x" * SIZE, 0, SIZE), partial(DATA, 0, SIZE)], True),
        ([refuse(412, "PreconditionFailed"), ABSENT, reply(200)], True),
        ([refuse(409, "ConditionalRequestConflict"), ABSENT, reply(200)], True),
        (
            [refuse(409, "ConditionalRequestConflict"), partial(b"other", 0, 5), partial(b"other", 0, 5)],
            False,
        ),
        ([drop, partial(DATA, 0, SIZE)], True),
        ([drop, partial(b"other", 0, 5), partial(b"other", 0, 5)], False),
        ([drop, ABSENT, reply(200)], True),
        # The connection of the 404 is pooled, so the next PUT is sent twice.
        ([drop, ABSENT, drop, drop, partial(DATA, 0, SIZE)], True),
        ([drop, drop, refuse(412, "PreconditionFailed"), partial(DATA, 0, SIZE)], True),
        ([refuse(500, "InternalError"), partial(DATA, 0, SIZE)], True),
        ([refuse(503, "SlowDown"), reply(200)], True),
    ],
)
def test_create_finds_out_what_became_of_it(steps, expected):
    with ScriptedServer(*steps) as server:
        assert store_at(server).create("k", DATA) is expected
    puts = [
        (target, headers.get("if-none-match"))
        for method, target, headers, _ in server.asked
        if method == "PUT"
    ]
    assert set(puts) == {(KEY, "*")}


def test_create_says_unknown_when_the_read_back_fails_too():
    with ScriptedServer(then=drop) as server, pytest.raises(CommitUnknownError, match="'k'"):
        store_at(server, deadline=0.3).create("k", DATA)
    assert {"PUT", "GET"} == set(server.methods())


@pytest.mark.parametrize(("status", "code"), [(403, "ExpiredToken"), (404, "NoSuchBucket")])
def test_create_says_unknown_when_a_lost_answer_is_followed_by_a_refusal(status, code):
    with (
        ScriptedServer(drop, refuse(status, code)) as server,
        pytest.raises(CommitUnknownError, match=r"ExpiredToken|no bucket"),
    ):
        store_at(server).create("k", DATA)


def test_a_lost_answer_is_not_forgotten_by_a_later_try_that_had_one():
    with (
        ScriptedServer(
            drop, ABSENT, refuse(412, "PreconditionFailed"), ABSENT, refuse(403, "AccessDenied")
        ) as server,
        pytest.raises(CommitUnknownError, match="AccessDenied"),
    ):
        store_at(server).create("k", DATA)


@pytest.mark.parametrize("step", [refuse(503, "SlowDown"), None], ids=["throttled", "unreachable"])
def test_create_that_had_no_effect_for_certain_is_no_unknown(step):
    with ScriptedServer(then=step) as server:
        url = server.url if step else "http://127.0.0.1:9"
        with pytest.raises(StoreTransientError, match=url):
            store_at(server, endpoint_url=url, deadline=0.3).create("k", DATA)


def test_create_is_one_plain_put_at_any_size():
    with ScriptedServer(reply(200)) as server:
        assert store_at(server).create("k", bytes(3 * SMALLEST_PART)) is True


# --- multipart


def test_an_error_inside_a_200_of_the_completion_is_tried_again():
    failed = reply(200, error_body("InternalError", "try again"))
    with ScriptedServer(CREATED, reply(200), reply(200), failed, failed, COMPLETED) as server:
        store_at(server).put("k", BIG, crc64=crc64nvme(BIG))
    *_, (_, target, headers, body) = server.asked
    assert target == f"{KEY}?uploadId=u%2F1"
    assert headers["x-amz-checksum-crc64nvme"] == BIG_CRC
    assert headers["x-amz-checksum-type"] == "FULL_OBJECT"
    assert body.count(b"<Part>") == 2


def test_a_refusal_inside_a_200_of_the_completion_is_final():
    failed = reply(200, error_body("AccessDenied"))
    with (
        ScriptedServer(CREATED, reply(200), reply(200), failed, reply(204)) as server,
        pytest.raises(StorePermissionError),
    ):
        store_at(server).put("k", BIG)
    assert server.methods()[-1] == "DELETE"


@pytest.mark.parametrize(
    "steps",
    [
        [drop, COMPLETED],
        [drop, GONE, found(BIG_CRC, len(BIG))],
        [drop, GONE, found(None, len(BIG)), partial(BIG, 0, len(BIG))],
    ],
    ids=["still there", "checksum kept", "no checksum kept"],
)
def test_a_lost_answer_of_the_completion_is_found_out(steps):
    with ScriptedServer(CREATED, reply(200), reply(200), *steps) as server:
        store_at(server).put("k", BIG)
    heads = [headers for method, _, headers, _ in server.asked if method == "HEAD"]
    assert all(headers["x-amz-checksum-mode"] == "ENABLED" for headers in heads)


@pytest.mark.parametrize(
    "steps",
    [
        [found(CRC, len(BIG))],
        [found(BIG_CRC, len(BIG) - 1)],
        [found(None, len(BIG)), partial(BIG[:-1] + b"!", 0, len(BIG))],
        [reply(404), ABSENT],
    ],
    ids=["other checksum", "other size", "other bytes", "absent"],
)
def test_an_upload_that_vanished_is_no_success(steps):
    with (
        ScriptedServer(CREATED, reply(200), reply(200), drop, GONE, *steps, GONE) as server,
        pytest.raises(StoreTransientError, match="put it again"),
    ):
        store_at(server).put("k", BIG)


def test_an_upload_is_aborted_after_its_last_part_ended():
    both, aborted = threading.Barrier(2), threading.Event()
    aborted_too_early = []

    def part(asked):
        asked.body()
        both.wait()
        if "partNumber=2" in asked.target:
            asked.answer(403, error_body("AccessDenied"))
        else:
            aborted_too_early.append(aborted.wait(0.3))
            asked.answer(200)

    def abort(asked):
        aborted.set()
        asked.answer(204)

    with ScriptedServer(CREATED, part, part, abort) as server, pytest.raises(StorePermissionError):
        store_at(server).put("k", BIG)
    assert aborted_too_early == [False]


def test_connections_of_an_upload_are_limited():
    running, most = [], []
    lock = threading.Lock()

    def part(asked):
        with lock:
            running.append(1)
            most.append(len(running))
        asked.body()
        with lock:
            running.pop()
        asked.answer(200)

    with ScriptedServer(CREATED, *[part] * 6, COMPLETED) as server:
        store_at(server, connections=2).put("k", bytes(6 * SMALLEST_PART))
    assert max(most) <= 2
