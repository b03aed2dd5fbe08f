"""S3 Express directory buckets, by what is documented of them; no server that is at hand speaks their dialect.

A scripted server plays the zone: it checks how requests are signed, and lists in no order and by whole folders only.
"""

from __future__ import annotations

import datetime as dt
import re
import threading
from urllib.parse import parse_qs, urlsplit

import pytest
from s3_stores import amazon_at, one_reader_of_boto3s_files  # noqa: F401 # the fixture is for all tests here
from scripted_http import ScriptedServer, error_body

from objckpt.errors import ConfigError, StorePermissionError
from objckpt.store import open_store
from objckpt.store.s3_options import SMALLEST_PART

BUCKET = "ckpt--use1-az4--x-s3"
HOST = f"{BUCKET}.s3express-use1-az4.us-east-1.amazonaws.com"
URI = f"s3://{BUCKET}/run"
DATE = "Tue, 01 Dec 2026 00:00:00 GMT"


class Zone(ScriptedServer):
    """A directory bucket: sessions, folders, no order. ``lifetime`` of a session in seconds."""

    def __init__(self, lifetime=300):
        super().__init__(then=self.answer)
        self.lifetime = lifetime
        self.objects = {}
        self.sessions = 0
        self.faults = []
        self.revoked = set()
        self._sessions = threading.Lock()

    def answer(self, asked):
        body = asked.body()
        url = urlsplit(asked.target)
        query = parse_qs(url.query, keep_blank_values=True)
        if url.netloc != HOST:
            self.faults.append(f"host {url.netloc}")
        signed = asked.headers["authorization"]
        if "session" in query:
            if "x-amz-s3session-token" in asked.headers or "/s3express/aws4_request" not in signed:
                self.faults.append("a session is asked for with the caller's own credentials")
            return asked.answer(200, self._session())
        token = asked.headers.get("x-amz-s3session-token", "")
        number = token.removeprefix("token")
        if f"Credential=session{number}/" not in signed or "/us-east-1/s3express/aws4_request" not in signed:
            self.faults.append(f"signed with {signed}, token {token!r}")
        if "x-amz-security-token" in asked.headers or "content-md5" in asked.headers:
            self.faults.append(f"{asked.method} with a header that directory buckets refuse")
        if "x-amz-s3session-token" not in signed:
            self.faults.append("the token is not signed")
        if token in self.revoked:
            return asked.answer(400, error_body("ExpiredToken"))
        key = url.path[1:]
        if asked.method == "PUT":
            if asked.headers.get("if-none-match") == "*" and key in self.objects:
                return asked.answer(412, error_body("PreconditionFailed"))
            self.objects[key] = body
            return asked.answer(200)
        if asked.method == "POST":
            for name in re.findall(rb"<Key>(.*?)</Key>", body):
                self.objects.pop(name.decode(), None)
            return asked.answer(200, b"<DeleteResult/>")
        if "uploads" in query:
            return asked.answer(200, self._uploads(query), Date=DATE)
        if "list-type" in query:
            return asked.answer(200, self._list(query))
        data = self.objects.get(key)
        if data is None:
            return asked.answer(404, error_body("NoSuchKey"))
        first = int(asked.headers["range"].removeprefix("bytes=").split("-")[0])
        return asked.answer(206, data[first:], Content_Range=f"bytes {first}-{len(data) - 1}/{len(data)}")

    def _session(self):
        with self._sessions:
            self.sessions += 1
            number = self.sessions
        until = (dt.datetime.now(dt.UTC) + dt.timedelta(seconds=self.lifetime)).strftime("%Y-%m-%dT%H:%M:%SZ")
        entry = f"<AccessKeyId>session{number}</AccessKeyId><SecretAccessKey>x</SecretAccessKey>"
        entry += f"<SessionToken>token{number}</SessionToken><Expiration>{until}</Expiration>"
        return f"<CreateSessionResult><Credentials>{entry}</Credentials></CreateSessionResult>".encode()

    def _prefix(self, query):
        prefix = query.get("prefix", [""])[0]
        if prefix and not prefix.endswith("/"):
            self.faults.append(f"prefix {prefix!r} does not end in a slash")
        return prefix

    def _list(self, query):
        prefix = self._prefix(query)
        if "start-after" in query:
            self.faults.append("start-after is not known")
        # By hash, as good as none; in pages of two, as a prefix of an upload under way lies between.
        found = sorted((key for key in self.objects if key.startswith(prefix)), key=lambda key: key[::-1])
        begin = int(query.get("continuation-token", ["0"])[0])
        entries = "".join(
            f"<Contents><Key>{key}</Key><Size>{len(self.objects[key])}</Size>"
            "<LastModified>2026-12-01T00:00:00Z</LastModified></Contents>"
            for key in found[begin : begin + 2]
        )
        more = begin + 2 < len(found)
        rest = f"<NextContinuationToken>{begin + 2}</NextContinuationToken>" if more else ""
        under_way = "<CommonPrefixes><Prefix>run/data/00/</Prefix></CommonPrefixes>"
        cut = f"<IsTruncated>{str(more).lower()}</IsTruncated>"
        return f"<ListBucketResult>{cut}{rest}{entries}{under_way}</ListBucketResult>".encode()

    def _uploads(self, query):
        self._prefix(query)
        return b"<ListMultipartUploadsResult><IsTruncated>false</IsTruncated></ListMultipartUploadsResult>"


