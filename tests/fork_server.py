"""A process that has torch loaded and forks off ranks of ``kill_job``, so that a launch costs no ten seconds.

It has no thread when it forks, and a rank is what it would be under torchrun: a session of its own, its output in a file, an exit code.
``ForkServer`` is the handle; run as a program, this is the server. It ends when its standard input does.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import threading
from pathlib import Path


class ForkServer:
    """Forks ranks. ``environment`` is the server's, and so what ``/proc`` shows of every rank of it."""

    def __init__(self, environment, log):
        with Path(log).open("ab") as output:
            self._process = subprocess.Popen(
                [sys.executable, __file__],
                env={**environment, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=output,
                text=True,
            )
        self._lock = threading.Lock()
        self.pid = self._process.pid
        if self._process.stdout.readline() != "ready\n":
            raise RuntimeError(f"the fork server ended at its start; see {log}")

    def fork(self, environment, output):
        """Pid of a new rank, which has ``environment`` over that of the server."""
        return self._ask({"environment": environment, "output": str(output)})

    def ended(self, pid):
        """Exit code of a rank, negative for a signal; None while it runs."""
        return self._ask({"ended": pid})

    def _ask(self, request):
        with self._lock:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
            answer = self._process.stdout.readline()
            if not answer:
                raise RuntimeError(f"the fork server ended with {self._process.wait(10)}")
            return json.loads(answer)

    def close(self):
        self._process.stdin.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()


def _load():
    import functools

    import botocore.session
    import torch
    import torch._dynamo  # an optimizer's first step does
    import torch.distributed

    import objckpt.store.s3

    # Each new session reads the description of S3 anew: they share one reader, which has read it.
    botocore.session.create_loader = functools.cache(botocore.session.create_loader)
    objckpt.store.s3  # noqa: B018
    torch.set_num_threads(1)
    parameter = torch.nn.Parameter(torch.zeros(2))
    parameter.grad = torch.zeros(2)
    optim = torch.optim.AdamW([parameter])
    optim.step()
    optim.zero_grad()


def _serve():
    """Returns in each rank, once."""
    ended = {}
    pending = b""
    while True:
        select.select([0], [], [])
        data = os.read(0, 1 << 16)
        if not data:
            sys.exit(0)
        *lines, pending = (pending + data).split(b"\n")
        for line in lines:
            request = json.loads(line)
            if "ended" in request:
                pid = request["ended"]
                if pid not in ended:
                    found, status = os.waitpid(pid, os.WNOHANG)
                    if found:
                        ended[pid] = os.waitstatus_to_exitcode(status)
                answer = ended.get(pid)
            else:
                answer = os.fork()
                if answer == 0:
                    _become(request)
                    return
            os.write(1, json.dumps(answer).encode() + b"\n")


def _become(request):
    os.setsid()
    os.environ.update(request["environment"])
    with Path(request["output"]).open("ab") as output, Path(os.devnull).open("rb") as nothing:
        os.dup2(nothing.fileno(), 0)
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    signal.signal(signal.SIGINT, signal.SIG_DFL)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    _load()
    import kill_job

    assert len(os.listdir("/proc/self/task")) == 1, "a fork would lose a thread"
    os.write(1, b"ready\n")
    _serve()
    kill_job.main()
