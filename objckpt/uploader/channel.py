"""Messages between a trainer and its uploader: one JSON object a line over a socket pair.

Invariants: messages arrive in order or not at all; secrets travel here and nowhere else; the end of the trainer is seen even while
children that it forked still hold its end of the socket.

Called by ``uploader`` on both sides.
"""

from __future__ import annotations

import json
import logging
import os
import queue
import selectors
import socket
import threading
from collections.abc import Callable
from typing import Any, Final

log = logging.getLogger(__name__)

Message = dict[str, Any]
#: What ``receive`` returns once the other side is gone.
GONE: Final[Message] = {"op": "gone"}


class Channel:
    """One end of the socket. ``send`` may be called from any thread, and is silent once the other side is gone."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end
        self._sending = threading.Lock()
        self._received: queue.SimpleQueue[Message] = queue.SimpleQueue()

    def send(self, message: Message) -> bool:
        """False if the other side is gone."""
        data = json.dumps(message).encode() + b"\n"
        try:
            with self._sending:
                self._end.sendall(data)
        except OSError:
            return False
        return True

    def listen(self, handle: Callable[[Message], None] | None = None, *, peer: int | None = None) -> None:
        """Start the thread that reads. Messages go to ``handle``, or wait for ``receive``; ``peer`` is a process whose end means GONE."""
        deliver = handle if handle is not None else self._received.put
        threading.Thread(target=self._read, args=(deliver, peer), name="objckpt-channel", daemon=True).start()

    def receive(self, timeout: float | None) -> Message | None:
        """The next message; None after ``timeout`` seconds (None: wait for ever)."""
        try:
            return self._received.get(timeout=timeout)
        except queue.Empty:
            return None

    def wake(self, message: Message) -> None:
        """Deliver a message of one's own to ``receive``."""
        self._received.put(message)

    def close(self) -> None:
        """Close this end; the other side sees GONE."""
        try:
            self._end.shutdown(socket.SHUT_RDWR)
        except OSError:
            log.debug("the other side of the channel was closed before")
        self._end.close()

    def _read(self, deliver: Callable[[Message], None], peer: int | None) -> None:
        process = _watch(peer)
        with selectors.DefaultSelector() as selector:
            selector.register(self._end, selectors.EVENT_READ)
            if process is not None:
                selector.register(process, selectors.EVENT_READ)
            buffer = b""
            ended = False
            while not ended:
                ready = {key.fileobj for key, _ in selector.select()}
                # What the trainer sent before it died comes first.
                if self._end in ready:
                    try:
                        data = self._end.recv(1 << 20)
                    except OSError:
                        data = b""
                    *lines, buffer = (buffer + data).split(b"\n")
                    for line in lines:
                        deliver(json.loads(line))
                    ended = not data
                elif process in ready:
                    ended = True
        if process is not None:
            os.close(process)
        deliver(GONE)


def _watch(peer: int | None) -> int | None:
    """A descriptor that becomes readable when process ``peer``, our parent, ends."""
    if peer is None:
        return None
    process = os.pidfd_open(peer)
    if os.getppid() != peer:  # it ended before, and its number may be another's by now
        os.close(process)
        end, other = os.pipe()
        os.close(other)
        return end
    return process
