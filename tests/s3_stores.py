"""S3 stores that ask a server which a test holds in its hand, one of them taking it for AWS; what is put and answered there."""

from __future__ import annotations

import base64
import functools

import pytest
from awscrt.checksums import crc64nvme
from scripted_http import refuse, reply

from objckpt.store.retry import RetryPolicy
from objckpt.store.s3 import S3Store
from objckpt.store.s3_options import SMALLEST_PART, S3Options

KEY = "/bucket/run/k"
DATA = bytes(range(256)) * 40
SIZE = len(DATA)
#: Two parts.
BIG = bytes(SMALLEST_PART) + b"tail"
CRC = base64.b64encode(crc64nvme(DATA).to_bytes(8, "big")).decode()
ABSENT = refuse(404, "NoSuchKey")
CREATED = reply(
    200, b"<InitiateMultipartUploadResult><UploadId>u/1</UploadId></InitiateMultipartUploadResult>"
)
COMPLETED = reply(200, b"<CompleteMultipartUploadResult><ETag>x</ETag></CompleteMultipartUploadResult>")


def partial(body, first, size, **rest):
    """The answer to a ranged GET: ``body`` from byte ``first`` on, of an object of ``size`` bytes."""
    return reply(206, body, Content_Range=f"bytes {first}-{first + len(body) - 1}/{size}", **rest)


@pytest.fixture(scope="module", autouse=True)
def one_reader_of_boto3s_files():
    """Each new session reads the description of S3 anew (150 ms of a test): they share one reader."""
    import botocore.session

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(botocore.session, "create_loader", functools.cache(botocore.session.create_loader))
        yield


def store_at(server, *, uri="s3://bucket/run", deadline=20, **options):
    """A store that asks ``server``, with waits between attempts that a test can bear."""
    given = {
        "key": "key-id",
        "secret": "not-a-secret",
        "endpoint_url": server.url,
        "part_size": SMALLEST_PART,
        "deadline": deadline,
    }
    store = S3Store(uri, S3Options.from_storage_options(given | options))
    store._retry = RetryPolicy(deadline=deadline, first_wait=0.001, longest_wait=0.01)
    return store


def amazon_at(server, **options):
    """Likewise, one that takes it for AWS: the server is the proxy for all hosts."""
    options.setdefault("client_kwargs", {"region_name": "us-east-1"})
    proxies = {"config_kwargs": {"proxies": {"http": server.url}}}
    return store_at(server, endpoint_url=None, use_ssl=False, **proxies, **options)
