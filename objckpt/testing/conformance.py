"""The conformance suite of the store seam: what every :class:`~objckpt.store.ObjectStore` must keep to.

Invariants: each test is named for the guarantee that it proves, and looks at the store through a second way in
(``raw_get`` and its sisters) that shares no code with the store under test; a deviation is named with its reason,
and an entry that no longer deviates fails.

Called by ``tests/test_conformance.py``, and by authors of other stores. Needs pytest, which objckpt itself does
not; for telling assertions, ``conftest.py`` calls ``pytest.register_assert_rewrite("objckpt.testing")`` first::

    class TestMyStore(ObjectStoreTests):
        @pytest.fixture
        def store_spec(self, tmp_path): return StoreSpec(f"my://{tmp_path}", opener="my_package:open_store")
        def raw_put(self, spec, key, data): ...
        def raw_get(self, spec, key): ...
        def raw_keys(self, spec): ...
"""

from __future__ import annotations

import mmap
import pickle
import random
import threading
import time
from collections.abc import Callable
from typing import Final

import pytest
from awscrt.checksums import crc64nvme

from objckpt.errors import (
    CommitUnknownError,
    CorruptCheckpointError,
    StoreError,
    StoreNotFoundError,
    StorePermissionError,
    StoreTransientError,
)
from objckpt.store import Buffer, ObjectStore, read_all
from objckpt.testing.store_hooks import StoreSpec, keys, race, read, start_children
from objckpt.testing.store_keys import KeyTests

__all__ = ["ObjectStoreTests", "StoreSpec"]

_THREADS: Final = 32
_PROCESSES: Final = 8
_OBJECT: Final = bytes(range(256)) * 4


