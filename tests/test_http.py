"""What the S3 store makes of a network that fails: a scripted server on loopback answers, or does not.

Each test names the guarantee; requests are checked as the server saw them.
"""

from __future__ import annotations

import base64
import datetime as dt
import gc
import time
import traceback
import warnings

import pytest
from s3_stores import ABSENT, BIG, CRC, DATA, KEY, SIZE, one_reader_of_boto3s_files, partial, store_at  # noqa: F401 # the fixture is for all tests here
from scripted_http import HangUpError, ScriptedServer, drop, error_body, hang, refuse, reply, self_signed

from objckpt.errors import (
    CommitUnknownError,
    CorruptCheckpointError,
    StoreError,
    StoreNotFoundError,
    StorePermissionError,
    StoreTransientError,
)
from objckpt.store.retry import RetryPolicy

SECRET = "s3cr3t-of-the-test"
TOKEN = "t0k3n-of-the-test"
ONCE = RetryPolicy(deadline=1e-9)


def open_at(server, *, retry=None, **options):
    store = store_at(server, **{"secret": SECRET, **options})
    store._retry = retry or store._retry
    return store


def read(store, size=SIZE, offset=0):
    into = bytearray(size)
    return bytes(into[: store.read("k", memoryview(into), offset)])


# --- sending


def test_an_early_refusal_is_read_before_the_broken_pipe_is_reported():
    def early(asked):
        asked.answer(403, error_body("AccessDenied", "not here"), close=True)

    with ScriptedServer(early) as server, pytest.raises(StorePermissionError, match="not here"):
        open_at(server, part_size=64 << 20).put("k", bytes(48 << 20))


def test_a_body_that_breaks_off_without_an_answer_is_sent_again():
    def cut(asked):
        raise HangUpError

    data = bytes(8 << 20)
    with ScriptedServer(cut, reply(200)) as server:
        open_at(server, part_size=64 << 20).put("k", data)
    assert server.asked[1][3] == data


def test_a_body_goes_out_as_it_is_with_its_crc_and_without_a_hash():
    with ScriptedServer(reply(200)) as server:
        open_at(server).put("k", memoryview(DATA))
    ((method, target, headers, body),) = server.asked
    assert (method, target, body) == ("PUT", KEY, DATA)
    assert headers["x-amz-checksum-crc64nvme"] == CRC
    assert headers["x-amz-content-sha256"] == "UNSIGNED-PAYLOAD"
    assert headers["authorization"].startswith("AWS4-HMAC-SHA256 Credential=key-id/")


def test_connections_are_kept_alive():
    with ScriptedServer(*[reply(200)] * 5, partial(DATA, 0, SIZE), ABSENT, reply(200)) as server:
        store = open_at(server)
        for _ in range(5):
            store.put("k", DATA)
        assert read(store) == DATA
        with pytest.raises(StoreNotFoundError):
            read(store)
        store.put("k", DATA)
    assert server.connections == 1


def test_a_stale_pooled_connection_is_opened_again_once_outside_the_retry_count():
    def then_close(asked):
        asked.body()
        asked.answer(200)
        raise HangUpError

    with ScriptedServer(then_close, reply(200), then_close, drop) as server:
        store = open_at(server, retry=ONCE)
        store.put("k", DATA)
        server.closed.get(timeout=5)
        store.put("k", DATA)
        store.put("k", DATA)
        server.closed.get(timeout=5)
        with pytest.raises(StoreTransientError) as caught:
            store.put("k", DATA)
        assert caught.value.attempts == 1
    assert server.connections == 3


def test_a_slow_but_moving_body_outlives_the_time_out():
    data = bytes(32 << 20)

    def slowly(asked):
        received = len(asked.rest)
        for goal in range(8 << 20, len(data) + 1, 8 << 20):
            # Each pause is shorter than the time-out; together they are longer.
            time.sleep(0.2)
            while received < goal:
                received += len(asked.connection.recv(1 << 20))
        asked.answer(200)

    with ScriptedServer(slowly) as server:
        open_at(server, retry=ONCE, part_size=64 << 20, config_kwargs={"read_timeout": 0.5}).put("k", data)


