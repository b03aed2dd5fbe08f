"""A TCP proxy on loopback that harms chosen exchanges between a client and an HTTP server.

Invariants: what no trouble is about passes unchanged; an answer that is dropped, or cut, was begun by the server, so the request has been
carried out; all connections end with the proxy.

It understands of HTTP/1.1 no more than where a request begins (clients here do not pipeline) and the interim answer ``100 Continue``; no
TLS. Requests keep their Host header, so a client that signs it signs the proxy's. Called by tests of stores, ours and those of others.
"""

from __future__ import annotations

import contextlib
import enum
import re
import selectors
import socket
import struct
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, Self
from urllib.parse import urlsplit

_CHUNK: Final = 1 << 16
_HEAD_END: Final = b"\r\n\r\n"
_LONGEST_HEAD: Final = 1 << 16
_BEGINS: Final = re.compile(rb"[A-Z]+ \S+ HTTP/1\.1\r\n")
_INTERIM: Final = b"HTTP/1.1 100"


class Harm(enum.Enum):
    """What becomes of an exchange."""

    CUT_REQUEST = "cut the request"  # the server gets the first bytes of it
    CUT_ANSWER = "cut the answer"  # the client gets the first bytes of it: none, if not said otherwise
    DELAY = "delay"  # the answer comes later
    HALF_OPEN = "half-open"  # the server carries it out, and the client waits for ever
    HOLD = "hold"  # the server gets the first bytes of the request, and the others when it is released


@dataclass(frozen=True, slots=True)
class Trouble:
    """``harm`` to requests whose head (from the method on, headers included) ``pattern`` (a regular expression) is found in.

    The ``nth`` of them (from 1) and the ``times - 1`` that follow it; all from there on, if that is None. ``after`` bytes pass before it
    stands still, or before a cut, which ends both connections, the client's with RST if ``reset``. ``seconds`` are a delay's.
    """

    harm: Harm
    pattern: bytes
    nth: int = 1
    times: int | None = 1
    after: int = 0
    reset: bool = False
    seconds: float = 0.0


class _HangUpError(Exception):
    """Both connections are to end."""


class FaultProxy:
    """A proxy in front of ``target`` (a URL), from entering to leaving the block. ``requests`` are the first lines of all that passed.

    ``hits`` are those that met a trouble, with it. ``held`` tells that one stands still, until :meth:`release`.
    """

    def __init__(self, target: str, troubles: Iterable[Trouble] = ()) -> None:
        parts = urlsplit(target)
        self._target = (parts.hostname or "", parts.port or 80)
        self._troubles: list[Trouble] = list(troubles)
        self._counts: list[int] = [0] * len(self._troubles)
        self.requests: list[str] = []
        self.hits: list[tuple[str, Trouble]] = []
        self._lock = threading.Lock()
        self.held = threading.Event()
        self._released = threading.Event()
        self._stopping = threading.Event()
        self._open: set[socket.socket] = set()
        self._threads: list[threading.Thread] = []

    def __enter__(self) -> Self:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._spawn(self._accept)
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        self.release()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        with self._lock:
            for connection in self._open:
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()

    @property
    def url(self) -> str:
        """Where clients are to go instead of the target."""
        return f"http://127.0.0.1:{self._listener.getsockname()[1]}"

    def arm(self, *troubles: Trouble) -> None:
        """From now on these alone, counted anew; what was seen so far is forgotten."""
        with self._lock:
            self._troubles = list(troubles)
            self._counts = [0] * len(troubles)
            self.requests.clear()
            self.hits.clear()

    def release(self) -> None:
        """Let go on what is held, and hold nothing more."""
        self._released.set()

    def hold(self) -> None:
        """Wait for the release."""
        self.held.set()
        self._released.wait()

    def _spawn(self, *call: object) -> None:
        thread = threading.Thread(target=call[0], args=call[1:], name="fault-proxy", daemon=True)  # type: ignore[arg-type]
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            self._spawn(self._carry, client)

    def _carry(self, client: socket.socket) -> None:
        """One client's connection, to its end."""
        with client, contextlib.suppress(OSError, _HangUpError):
            client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with socket.create_connection(self._target) as server:
                server.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                with self._lock:
                    if self._stopping.is_set():
                        return
                    self._open |= {client, server}
                try:
                    _Connection(self, client, server).run()
                finally:
                    with self._lock:
                        self._open -= {client, server}

    def meet(self, head: bytes) -> Trouble | None:
        """Note a request; the trouble that it meets."""
        line = head.partition(b"\r\n")[0].decode("ascii", "replace")
        with self._lock:
            self.requests.append(line)
            hitting = None
            for position, trouble in enumerate(self._troubles):
                if re.search(trouble.pattern, head):
                    self._counts[position] += 1
                    later = self._counts[position] - trouble.nth
                    if hitting is None and later >= 0 and (trouble.times is None or later < trouble.times):
                        hitting = trouble
            if hitting is not None:
                self.hits.append((line, hitting))
        return hitting

    def wait(self, seconds: float) -> None:
        """Wait so long, or until the proxy ends."""
        self._stopping.wait(seconds)


