"""The conformance suite over moto, in this process: what it proves of AWS is little, what it plays is quick.

What moto lacks is listed here by test, so that a moto that mends it is noticed.
"""

from __future__ import annotations

import contextlib
import functools
import uuid
from dataclasses import replace
from typing import ClassVar
from urllib.parse import urlsplit

import pytest

from objckpt.testing.conformance import ObjectStoreTests, StoreSpec
from objckpt.testing.servers import Moto


@pytest.fixture(scope="module")
def moto():
    import botocore.session

    with pytest.MonkeyPatch.context() as patch, Moto() as server:
        # Each new session reads the description of S3 anew: they share one reader.
        patch.setattr(botocore.session, "create_loader", functools.cache(botocore.session.create_loader))
        yield server


class TestMoto(ObjectStoreTests):
    backend, server, distribution = "s3://", "moto", "moto"
    part_size = 5 << 20
    torn_size = 12 << 20
    # The races are another server's matter: this one answers in one process, a request at a time.
    race_rounds = 1
    known_deviations: ClassVar = {
        "test_an_orphaned_upload_is_aborted_and_a_young_one_spared": "it says that every upload began in 2010",
    }

    @pytest.fixture(autouse=True)
    def _server(self, moto):
        self.moto = moto
        self.client = moto.client()
        with contextlib.ExitStack() as self.stack:
            yield

    @pytest.fixture
    def store_spec(self, moto):
        options = {**moto.storage_options, "part_size": self.part_size, "deadline": 5}
        return StoreSpec(f"s3://{moto.bucket}/{uuid.uuid4().hex}", options)

    # moto lies in this process: its own memory is the second way in.

    def raw_put(self, spec, key, data):
        self._backend.put_object(self.moto.bucket, self._full(spec, key), data)

    def raw_get(self, spec, key):
        found = self._bucket.keys.get(self._full(spec, key))
        return None if found is None else found.value

    def raw_keys(self, spec):
        head = self._full(spec, "")
        return {key.removeprefix(head) for key in list(self._bucket.keys) if key.startswith(head)}

    @property
    def _backend(self):
        from moto.core import DEFAULT_ACCOUNT_ID
        from moto.s3.models import s3_backends

        return s3_backends[DEFAULT_ACCOUNT_ID]["aws"]

    @property
    def _bucket(self):
        return self._backend.get_bucket(self.moto.bucket)

    def raw_begin_upload(self, spec, key):
        place = {"Bucket": self.moto.bucket, "Key": self._full(spec, key)}
        upload_id = self.client.create_multipart_upload(**place)["UploadId"]
        self.client.upload_part(**place, UploadId=upload_id, PartNumber=1, Body=b"half of it")
        return True

    def raw_uploads(self, spec):
        head = self._full(spec, "")
        found = self.client.list_multipart_uploads(Bucket=self.moto.bucket, Prefix=head).get("Uploads", [])
        return {entry["Key"].removeprefix(head) for entry in found}

    def wrong_credentials(self, spec):
        admin = self._enforce()
        return replace(spec, storage_options={**spec.storage_options, **admin, "secret": "not-the-secret"})

    def readonly_credentials(self, spec):
        reader = self.moto.make_user(["s3:GetObject", "s3:ListBucket"])
        self._enforce()
        return replace(spec, storage_options={**spec.storage_options, **reader})

    def _enforce(self):
        """From here to the end of the test policies hold, and the client is an administrator's."""
        admin = self.moto.make_user(["*"])
        self.stack.enter_context(self.moto.enforcing())
        self.client = self.moto.client(aws_access_key_id=admin["key"], aws_secret_access_key=admin["secret"])
        return admin

    def missing_bucket(self, spec):
        return replace(spec, uri=f"s3://objckpt-no-such-bucket/{uuid.uuid4().hex}")

    def unreachable_endpoint(self, spec):
        # Port 9 of loopback: bound by nobody, so the connection is refused at once.
        options = {"endpoint_url": "http://127.0.0.1:9", "deadline": 0.5}
        return replace(spec, storage_options={**spec.storage_options, **options})

    def _full(self, spec, key):
        return urlsplit(spec.uri).path.strip("/") + "/" + key
