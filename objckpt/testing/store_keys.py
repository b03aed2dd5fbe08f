"""The part of the conformance suite that is about names: which keys there may be, their listing and their removal.

Invariants: see ``conformance``, of which these tests are a part. Called through ``ObjectStoreTests``.
"""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Final

import pytest

from objckpt.errors import StoreError, StoreNotFoundError
from objckpt.store import ObjectStore, read_all
from objckpt.testing.store_hooks import StoreHooks, StoreSpec, keys

_MANY: Final = 1_100

# Keys that every store must take as they are.
_ODD_KEYS: Final = {
    "space": "a b/c d",
    "plus": "a+b/c++",
    "percent": "100%/%",
    "percent-escape": "a%2Fb%20c",
    "reserved": "a=1&b=2?c#d;e,f:g@h!$'()*[]",
    "quotes": "\"double\" 'single' `back`",
    "backslash": "a\\b",
    "markup": "<a>&amp;</a>",
    "composed": "\u00e9/\u4e2d\u6587/\U0001f600",
    "decomposed": "e\u0301",
    "leading-dot": ".hidden/..two",
    "dots": "...",
    "tilde": "~/x",
    "dash": "-rf",
    "segment-of-255": "s" * 255,
    # Room for the root, which counts too in a bucket.
    "long": "/".join(["k" * 190] * 5),
}
# Keys that a store may refuse, but neither mangle nor take for another one's.
_HOSTILE_KEYS: Final = {
    "empty": "",
    "slash": "/",
    "leading-slash": "/a",
    "trailing-slash": "a/b/",
    "double-slash": "a//b",
    "dot": "a/./b",
    "parent": "../escaped",
    "parent-inside": "a/../b",
    "parent-beyond": "a/../../escaped",
    "only-parent": "..",
    "newline": "a\nb",
    "nul": "a\0b",
    "surrogate": "a\ud800b",
    "segment-of-256": "s" * 256,
    "segment-of-1024": "s" * 1024,
    "over-1024-bytes": "/".join(["k" * 204] * 5) + "kk",
}


