"""A server for tests as a child process: what all of them share.

Invariants: it listens on loopback only; it is never alive longer than the process that started it, not even when
that one is killed; its data go with it.

Called by the servers beside this file.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from abc import ABC, abstractmethod
from pathlib import Path
from typing import ClassVar, Final, Self

LOOPBACK: Final = "127.0.0.1"
#: Some servers open each of their ports again, this much higher, for their own RPC: each port's twin is free too.
RPC_OFFSET: Final = 10_000
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


class NotReadyError(Exception):
    """The server does not answer as it should yet."""


class ChildServer(ABC):
    """A server on ``127.0.0.1``: a context manager, or ``start()`` and ``stop()``.

    ``kill()`` is what a crash does to it; ``restart()`` brings it back with the same ports, keys and data. Not thread-safe.
    ``RuntimeError`` with the end of the server's log if it does not come up.
    """

    #: Its name in messages.
    title: ClassVar[str]
    #: What it needs a port for; the first is the one that clients use.
    services: ClassVar[tuple[str, ...]] = ("http",)

    def __init__(self) -> None:
        self._ports: dict[str, int] = {}
        self._directory: Path | None = None
        self._process: subprocess.Popen[bytes] | None = None

    @abstractmethod
    def _command(self, directory: Path, ports: dict[str, int]) -> list[str]:
        """The command line; ``directory`` is the server's own, and its working directory."""

    @abstractmethod
    def _try(self) -> None:
        """Use the server once. :class:`NotReadyError` while it cannot be used."""

    def _prepare(self, directory: Path) -> None:  # noqa: B027 # many read nothing
        """Write what the server reads at its first start."""

    def _sockets(self) -> list[Path]:
        """The sockets that it makes outside its directory, and leaves there when it is killed."""
        return []

    @property
    def endpoint_url(self) -> str:
        """``http://127.0.0.1:<port>``; RuntimeError before ``start()``."""
        if not self._ports:
            raise RuntimeError(f"this {self.title} has no port yet: call start() first")
        return f"http://{LOOPBACK}:{self._ports[self.services[0]]}"

    @property
    def pid(self) -> int:
        """The server's process id; RuntimeError while it does not run."""
        if self._process is None:
            raise RuntimeError(f"this {self.title} does not run: call start() first")
        return self._process.pid

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        """Start on fresh ports with no data, and return once it can be used."""
        if self._process is not None:
            raise RuntimeError(
                f"this {self.title} runs already as process {self._process.pid}: call restart() to begin anew"
            )
        self._directory = Path(tempfile.mkdtemp(prefix=f"objckpt-{self.title.lower()}-"))
        try:
            self._prepare(self._directory)
            for last in (False, False, True):
                # Between the look and the server's own bind another process may take a port.
                self._ports = _free_ports(*self.services)
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
            raise RuntimeError(f"this {self.title} was never started: call start()")
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

    def _launch(self) -> None:
        assert self._directory is not None
        directory = self._directory
        # Defaults come from the environment and from files in the home and the working directory: it gets none.
        environment = {"PATH": os.environ.get("PATH", ""), "HOME": str(directory), "TMPDIR": str(directory)}
        sockets = [str(path) for path in self._sockets()]
        watched = [sys.executable, "-I", "-S", "-c", _WATCHED]
        watched += [str(os.getpid()), str(directory), str(len(sockets)), *sockets]
        with (directory / "server.log").open("ab") as log:
            self._process = subprocess.Popen(
                [*watched, *self._command(directory, self._ports)],
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
        deadline = time.monotonic() + _READY_TIMEOUT
        while True:
            try:
                self._try()
            except NotReadyError as error:
                if process.poll() is not None:
                    text = f"{self.title} ended with {process.returncode} at its start."
                    raise _EndedAtStartError(f"{text} {self._log_tail()}") from error
                if time.monotonic() > deadline:
                    text = f"{self.title} was of no use within {_READY_TIMEOUT:.0f} s ({error})."
                    raise RuntimeError(f"{text} {self._log_tail()}") from error
                time.sleep(0.05)
            else:
                return

    def _log_tail(self) -> str:
        assert self._directory is not None
        text = (self._directory / "server.log").read_text(errors="replace")
        return f"The end of its log:\n{text[-_LOG_TAIL:]}"

    def _terminate(self) -> None:
        if self._process is None:
            return
        self._process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_STOP_TIMEOUT)
        self.kill()


def packaged_binary(package: str, *names: str) -> str:
    """The path of an installed package's file of one of these names, as the package records it. RuntimeError if it is not there."""
    try:
        files = importlib.metadata.files(package) or []
    except importlib.metadata.PackageNotFoundError:
        raise RuntimeError(f"a server is not installed: pip install {package}") from None
    for file in files:
        if file.name in names:
            return str(Path(str(file.locate())).resolve())
    raise RuntimeError(f"the installed {package} holds no {' or '.join(names)}: reinstall it")


def _free_ports(*services: str) -> dict[str, int]:
    """A port for each service, free on loopback as is the one ``RPC_OFFSET`` above it."""
    ports: dict[str, int] = {}
    for port in random.sample(_PORTS, len(_PORTS)):
        if len(ports) == len(services):
            return ports
        if _is_free(port) and _is_free(port + RPC_OFFSET):
            ports[services[len(ports)]] = port
    raise RuntimeError(f"no {len(services)} free ports between {_PORTS.start} and {_PORTS.stop}")


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind((LOOPBACK, port))
        except OSError:
            return False
    return True