def test_a_hanging_server_ends_at_the_time_out():
    with ScriptedServer(then=hang) as server:
        store = open_at(server, deadline=0.3)
        verbs = [
            lambda: store.put("k", DATA),
            lambda: read(store),
            lambda: store.head("k"),
            lambda: list(store.list("")),
            lambda: store.delete(["k"]),
        ]
        for verb in verbs:
            begun = time.monotonic()
            with pytest.raises(StoreTransientError, match=server.url):
                verb()
            assert time.monotonic() - begun < 3


def test_a_plain_proxy_is_used():
    with ScriptedServer(reply(200)) as server:
        store = open_at(
            server,
            endpoint_url="http://store.invalid:8333",
            config_kwargs={"proxies": {"http": server.url.replace("//", "//user:pass@")}},
        )
        store.put("k", DATA)
    _, target, headers, _ = server.asked[0]
    assert target == f"http://store.invalid:8333{KEY}"
    assert headers["host"] == "store.invalid:8333"
    assert base64.b64decode(headers["proxy-authorization"].split()[1]) == b"user:pass"


# --- receiving


def test_a_truncated_body_is_resumed_from_where_it_stopped():
    def cut(first, count):
        rest = DATA[first:]

        def step(asked):
            asked.answer(
                206,
                rest[:count],
                length=len(rest),
                close=True,
                Content_Range=f"bytes {first}-{SIZE - 1}/{SIZE}",
            )

        return step

    with ScriptedServer(cut(0, 4000), cut(4000, 0), cut(4000, 1), partial(DATA[4001:], 4001, SIZE)) as server:
        assert read(open_at(server)) == DATA
    ranges = [headers["range"] for _, _, headers, _ in server.asked]
    assert ranges == [f"bytes={first}-{SIZE - 1}" for first in (0, 4000, 4000, 4001)]


def test_a_whole_object_for_a_range_gives_the_right_bytes():
    with ScriptedServer(then=reply(200, DATA)) as server:
        store = open_at(server)
        assert read(store, 5, 10) == DATA[10:15]
        assert read(store, 100, SIZE - 7) == DATA[-7:]
        assert read(store, 10, SIZE) == b""
        assert read(store, 10, SIZE + 5) == b""
        assert read(store, SIZE * 2) == DATA


def test_a_whole_object_that_breaks_off_is_resumed():
    def cut(asked):
        asked.answer(200, DATA[:5000], length=SIZE, close=True)

    with ScriptedServer(cut, reply(200, DATA)) as server:
        assert read(open_at(server), 6000, 100) == DATA[100:6100]


def test_a_range_under_status_200_is_taken_as_the_range():
    with ScriptedServer(reply(200, DATA[10:15], Content_Range=f"bytes 10-14/{SIZE}")) as server:
        assert read(open_at(server), 5, 10) == DATA[10:15]


def test_a_wrong_range_is_refused():
    with ScriptedServer(partial(DATA[:5], 0, SIZE)) as server, pytest.raises(StoreError, match="ranges"):
        read(open_at(server), 5, 10)


def test_less_than_was_asked_for_is_not_taken_for_the_end():
    with ScriptedServer(partial(DATA[:7], 0, SIZE), partial(DATA[7:], 7, SIZE)) as server:
        assert read(open_at(server)) == DATA


def test_a_range_behind_the_end_is_the_end():
    with ScriptedServer(refuse(416, "InvalidRange")) as server:
        assert read(open_at(server), 10, 10**9) == b""


def test_a_chunked_body_is_read():
    def chunked(asked):
        head = f"HTTP/1.1 206 X\r\nTransfer-Encoding: chunked\r\nContent-Range: bytes 0-9/{SIZE}\r\n\r\n"
        asked.connection.sendall(
            head.encode() + b"4\r\n" + DATA[:4] + b"\r\n6\r\n" + DATA[4:10] + b"\r\n0\r\n\r\n"
        )

    with ScriptedServer(chunked, partial(DATA[10:], 10, SIZE)) as server:
        assert read(open_at(server)) == DATA
    assert server.connections == 1


