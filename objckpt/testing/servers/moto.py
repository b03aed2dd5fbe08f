"""moto, which plays AWS inside this process: S3, STS and IAM with the errors that AWS gives, without a server to start.

Invariants: it listens on loopback only; what it holds is gone when it is stopped. All of a process's moto servers share one
state (moto keeps it in globals), so a process should run one at a time.

Called by tests of S3 errors and options. It is no proof of AWS: ``tests/test_conformance_moto.py`` lists where it deviates.
"""

from __future__ import annotations

import json
import logging
import urllib.request
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Self

from objckpt.testing.servers.child import LOOPBACK

if TYPE_CHECKING:
    from moto.server import ThreadedMotoServer
    from mypy_boto3_s3 import S3Client


class Moto:
    """moto's server in a thread: a context manager, or ``start()`` and ``stop()``. Any credentials do, but inside ``enforcing()``."""

    def __init__(self, bucket: str = "objckpt-test") -> None:
        self.bucket = bucket
        self.key = "moto-key"
        self.secret = uuid.uuid4().hex
        self._server: ThreadedMotoServer | None = None

    @property
    def endpoint_url(self) -> str:
        """``http://127.0.0.1:<port>``; RuntimeError before ``start()``."""
        if self._server is None:
            raise RuntimeError("this moto does not run: call start() first")
        return f"http://{LOOPBACK}:{self._server.get_host_and_port()[1]}"

    @property
    def storage_options(self) -> dict[str, Any]:
        """What ``open_store("s3://<bucket>/...", **storage_options)`` needs to come here."""
        return {"key": self.key, "secret": self.secret, "endpoint_url": self.endpoint_url}

    @property
    def as_aws(self) -> dict[str, Any]:
        """Likewise, for a store that takes this for AWS itself: moto is the proxy for all of AWS's names, which it plays."""
        return {
            "key": self.key,
            "secret": self.secret,
            "use_ssl": False,
            "client_kwargs": {"region_name": "us-east-1"},
            "config_kwargs": {"proxies": {"http": self.endpoint_url}},
        }

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        """Start on a fresh port with one bucket."""
        from moto.server import ThreadedMotoServer  # noqa: PLC0415 # it takes its time to load

        # A line to stderr for each request.
        logging.getLogger("werkzeug").setLevel(logging.WARNING)
        self._server = ThreadedMotoServer(LOOPBACK, 0, verbose=False)
        self._server.start()
        self._admin("reset")
        self.client().create_bucket(Bucket=self.bucket)

    def stop(self) -> None:
        """End it, and forget what it held. Does nothing if it does not run."""
        if self._server is not None:
            self._admin("reset")
            self._server.stop()
            self._server = None

    def make_bucket(self) -> str:
        """Make a new, empty bucket and return its name."""
        name = f"objckpt-{uuid.uuid4().hex[:16]}"
        self.client().create_bucket(Bucket=name)
        return name

    def client(self, service: str = "s3", **arguments: Any) -> S3Client:
        """A boto3 client of S3, or of another ``service``: no retries, path style; ``arguments`` are those of ``boto3.client``."""
        import boto3  # noqa: PLC0415 # a test that only needs the address need not load it
        from botocore.config import Config  # noqa: PLC0415 # likewise

        settings: dict[str, Any] = {
            "endpoint_url": self.endpoint_url,
            "region_name": "us-east-1",
            "aws_access_key_id": self.key,
            "aws_secret_access_key": self.secret,
            "config": Config(retries={"total_max_attempts": 1}, s3={"addressing_style": "path"}),
        }
        made: Any = boto3.client
        client: S3Client = made(service, **(settings | arguments))
        return client

    def make_user(self, actions: Sequence[str]) -> dict[str, str]:
        """``key`` and ``secret`` of a new IAM user who may do ``actions`` (``s3:GetObject``, ``*`` ...) on everything."""
        iam: Any = self.client("iam")
        name = uuid.uuid4().hex
        iam.create_user(UserName=name)
        statement = {"Effect": "Allow", "Action": list(actions), "Resource": "*"}
        document = json.dumps({"Version": "2012-10-17", "Statement": [statement]})
        iam.put_user_policy(UserName=name, PolicyName="objckpt", PolicyDocument=document)
        made = iam.create_access_key(UserName=name)["AccessKey"]
        return {"key": made["AccessKeyId"], "secret": made["SecretAccessKey"]}

    @contextmanager
    def enforcing(self) -> Iterator[None]:
        """Meanwhile signatures and policies are checked, and none but the users of :meth:`make_user` is known."""
        self._admin("reset-auth", b"0")
        try:
            yield
        finally:
            self._admin("reset-auth", b"inf")

    def _admin(self, call: str, data: bytes = b"") -> None:
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        # Named a form, as urllib does by itself, it would be taken apart as one.
        plain = {"Content-Type": "text/plain"}
        request = urllib.request.Request(f"{self.endpoint_url}/moto-api/{call}", data, plain)  # noqa: S310 # loopback's http
        opener.open(request).close()