class ObjectStoreTests(KeyTests):
    """Subclass it, give the fixture ``store_spec`` and the three ``raw_`` methods; the other hooks have defaults."""

    # --- create

    def test_create_by_32_threads_has_one_winner(self, store_spec: StoreSpec, store: ObjectStore) -> None:
        stores = [store, store_spec.open()]
        for round_ in range(self.race_rounds):
            key = f"versions/{round_:04d}"
            contents = [f"{index}".encode() * (index + 1) for index in range(_THREADS)]
            won = race(_THREADS, lambda index: stores[index % 2].create(key, contents[index]))  # noqa: B023 # ends in here
            assert won.count(True) == 1
            assert self.raw_get(store_spec, key) == contents[won.index(True)]

    def test_create_by_8_processes_has_one_winner(self, store_spec: StoreSpec) -> None:
        with start_children(store_spec, _PROCESSES) as children:
            for round_ in range(self.race_rounds):
                key = f"versions/{round_:04d}"
                for index, child in enumerate(children):
                    child.call("create", key, index, 100)
                answers = [(child.answer(), child.answer())[1] for child in children]
                assert answers.count(True) == 1
                assert answers.count(False) == _PROCESSES - 1
                assert self.raw_get(store_spec, key) == random.Random(answers.index(True)).randbytes(100)

    def test_create_by_racers_with_the_same_bytes_is_true_for_all(self, store: ObjectStore) -> None:
        assert race(8, lambda _: store.create("record", b"a pure function")) == [True] * 8

    def test_create_again_with_the_same_bytes_is_true(
        self, store_spec: StoreSpec, store: ObjectStore
    ) -> None:
        assert store.create("v/1", b"mine") is True
        assert store.create("v/1", b"mine") is True
        assert store_spec.open().create("v/1", b"mine") is True

    def test_create_with_other_bytes_is_false_and_keeps_the_content(
        self, store_spec: StoreSpec, store: ObjectStore
    ) -> None:
        assert store.create("v/1", b"mine") is True
        for other in (b"yours", b"MINE", b"min", b"mine!", b""):
            assert store.create("v/1", other) is False
            assert self.raw_get(store_spec, "v/1") == b"mine"

    def test_create_sees_what_others_put(self, store_spec: StoreSpec, store: ObjectStore) -> None:
        self.raw_put(store_spec, "v/1", b"theirs")
        assert store.create("v/1", b"mine") is False
        assert store.create("v/1", b"theirs") is True

    def test_create_works_again_after_delete(self, store_spec: StoreSpec, store: ObjectStore) -> None:
        assert store.create("v/1", b"first")
        store.delete(["v/1"])
        assert store.create("v/1", b"second")
        assert self.raw_get(store_spec, "v/1") == b"second"

    # --- put

    def test_put_cut_in_the_middle_leaves_nothing_visible(self, store_spec: StoreSpec, seed: int) -> None:
        draw = random.Random(seed)
        with start_children(store_spec, 1) as (child,):
            child.call("put", "whole", seed, self.torn_size)
            assert child.answer() == "begins"
            began = time.monotonic()
            child.answer()
            usual = time.monotonic() - began
        assert self.raw_get(store_spec, "whole") == draw.randbytes(self.torn_size)
        cut = 0
        for attempt in range(6):
            key = f"torn/{attempt}"
            with start_children(store_spec, 1) as (child,):
                child.call("put", key, attempt, self.torn_size)
                assert child.answer() == "begins"
                # A random moment is the point here, not an event to wait for.
                time.sleep(draw.uniform(0.05, 0.9) * usual)
                child.kill()
                cut += child.answer() is None
            # The server may still be at work on the last request of the killed process, and the object appear between two looks.
            before = keys(store_spec.open(), "torn/")
            found = self.raw_get(store_spec, key)
            after = keys(store_spec.open(), "torn/")
            assert found is None or found == random.Random(attempt).randbytes(self.torn_size)
            assert (key in before) <= (found is not None) <= (key in after)
            if cut >= 2:
                return
        assert cut, f"no kill met a put of {self.torn_size} bytes: raise torn_size"

    def test_put_is_whole_for_who_reads_meanwhile(self, store_spec: StoreSpec, store: ObjectStore) -> None:
        data = random.Random(1).randbytes(2 * self.part_size + 1)
        done = threading.Event()

        def put(_: int) -> None:
            try:
                store.put("racing", data)
            finally:
                done.set()

        def look(_: int) -> None:
            reader = store_spec.open()
            last = False
            while not last:
                last = done.is_set()
                for info in reader.list("racing"):
                    assert info.size == len(data)
                    assert read(reader, "racing", len(data)) == data
                    return

        race(2, lambda index: (put, look)[index](index))

    def test_put_of_an_existing_key_with_the_same_bytes_succeeds(
        self, store_spec: StoreSpec, store: ObjectStore
    ) -> None:
        store.put("shard", _OBJECT)
        store.put("shard", _OBJECT)
        assert self.raw_get(store_spec, "shard") == _OBJECT
        assert self.raw_keys(store_spec) == {"shard"}

    @pytest.mark.parametrize("parts", [0, 1, 3])
    def test_put_with_the_right_crc64_is_stored(
        self, store_spec: StoreSpec, store: ObjectStore, parts: int, seed: int
    ) -> None:
        data = random.Random(seed).randbytes(parts * self.part_size + parts * 17)
        store.put("shard", data, crc64=crc64nvme(data))
        assert self.raw_get(store_spec, "shard") == data
        assert store.head("shard").crc64 in {None, crc64nvme(data)}

    @pytest.mark.parametrize("parts", [0, 1, 3])
    def test_put_with_a_wrong_crc64_leaves_nothing_visible(
        self, store_spec: StoreSpec, store: ObjectStore, parts: int, seed: int
    ) -> None:
        data = random.Random(seed).randbytes(parts * self.part_size + parts * 17)
        with pytest.raises(CorruptCheckpointError, match="shard"):
            store.put("shard", data, crc64=crc64nvme(data) ^ 1)
        assert self.raw_get(store_spec, "shard") is None
        assert self.raw_keys(store_spec) == set()
        with pytest.raises(StoreNotFoundError):
            store.head("shard")
        store.put("shard", data, crc64=crc64nvme(data))
        assert self.raw_get(store_spec, "shard") == data

    @pytest.mark.parametrize("verb", ["put", "create"])
    def test_every_kind_of_buffer_is_taken(
        self, store_spec: StoreSpec, store: ObjectStore, verb: str
    ) -> None:
        mapping = mmap.mmap(-1, len(_OBJECT))
        mapping[:] = _OBJECT
        buffers: dict[str, Buffer] = {
            "bytes": _OBJECT,
            "bytearray": bytearray(_OBJECT),
            "memoryview": memoryview(bytearray(_OBJECT)),
            "readonly": memoryview(bytearray(_OBJECT)).toreadonly(),
            "slice": memoryview(b"head" + _OBJECT + b"tail")[4:-4],
            "mmap": memoryview(mapping),
        }
        for kind, buffer in buffers.items():
            getattr(store, verb)(kind, buffer)
            assert self.raw_get(store_spec, kind) == _OBJECT, kind

    def test_an_object_of_several_parts_comes_back(
        self, store_spec: StoreSpec, store: ObjectStore, seed: int
    ) -> None:
        size = 3 * self.part_size + 12_345
        data = random.Random(seed).randbytes(size)
        store.put("large", data)
        assert self.raw_get(store_spec, "large") == data
        assert store.head("large").size == size
        assert read_all(store, "large") == data
        for offset, length in [
            (self.part_size - 5, 10),
            (self.part_size, 100),
            (2 * self.part_size + 3, self.part_size),
            (size - 7, 100),
        ]:
            assert read(store, "large", length, offset) == data[offset : offset + length]

    def test_an_empty_object_is_an_object(self, store_spec: StoreSpec, store: ObjectStore) -> None:
        store.put("put", b"")
        assert store.create("created", b"") is True
        assert store.create("created", b"x") is False
        assert [(info.key, info.size) for info in store.list("")] == [("created", 0), ("put", 0)]
        assert store.head("put").size == 0
        assert read_all(store, "put") == b""
        assert read(store, "put", 10) == b""
        assert self.raw_get(store_spec, "put") == b""

    def test_threads_share_a_store(self, store: ObjectStore) -> None:
        def work(index: int) -> None:
            data = f"{index}".encode() * 1000
            for turn in range(3):
                store.put(f"{index:02d}/{turn}", data)
                assert read_all(store, f"{index:02d}/{turn}") == data
                assert keys(store, f"{index:02d}/") == [f"{index:02d}/{entry}" for entry in range(turn + 1)]

        race(8, work)

    # --- read and head

    def test_read_fills_what_the_range_holds(self, store_spec: StoreSpec, store: ObjectStore) -> None:
        self.raw_put(store_spec, "object", _OBJECT)
        last = len(_OBJECT) - 1
        beginning = [(0, 1), (0, 0), (7, 0), (0, last), (0, last + 1), (0, last + 1000)]
        end = [(last, 1), (last, 2), (last - 20, 100), (last + 1, 0), (last + 1, 1), (last + 5000, 10)]
        for offset, length in beginning + end:
            around = bytearray(b"." * (length + 20))
            count = store.read("object", memoryview(around)[10 : 10 + length], offset)
            expected = _OBJECT[offset : offset + length]
            assert (offset, length, count) == (offset, length, len(expected))
            assert around[10 : 10 + count] == expected
            assert around[:10] == around[10 + length :] == b"." * 10

    def test_read_all_returns_the_object(self, store_spec: StoreSpec, store: ObjectStore) -> None:
        self.raw_put(store_spec, "object", _OBJECT)
        assert read_all(store, "object") == _OBJECT
        assert read_all(store, "object", len(_OBJECT)) == _OBJECT
        assert read_all(store, "object", 3) == _OBJECT

    def test_head_tells_size_and_time(self, store_spec: StoreSpec, store: ObjectStore) -> None:
        self.raw_put(store_spec, "a/object", _OBJECT)
        info = store.head("a/object")
        assert (info.key, info.size) == ("a/object", len(_OBJECT))
        assert abs(info.modified - time.time()) < 120
        assert info.crc64 in {None, crc64nvme(_OBJECT)}
        (listed,) = store.list("")
        assert (listed.key, listed.size, listed.crc64) == ("a/object", len(_OBJECT), None)
        assert abs(listed.modified - info.modified) <= 1

    @pytest.mark.parametrize("verb", ["read", "head", "read_all"])
    def test_a_missing_object_is_told(self, store_spec: StoreSpec, store: ObjectStore, verb: str) -> None:
        self.raw_put(store_spec, "a/b", _OBJECT)
        verbs: dict[str, Callable[[str], object]] = {
            "read": lambda key: read(store, key, 10),
            "head": store.head,
            "read_all": lambda key: read_all(store, key),
        }
        for key in ("missing", "a", "a/", "a/b/c", "a/bb"):
            with pytest.raises(StoreError) as caught:
                verbs[verb](key)
            # A store that cannot hold a key that ends in a slash says that instead.
            assert isinstance(caught.value, StoreNotFoundError) or key.endswith("/")
            assert (caught.value.key, store.uri in str(caught.value)) == (key, True)
            again = pickle.loads(pickle.dumps(caught.value))  # noqa: S301 # our own bytes
            assert (type(again), str(again), again.key) == (type(caught.value), str(caught.value), key)

    # --- errors

    def test_a_store_keeps_to_the_protocol(self, store: ObjectStore) -> None:
        assert isinstance(store, ObjectStore)
        assert not store.uri.endswith("/")

    def test_wrong_credentials_are_told_as_such(self, store_spec: StoreSpec) -> None:
        self._expect(store_spec, self.wrong_credentials(store_spec), StorePermissionError)

    def test_a_missing_bucket_is_told_as_such(self, store_spec: StoreSpec) -> None:
        self._expect(store_spec, self.missing_bucket(store_spec), StoreNotFoundError)

    def test_an_unreachable_endpoint_is_told_as_such(self, store_spec: StoreSpec) -> None:
        self._expect(store_spec, self.unreachable_endpoint(store_spec), StoreTransientError)

    def test_credentials_that_may_only_read_do_read_and_are_told_when_they_write(
        self, store_spec: StoreSpec
    ) -> None:
        readonly = self.readonly_credentials(store_spec)
        if readonly is None:
            pytest.skip("this store has no such credentials")
        self.raw_put(store_spec, "a/b", _OBJECT)
        store = readonly.open()
        assert keys(store) == ["a/b"]
        assert read_all(store, "a/b") == _OBJECT
        writes: list[Callable[[], object]] = [
            lambda: store.put("a/c", b"x"),
            lambda: store.put("a/c", bytes(2 * self.part_size + 1)),
            lambda: store.create("a/c", b"x"),
            lambda: store.delete(["a/b"]),
        ]
        for write in writes:
            with pytest.raises(StorePermissionError):
                write()
        assert self.raw_keys(store_spec) == {"a/b"}

    def _expect(self, spec: StoreSpec, broken: StoreSpec | None, kind: type[StoreError]) -> None:
        """Every verb of ``broken`` raises ``kind``, and says of what without telling a secret."""
        if broken is None:
            pytest.skip("this has no meaning for this store")
        store = broken.open()
        verbs: dict[str, Callable[[], object]] = {
            "put": lambda: store.put("a/b", b"x"),
            "put in parts": lambda: store.put("a/b", bytes(2 * self.part_size + 1)),
            "create": lambda: store.create("a/b", b"x"),
            "read": lambda: read(store, "a/b", 10),
            "head": lambda: store.head("a/b"),
            "list": lambda: keys(store),
            "delete": lambda: store.delete(["a/b"]),
            "abort_uploads": lambda: store.abort_uploads("", 3600),
        }
        for name, verb in verbs.items():
            with pytest.raises((kind, CommitUnknownError) if name == "create" else kind) as caught:
                verb()
            text = str(caught.value)
            assert store.uri in text, name
            for options in (spec.storage_options, broken.storage_options):
                assert str(options.get("secret", "no secret")) not in text, name
        assert self.raw_keys(spec) == set()
