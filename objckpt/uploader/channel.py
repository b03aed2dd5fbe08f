"""Messages between a trainer and its uploader: one JSON object a line over a socket pair, and descriptors along with it.

Invariants: messages arrive in order or not at all, and what a message sends along is there when it is read; secrets travel here and
nowhere else; the end of the trainer is seen even while children that it forked still hold its end of the socket.

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
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Final

log = logging.getLogger(__name__)

Message = dict[str, Any]
#: The field of a message that came with descriptors; they are the receiver's to close.
DESCRIPTORS: Final = "descriptors"
_MOST_DESCRIPTORS: Final = 64
#: What ``receive`` returns once the other side is gone.
GONE: Final[Message] = {"op": "gone"}


class Channel:
    """One end of the socket. ``send`` may be called from any thread, and is silent once the other side is gone."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end
        self._listening = False
        self._sending = threading.Lock()
        self._received: queue.SimpleQueue[Message] = queue.SimpleQueue()

    def send(self, message: Message, descriptors: Sequence[int] = ()) -> bool:
        """False if the other side is gone. It gets duplicates of ``descriptors`` along with the message."""
        if descriptors:
            message = {**message, DESCRIPTORS: len(descriptors)}
        data = json.dumps(message).encode() + b"\n"
        try:
            with self._sending:
                if descriptors:
                    data = data[socket.send_fds(self._end, [data], list(descriptors)) :]
                self._end.sendall(data)
        except OSError:
            return False
        return True

    def listen(self, handle: Callable[[Message], None] | None = None, *, peer: int | None = None) -> None:
        """Start the thread that reads. Messages go to ``handle``, or wait for ``receive``; ``peer`` is a process whose end means GONE."""
        deliver = handle if handle is not None else self._received.put
        self._listening = True
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
        """End it, for both sides: they see GONE."""
        try:
            self._end.shutdown(socket.SHUT_RDWR)
        except OSError:
            log.debug("the other side of the channel was closed before")
        if not self._listening:  # else its thread wakes up and closes it: a closed socket would wake nobody
            self._end.close()

    def _read(self, deliver: Callable[[Message], None], peer: int | None) -> None:
        process = _watch(peer)
        with selectors.DefaultSelector() as selector:
            selector.register(self._end, selectors.EVENT_READ)
            if process is not None:
                selector.register(process, selectors.EVENT_READ)
            buffer = b""
            descriptors: deque[int] = (
                deque()
            )  # the kernel hands them over with or before their message's first byte
            ended = False
            while not ended:
                ready = {key.fileobj for key, _ in selector.select()}
                # What the trainer sent before it died comes first.
                if self._end in ready:
                    try:
                        data, came, _, _ = socket.recv_fds(self._end, 1 << 20, _MOST_DESCRIPTORS)
                    except OSError:
                        data, came = b"", []
                    for descriptor in came:
                        os.set_inheritable(descriptor, False)  # noqa: FBT003 # Python 3.11 passes no flag on to the kernel
                    descriptors.extend(came)
                    *lines, buffer = (buffer + data).split(b"\n")
                    for line in lines:
                        message = json.loads(line)
                        if DESCRIPTORS in message:
                            message[DESCRIPTORS] = [
                                descriptors.popleft() for _ in range(message[DESCRIPTORS])
                            ]
                        deliver(message)
                    ended = not data
                elif process in ready:
                    ended = True
        if process is not None:
            os.close(process)
        self._end.close()
        deliver(GONE)


def _watch(peer: int | None) -> int | None:
    """A descriptor that becomes readable when process ``peer``, our parent, ends."""
    if peer is None:
        return None
    try:
        process = os.pidfd_open(peer)
    except ProcessLookupError:
        log.debug("process %d has ended before it could be watched", peer)
    else:
        if os.getppid() == peer:
            return process
        os.close(process)  # it ended before, and its number is another's by now
    end, other = os.pipe()
    os.close(other)
    return end
