"""Servers for tests, each a child process on loopback with ports and data of its own.

Invariant: a server ends with the process that started it.

Called by the fixtures in ``tests/conftest.py``, the demo, the benchmarks, and tests of those who build on objckpt.
"""

from objckpt.testing.servers.seaweedfs import SeaweedFS

__all__ = ["SeaweedFS"]
