"""A server that says what a test tells it to, request by request, or hangs up in the middle."""

from __future__ import annotations

import contextlib
import socket
import ssl
import subprocess
import threading
from dataclasses import dataclass
from queue import SimpleQueue


class HangUpError(Exception):
    pass


@dataclass
class Asked:
    """A request whose body is not read yet."""

    connection: socket.socket
    method: str
    target: str
    headers: dict[str, str]
    rest: bytes
    number: int
    stopping: threading.Event

    def body(self):
        """Reads the body to its end."""
        wanted = int(self.headers.get("content-length", 0))
        while len(self.rest) < wanted:
            data = self.connection.recv(1 << 20)
            if not data:
                raise HangUpError
            self.rest += data
        return self.rest

    def answer(self, status, body=b"", *, length=None, close=False, **headers):
        headers.setdefault("ETag", '"etag"')
        lines = [f"HTTP/1.1 {status} X", f"Content-Length: {len(body) if length is None else length}"]
        lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
        lines += ["Connection: close"] if close else []
        head = ("\r\n".join(lines) + "\r\n\r\n").encode()
        self.connection.sendall(head + (b"" if self.method == "HEAD" else body))
        if close:
            raise HangUpError


def reply(status, body=b"", **rest):
    def step(asked):
        asked.body()
        asked.answer(status, body, **rest)

    return step


def refuse(status, code, message="", **rest):
    return reply(status, error_body(code, message), **rest)


def error_body(code, message=""):
    return f"<Error><Code>{code}</Code><Message>{message}</Message></Error>".encode()


def drop(asked):
    """Takes the whole request and hangs up: its answer is lost."""
    asked.body()
    raise HangUpError


def hang(asked):
    asked.body()
    asked.stopping.wait()
    raise HangUpError


class ScriptedServer:
    """Plays its steps in the order in which requests come. After the last one it repeats ``then``.

    ``asked``: (method, target, headers, body read) of each request. ``connections``: how many were opened.
    """

    def __init__(self, *steps, then=None, tls=None):
        self.steps = list(steps)
        self.then = then
        self.tls = tls
        self.asked = []
        self.connections = 0
        self.closed = SimpleQueue()
        self.surplus = []
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._open = set()
        self._threads = []

    def __enter__(self):
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self.url = f"{'https' if self.tls else 'http'}://127.0.0.1:{self.port}"
        self._spawn(self._accept)
        return self

    def __exit__(self, *exc):
        self._stopping.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        with self._lock:
            for connection in self._open:
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(5)
        if exc[0] is None:
            assert not self.surplus, f"requests that nobody expected: {self.surplus}"
            assert not self.steps, f"{len(self.steps)} steps were not asked for"

    def methods(self):
        return [method for method, *_ in self.asked]

    def _spawn(self, target, *args):
        thread = threading.Thread(target=target, args=args, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self):
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            self.connections += 1
            self._spawn(self._serve, connection)

    def _serve(self, connection):
        with connection:
            with self._lock:
                self._open.add(connection)
            try:
                if self.tls is not None:
                    connection = self.tls.wrap_socket(connection, server_side=True)
                    with self._lock:
                        self._open.add(connection)
                while not self._stopping.is_set():
                    self._one(connection)
            except (HangUpError, OSError):
                connection.close()
            finally:
                with self._lock:
                    self._open = {entry for entry in self._open if entry.fileno() >= 0}
        self.closed.put(True)

    def _one(self, connection):
        head = b""
        while b"\r\n\r\n" not in head:
            data = connection.recv(1 << 16)
            if not data:
                raise HangUpError
            head += data
        head, _, rest = head.partition(b"\r\n\r\n")
        first, *lines = head.decode("latin-1").split("\r\n")
        method, target, _ = first.split(" ")
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        with self._lock:
            asked = Asked(connection, method, target, headers, rest, len(self.asked), self._stopping)
            entry = [method, target, headers, b""]
            self.asked.append(entry)
            step = self.steps.pop(0) if self.steps else self.then
            if step is None:
                self.surplus.append((method, target))
                step = reply(500)
        try:
            step(asked)
        finally:
            entry[3] = asked.rest


def self_signed(folder):
    """A certificate for 127.0.0.1 that signs itself: its path, and a context of a server that shows it."""
    cert, key = folder / "cert.pem", folder / "key.pem"
    command = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "ec",
        "-pkeyopt",
        "ec_paramgen_curve:prime256v1",
        "-nodes",
    ]
    command += ["-days", "2", "-subj", "/CN=objckpt", "-addext", "subjectAltName=IP:127.0.0.1"]
    subprocess.run([*command, "-keyout", str(key), "-out", str(cert)], check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(cert, key)
    return str(cert), context
