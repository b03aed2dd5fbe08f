"""The codec: what is read back is what was written, its bytes are a pure function of it, and nothing else is ever believed."""

from __future__ import annotations

import copy
import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from objckpt.errors import CorruptCheckpointError, FormatVersionError
from objckpt.manifest import (
    BLOCK_SIZE,
    GROUP_SIZE,
    Attempt,
    DataObject,
    Entry,
    GroupRecord,
    Index,
    KeepBest,
    KeepEvery,
    KeepFor,
    KeepLast,
    Piece,
    Policy,
    Rank,
    RankRecord,
    Reference,
    Save,
    Step,
    Version,
    data_key,
    decode_group,
    decode_index,
    decode_record,
    decode_version,
    encode_group,
    encode_index,
    encode_record,
    encode_version,
    folder_prefix,
    group_key,
    group_of,
    groups,
    index_key,
    probe_key,
    rank_of,
    record_key,
    records_prefix,
    save_of,
    seal,
    version_key,
    version_of,
)

quick = settings(max_examples=60, deadline=None)

crcs = st.integers(0, 2**64 - 1)
sizes = st.integers(0, 2**40)
times = st.floats(allow_nan=False, allow_infinity=False, min_value=-1e15, max_value=1e15)
saves = st.builds(Save, st.integers(1, 10**12 - 1), st.integers(0, 10**12 - 1))
values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)


finite = st.floats(allow_nan=False, allow_infinity=False)
rules = (
    st.builds(KeepLast, st.integers(1, 9))
    | st.builds(KeepEvery, st.integers(1, 10**6))
    | st.builds(KeepBest, st.text(max_size=5), st.integers(1, 9), st.sampled_from(["min", "max"]))
    | st.builds(KeepFor, times)
)


@st.composite
def pieces(draw, objects):
    number = draw(st.integers(0, len(objects) - 1))
    begin = draw(st.integers(0, objects[number].size))
    whole = draw(st.lists(st.integers(0, 9), max_size=3))
    offset = [draw(st.integers(0, n)) for n in whole]
    shape = [draw(st.integers(0, n - o)) for n, o in zip(whole, offset, strict=True)]
    return Piece(
        draw(st.text(max_size=8)),
        "float32",
        tuple(whole),
        tuple(offset),
        tuple(shape),
        number,
        begin,
        draw(st.integers(begin, objects[number].size)),
    )


