"""The process that drains a rank's spool into the store and commits, and the trainer's handle on it.

Invariants: the uploader never imports torch; it holds the spool's lock and the trainer does not; it is in a session of its own, so
that a launcher that kills the trainer's group leaves it to finish; options and secrets reach it over a socket pair, never by argv,
environment or disk.

``UploaderProcess`` is used by ``checkpointer``; ``loop`` is what runs in the process (``python -m objckpt.uploader``) or, in tests, in a
thread.
"""

from __future__ import annotations

import logging
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from objckpt.uploader.channel import Channel, Message

log = logging.getLogger(__name__)


class UploaderProcess:
    """The trainer's side: start, send, wait. Events go to ``on_event``, called in a thread; ``{"op": "gone"}`` is the last one."""

    def __init__(self, log_file: int, on_event: Callable[[Message], None]) -> None:
        ours, theirs = socket.socketpair()
        package = Path(__file__).resolve().parents[2]
        path = os.pathsep.join(filter(None, [str(package), os.environ.get("PYTHONPATH", "")]))
        # No GPU memory is to be held by it, and a traceback of a dying process is worth a line in its log.
        environment = {
            **os.environ,
            "PYTHONPATH": path,
            "CUDA_VISIBLE_DEVICES": "",
            "PYTHONFAULTHANDLER": "1",
        }
        with theirs:
            self._process = subprocess.Popen(  # noqa: S603 # our own module by our own interpreter
                [sys.executable, "-P", "-m", "objckpt.uploader", str(theirs.fileno()), str(os.getpid())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=log_file,
                stderr=log_file,
                env=environment,
                start_new_session=True,
            )
        self._channel = Channel(ours)
        self._channel.listen(on_event)

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    def send(self, message: Message, descriptors: Sequence[int] = ()) -> bool:
        """False if the process is gone. It gets duplicates of ``descriptors``."""
        return self._channel.send(message, descriptors)

    def wait(self, timeout: float | None) -> bool:
        """Wait for its end, in seconds. False if it still runs."""
        try:
            self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            return False
        self._channel.close()
        return True

    def leave(self) -> None:
        """Let it go on by itself."""
        self._channel.close()
        self._process.returncode = self._process.poll() or 0  # no ResourceWarning: it is meant to outlive us