class _Connection:
    """A client's connection and the one to the server: one exchange after the other."""

    def __init__(self, proxy: FaultProxy, client: socket.socket, server: socket.socket) -> None:
        self._proxy = proxy
        self._client = client
        self._server = server
        self._answered = True  # what comes next from the client is a request
        self._head = b""
        self._trouble: Trouble | None = None
        self._passed = 0  # bytes of the request or of the answer, as its trouble counts them

    def run(self) -> None:
        with (
            selectors.DefaultSelector() as selector
        ):  # not select(): a test process may have more than 1024 descriptors
            selector.register(self._client, selectors.EVENT_READ, self._ask)
            selector.register(self._server, selectors.EVENT_READ, self._answer)
            while True:
                for key, _ in selector.select():
                    side = self._client if key.fileobj is self._client else self._server
                    data = side.recv(_CHUNK)
                    if not data:
                        return
                    key.data(data)

    def _ask(self, data: bytes) -> None:
        if self._answered:
            self._head += data
            if _HEAD_END not in self._head and len(self._head) < _LONGEST_HEAD:
                return
            data, self._head = self._head, b""
            if _BEGINS.match(data):  # else it is the rest of a body whose answer came early
                self._answered = False
                self._passed = 0
                self._trouble = self._proxy.meet(data.partition(_HEAD_END)[0])
        trouble = self._trouble
        match None if trouble is None else trouble.harm:
            case Harm.CUT_REQUEST:
                assert trouble is not None
                self._pass(self._server, data, trouble)
            case Harm.HOLD:
                assert trouble is not None
                allowed = max(0, trouble.after - self._passed)
                self._server.sendall(data[:allowed])
                if len(data) > allowed:
                    self._proxy.hold()
                    self._server.sendall(data[allowed:])
                self._passed += len(data)
            case _:
                self._server.sendall(data)

    def _answer(self, data: bytes) -> None:
        if not self._answered and data.startswith(_INTERIM):
            self._client.sendall(data)
            return
        first, self._answered = not self._answered, True
        trouble = self._trouble
        match None if trouble is None else trouble.harm:
            case Harm.CUT_ANSWER:
                assert trouble is not None
                self._pass(self._client, data, trouble)
            case Harm.HALF_OPEN:
                return
            case Harm.DELAY if first:
                assert trouble is not None
                self._proxy.wait(trouble.seconds)
                self._client.sendall(data)
            case _:
                self._client.sendall(data)

    def _pass(self, to: socket.socket, data: bytes, trouble: Trouble) -> None:
        """Pass on what may pass before a cut."""
        allowed = data[: max(0, trouble.after - self._passed)]
        to.sendall(allowed)
        self._passed += len(allowed)
        if self._passed >= trouble.after:
            if trouble.reset:
                # No time to linger: the kernel sends RST on close.
                self._client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            raise _HangUpError