@st.composite
def records(draw, save=None, rank=None, world_size=None):
    save = save or draw(saves)
    rank = draw(st.integers(0, 99_998)) if rank is None else rank
    bases = tuple(draw(st.lists(saves, max_size=2)))
    objects = []
    for number, owner in enumerate((save, *bases)):
        block = draw(st.sampled_from([7, 64, BLOCK_SIZE]))
        size = draw(st.integers(0, 5 * block))
        checksums = tuple(draw(crcs) for _ in range(-(-size // block)))
        objects.append(DataObject(data_key(owner, Rank(rank), number), size, block, checksums))
    return RankRecord(
        run=draw(st.text(max_size=5)),
        save=save,
        rank=Rank(rank),
        world_size=world_size or draw(st.integers(rank + 1, 100_000)),
        created_at=draw(times),
        metadata=draw(values),
        bases=bases,
        objects=tuple(objects),
        pieces=tuple(draw(st.lists(pieces(objects), max_size=3))),
        values=draw(values),
        rank_values=draw(values),
    )


@st.composite
def group_records(draw):
    save, group = draw(saves), draw(st.integers(0, 3))
    world_size = group * GROUP_SIZE + draw(st.integers(1, 3))
    members = tuple(draw(records(save, rank, world_size)) for rank in range(group * GROUP_SIZE, world_size))
    return GroupRecord(draw(st.text(max_size=5)), save, group, world_size, members)


@st.composite
def indexes(draw):
    save = draw(saves)
    world_size = draw(st.integers(1, 4) | st.integers(GROUP_SIZE + 1, 4 * GROUP_SIZE))
    count = groups(world_size)
    keys = (
        [record_key(save, Rank(i)) for i in range(world_size)]
        if count == 1
        else [group_key(save, g) for g in range(count)]
    )
    return Index(
        run=draw(st.text(max_size=5)),
        save=save,
        world_size=world_size,
        created_at=draw(times),
        metadata=draw(values),
        nbytes=draw(sizes),
        bases=tuple(draw(st.lists(saves, max_size=2))),
        records=tuple(Reference(key, draw(sizes), draw(crcs)) for key in keys),
    )


@st.composite
def versions(draw):
    number = draw(st.integers(1, 10**20 - 1).map(lambda n: min(n, 2**63 - 1)))
    listed = draw(st.lists(saves, max_size=3, unique=True))
    return Version(
        number=number,
        change=draw(st.sampled_from(["start", "commit", "finish"])),
        run=draw(st.text(max_size=5)),
        attempt=Attempt(draw(st.integers(1, number))),
        launch=draw(st.none() | st.text(max_size=5)),
        nonce=draw(st.text(max_size=5)),
        world_size=draw(st.integers(1, 10**5)),
        policy=Policy(tuple(draw(st.lists(rules, max_size=3))), draw(st.integers(0, 9))),
        superseded=tuple(draw(st.lists(st.text(max_size=5), max_size=3))),
        head=draw(st.none() | st.sampled_from(listed)) if listed else None,
        kept=tuple(
            Entry(
                save=save,
                parent=draw(st.none() | saves),
                world_size=draw(st.integers(1, 10**5)),
                nbytes=draw(sizes),
                created_at=draw(times),
                index=Reference(index_key(save), draw(sizes), draw(crcs)),
                bases=tuple(draw(st.lists(saves, max_size=2))),
                pinned=draw(st.booleans()),
                metrics=tuple(draw(st.dictionaries(st.text(max_size=3), finite, max_size=2)).items()),
            )
            for save in listed
        ),
    )


def read_back(record):
    """The same kind of record, from any bytes, as it is read from where this one lies."""
    match record:
        case RankRecord():
            return encode_record, lambda data: decode_record(data, record.save, record.rank)
        case GroupRecord():
            return encode_group, lambda data: decode_group(data, record.save, record.group)
        case Index():
            return encode_index, lambda data: decode_index(data, record.save)
        case _:
            return encode_version, lambda data: decode_version(data, record.number)


def sealed(body):
    """A record with other fields, or more, whose checksum is right."""
    body.pop("crc64", None)
    return seal(json.dumps(body, separators=(",", ":")).encode().removesuffix(b"}"))


def opened(data):
    """A record without its last field, the checksum."""
    return data[: data.rindex(b',"crc64":"')]


every_kind = st.one_of(records(), group_records(), indexes(), versions())


@quick
@given(every_kind)
def test_a_record_is_read_back_as_it_was_written(record):
    encode, decode = read_back(record)
    data = encode(record)
    assert decode(data) == record
    assert encode(decode(data)) == data == encode(copy.deepcopy(record))
    assert data.endswith(b"\n")
    assert data.isascii()


@quick
@given(every_kind, st.integers(3, 2**40))
def test_a_newer_format_is_refused_by_name(record, version):
    encode, decode = read_back(record)
    newer = json.loads(encode(record)) | {"version": version}
    with pytest.raises(FormatVersionError, match="upgrade objckpt"):
        decode(sealed(newer))


# ------------------------------------------------------------------ damage

HUGE = 10**400
ODD = [None, True, False, -1, 0, 1, 2**31, 2**63 - 1, 2**63, 10**18, HUGE, -HUGE, 0.5, -0.0, 1e308, math.nan]
ODD += [math.inf, "", "0", "x" * 300, "\ud800", "0" * 16, "index/000001-000000000001.json", [], [[]], [1, 2]]
ODD += [
    {},
    {"attempt": 1, "step": HUGE},
    {"key": "..", "size": 1, "crc64": "0" * 16},
    [None],
    [{}],
    [{"a": []}],
]


def places(body, path=()):
    """Paths to every value of a JSON document but the document itself."""
    inner = body.items() if isinstance(body, dict) else enumerate(body) if isinstance(body, list) else ()
    for key, value in inner:
        yield (*path, key)
        yield from places(value, (*path, key))


def believed_or_refused(record, data):
    encode, decode = read_back(record)
    try:
        found = decode(data)
    except CorruptCheckpointError:
        return
    # What is believed can be written again, and means the same.
    assert decode(encode(found)) == found


FREE = {"metadata", "values", "rank_values"}  # any JSON


def examples():
    """One record of each kind, with something in every field."""
    save, base = Save(2, 30), Save(1, 20)
    objects = tuple(DataObject(data_key(s, 0), 100, 64, (1, 2)) for s in (save, base))
    of_pieces = (Piece("w", "int8", (9, 9), (1, 1), (2, 3), 1, 64, 70),)
    record = RankRecord("r", save, 0, 1, 1.5, {"a": [1]}, (base,), objects, of_pieces, [1], {"b": 2})
    index = Index("r", save, 1, 1.5, {"a": 1}, 9, (base,), (Reference(record_key(save, 0), 9, 1),))
    kept = tuple(
        Entry(s, p, 1, 9, 1.5, Reference(index_key(s), 9, 1), (base,), pinned=True)
        for s, p in ((base, save), (save, base))
    )
    version = Version(
        3, "commit", "r", Attempt(2), "l", "n", 1, Policy((KeepLast(2),), lag=1), ("m",), save, kept
    )
    return [record, GroupRecord("r", save, 0, 1, (record,)), index, version]


@pytest.mark.parametrize("record", examples(), ids=lambda record: type(record).__name__)
def test_every_field_with_every_odd_value_is_refused_or_read(record):
    encode, decode = read_back(record)
    text = encode(record)
    for path in places(json.loads(text)):
        for odd in ODD:
            body = json.loads(text)
            parent = body
            for key in path[:-1]:
                parent = parent[key]
            was, parent[path[-1]] = parent[path[-1]], odd
            if path == ("crc64",):
                continue
            data = sealed(body)
            believed_or_refused(record, data)
            if (
                type(was) is not type(odd)
                and odd is not None
                and path[-1] != "created_at"
                and FREE.isdisjoint(path)
            ):
                with pytest.raises(CorruptCheckpointError):
                    decode(data)


@settings(max_examples=200, deadline=None)
@given(every_kind, st.data())
def test_a_record_with_any_field_damaged_is_refused_or_read(record, data):
    encode, _ = read_back(record)
    body = json.loads(encode(record))
    path = data.draw(st.sampled_from(sorted(set(places(body)) - {("crc64",)}, key=str)))
    parent = body
    for key in path[:-1]:
        parent = parent[key]
    how = data.draw(st.sampled_from(["odd", "odd", "odd", "json", "gone", "twice"]))
    if how == "gone":
        del parent[path[-1]]
    elif how == "twice" and isinstance(parent, list):
        parent.insert(path[-1], copy.deepcopy(parent[path[-1]]))
    elif how == "json":
        parent[path[-1]] = data.draw(values)
    else:
        parent[path[-1]] = data.draw(st.sampled_from(ODD))
    believed_or_refused(record, sealed(body))


@quick
@given(every_kind, st.binary(max_size=60) | values.map(lambda v: json.dumps(v).encode()))
def test_bytes_that_are_no_record_are_refused(record, data):
    _, decode = read_back(record)
    with pytest.raises(CorruptCheckpointError):
        decode(data)


@settings(max_examples=150, deadline=None)
@given(every_kind, st.data())
def test_a_record_with_any_byte_damaged_is_refused_or_read(record, data):
    encode, _ = read_back(record)
    damaged = bytearray(encode(record))
    at = data.draw(st.integers(0, len(damaged) - 1))
    damaged[at] = data.draw(st.integers(0, 255))
    believed_or_refused(record, bytes(damaged[: data.draw(st.integers(at, len(damaged)))]))


@pytest.mark.parametrize("record", examples(), ids=lambda record: type(record).__name__)
def test_a_record_with_any_bit_flipped_or_cut_anywhere_is_refused(record):
    encode, decode = read_back(record)
    data = encode(record)
    for bit in range(8 * len(data)):
        damaged = bytearray(data)
        damaged[bit // 8] ^= 1 << bit % 8
        with pytest.raises(CorruptCheckpointError):
            decode(bytes(damaged))
    for size in range(len(data)):
        with pytest.raises(CorruptCheckpointError):
            decode(data[:size])


def test_a_version_of_format_1_is_read():
    body = json.loads(encode_version(Version(3, "start", "r", Attempt(3), "l", "n", 1))) | {"version": 1}
    del body["crc64"]
    for keep, rules in ((None, ()), (4, (KeepLast(4),))):
        body["policy"] = {"keep": keep, "lag": 1}
        assert decode_version(json.dumps(body).encode(), 3).policy == Policy(rules, 1)


def version(**fields):
    body = json.loads(encode_version(Version(3, "start", "r", Attempt(3), "l", "n", 1)))
    return sealed(body | fields)


@pytest.mark.parametrize("text", ["NaN", "Infinity", "-Infinity", "1e999"])
def test_a_number_that_json_does_not_have_is_refused(text):
    """Else an index made from such a record could not be written, and the commit would fail with another error."""
    record = RankRecord("r", Save(1, 1), 0, 1, 1.5, {"x": 1}, (), (), (), None, None)
    for old in (b"1.5", b'{"x":1}'):
        with pytest.raises(CorruptCheckpointError, match="JSON number"):
            decode_record(seal(opened(encode_record(record)).replace(old, text.encode())), Save(1, 1), 0)


@pytest.mark.parametrize("opening", ["[", '{"a":'])
def test_deep_nesting_is_refused(opening):
    deep = seal(opened(version(launch="DEEP")).replace(b'"DEEP"', opening.encode() * 100_000))
    with pytest.raises(CorruptCheckpointError):
        decode_version(deep, 3)


def test_an_index_of_a_world_that_cannot_be_is_refused_at_once():
    """The list of the keys it should name would fill the memory."""
    save = Save(1, 1)
    index = Index("r", save, 1, 1.0, None, 0, (), (Reference(record_key(save, 0), 1, 1),))
    body = json.loads(encode_index(index)) | {"world_size": 2**62}
    with pytest.raises(CorruptCheckpointError, match="its records are not those of"):
        decode_index(sealed(body), save)


def test_a_version_that_lies_elsewhere_or_lacks_its_head_is_refused():
    with pytest.raises(CorruptCheckpointError, match="says that it is version 3"):
        decode_version(version(), 4)
    with pytest.raises(CorruptCheckpointError, match=r"head .* is not in 'kept'"):
        decode_version(version(head={"attempt": 1, "step": 1}), 3)


def test_a_record_that_names_an_object_outside_its_save_and_bases_is_refused():
    save, base, other = Save(2, 30), Save(1, 20), Save(1, 10)

    def of(key):
        objects = (DataObject(key, 3, 64, (1,)),)
        return encode_record(RankRecord("r", save, 0, 1, 1.0, None, (base,), objects, (), None, None))

    for fine in (save, base):
        assert decode_record(of(data_key(fine, 0)), save, 0).objects[0].key == data_key(fine, 0)
    for key in (
        data_key(other, 0),
        record_key(save, 0),
        index_key(save),
        "../" + data_key(save, 0),
        data_key(save, 0) + "\n",
        data_key(save, 0).replace("000002", "0000002"),  # the same save by another name
        data_key(save, 0).replace("2", "\u0662"),  # likewise, in Arabic digits
    ):
        with pytest.raises(CorruptCheckpointError, match="no shard of this save"):
            decode_record(of(key), save, 0)


# ------------------------------------------------------------------ keys


@quick
@given(st.lists(st.integers(1, 10**20 - 1), min_size=2, max_size=6))
def test_versions_sort_as_numbers_do(numbers):
    assert sorted(map(version_key, numbers)) == [version_key(n) for n in sorted(numbers)]
    assert [version_of(version_key(n)) for n in numbers] == numbers


@quick
@given(saves, st.integers(0, 99_999), st.integers(0, 99))
def test_keys_parse_back(save, rank, number):
    for key in (index_key(save), record_key(save, rank), data_key(save, rank, number)):
        assert save_of(key) == save
    assert rank_of(record_key(save, rank)) == rank
    assert group_of(group_key(save, rank // GROUP_SIZE)) == rank // GROUP_SIZE
    assert save_of(group_key(save, rank // GROUP_SIZE)) == save
    assert record_key(save, rank).startswith(folder_prefix(save, rank // GROUP_SIZE))
    assert record_key(save, rank).startswith(records_prefix(save.attempt))
    assert (
        rank_of(group_key(save, 0)) is group_of(record_key(save, rank)) is version_of(index_key(save)) is None
    )


@quick
@given(saves, saves)
def test_saves_of_one_attempt_sort_by_step_and_no_prefix_takes_in_anothers(one, other):
    if one.attempt == other.attempt:
        assert (str(one) < str(other)) == (one.step < other.step)
    else:
        assert not index_key(one).startswith(records_prefix(other.attempt))
        assert not record_key(one, 0).startswith(records_prefix(other.attempt))


@pytest.mark.parametrize(
    "key",
    [
        "",
        "manifest/",
        "manifest/1.json",
        "manifest/" + "0" * 19 + "x.json",
        "manifest/" + "0" * 20 + ".json.tmp",
        "x/" + version_key(1),
        version_key(1) + "\n",
        "manifest/"
        + "\u0661" * 20
        + ".json",  # digits, but not ours: a list would name a version that cannot be read
        probe_key("0"),
        "data/05/notes.txt",
        "index/000041-12000.json",
    ],
)
def test_keys_of_others_belong_to_nobody(key):
    assert version_of(key) is save_of(key) is rank_of(key) is group_of(key) is None


def test_the_keys_are_those_of_the_format():
    save = Save(Attempt(41), Step(12_000))
    assert version_key(42) == "manifest/00000000000000000042.json"
    assert index_key(save) == "index/000041-000000012000.json"
    assert record_key(save, 5) == "records/000041-000000012000/0000/r00005.json"
    assert record_key(save, 300) == "records/000041-000000012000/0001/r00300.json"
    assert group_key(save, 0) == "records/000041-000000012000/groups/0000.json"
    assert data_key(save, 261) == "data/05/000041-000000012000-r00261-00.safetensors"
    assert [groups(n) for n in (1, 256, 257, 512, 513)] == [1, 1, 2, 2, 3]
