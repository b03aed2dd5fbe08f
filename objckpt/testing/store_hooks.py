"""What the conformance suite asks of a store's author, and the threads and processes that it races.

Invariants: a store is described by plain values (:class:`StoreSpec`), so that another process can open the same; no process
that is started here outlives the test.

Called by ``conformance`` and ``store_keys``.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import os
import random
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final, Self

import pytest

from objckpt.store import ObjectStore

# What runs in the processes that race or die: no pytest, so that it starts quickly. One JSON line in, one out.
_PROGRAM: Final = """
import importlib, json, random, sys
spec = json.loads(sys.stdin.readline())
module, _, name = spec["opener"].partition(":")
store = getattr(importlib.import_module(module), name)(spec["uri"], **spec["storage_options"])
print(json.dumps("ready"), flush=True)
for line in sys.stdin:
    verb, key, seed, size = json.loads(line)
    data = random.Random(seed).randbytes(size)
    print(json.dumps("begins"), flush=True)
    print(json.dumps(getattr(store, verb)(key, data)), flush=True)
"""


@dataclass(frozen=True)
class StoreSpec:
    """How to open a store anew, here or in another process: plain values, which pass as JSON.

    ``opener`` is ``module:function``, called as ``function(uri, **storage_options)``.
    """

    uri: str
    storage_options: Mapping[str, Any] = field(default_factory=dict)
    opener: str = "objckpt.store:open_store"

    def open(self) -> ObjectStore:
        """Another store object on the same root."""
        module, _, name = self.opener.partition(":")
        store: ObjectStore = getattr(importlib.import_module(module), name)(self.uri, **self.storage_options)
        return store


class Child:
    """A process of its own with a store open. Ended by ``close`` whatever it does."""

    def __init__(self, spec: StoreSpec) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", _PROGRAM],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            text=True,
        )
        self._say({"uri": spec.uri, "storage_options": dict(spec.storage_options), "opener": spec.opener})

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()

    def call(self, verb: str, key: str, seed: int, size: int) -> None:
        """Begin ``store.<verb>(key, random.Random(seed).randbytes(size))``; answers "begins", then the result."""
        self._say([verb, key, seed, size])

    def answer(self) -> Any:
        """The next line that the process says; None if it died before."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        return json.loads(line) if line else None

    def kill(self) -> None:
        """SIGKILL, and wait."""
        self._process.kill()
        self._process.wait()

    def _say(self, value: Any) -> None:
        assert self._process.stdin is not None
        # A pipe that breaks here means that it died: the answer that is missing tells the test.
        self._process.stdin.write(json.dumps(value) + "\n")
        self._process.stdin.flush()


@contextmanager
def start_children(spec: StoreSpec, count: int) -> Iterator[list[Child]]:
    with ExitStack() as stack:
        children = [stack.enter_context(Child(spec)) for _ in range(count)]
        for child in children:
            assert child.answer() == "ready"
        yield children


def race(count: int, act: Callable[[int], Any]) -> list[Any]:
    """The results of ``act(0)`` to ``act(count - 1)``, all begun at once in threads of their own."""
    barrier = threading.Barrier(count)

    def run(index: int) -> Any:
        barrier.wait()
        return act(index)

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(run, range(count)))


def read(store: ObjectStore, key: str, length: int, offset: int = 0) -> bytes:
    into = bytearray(length)
    return bytes(into[: store.read(key, memoryview(into), offset)])


def keys(store: ObjectStore, prefix: str = "", start_after: str = "") -> list[str]:
    return [info.key for info in store.list(prefix, start_after)]


class StoreHooks:
    """The hooks of the suite: the fixture ``store_spec`` and the ``raw_`` methods must be given, the rest have defaults."""

    #: Test name (with or without its ``[parameter]``) to the reason why this store fails it, a strict expected failure.
    known_deviations: ClassVar[Mapping[str, str]] = {}
    #: For the table of stores: the scheme, and what served it in this class.
    backend: ClassVar[str] = ""
    server: ClassVar[str] = ""
    #: The installed package whose version the server has; "" where ``server_version`` finds it otherwise.
    distribution: ClassVar[str] = ""
    #: Bytes of a part, for stores that send large objects in parts.
    part_size: ClassVar[int] = 1 << 20
    #: How often the racing tests begin anew.
    race_rounds: ClassVar[int] = 6
    #: Bytes of the put that is killed: long enough that a kill meets it.
    torn_size: ClassVar[int] = 48 << 20

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Refuse a deviation for a test that does not exist: it would excuse nothing and mislead its reader."""
        super().__init_subclass__(**kwargs)
        unknown = [name for name in cls.known_deviations if not hasattr(cls, name.partition("[")[0])]
        if unknown:
            raise TypeError(
                f"{cls.__name__}.known_deviations names tests that do not exist: {', '.join(unknown)}"
            )

    @classmethod
    def server_version(cls) -> str:
        """The version of what the tests ran on; "" if it has none."""
        return importlib.metadata.version(cls.distribution) if cls.distribution else ""

    @pytest.fixture
    def store_spec(self) -> StoreSpec:
        """A fresh, empty root without a trailing slash. To be overridden."""
        raise NotImplementedError

    def raw_put(self, spec: StoreSpec, key: str, data: bytes) -> None:
        """Put an object without the store under test."""
        raise NotImplementedError

    def raw_get(self, spec: StoreSpec, key: str) -> bytes | None:
        """An object's content without the store under test; None if there is none."""
        raise NotImplementedError

    def raw_keys(self, spec: StoreSpec) -> set[str]:
        """All keys below the root, without the store under test."""
        raise NotImplementedError

    def raw_begin_upload(self, spec: StoreSpec, key: str) -> bool:  # noqa: ARG002 # for those who override it
        """Leave an unfinished upload of ``key`` behind, as a killed process does. False if there is no such thing."""
        return False

    def raw_uploads(self, spec: StoreSpec) -> set[str]:
        """Keys of unfinished uploads. Only called after ``raw_begin_upload`` gave True."""
        raise NotImplementedError

    def wrong_credentials(self, spec: StoreSpec) -> StoreSpec | None:  # noqa: ARG002 # for those who override it
        """The same root with credentials that the store does not know; None where there are none."""
        return None

    def readonly_credentials(self, spec: StoreSpec) -> StoreSpec | None:  # noqa: ARG002 # likewise
        """The same root with credentials that may read only; None where there are none."""
        return None

    def missing_bucket(self, spec: StoreSpec) -> StoreSpec | None:  # noqa: ARG002 # likewise
        """A root in a bucket that does not exist; None where roots need not be made."""
        return None

    def unreachable_endpoint(self, spec: StoreSpec) -> StoreSpec | None:  # noqa: ARG002 # likewise
        """A server that does not answer, with a deadline of about a second; None where there is no server."""
        return None

    @pytest.fixture(autouse=True)
    def _deviation(self, request: pytest.FixtureRequest) -> None:
        name = request.node.name
        reason = self.known_deviations.get(name) or self.known_deviations.get(name.partition("[")[0])
        if reason:
            request.node.add_marker(pytest.mark.xfail(reason=reason, strict=True))

    @pytest.fixture
    def store(self, store_spec: StoreSpec) -> ObjectStore:
        """The store under test on its fresh root."""
        return store_spec.open()

    @pytest.fixture
    def seed(self) -> int:
        """Drawn anew each time; pytest shows the output of a test that fails."""
        seed = random.SystemRandom().randrange(1 << 32)
        print(f"seed {seed}")  # noqa: T201 # how a failure is repeated
        return seed
