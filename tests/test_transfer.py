"""What reaches a tensor is what was saved, or an error that names the object."""

from __future__ import annotations

import random
import threading
import uuid

import pytest
from awscrt.checksums import crc64nvme
from hypothesis import given, settings
from hypothesis import strategies as st

from objckpt.errors import CorruptCheckpointError, StorePermissionError
from objckpt.manifest import DataObject, Piece, RankRecord, Save, data_key
from objckpt.plan import reads, stored
from objckpt.store import open_store
from objckpt.transfer import block_checksums, fetch, upload, verify, whole_checksum

BLOCK = 16


class Counting:
    """A store that counts the bytes that are read."""

    def __init__(self, store):
        self.store, self.count, self.lock = store, 0, threading.Lock()

    def __getattr__(self, name):
        return getattr(self.store, name)

    def read(self, key, into, offset=0):
        count = self.store.read(key, into, offset)
        with self.lock:
            self.count += count
        return count


class Shards:
    """Tensors of random bytes in the objects of a few ranks, in ``memory://``."""

    def __init__(self, sizes, block=BLOCK, seed=0):
        draw = random.Random(seed)
        self.store = Counting(open_store(f"memory://{uuid.uuid4().hex}/run"))
        self.content, self.objects, self.images, records = {}, [], {}, []
        for rank, of_rank in enumerate(sizes):
            pieces, image = [], draw.randbytes(draw.randrange(20))  # a header
            for number, size in enumerate(of_rank):
                name = f"{rank}.{number}"
                self.content[name] = draw.randbytes(size)
                span = (len(image), len(image) + size)
                pieces.append(Piece(name, "uint8", (size,), (0,), (size,), 0, *span))
                image += self.content[name]
            obj = DataObject(
                data_key(Save(1, 1), rank), len(image), block, block_checksums(memoryview(image), block)
            )
            upload(self.store, obj, memoryview(image))
            self.objects.append(obj)
            self.images[obj.key] = image
            records.append(
                RankRecord("r", Save(1, 1), rank, 9, 1.0, None, (), (obj,), tuple(pieces), None, None)
            )
        self.pieces = stored(records)

    def fetch(self, wanted=None, *, part_size=64, concurrency=3, local=None):
        wanted = list(self.content) if wanted is None else wanted
        targets = {name: bytearray(len(self.content[name])) for name in wanted}
        views = {name: memoryview(data) for name, data in targets.items()}
        plan = reads(self.pieces, wanted)
        count = fetch(self.store, plan, views, part_size=part_size, concurrency=concurrency, local=local)
        assert targets == {name: self.content[name] for name in wanted}
        return count

    def blocks(self, wanted):
        """Bytes of all blocks that hold a byte of what is wanted."""
        found = set()
        for name in wanted:
            for piece, obj in self.pieces[name]:
                found |= {(obj.key, byte // obj.block_size) for byte in range(piece.begin, piece.end)}
        sizes = {o.key: o.size for o in self.objects}
        return sum(min(BLOCK, sizes[key] - number * BLOCK) for key, number in found)


some_sizes = st.lists(st.lists(st.integers(0, 150), max_size=6), min_size=1, max_size=4)


@settings(max_examples=80, deadline=None)
@given(some_sizes, st.data())
def test_any_layout_comes_back_as_it_was_and_no_block_is_read_in_vain(sizes, data):
    shards = Shards(sizes, seed=data.draw(st.integers(0, 99)))
    wanted = [name for name in shards.content if data.draw(st.booleans())]
    count = shards.fetch(
        wanted, part_size=data.draw(st.integers(1, 200)), concurrency=data.draw(st.integers(1, 4))
    )
    assert count == shards.store.count == shards.blocks(wanted)


def test_a_flipped_bit_anywhere_is_found():
    shards = Shards([[40, 7], [30]])
    draw = random.Random(1)
    for obj in shards.objects:
        for at in range(obj.size):
            damaged = bytearray(shards.images[obj.key])
            damaged[at] ^= 1 << draw.randrange(8)
            shards.store.put(obj.key, damaged)
            used = any(
                p.begin // BLOCK <= at // BLOCK <= (p.end - 1) // BLOCK
                for found in shards.pieces.values()
                for p, o in found
                if o == obj
            )
            if used:
                with pytest.raises(CorruptCheckpointError, match=f"block {at // BLOCK} .* of {obj.key}"):
                    shards.fetch()
            else:
                shards.fetch()
        shards.store.put(obj.key, shards.images[obj.key])
    shards.fetch()


def test_a_bit_that_flips_on_the_way_is_read_once_more_and_one_that_flips_twice_is_told(caplog):
    shards = Shards([[40, 9], [33]])
    store, honest, times = shards.store, shards.store.read, {}

    def flips(key, into, offset=0):
        count = honest(key, into, offset)
        times[key, offset] = times.get((key, offset), 0) + 1
        if times[key, offset] <= worst:
            into[count // 2] ^= 4
        return count

    store.read = flips
    worst = 1
    shards.fetch()
    assert times
    assert set(times.values()) == {2}
    assert "reading it once more" in caplog.text
    times.clear()
    worst = 2
    with pytest.raises(CorruptCheckpointError, match="is damaged"):
        shards.fetch()


@pytest.mark.parametrize("size", [0, 1, BLOCK, 39, 69])
def test_an_object_cut_short_is_told_with_its_key(size):
    shards = Shards([[70]])
    obj = shards.objects[0]
    shards.store.put(obj.key, shards.images[obj.key][:size])
    with pytest.raises(CorruptCheckpointError, match=f"{obj.key} is cut short"):
        shards.fetch()


def test_a_missing_object_is_told_with_its_key():
    shards = Shards([[70], [70]])
    shards.store.delete([shards.objects[1].key])
    with pytest.raises(CorruptCheckpointError, match=f"{shards.objects[1].key} is missing"):
        shards.fetch()


def test_what_the_store_refuses_passes_through_and_ends_the_rest():
    shards = Shards([[4000]])
    asked = []

    class Refusing(Counting):
        def read(self, key, into, offset=0):
            asked.append(offset)
            raise StorePermissionError("no", key=key)

    shards.store = Refusing(shards.store)
    with pytest.raises(StorePermissionError):
        shards.fetch(part_size=BLOCK, concurrency=1)
    assert len(asked) < 250


@pytest.mark.parametrize("change", [-1, 1, 20])
def test_a_record_that_gives_a_tensor_another_size_is_damage(change):
    """Else its end would be left as it was, or another tensor's bytes would land in it."""
    shards = Shards([[70, 50]])
    target = memoryview(bytearray(70 + change))
    with pytest.raises(CorruptCheckpointError, match=r"'0\.0' gives 70 bytes"):
        fetch(shards.store, reads(shards.pieces, ["0.0"]), {"0.0": target}, part_size=64, concurrency=1)


# ------------------------------------------------------------------ local copies


def copy_of(images):
    def local(obj, into, offset):
        if obj.key not in images:
            return None
        found = images[obj.key][offset : offset + len(into)]
        into[: len(found)] = found
        return len(found)

    return local


def test_a_local_copy_saves_the_way_to_the_store():
    shards = Shards([[70, 9], [70]])
    assert shards.fetch(local=copy_of(shards.images)) == shards.store.count == 0
    first, second = shards.objects
    del shards.images[second.key]
    assert shards.fetch(local=copy_of(shards.images)) == shards.blocks(["1.0"])
    assert first.key in shards.images


def test_a_wrong_local_copy_is_passed_over_block_by_block(caplog):
    shards = Shards([[200]])
    obj = shards.objects[0]
    wrong = bytearray(shards.images[obj.key])
    wrong[100] ^= 1
    assert shards.fetch(part_size=BLOCK, local=copy_of({obj.key: bytes(wrong)})) == BLOCK
    assert f"local copy: block {100 // BLOCK}" in caplog.text


def test_a_short_local_copy_is_passed_over():
    shards = Shards([[200]])
    obj = shards.objects[0]
    short = shards.images[obj.key][:100]
    count = shards.fetch(part_size=BLOCK, local=copy_of({obj.key: short}))
    assert count == obj.size - 100 // BLOCK * BLOCK


# ------------------------------------------------------------------ checksums, and the way up


@settings(max_examples=60, deadline=None)
@given(st.binary(max_size=200), st.integers(1, 60))
def test_the_whole_checksum_follows_from_those_of_the_blocks(data, block):
    crcs = block_checksums(memoryview(data), block)
    obj = DataObject("k", len(data), block, crcs)
    assert len(crcs) == -(-len(data) // block)
    assert whole_checksum(obj) == crc64nvme(data)
    verify(obj, 0, memoryview(data), "here")


def test_bytes_that_changed_since_they_were_read_first_are_not_sent():
    store = open_store(f"memory://{uuid.uuid4().hex}/run")
    image = bytearray(random.Random(3).randbytes(100))
    obj = DataObject(data_key(Save(1, 1), 0), 100, BLOCK, block_checksums(memoryview(image), BLOCK))
    image[50] ^= 1
    with pytest.raises(CorruptCheckpointError):
        upload(store, obj, memoryview(image))
    assert [*store.list("")] == []
    image[50] ^= 1
    slot = memoryview(bytes(image) + b"the rest of a slot")
    upload(store, obj, slot)
    assert store.head(obj.key).size == 100
