"""HTTP/1.1 over kept-alive connections, with headers that the stores sign or put a token into: the bytes' path.

Invariants: a body is sent from the caller's memory and received into the caller's memory, never copied, hashed or collected
here; a connection goes back to the pool only if its answer was read to the end; an answer that came is never lost to a broken
pipe; every wait on a socket has a time-out. Nothing is retried here but the reopening of a pooled connection that the server
had closed meanwhile.

Called by the modules of ``s3`` and ``gcs``.
"""

from __future__ import annotations

import base64
import email.utils
import http.client
import logging
import os
import socket
import ssl
import threading
import weakref
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final
from urllib.parse import unquote, urlsplit

if TYPE_CHECKING:
    from collections.abc import Mapping

_log = logging.getLogger("objckpt.store")

#: What one ``readinto`` takes at most: a time-out in the middle of one loses the count of what came, so it bounds a resume's loss.
_RECEIVE_STEP: Final = 4 << 20
#: Bodies of refusals and of small answers; what is longer is cut.
_LONGEST_TEXT: Final = 1 << 20
#: How long an answer is waited for that may have come before the sending broke, in seconds.
_EARLY_ANSWER_WAIT: Final = 2.0
_MOST_IDLE: Final = 64
_OK: Final = 200
_PARTIAL: Final = 206


class NoAnswerError(Exception):
    """No status line came. ``sent``: the request may have reached the server, so it may have had its effect."""

    def __init__(self, message: str, *, sent: bool) -> None:
        super().__init__(message)
        self.sent = sent


class UntrustedServerError(Exception):
    """The server's certificate was not accepted: trying again does not help."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where requests go. Time-outs in seconds: ``connect_timeout`` for TCP and TLS to stand, ``read_timeout`` for bytes to move.

    ``proxy`` is a URL, which may hold a password.
    """

    scheme: str
    host: str
    port: int | None
    tls: ssl.SSLContext | None
    connect_timeout: float = 10.0
    read_timeout: float = 60.0
    proxy: str | None = field(default=None, repr=False)

    @property
    def authority(self) -> str:
        """``host`` or ``host:port``, as the Host header has it."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port is None else f"{host}:{self.port}"


@dataclass(frozen=True, slots=True)
class Answer:
    """What a server said.

    ``body`` is the text of a refusal or of a small answer. Where a buffer was given and the status is 200 or 206, ``received``
    bytes of it are filled, and ``failure`` says why the body ended before its time, if it did.
    """

    status: int
    headers: http.client.HTTPMessage
    body: bytes = b""
    received: int = 0
    failure: Exception | None = None

    @property
    def is_whole(self) -> bool:
        """Whether a 200 or 206 carries the whole object. Some servers answer a range with 200, and yet a Content-Range."""
        return self.status == _OK and "Content-Range" not in self.headers

    def extent(self) -> tuple[int, int | None]:
        """The first byte that a 200 or 206 brings, and the object's size (None if it is not told); (-1, None) if it is not of that form."""
        if self.is_whole:
            length = self.headers.get("Content-Length", "")
            return 0, int(length) if length.isdecimal() else None
        interval, _, size = self.headers.get("Content-Range", "").removeprefix("bytes ").partition("/")
        first, _, last = interval.partition("-")
        if not (first.isdecimal() and last.isdecimal()):
            return -1, None
        return int(first), int(size) if size.isdecimal() else None


@dataclass(frozen=True, slots=True)
class Request:
    """What is asked. ``target`` is the quoted path with its query; ``body`` is sent piece by piece, if it is several.

    ``into`` takes the body of a 206, or that of a 200 after its first ``skip`` bytes (a server that ignores Range sends the
    whole object).
    """

    method: str
    target: str
    headers: Mapping[str, str]
    body: memoryview | bytes | tuple[memoryview | bytes, ...] = b""
    into: memoryview | None = None
    skip: int = 0

    @property
    def pieces(self) -> tuple[memoryview | bytes, ...]:
        """The body, one or several."""
        return self.body if isinstance(self.body, tuple) else (self.body,)


