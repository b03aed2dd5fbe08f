"""What the GCS store makes of options, URIs and a network that fails: no server that knows GCS is needed for it."""

from __future__ import annotations

import json
import random
import subprocess
import sys

import pytest
from scripted_http import ScriptedServer, drop, hang, reply, self_signed

from objckpt.errors import CommitUnknownError, ConfigError, StoreError, StoreTransientError
from objckpt.store import open_store, read_all

SMALL = random.Random(7).randbytes(10_000)


def test_create_that_nobody_answers_is_unknown():
    with ScriptedServer(then=drop) as server:
        store = open_store("gs://b/run", token="anon", endpoint_url=server.url, deadline=0.3)
        with pytest.raises(CommitUnknownError, match="not known"):
            store.create("v/1", b"mine")


def test_create_that_never_left_is_not_unknown():
    store = open_store("gs://b/run", token="anon", endpoint_url="http://127.0.0.1:9", deadline=0.3)
    with pytest.raises(StoreTransientError, match=r"127\.0\.0\.1:9"):
        store.create("v/1", b"mine")


def test_google_itself_is_not_asked_whether_it_has_the_xml_api():
    session = open_store("gs://b", token="anon")._session
    assert (session.endpoint, session.has_xml) == ("https://storage.googleapis.com", True)


def test_a_truncated_body_is_resumed_from_where_it_stopped():
    def cut(first, count):
        rest = SMALL[first:]
        headers = {"Content_Range": f"bytes {first}-{len(SMALL) - 1}/{len(SMALL)}"}
        return lambda asked: asked.answer(206, rest[:count], length=len(rest), close=True, **headers)

    rest = reply(206, SMALL[4001:], Content_Range=f"bytes 4001-{len(SMALL) - 1}/{len(SMALL)}")
    with ScriptedServer(cut(0, 4000), cut(4000, 0), cut(4000, 1), rest) as server:
        store = open_store("gs://b/run", token="anon", endpoint_url=server.url)
        assert read_all(store, "k", len(SMALL)) == SMALL
    ranges = [headers["range"].split("-")[0] for _, _, headers, _ in server.asked]
    assert ranges == [f"bytes={first}" for first in (0, 4000, 4000, 4001)]


def test_a_hanging_server_ends_at_the_deadline():
    with ScriptedServer(then=hang) as server:
        store = open_store("gs://b/run", token="anon", endpoint_url=server.url, deadline=0.2)
        for verb in (
            lambda: store.put("k", SMALL),
            lambda: store.head("k"),
            lambda: store.delete(["k", "l"]),
        ):
            with pytest.raises(StoreTransientError, match=server.url):
                verb()


def test_a_certificate_is_asked_for_by_both_ways(tmp_path, monkeypatch):
    bundle, context = self_signed(tmp_path)
    about = json.dumps({"name": "run/k", "size": "0", "timeCreated": "2026-01-01T00:00:00Z"}).encode()
    media = reply(206, SMALL[:4], Content_Range="bytes 0-3/4")
    with ScriptedServer(media, reply(200, about), tls=context) as server:
        options = {"token": "anon", "endpoint_url": server.url, "deadline": 5}
        untrusting = open_store("gs://b/run", **options)
        for verb in (lambda: untrusting.read("k", memoryview(bytearray(4))), lambda: untrusting.head("k")):
            with pytest.raises(StoreError, match="REQUESTS_CA_BUNDLE") as caught:
                verb()
            assert not isinstance(caught.value, StoreTransientError)
        monkeypatch.setenv("REQUESTS_CA_BUNDLE", bundle)
        store = open_store("gs://b/run", **options)
        assert store.read("k", memoryview(bytearray(4))) == 4
        assert store.head("k").size == 0


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"tokn": "x"}, "token"),
        ({"endpoint": "http://x"}, "endpoint_url"),
        ({"requests_timeout": 3}, "deadline"),
        ({"anon": True}, "token"),
        ({"token": "browser"}, "GOOGLE_APPLICATION_CREDENTIALS"),
        ({"token": 3}, "path"),
        ({"endpoint_url": "http://user:hunter2@host"}, "endpoint_url"),
        ({"endpoint_url": "http://host/storage/v1"}, "without a path"),
        ({"endpoint_url": "host:80"}, "endpoint_url"),
        ({"project": 3}, "project"),
        ({"part_size": 1}, "5 MiB"),
        ({"part_size": True}, "5 MiB"),
        ({"connections": 0}, "connections"),
        ({"deadline": 0}, "deadline"),
    ],
)
def test_an_option_that_cannot_be_is_refused_with_what_to_say_instead(options, named):
    with pytest.raises(ConfigError) as caught:
        open_store("gs://bucket/run", **options)
    assert named in str(caught.value)
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize(
    ("token", "named"),
    [
        ("ya29.hunter2", "no file"),
        ({"type": "external_account", "secret": "hunter2"}, "GOOGLE_APPLICATION_CREDENTIALS"),
        ({"type": "authorized_user", "client_id": "hunter2"}, "not complete"),
        ({"type": "service_account", "private_key": "hunter2", "client_email": "x", "token_uri": "y"}, "not"),
    ],
)
def test_a_token_that_cannot_be_is_told_at_the_first_verb_and_not_shown(token, named):
    store = open_store("gs://bucket/run", token=token)
    with pytest.raises(ConfigError, match=named) as caught:
        store.head("k")
    assert "hunter2" not in str(caught.value) + repr(store) + repr(store._options)


@pytest.mark.parametrize("uri", ["gs://", "gs:///run", "gs://key:hunter2@bucket/run"])
def test_a_uri_that_cannot_be_is_refused(uri):
    with pytest.raises(ConfigError) as caught:
        open_store(uri)
    assert "hunter2" not in str(caught.value)


def test_the_uri_is_the_same_with_and_without_slashes():
    for uri in ("gs://bucket/a/b", "gs://bucket/a/b/", "gcs://bucket//a/b//"):
        assert open_store(uri).uri == "gs://bucket/a/b"
    assert open_store("gs://bucket/").uri == open_store("gs://bucket").uri == "gs://bucket"


def test_a_store_is_cheap_to_make():
    program = """
import sys
from objckpt.store import open_store
open_store("gs://bucket/run", token="anon")
print(sorted({"google.auth", "google.cloud.storage", "boto3", "torch", "fsspec"} & set(sys.modules)))
"""
    found = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    assert found.stdout.strip() == "[]"
