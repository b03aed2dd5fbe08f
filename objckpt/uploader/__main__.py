"""``python -m objckpt.uploader FD PID``: started by ``UploaderProcess`` alone."""

from __future__ import annotations

import logging
import signal
import socket
import sys

from objckpt.uploader.channel import Channel
from objckpt.uploader.loop import serve


def main() -> int:
    """Serve the trainer at the other end of the inherited socket until it is gone and all is done."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    channel = Channel(socket.socket(fileno=int(sys.argv[1])))
    for ignored in (signal.SIGINT, signal.SIGHUP):  # meant for the trainer
        signal.signal(ignored, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: channel.wake({"op": "hurry"}))
    channel.listen(peer=int(sys.argv[2]))
    serve(channel)
    return 0


if __name__ == "__main__":
    sys.exit(main())