def test_a_content_encoding_does_not_matter():
    with ScriptedServer(partial(DATA, 0, SIZE, Content_Encoding="gzip")) as server:
        assert read(open_at(server)) == DATA
    assert server.asked[0][2]["accept-encoding"] == "identity"


# --- refusals


@pytest.mark.parametrize(
    ("status", "code"), [(503, "SlowDown"), (429, "TooManyRequests"), (500, "InternalError")]
)
def test_a_burst_of_throttling_ends_in_success(status, code):
    burst = [refuse(status, code)] * 5
    listed = b"<ListBucketResult><IsTruncated>false</IsTruncated></ListBucketResult>"
    with ScriptedServer(
        *burst, reply(200), *burst, partial(DATA, 0, 4), *burst, reply(200, listed)
    ) as server:
        store = open_at(server)
        store.put("k", DATA)
        assert read(store, 4) == DATA[:4]
        assert list(store.list("")) == []
    assert len(server.asked) == 18


@pytest.mark.parametrize(
    ("status", "code"), [(403, "AccessDenied"), (400, "ExpiredToken"), (404, "NoSuchBucket")]
)
def test_a_refusal_is_not_tried_again(status, code):
    kind = StoreNotFoundError if status == 404 else StorePermissionError
    with ScriptedServer(then=refuse(status, code)) as server:
        store = open_at(server)
        for verb in (
            lambda: store.put("k", DATA),
            lambda: store.create("k", DATA),
            lambda: read(store),
            lambda: list(store.list("")),
        ):
            with pytest.raises(kind) as caught:
                verb()
            assert caught.value.attempts == 1
    assert len(server.asked) == 4


def test_a_bucket_elsewhere_is_told_with_its_region():
    moved = refuse(301, "PermanentRedirect", x_amz_bucket_region="eu-central-1")
    with ScriptedServer(moved) as server, pytest.raises(StoreError, match="region_name': 'eu-central-1'"):
        open_at(server).put("k", DATA)


def test_bytes_that_arrived_wrong_are_told():
    with (
        ScriptedServer(refuse(400, "BadDigest")) as server,
        pytest.raises(CorruptCheckpointError, match="run/k"),
    ):
        open_at(server).put("k", DATA)


def test_keys_that_were_not_deleted_are_told_and_busy_ones_tried_again():
    def result(*errors):
        entries = "".join(f"<Error><Key>run/{key}</Key><Code>{code}</Code></Error>" for key, code in errors)
        return reply(200, f"<DeleteResult>{entries}</DeleteResult>".encode())

    steps = [result(("a", "SlowDown"), ("b", "AccessDenied"), ("c", "NoSuchKey")), result()]
    with (
        ScriptedServer(*steps) as server,
        pytest.raises(StorePermissionError, match="'run/b': AccessDenied") as caught,
    ):
        open_at(server).delete(["a", "b", "c", "d"])
    assert caught.value.key == "b"
    assert "'run/a'" not in str(caught.value)
    _, _, headers, body = server.asked[1]
    assert b"run/a" in body
    assert b"run/b" not in body
    assert "content-md5" in headers
    assert not [name for name in headers if name.startswith(("x-amz-checksum", "x-amz-sdk"))]


# --- TLS, credentials, secrets


def test_a_certificate_is_verified_and_a_bundle_accepted(tmp_path, monkeypatch):
    cert, tls = self_signed(tmp_path)
    listed = b"<ListBucketResult><IsTruncated>false</IsTruncated></ListBucketResult>"
    with ScriptedServer(*[reply(200), reply(200, listed)] * 3, tls=tls) as server:
        for verb in (lambda store: store.put("k", DATA), lambda store: list(store.list(""))):
            with pytest.raises(StoreError, match="AWS_CA_BUNDLE") as caught:
                verb(open_at(server))
            assert not isinstance(caught.value, StoreTransientError)
            assert caught.value.attempts == 1
        for verify in (cert, False):
            store = open_at(server, client_kwargs={"verify": verify})
            store.put("k", DATA)
            with warnings.catch_warnings(action="ignore"):
                list(store.list(""))
        monkeypatch.setenv("AWS_CA_BUNDLE", cert)
        store = open_at(server)
        store.put("k", DATA)
        list(store.list(""))


