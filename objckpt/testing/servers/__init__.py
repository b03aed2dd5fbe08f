"""Servers for tests on loopback, each (but moto) a child process with ports and data of its own.

Invariant: a server ends with the process that started it.

Called by the fixtures in ``tests/conftest.py``, the demo, the benchmarks, and tests of those who build on objckpt.
"""

from objckpt.testing.servers.fake_gcs import FakeGCS
from objckpt.testing.servers.moto import Moto
from objckpt.testing.servers.rclone import Rclone
from objckpt.testing.servers.seaweedfs import SeaweedFS

__all__ = ["FakeGCS", "Moto", "Rclone", "SeaweedFS"]
