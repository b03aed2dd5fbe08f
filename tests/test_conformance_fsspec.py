"""The conformance suite over what fsspec offers from other packages: Azure through adlfs, on Azurite."""

from __future__ import annotations

import uuid
from dataclasses import replace
from typing import ClassVar

import pytest

from objckpt.testing.conformance import ObjectStoreTests, StoreSpec
from objckpt.testing.servers.azurite import Azurite


@pytest.fixture(scope="module")
def azurite():
    pytest.importorskip("adlfs", reason="adlfs is not installed: pip install 'objckpt[azure]'")
    if Azurite.version() is None:
        pytest.skip("Azurite is not on the PATH: npm install -g azurite")
    with Azurite() as server:
        yield server


class TestAzurite(ObjectStoreTests):
    backend, server = "abfs://", "Azurite"
    part_size = 5 << 20
    # Above 64 MiB the client sends blocks.
    torn_size = 80 << 20
    race_rounds = 3
    known_deviations: ClassVar = {
        "test_an_odd_key_is_taken_as_it_is[backslash]": "it takes a backslash for a slash, so such a key is refused",
    }

    @classmethod
    def server_version(cls):
        return Azurite.version() or ""

    @pytest.fixture(autouse=True)
    def _server(self, azurite):
        self.server = azurite
        self.raw = azurite.client()

    @pytest.fixture
    def store_spec(self, _server):
        uri = f"abfs://{self.server.container}/{uuid.uuid4().hex}"
        return StoreSpec(uri, {**self.server.storage_options, "deadline": 5})

    def raw_put(self, spec, key, data):
        self.raw.upload_blob(self._full(spec, key), data)

    def raw_get(self, spec, key):
        from azure.core.exceptions import ResourceNotFoundError

        try:
            return self.raw.download_blob(self._full(spec, key)).readall()
        except ResourceNotFoundError:
            return None

    def raw_keys(self, spec):
        head = self._full(spec, "")
        return {blob.name.removeprefix(head) for blob in self.raw.list_blobs(name_starts_with=head)}

    def wrong_credentials(self, spec):
        wrong = self.server.connection_string("AccountKey=" + "bm90IHRoZSBrZXk=")
        return replace(spec, storage_options={"connection_string": wrong, "deadline": 5})

    def readonly_credentials(self, spec):
        return replace(spec, storage_options={**self.server.reading(), "deadline": 5})

    def missing_bucket(self, spec):
        return replace(spec, uri=f"abfs://objckpt-no-such-container/{uuid.uuid4().hex}")

    def unreachable_endpoint(self, spec):
        # Port 9 of loopback: bound by nobody, so the connection is refused at once.
        string = self.server.storage_options["connection_string"].replace(
            self.server.endpoint_url, "http://127.0.0.1:9"
        )
        return replace(spec, storage_options={"connection_string": string, "deadline": 0.5})

    def _full(self, spec, key):
        return spec.uri.removeprefix(f"abfs://{self.server.container}/") + "/" + key
