"""The server that the tests run: what they rely on when they kill it, or are killed."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import botocore.exceptions
import pytest

from objckpt.testing.servers import SeaweedFS


def wait_for_end(pidfd):
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    assert poll.poll(20_000), "the process lives on"


def test_a_killed_server_comes_back_with_its_data_on_its_ports():
    with SeaweedFS() as server:
        url, bucket = server.endpoint_url, server.make_bucket()
        server.client().put_object(Bucket=bucket, Key="a", Body=b"kept")
        server.kill()
        with pytest.raises(botocore.exceptions.EndpointConnectionError):
            server.client().head_object(Bucket=bucket, Key="a")
        server.restart()
        assert server.endpoint_url == url
        assert server.client().get_object(Bucket=bucket, Key="a")["Body"].read() == b"kept"
        with pytest.raises(server.client().exceptions.NoSuchBucket):
            server.client().put_object(Bucket="objckpt-never-made", Key="a", Body=b"x")
        directory = server._directory
    assert not directory.exists()


def test_a_server_dies_with_a_process_that_is_killed():
    program = """
import sys, threading
from objckpt.testing.servers import SeaweedFS
server = SeaweedFS()
# A thread that ends must not take the server along.
thread = threading.Thread(target=server.start)
thread.start()
thread.join()
print(server.pid, server._directory, flush=True)
server.client().put_object(Bucket=server.bucket, Key="a", Body=b"x")
print("stored", flush=True)
sys.stdin.read()
"""
    command = [sys.executable, "-c", program]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as owner:
        pid, directory = owner.stdout.readline().split()
        assert owner.stdout.readline() == "stored\n"
        pidfd = os.pidfd_open(int(pid))
        owner.send_signal(signal.SIGKILL)
    try:
        wait_for_end(pidfd)
    finally:
        os.close(pidfd)
    # The watchdog removes it a moment after the server's end.
    for _ in range(200):
        if not Path(directory).exists():
            return
        select.select([], [], [], 0.05)
    pytest.fail(f"{directory} is still there")
