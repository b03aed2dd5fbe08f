"""A TCP proxy that stands still at a chosen byte on its way to a server, until it is let go on."""

from __future__ import annotations

import re
import socket
import threading
from urllib.parse import urlsplit

REQUEST = re.compile(rb"(PUT|POST|DELETE|GET|HEAD) (\S+) HTTP/1\.1\r\n")


class Gate:
    """``hold`` arms it with a pattern of ``METHOD path``, how many bytes of such a request may pass, and how many such requests before it;
    ``held`` tells that one waits.
    """

    def __init__(self, endpoint_url):
        target = urlsplit(endpoint_url)
        self._target = target.hostname, target.port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.endpoint_url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._armed = None
        self._skip = 0
        self.held = threading.Event()
        self._released = threading.Event()
        threading.Thread(target=self._accept, daemon=True).start()

    def hold(self, pattern, passing=0, skip=0):
        self._skip = skip
        self._armed = re.compile(pattern), passing

    def release(self):
        self._armed = None
        self._released.set()

    def close(self):
        self.release()
        self._listener.close()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def _accept(self):
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return  # closed
            server = socket.create_connection(self._target)
            for source, sink, ask in ((client, server, self._pass), (server, client, None)):
                threading.Thread(target=_pump, args=(source, sink, ask and ask()), daemon=True).start()

    def _pass(self):
        """A look at all bytes of one connection."""
        request, count = "", 0

        def look(data):
            nonlocal request, count
            if found := REQUEST.match(data):
                request, count = b" ".join(found.groups()).decode(), 0
                if self._skip and self._armed and self._armed[0].match(request):
                    self._skip -= 1
                    request = ""
            count += len(data)
            if self._armed and self._armed[0].match(request) and count > self._armed[1]:
                self.held.set()
                self._released.wait()

        return look


def _pump(source, sink, look):
    try:
        while data := source.recv(1 << 16):
            if look is not None:
                look(data)
            sink.sendall(data)
    except OSError:
        pass  # one of the two is gone
    finally:
        for end in (source, sink):
            try:
                end.shutdown(socket.SHUT_RDWR)
            except OSError:
                continue
