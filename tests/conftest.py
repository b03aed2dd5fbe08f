"""What the tests share. The server is one per xdist worker; each test has a prefix or a bucket of its own in it."""

from __future__ import annotations

import functools
import uuid

import pytest

pytest.register_assert_rewrite("objckpt.testing")

from objckpt.testing.servers import SeaweedFS  # noqa: E402 # after the line above


@pytest.fixture(scope="session")
def weed():
    """A SeaweedFS for all tests of this worker that do not kill it."""
    import botocore.session

    with pytest.MonkeyPatch.context() as patch, SeaweedFS() as server:
        # Each new session reads the description of S3 anew (150 ms of a test): they share one reader.
        patch.setattr(botocore.session, "create_loader", functools.cache(botocore.session.create_loader))
        yield server


@pytest.fixture(scope="session")
def weed_client(weed):
    """The administrator's boto3 client of that server, which shares no code with the store under test."""
    return weed.client()


@pytest.fixture
def bucket_uri(weed):
    """A prefix in its bucket that no other test uses, as ``s3://bucket/prefix``."""
    return f"s3://{weed.bucket}/{uuid.uuid4().hex}"
