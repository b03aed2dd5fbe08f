"""Images: what safetensors' own loader reads from them is what was put in."""

from __future__ import annotations

import json
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import deserialize, safe_open
from safetensors.torch import load

from objckpt.errors import StateMismatchError
from objckpt.shard import DTYPES, Part, layout, whole

quick = settings(max_examples=100, deadline=None)


def filled(image, seed=0):
    """The image with random bytes (0 or 1 for bool) and what each piece's bytes are."""
    draw = random.Random(seed)
    data = bytearray(image.size)
    data[: len(image.header)] = image.header
    content = {}
    for p in image.pieces:
        size = p.end - p.begin
        content[p.name] = (
            bytes(draw.randrange(2) for _ in range(size)) if p.dtype == "bool" else draw.randbytes(size)
        )
        data[p.begin : p.end] = content[p.name]
    return bytes(data), content


def bits(tensor):
    return bytes(tensor.contiguous().reshape(-1).view(torch.uint8).numpy()) if tensor.numel() else b""


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 0, 3), (2, 3, 4)])
def test_safetensors_reads_every_dtype(dtype, shape, tmp_path):
    image = layout([whole("w", dtype, shape), whole("odd", "uint8", (3,))], {"a": "b"})
    data, content = filled(image)
    found = dict(deserialize(data))
    expected = [*shape, 2] if dtype == "complex128" else list(shape)
    assert (found["w"]["dtype"], found["w"]["shape"]) == (DTYPES[dtype][0], expected)
    assert {name: bytes(one["data"]) for name, one in found.items()} == content
    (tmp_path / "x.safetensors").write_bytes(data)
    with safe_open(tmp_path / "x.safetensors", "pt") as file:
        assert file.metadata() == {"a": "b"}


@pytest.mark.parametrize("dtype", [d for d in DTYPES if d != "complex128"])
def test_torch_reads_every_dtype_bit_for_bit(dtype):
    data, content = filled(layout([whole("w", dtype, (2, 3))], {}))
    tensor = load(data)["w"]
    assert tensor.dtype == getattr(torch, dtype)
    assert tensor.shape == (2, 3)
    assert bits(tensor) == content["w"]


def test_complex128_is_two_float64_in_a_last_dimension():
    data, content = filled(layout([whole("z", "complex128", (3,))], {}))
    tensor = load(data)["z"]
    assert (tensor.dtype, tensor.shape) == (torch.float64, (3, 2))
    assert bits(torch.view_as_complex(tensor)) == content["z"]


parts = st.lists(
    st.builds(
        lambda name, dtype, shape: whole(name, dtype, tuple(shape)),
        st.text(min_size=1, max_size=9).filter(lambda name: name != "__metadata__"),
        st.sampled_from(sorted(DTYPES)),
        st.lists(st.integers(0, 4), max_size=3),
    ),
    max_size=12,
    unique_by=lambda part: part.name,
)


@quick
@given(parts, st.dictionaries(st.text(max_size=5), st.text(max_size=5), max_size=3), st.integers())
def test_an_image_has_no_holes_and_every_tensor_is_aligned(of_parts, metadata, seed):
    image = layout(of_parts, metadata)
    length = int.from_bytes(image.header[:8], "little")
    assert len(image.header) == 8 + length
    assert len(image.header) % 64 == 0
    assert image.header[8:].startswith(b"{")
    at = len(image.header)
    for piece in image.pieces:
        assert piece.begin == at
        assert piece.begin % DTYPES[piece.dtype][1] == 0
        at = piece.end
    assert image.size == at
    by_name = {p.name: p for p in of_parts}
    for piece in image.pieces:
        part = by_name.pop(piece.name)
        assert (piece.dtype, piece.shape, piece.offset) == (part.dtype, part.shape, part.offset)
        assert piece.end - piece.begin == part.nbytes
    assert not by_name
    data, content = filled(image, seed)
    assert {name: bytes(one["data"]) for name, one in deserialize(data)} == content
    random.Random(seed).shuffle(of_parts)
    assert layout(of_parts, metadata) == image  # the order in which they come is no matter


def test_metadata_stand_where_safetensors_has_them():
    image = layout([], {"objckpt": "1"})
    assert json.loads(image.header[8:]) == {"__metadata__": {"objckpt": "1"}}
    assert image.size == len(image.header)
    assert deserialize(image.header) == []


def test_a_box_has_its_own_shape_in_the_file_and_its_place_in_the_piece():
    image = layout([Part("w", "float32", (8, 4), (2, 0), (3, 4))], {})
    assert json.loads(image.header[8:])["w"]["shape"] == [3, 4]
    (piece,) = image.pieces
    assert (piece.global_shape, piece.offset, piece.shape) == ((8, 4), (2, 0), (3, 4))


@pytest.mark.parametrize("name", ["w", "__metadata__"])
def test_two_parts_of_one_name_are_refused(name):
    with pytest.raises(StateMismatchError, match=f"'{name}'"):
        layout([whole("w", "int8", (1,)), whole(name, "int16", (1,))], {})


def test_a_name_that_is_no_unicode_is_refused():
    with pytest.raises(StateMismatchError, match="Unicode"):
        layout([whole("\ud800", "int8", (1,))], {})


def test_a_header_beyond_the_formats_limit_is_refused(monkeypatch):
    of_parts = [whole(f"tensor-{i}", "float32", (1,)) for i in range(100)]
    length = len(layout(of_parts, {}).header) - 8
    monkeypatch.setattr("objckpt.shard._HEADER_LIMIT", length)
    layout(of_parts, {})
    monkeypatch.setattr("objckpt.shard._HEADER_LIMIT", length - 1)
    with pytest.raises(StateMismatchError, match=str(length)):
        layout(of_parts, {})
