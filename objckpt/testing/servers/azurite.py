"""Azurite, Microsoft's emulator of Azure Blob Storage: one account, one container. It is an npm package, and so not on every machine.

Invariant: its data live in its memory, so that ``kill()`` loses them.

Called by the tests of the Azure store.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any, Final

from objckpt.testing.servers.child import LOOPBACK, ChildServer, NotReadyError

#: Known to everybody: Microsoft documents them for its emulator.
_ACCOUNT: Final = "devstoreaccount1"
_KEY: Final = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="


class Azurite(ChildServer):
    """Azurite's blob service. Needs node and ``azurite-blob`` on the PATH (``npm install -g azurite``), and adlfs."""

    title = "Azurite"

    def __init__(self, container: str = "objckpt-test") -> None:
        super().__init__()
        self.container = container

    @staticmethod
    def version() -> str | None:
        """Of the Azurite on the PATH; None if there is none."""
        program = shutil.which("azurite-blob")
        if program is None:
            return None
        done = subprocess.run([program, "--version"], capture_output=True, text=True, check=True, timeout=60)
        return done.stdout.strip()

    @property
    def storage_options(self) -> dict[str, Any]:
        """What ``open_store("abfs://<container>/...", **storage_options)`` needs to come here."""
        return {"connection_string": self.connection_string(f"AccountKey={_KEY}")}

    def connection_string(self, credentials: str) -> str:
        """One with these ``credentials`` (``AccountKey=...`` or ``SharedAccessSignature=...``)."""
        endpoint = f"{self.endpoint_url}/{_ACCOUNT}"
        return f"DefaultEndpointsProtocol=http;AccountName={_ACCOUNT};{credentials};BlobEndpoint={endpoint};"

    def reading(self) -> dict[str, Any]:
        """``storage_options`` that may list and read only."""
        from datetime import UTC, datetime, timedelta  # noqa: PLC0415 # with its only user

        from azure.storage.blob import (  # noqa: PLC0415 # an extra
            AccountSasPermissions,
            ResourceTypes,
            generate_account_sas,
        )

        signature = generate_account_sas(
            _ACCOUNT,
            _KEY,
            ResourceTypes(container=True, object=True),
            AccountSasPermissions(read=True, list=True),
            datetime.now(UTC) + timedelta(hours=1),
        )
        return {"connection_string": self.connection_string(f"SharedAccessSignature={signature}")}

    def client(self) -> Any:
        """Azure's own client of the container, which shares no code with the store under test."""
        from azure.storage.blob import ContainerClient  # noqa: PLC0415 # an extra

        return ContainerClient.from_connection_string(
            self.storage_options["connection_string"], self.container
        )

    def _command(self, directory: Path, ports: dict[str, int]) -> list[str]:  # noqa: ARG002 # it keeps nothing on disk
        program = shutil.which("azurite-blob")
        if program is None:
            raise RuntimeError("Azurite is not on the PATH: npm install -g azurite")
        address = ["--blobHost", LOOPBACK, "--blobPort", str(ports["http"])]
        return [
            program,
            *address,
            "--inMemoryPersistence",
            "--silent",
            "--disableTelemetry",
            "--skipApiVersionCheck",
        ]

    def _try(self) -> None:
        from azure.core.exceptions import AzureError, ResourceExistsError  # noqa: PLC0415 # an extra

        try:
            self.client().create_container(retry_total=0, connection_timeout=2)
        except ResourceExistsError:
            return
        except AzureError as error:
            raise NotReadyError(str(error)) from error