@pytest.fixture
def zone():
    with Zone() as server:
        yield server
    assert server.faults == []


def test_every_verb_is_signed_with_a_session_in_the_way_of_the_zone(zone):
    store = amazon_at(zone, uri=URI)
    store.put("data/00/x", b"one")
    assert store.create("manifest/1", b"v1") is True
    assert store.create("manifest/1", b"v2") is False
    into = bytearray(3)
    assert (store.read("data/00/x", memoryview(into)), bytes(into)) == (3, b"one")
    assert [info.key for info in store.list("")] == ["data/00/x", "manifest/1"]
    store.delete(["data/00/x"])
    assert store.abort_uploads("data/0", 1) == 0
    assert zone.objects == {"run/manifest/1": b"v1"}
    # boto3 keeps one for its calls, the bytes' way has one of its own.
    assert zone.sessions == 2


def test_a_list_is_sorted_whatever_the_zone_says_and_filtered_by_prefix_and_start(zone):
    store = amazon_at(zone, uri=URI)
    keys = [f"manifest/{number:020d}.json" for number in range(7)] + ["manifest-not", "data/05/a", "data/05b"]
    for key in keys:
        store.put(key, b"x")
    zone.objects["runner/up"] = b""
    assert [info.key for info in store.list("")] == sorted(keys)
    assert [info.key for info in store.list("manifest/")] == sorted(keys)[3:]
    assert [info.key for info in store.list("manifest/", start_after=keys[4])] == keys[5:7]
    assert [info.key for info in store.list("data/05")] == ["data/05/a", "data/05b"]
    assert [info.key for info in store.list("man")] == sorted(keys)[2:]


def test_a_session_is_renewed_before_it_ends():
    with Zone(lifetime=5) as zone:
        store = amazon_at(zone, uri=URI)
        store.put("k", b"x")
        store.put("k", b"x")
    assert zone.faults == []
    assert zone.sessions >= 2


def test_a_session_that_ended_early_is_renewed(zone):
    store = amazon_at(zone, uri=URI)
    store.put("k", b"x")
    zone.revoked.add("token1")
    store.put("k", b"y")
    assert zone.objects["run/k"] == b"y"


def test_an_endpoint_of_ones_own_has_the_bucket_in_its_host_name():
    store = open_store(URI, key="k", secret="s", endpoint_url="http://zone.invalid:9")
    way = store._session._way
    assert (way.pool.endpoint.authority, way.base_path) == (f"{BUCKET}.zone.invalid:9", "")


def test_the_key_of_encryption_goes_with_the_session_and_the_objects(zone):
    additional = {"ServerSideEncryption": "aws:kms", "SSEKMSKeyId": "arn:aws:kms:us-east-1:1:key/2"}
    amazon_at(zone, uri=URI, s3_additional_kwargs=additional).put("k", b"x")
    for _, _, headers, _ in zone.asked:
        assert headers["x-amz-server-side-encryption-aws-kms-key-id"] == "arn:aws:kms:us-east-1:1:key/2"


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"anon": True}, "wants a session"),
        ({"s3_additional_kwargs": {"Tagging": "a=b"}}, "have no Tagging"),
        ({"requester_pays": True}, "have no RequestPayer"),
    ],
)
def test_what_a_directory_bucket_does_not_have_is_refused(options, named):
    with pytest.raises(ConfigError, match=named):
        open_store(URI, **options)


def test_who_may_not_have_a_session_is_told(zone):
    def refused(asked):
        asked.body()
        asked.answer(403, error_body("AccessDenied", "s3express:CreateSession"))

    zone.then = refused
    store = amazon_at(zone, uri=URI)
    for verb in (
        lambda: store.put("k", b"x"),
        lambda: list(store.list("")),
        lambda: store.put("k", bytes(SMALLEST_PART + 1)),
    ):
        with pytest.raises(StorePermissionError, match="s3express:CreateSession"):
            verb()