class KeyTests(StoreHooks):
    """Keys, ``list``, ``delete`` and ``abort_uploads``."""

    def _fill(self, spec: StoreSpec, *names: str) -> None:
        for name in names:
            self.raw_put(spec, name, name.encode())

    # --- keys

    @pytest.mark.parametrize("name", _ODD_KEYS)
    def test_an_odd_key_is_taken_as_it_is(self, store_spec: StoreSpec, store: ObjectStore, name: str) -> None:
        self._round_trip(store_spec, store, _ODD_KEYS[name])

    @pytest.mark.parametrize("name", _HOSTILE_KEYS)
    def test_a_hostile_key_works_or_is_refused_without_effect(
        self, store_spec: StoreSpec, store: ObjectStore, name: str
    ) -> None:
        key = _HOSTILE_KEYS[name]
        self._fill(store_spec, "a/c", "b")
        before = self.raw_keys(store_spec)
        try:
            store.put(key, b"content")
        except StoreError as error:
            assert (error.key, store.uri in str(error)) == (key, True)  # noqa: PT017 # it may also work
            with pytest.raises(StoreError):
                store.create(key, b"content")
            with pytest.raises(StoreError):
                store.head(key)
            assert self.raw_keys(store_spec) == before
        else:
            store.delete([key])
            assert self.raw_keys(store_spec) == before
            self._round_trip(store_spec, store, key)
        assert self.raw_get(store_spec, "a/c") == b"a/c"

    def _round_trip(self, spec: StoreSpec, store: ObjectStore, key: str) -> None:
        others = set(keys(store))
        assert store.create(key, b"content") is True
        assert store.create(key, b"other") is False
        store.put(key, b"content")
        assert self.raw_get(spec, key) == b"content"
        assert store.head(key).size == len(b"content")
        assert read_all(store, key) == b"content"
        assert keys(store) == sorted({key, *others})
        assert keys(store, key) == [key]
        assert keys(store, key[:1], start_after=key[:-1])[:1] == [key]
        assert self.raw_keys(spec) == {key, *others}
        store.delete([key])
        assert self.raw_keys(spec) == others
        with pytest.raises(StoreNotFoundError):
            store.head(key)

    def test_composed_and_decomposed_names_are_two_objects(self, store: ObjectStore) -> None:
        store.put("\u00e9", b"composed")
        store.put("e\u0301", b"decomposed")
        assert read_all(store, "\u00e9") == b"composed"
        assert keys(store) == ["e\u0301", "\u00e9"]

    def test_upper_and_lower_case_are_two_objects(self, store: ObjectStore) -> None:
        store.put("Key", b"upper")
        store.put("key", b"lower")
        assert read_all(store, "Key") == b"upper"
        assert keys(store) == ["Key", "key"]

    # --- list

    def test_list_of_an_empty_root_is_empty(self, store: ObjectStore) -> None:
        assert keys(store) == []
        assert keys(store, "a/") == []

    def test_list_is_sorted_by_code_point(self, store_spec: StoreSpec, store: ObjectStore, seed: int) -> None:
        # U+FF5E and U+1F600 change places in UTF-16.
        names = [
            "A",
            "Z",
            "a",
            "a0",
            "aa",
            "b/1",
            "b/10",
            "b/2",
            "z",
            "\u00e9",
            "\u4e2d",
            "\uff5e",
            "\U0001f600",
        ]
        assert names == sorted(names)
        self._fill(store_spec, *random.Random(seed).sample(names, len(names)))
        assert keys(store) == names

    def test_list_sorts_the_slash_as_any_character(self, store_spec: StoreSpec, store: ObjectStore) -> None:
        self._fill(store_spec, "o/x/1", "o/x-1", "o/x.1", "o/x0", "o/x/1-", "o/x!")
        assert keys(store) == ["o/x!", "o/x-1", "o/x.1", "o/x/1", "o/x/1-", "o/x0"]

    def test_list_begins_after_a_key_that_a_slash_follows_in_the_order(
        self, store_spec: StoreSpec, store: ObjectStore
    ) -> None:
        self._fill(store_spec, "o/x/1", "o/x-1", "o/x.1", "o/x0", "o/x/1-", "o/x!")
        assert keys(store, start_after="o/x-1") == ["o/x.1", "o/x/1", "o/x/1-", "o/x0"]

    def test_list_and_delete_go_on_beyond_a_thousand(self, store_spec: StoreSpec, store: ObjectStore) -> None:
        names = [f"many/{index:05d}" for index in range(_MANY)]
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda name: self.raw_put(store_spec, name, b""), names))
        self._fill(store_spec, "many.txt", "zzz")
        assert keys(store) == ["many.txt", *names, "zzz"]
        assert keys(store, "many/") == names
        assert keys(store, "many/", start_after=names[49]) == names[50:]
        assert keys(store, "many/", start_after=names[1049]) == names[1050:]
        assert keys(store, "many/001") == names[100:200]
        store.delete(name for name in ["missing", *names, "many/00001x"])
        assert self.raw_keys(store_spec) == {"many.txt", "zzz"}

    def test_list_begins_after_a_key_that_may_be_absent(
        self, store_spec: StoreSpec, store: ObjectStore
    ) -> None:
        self._fill(store_spec, "c/9", "d/1", "d/2", "d/4/x", "e/1")
        everything = ["d/1", "d/2", "d/4/x"]
        for start_after in ("", "a", "c/9", "d", "d/"):
            assert keys(store, "d/", start_after) == everything
        assert keys(store, "d/", "d/1") == ["d/2", "d/4/x"]
        for start_after in ("d/2", "d/3", "d/4", "d/4/"):
            assert keys(store, "d/", start_after) == ["d/4/x"]
        for start_after in ("d/4/x", "d/9", "e", "e/1"):
            assert keys(store, "d/", start_after) == []

    def test_list_takes_its_prefix_as_a_string_and_not_as_a_directory(
        self, store_spec: StoreSpec, store: ObjectStore
    ) -> None:
        self._fill(store_spec, "dir/ab", "dir/abc", "dir/abd/x", "dir/b", "dirt", "other/dir/ab")
        assert keys(store, "dir/ab") == ["dir/ab", "dir/abc", "dir/abd/x"]
        assert keys(store, "dir/") == ["dir/ab", "dir/abc", "dir/abd/x", "dir/b"]
        assert keys(store, "dir") == ["dir/ab", "dir/abc", "dir/abd/x", "dir/b", "dirt"]
        assert keys(store, "dir/abd/") == ["dir/abd/x"]
        for prefix in ("dir/abc/", "dir/ab/", "ir/", "../", "/"):
            assert keys(store, prefix) == []

    def test_list_shows_at_once_what_was_put_and_deleted(
        self, store_spec: StoreSpec, store: ObjectStore
    ) -> None:
        other = store_spec.open()
        for turn in range(10):
            store.put(f"now/{turn}", b"x")
            assert keys(other, "now/")[-1] == f"now/{turn}"
        for turn in range(10):
            store.delete([f"now/{turn}"])
            assert f"now/{turn}" not in keys(other, "now/")

    # --- the root

    def test_a_root_whose_name_begins_alike_is_another_root(
        self, store_spec: StoreSpec, store: ObjectStore
    ) -> None:
        sibling = replace(store_spec, uri=store_spec.uri + "-2")
        self._fill(sibling, "a/theirs")
        self._fill(store_spec, "a/ours")
        assert keys(store) == ["a/ours"]
        assert keys(sibling.open()) == ["a/theirs"]
        store.delete(["a/theirs", "a/ours"])
        assert self.raw_keys(sibling) == {"a/theirs"}

    def test_a_root_with_a_trailing_slash_is_the_same_root(
        self, store_spec: StoreSpec, store: ObjectStore
    ) -> None:
        slashed = replace(store_spec, uri=store_spec.uri + "/").open()
        assert store.uri == slashed.uri
        assert not store.uri.endswith("/")
        store.put("a/1", b"one")
        assert slashed.create("a/1", b"two") is False
        slashed.put("a/2", b"two")
        assert read_all(store, "a/2") == b"two"
        assert keys(store) == keys(slashed) == ["a/1", "a/2"]
        assert self.raw_keys(store_spec) == {"a/1", "a/2"}

    # --- delete

    def test_delete_takes_missing_keys_and_leaves_neighbours(
        self, store_spec: StoreSpec, store: ObjectStore
    ) -> None:
        self._fill(store_spec, "a/1", "a/2", "a/22", "a-1", "b/1/x")
        store.delete(iter(["a/1", "a/2", "missing", "a", "b/1", "a/22/x", "a/1"]))
        assert self.raw_keys(store_spec) == {"a/22", "a-1", "b/1/x"}
        store.delete(["a/1", "a/2"])
        store.delete([])
        assert self.raw_keys(store_spec) == {"a/22", "a-1", "b/1/x"}
        store.delete(["b/1/x"])
        store.put("b", b"where a directory may have been")
        assert self.raw_get(store_spec, "b") == b"where a directory may have been"

    # --- unfinished uploads

    def test_an_orphaned_upload_is_aborted_and_a_young_one_spared(
        self, store_spec: StoreSpec, store: ObjectStore
    ) -> None:
        if not self.raw_begin_upload(store_spec, "data/one"):
            assert store.abort_uploads("", -5) == 0
            pytest.skip("this store has no unfinished uploads")
        assert self.raw_begin_upload(store_spec, "data/two")
        assert self.raw_begin_upload(store_spec, "other/three")
        self._fill(store_spec, "data/whole")
        assert keys(store) == ["data/whole"]
        assert store.abort_uploads("", 3600) == 0
        assert self.raw_uploads(store_spec) == {"data/one", "data/two", "other/three"}
        # Older than a moment that is still to come: all, however coarse the store's clock.
        assert store.abort_uploads("data/", -5) == 2
        assert self.raw_uploads(store_spec) == {"other/three"}
        assert store.abort_uploads("data/", -5) == 0
        assert self.raw_keys(store_spec) == {"data/whole"}