def test_credentials_that_refresh_are_asked_anew_for_each_request():
    from botocore.credentials import RefreshableCredentials

    count = iter(range(100))

    def refresh():
        soon = dt.datetime.now(dt.UTC) + dt.timedelta(seconds=1)
        return {
            "access_key": f"id{next(count)}",
            "secret_key": "x",
            "token": TOKEN,
            "expiry_time": soon.isoformat(),
        }

    with ScriptedServer(reply(200), reply(200)) as server:
        store = open_at(server)
        store._session._credentials = RefreshableCredentials.create_from_metadata(refresh(), refresh, "test")
        store.put("k", DATA)
        store.put("k", DATA)
    first, second = (headers["authorization"] for _, _, headers, _ in server.asked)
    assert first.split("/")[0] != second.split("/")[0]
    assert server.asked[0][2]["x-amz-security-token"] == TOKEN


def test_missing_credentials_are_told_with_the_way_out(monkeypatch, tmp_path):
    for name in ("AWS_ACCESS_KEY_ID", "AWS_PROFILE", "AWS_WEB_IDENTITY_TOKEN_FILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    with ScriptedServer() as server:
        store = open_at(server, key=None, secret=None)
        for verb in (
            lambda: store.put("k", DATA),
            lambda: list(store.list("")),
            lambda: store.create("k", DATA),
        ):
            with pytest.raises(StorePermissionError, match="AWS_ACCESS_KEY_ID"):
                verb()


def test_an_anonymous_store_signs_nothing():
    listed = b"<ListBucketResult><IsTruncated>false</IsTruncated></ListBucketResult>"
    with ScriptedServer(partial(DATA, 0, SIZE), reply(200, listed)) as server:
        store = open_at(server, key=None, secret=None, anon=True)
        assert read(store) == DATA
        list(store.list(""))
    assert not [headers for _, _, headers, _ in server.asked if "authorization" in headers]


@pytest.mark.parametrize(
    "step",
    [
        refuse(403, "SignatureDoesNotMatch", f"you signed with {SECRET} and {TOKEN}"),
        refuse(400, "InvalidToken", f"{TOKEN} is wrong"),
        refuse(418, "Teapot", f"{SECRET}{TOKEN}"),
        refuse(503, "SlowDown", f"{SECRET} {TOKEN}"),
        drop,
    ],
)
def test_no_secret_is_in_an_error(step):
    with ScriptedServer(then=step) as server:
        store = open_at(server, token=TOKEN, deadline=0.05)
        assert SECRET not in repr(store) + repr(store._options) + repr(vars(store))
        for verb in (
            lambda: store.put("k", DATA),
            lambda: store.put("k", BIG),
            lambda: store.create("k", DATA),
            lambda: read(store),
            lambda: store.head("k"),
            lambda: list(store.list("")),
            lambda: store.delete(["k"]),
            lambda: store.abort_uploads("", 1),
        ):
            with pytest.raises((StoreError, CommitUnknownError)) as caught:
                verb()
            for text in (str(caught.value), repr(caught.value), repr(caught.value.__dict__)):
                assert SECRET not in text
                assert TOKEN not in text
            if step is drop:
                assert SECRET not in "".join(traceback.format_exception(caught.value))


def test_idle_connections_are_dropped_without_a_warning():
    with ScriptedServer(reply(200)) as server, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", ResourceWarning)
        store = open_at(server)
        store.put("k", DATA)
        del store
        gc.collect()
        server.closed.get(timeout=5)
    assert [str(warning.message) for warning in caught if "unclosed" in str(warning.message)] == []
