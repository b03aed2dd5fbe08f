"""Plans: each replica is written once, each wanted byte is read once, in whole blocks."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from objckpt.errors import CorruptCheckpointError
from objckpt.manifest import DataObject, Piece, RankRecord, Save, data_key
from objckpt.plan import ObjectRead, Segment, assign, reads, requests, stored

quick = settings(max_examples=150, deadline=None)
names = st.dictionaries(st.text(max_size=6), st.integers(0, 10**9), max_size=40)


@quick
@given(names, st.integers(1, 9), st.integers())
def test_every_replica_is_written_by_one_rank_whatever_the_order_of_names(replicas, world_size, seed):
    shuffled = list(replicas.items())
    random.Random(seed).shuffle(shuffled)
    owners = assign(shuffled, world_size)
    assert owners == assign(replicas.items(), world_size)
    assert owners.keys() == replicas.keys()
    assert all(0 <= rank < world_size for rank in owners.values())


@quick
@given(names, st.integers(1, 9))
def test_ranks_write_the_same_to_within_one_piece(replicas, world_size):
    loads = [0] * world_size
    for name, rank in assign(replicas.items(), world_size).items():
        loads[rank] += replicas[name]
    assert max(loads) - min(loads) <= max(replicas.values(), default=0)


# ------------------------------------------------------------------ reads


def obj(size, block=16, rank=0):
    return DataObject(data_key(Save(1, 1), rank), size, block, (0,) * -(-size // block))


def record(rank, sizes, block=16):
    pieces, at = [], 0
    for number, size in enumerate(sizes):
        pieces.append(Piece(f"{rank}.{number}", "uint8", (size,), (0,), (size,), 0, at, at + size))
        at += size
    objects = (obj(at, block, rank),)
    return RankRecord("r", Save(1, 1), rank, 9, 1.0, None, (), objects, tuple(pieces), None, None)


@quick
@given(st.lists(st.lists(st.integers(0, 99), max_size=6), min_size=1, max_size=4), st.data())
def test_reads_name_each_wanted_byte_once_and_no_other(sizes, data):
    records = [record(rank, of_rank) for rank, of_rank in enumerate(sizes)]
    pieces = stored(records)
    wanted = [name for name in pieces if data.draw(st.booleans())]
    found = {}
    for read in reads(pieces, wanted):
        assert [s.begin for s in read.segments] == sorted(s.begin for s in read.segments)
        for s in read.segments:
            assert s.name not in found
            found[s.name] = (read.obj.key, s.begin, s.end, s.at)
    assert found == {name: (o.key, p.begin, p.end, 0) for name in wanted for p, o in pieces[name]}


def test_a_tensor_that_is_stored_in_boxes_only_is_refused_by_name():
    piece = Piece("w", "uint8", (4,), (2,), (2,), 0, 0, 2)
    with pytest.raises(CorruptCheckpointError, match="'w'"):
        reads({"w": [(piece, obj(2))]}, ["w"])


# ------------------------------------------------------------------ requests


@st.composite
def some_reads(draw):
    """Segments that do not overlap, with gaps, some empty, over an object whose last block is short; each at its own place of a tensor."""
    block = draw(st.integers(1, 20))
    segments, at = [], 0
    for number in range(draw(st.integers(0, 8))):
        begin = at + draw(st.integers(0, 50))
        at = begin + draw(st.integers(0, 60))
        segments.append(Segment(f"t{number % 3}", begin, at, 1000 * number))
    return ObjectRead(obj(at + draw(st.integers(0, 30)), block), tuple(segments))


@settings(max_examples=400, deadline=None)
@given(some_reads(), st.integers(1, 100))
def test_requests_are_whole_blocks_and_cover_each_wanted_byte_once(read, part_size):
    block, size = read.obj.block_size, read.obj.size
    wanted = {}
    for s in read.segments:
        for byte in range(s.begin, s.end):
            wanted[s.name, s.at + byte - s.begin] = byte
    found, blocks = {}, []
    for request in requests(read, part_size):
        assert request.obj is read.obj
        assert request.begin % block == 0
        assert request.begin < request.end <= size
        assert request.end % block == 0 or request.end == size
        assert request.end - request.begin <= max(part_size, block)
        blocks += range(request.begin // block, -(-request.end // block))
        for s in request.segments:
            assert request.begin <= s.begin < s.end <= request.end
            for byte in range(s.begin, s.end):
                assert (s.name, s.at + byte - s.begin) not in found
                found[s.name, s.at + byte - s.begin] = byte
    assert found == wanted
    assert blocks == sorted({byte // block for byte in wanted.values()})  # no block twice, none in vain


@quick
@given(some_reads(), st.integers(1, 100))
def test_neighbouring_blocks_are_read_together(read, part_size):
    found = requests(read, part_size)
    limit = max(1, part_size // read.obj.block_size) * read.obj.block_size
    for one, next_one in itertools.pairwise(found):
        assert one.end < next_one.begin or one.end - one.begin == limit


def test_a_tensor_over_many_blocks_is_one_segment_of_a_request():
    read = ObjectRead(obj(100, 16), (Segment("a", 3, 90, 0), Segment("b", 90, 95, 0)))
    (request,) = requests(read, 1000)
    assert request.segments == (Segment("a", 3, 90, 0), Segment("b", 90, 95, 0))
    assert (request.begin, request.end) == (0, 96)