class ConnectionPool:
    """Connections to one endpoint, made as they are needed and kept while the server keeps them. Safe to call from many threads."""

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        self._idle: deque[http.client.HTTPConnection] = deque(maxlen=_MOST_IDLE)
        self._lock = threading.Lock()
        weakref.finalize(self, _close_all, self._idle)

    def exchange(self, request: Request) -> Answer:
        """One request and its answer. :class:`NoAnswerError` if none came, :class:`UntrustedServerError` for a certificate."""
        with self._lock:
            pooled = self._idle.pop() if self._idle else None
        sent = False
        if pooled is not None:
            try:
                return self._exchange(pooled, request)
            except NoAnswerError as error:
                if isinstance(error.__cause__, TimeoutError):
                    raise
                # Servers close idle connections when they like: this says nothing of the request.
                sent = error.sent
                _log.debug("a pooled connection to %s was closed: opened again", self.endpoint.authority)
        try:
            return self._exchange(self._open(), request)
        except NoAnswerError as error:
            error.sent = error.sent or sent
            raise

    def _open(self) -> http.client.HTTPConnection:
        endpoint = self.endpoint
        host, port, proxy = endpoint.host, endpoint.port, urlsplit(endpoint.proxy) if endpoint.proxy else None
        if proxy is not None and proxy.hostname is not None:
            host, port = proxy.hostname, proxy.port or 8080
        connection: http.client.HTTPConnection
        if endpoint.tls is not None:
            connection = http.client.HTTPSConnection(
                host, port, timeout=endpoint.connect_timeout, context=endpoint.tls
            )
            if proxy is not None:
                connection.set_tunnel(endpoint.host, endpoint.port or 443, _proxy_headers(endpoint.proxy))
        else:
            connection = http.client.HTTPConnection(host, port, timeout=endpoint.connect_timeout)
        # A request on a closed connection must fail here, not open another one behind the pool's back.
        connection.auto_open = 0
        try:
            connection.connect()
        except ssl.SSLCertVerificationError as error:
            connection.close()
            raise UntrustedServerError(
                f"the certificate of {endpoint.authority} was not accepted: {error.verify_message}"
            ) from error
        except (OSError, http.client.HTTPException) as error:
            connection.close()
            raise NoAnswerError(_reason(error), sent=False) from error
        connection.sock.settimeout(endpoint.read_timeout)
        connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        return connection

    def _exchange(self, connection: http.client.HTTPConnection, request: Request) -> Answer:
        reusable = False
        sent = False
        try:
            connection.putrequest(request.method, self._through_proxy(request.target), skip_host=True)
            for name, value in self._headers(request.headers).items():
                connection.putheader(name, value)
            length = sum(map(len, request.pieces))
            if length or request.method in {"PUT", "POST"}:
                connection.putheader("Content-Length", str(length))
            sent = True
            try:
                connection.endheaders()
                for piece in request.pieces:
                    _send(connection.sock, piece)
            except OSError as broken:
                response = self._early_answer(connection, broken)
                early = True
            else:
                response = connection.getresponse()
                early = False
            answer = _receive(response, request.into, request.skip)
            reusable = (
                not early and answer.failure is None and response.isclosed() and not response.will_close
            )
        except (OSError, http.client.HTTPException) as error:
            raise NoAnswerError(_reason(error), sent=sent) from error
        else:
            return answer
        finally:
            if reusable:
                with self._lock:
                    full = len(self._idle) == _MOST_IDLE
                    if not full:
                        self._idle.append(connection)
                reusable = not full
            if not reusable:
                connection.close()

    def _early_answer(
        self, connection: http.client.HTTPConnection, broken: OSError
    ) -> http.client.HTTPResponse:
        """The answer that a server sent before it stopped listening to the body; ``broken`` is raised if there is none."""
        try:
            connection.sock.settimeout(min(_EARLY_ANSWER_WAIT, self.endpoint.read_timeout))
            return connection.getresponse()
        except (OSError, http.client.HTTPException):
            raise broken from None

    def _through_proxy(self, target: str) -> str:
        if self.endpoint.proxy and self.endpoint.tls is None:
            return f"{self.endpoint.scheme}://{self.endpoint.authority}{target}"
        return target

    def _headers(self, headers: Mapping[str, str]) -> Mapping[str, str]:
        all_headers = {"Host": self.endpoint.authority, **headers}
        if self.endpoint.proxy and self.endpoint.tls is None:
            all_headers.update(_proxy_headers(self.endpoint.proxy))
        return all_headers


def tls_context(
    verify: bool | str, default_bundle: str, client_cert: str | tuple[str, str] | None = None
) -> ssl.SSLContext:
    """A context that verifies against ``verify`` (a file or folder of certificates), or ``default_bundle`` if it is True, or not
    at all if it is False. ``client_cert`` is a file with certificate and key, or the two. Raises OSError if a file cannot be read.
    """
    bundle = default_bundle if verify is True else verify
    if not bundle:
        context = ssl.create_default_context()
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    elif os.path.isdir(bundle):  # noqa: PTH112 # a str from the configuration, handed on as one
        context = ssl.create_default_context(capath=bundle)
    else:
        context = ssl.create_default_context(cafile=bundle)
    if client_cert is not None:
        context.load_cert_chain(*([client_cert] if isinstance(client_cert, str) else client_cert))
    return context


def http_date(text: str) -> float:
    """A date of a header, in seconds since the epoch."""
    return email.utils.parsedate_to_datetime(text).timestamp()


def _send(sock: socket.socket, body: memoryview | bytes) -> None:
    # Not sendall: its time-out is for all bytes together, so that a big part on a slow line would never get through.
    view = memoryview(body)
    position = 0
    while position < len(view):
        position += sock.send(view[position:])


def _receive(response: http.client.HTTPResponse, into: memoryview | None, skip: int) -> Answer:
    received = 0
    body = b""
    failure: Exception | None = None
    try:
        if into is not None and response.status in {_OK, _PARTIAL}:
            if Answer(response.status, response.headers).is_whole:
                _drop(response, skip)
            while received < len(into):
                count = response.readinto(into[received : received + _RECEIVE_STEP])
                if not count:
                    break
                received += count
            if received < len(into) and response.length:
                failure = http.client.IncompleteRead(b"", response.length)
            # A chunked body has its end still unread; a whole object has more than was wanted, and is not worth reading.
            elif received == len(into) and not response.isclosed() and response.length is None:
                response.read(1)
        else:
            body = response.read(_LONGEST_TEXT)
            if response.length:
                failure = http.client.IncompleteRead(b"", response.length)
    except (OSError, http.client.HTTPException) as error:
        failure = error
    return Answer(response.status, response.headers, body, received, failure)


def _drop(response: http.client.HTTPResponse, count: int) -> None:
    scratch = memoryview(bytearray(min(count, 1 << 20)))
    while count:
        step = response.readinto(scratch[: min(count, len(scratch))])
        if not step:
            return
        count -= step


def _proxy_headers(proxy: str | None) -> dict[str, str]:
    parts = urlsplit(proxy or "")
    if parts.username is None:
        return {}
    secret = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
    return {"Proxy-Authorization": f"Basic {base64.b64encode(secret.encode()).decode('ascii')}"}


def _reason(error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return "timed out"
    return str(error) or type(error).__name__


def _close_all(idle: deque[http.client.HTTPConnection]) -> None:
    while idle:
        idle.pop().close()
