"""Plain values keep their exact types and bits through JSON, and nothing malformed gets through."""

from __future__ import annotations

import contextlib
import datetime as dt
import enum
import json
import math
import random
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from pathlib import PurePosixPath
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import DataLoader

from objckpt.errors import CorruptCheckpointError, StateMismatchError
from objckpt.state import PerRank, capture, prepare, values

# --- plain values -----------------------------------------------------------------------------------------------------


class Reader:
    def foreign(self, node: values.Node, path: str, live: Any) -> Any:
        return values.unknown_tag(node, path, live)

    def problem(self, path: str, text: str) -> None:
        raise StateMismatchError(f"{path}: {text}")


def through_json(value: Any, live: Any = None) -> Any:
    text = json.dumps(values.encode(value, "v", lambda _value, _path: None), allow_nan=False)
    return values.decode(json.loads(text), "v", Reader(), live)


def same(left: Any, right: Any) -> bool:
    """Equal with equal types at every depth, equal order, signs of zero, and NaN equal to NaN."""
    if type(left) is not type(right):
        return False
    if isinstance(left, float):
        return (math.isnan(left) and math.isnan(right)) or (
            left == right and math.copysign(1, left) == math.copysign(1, right)
        )
    if isinstance(left, complex):
        return same(left.real, right.real) and same(left.imag, right.imag)
    if isinstance(left, dict):
        factories = getattr(left, "default_factory", None), getattr(right, "default_factory", None)
        return factories[0] is factories[1] and same(list(left.items()), list(right.items()))
    if isinstance(left, deque):
        return left.maxlen == right.maxlen and same(list(left), list(right))
    if isinstance(left, (list, tuple)):
        return len(left) == len(right) and all(map(same, left, right))
    if isinstance(left, (set, frozenset)):
        return same(sorted(left, key=repr), sorted(right, key=repr))
    if isinstance(left, slice):
        return same([left.start, left.stop, left.step], [right.start, right.stop, right.step])
    return bool(left == right)


keys = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(allow_nan=False),
    st.text(st.characters(exclude_categories=())),
    st.binary(max_size=8),
)
scalars = st.one_of(
    keys,
    st.floats(),
    st.complex_numbers(),
    st.integers(min_value=-(2**70), max_value=2**70),
    st.builds(slice, st.none() | st.integers(), st.none() | st.integers()),
    st.builds(range, st.integers(), st.integers(), st.integers(min_value=1)),
    st.sampled_from(
        [torch.float32, torch.bool, torch.Size([2, 0]), torch.device("cuda:1"), torch.device("cpu")]
    ),
    st.sampled_from(
        [
            np.float32(0.1),
            np.int8(-3),
            np.uint64(2**64 - 1),
            np.bool_(True),
            np.complex64(1 - 2j),
            np.float16("inf"),
        ]
    ),
)
plain_values = st.recursive(
    scalars,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(st.text(max_size=4), inner, max_size=4),
        st.dictionaries(st.one_of(keys, st.tuples(keys, keys)), inner, max_size=4),
        st.dictionaries(keys, inner, max_size=4).map(OrderedDict),
        st.builds(
            defaultdict,
            st.sampled_from([None, int, float, list, dict, set, str]),
            st.dictionaries(keys, inner, max_size=3),
        ),
        st.lists(keys, max_size=6).map(Counter),
        st.builds(
            lambda items, extra: deque(items, len(items) + extra),
            st.lists(inner, max_size=3),
            st.integers(0, 2),
        ),
        st.lists(inner, max_size=3).map(deque),
        st.sets(keys, max_size=4),
        st.frozensets(st.one_of(keys, st.frozensets(keys, max_size=2)), max_size=3),
    ),
    max_leaves=12,
)


@settings(deadline=None, max_examples=120)
@given(plain_values)
def test_every_plain_value_keeps_type_order_and_bits_through_json(value: Any) -> None:
    assert same(through_json(value), value)


@pytest.mark.parametrize(
    "value",
    [10**5000, -(10**5000), 2**53 + 1, -(2**53) - 1, 2**2048, -0.0, math.nan, "\ud800", True, 1, 1.0],
    ids=lambda value: type(value).__name__,
)
def test_numbers_and_text_that_json_cannot_say(value: Any) -> None:
    assert same(through_json(value), value)


def test_equal_sets_have_equal_json_in_any_order() -> None:
    names = [f"name{i}" for i in range(50)]
    first, second = set(names), set()
    for name in reversed(names):
        second.add(name)
    assert json.dumps(values.encode(first, "", lambda *_: None)) == json.dumps(
        values.encode(second, "", lambda *_: None)
    )
    assert values.encode(first, "", lambda *_: None)["items"] == sorted(names)


def test_plain_json_stays_plain_and_dollar_keys_are_safe() -> None:
    plain = {"a": [1, 2.5, None, "x"], "b": {"c": True}}
    assert values.encode(plain, "", lambda *_: None) == plain
    for awkward in (
        {"$": "tuple", "items": []},
        {"$x": 1},
        {"": 2},
        {1: "a", "1": "b", 1.5: "c", (1, "x"): "d"},
    ):
        assert same(through_json(awkward), awkward)


class Point(NamedTuple):
    x: int
    y: Any


Old = namedtuple("Old", ["x"])  # noqa: PYI024 # the other way to make one


def test_a_named_tuple_takes_its_class_from_the_live_value() -> None:
    value = {"p": Point(1, 2)}
    assert same(through_json([Old(1)], live=[Old(0), 3]), [Old(1)])
    assert same(through_json(value, live={"p": Point(0, Old(0))}), value)
    with pytest.raises(
        StateMismatchError,
        match=r"v\.p: the checkpoint has a named tuple test_state_values\.Point\('x', 'y'\).*nothing",
    ):
        through_json(value)
    with pytest.raises(StateMismatchError, match="named tuple"):
        through_json(value, live={"p": Old(1)})


class Colour(enum.Enum):
    RED = 1


class Level(enum.IntEnum):
    LOW = 1


class MyList(list[int]):
    pass


@pytest.mark.parametrize(
    ("value", "way_out"),
    [
        (Colour.RED, r"Colour.*\.value or \.name"),
        (Level.LOW, r"\.value or \.name"),
        (dt.datetime(2024, 1, 1), r"datetime\.datetime.*isoformat"),  # noqa: DTZ001 # any
        (PurePosixPath("a"), "PurePosixPath.*state_dict"),
        (MyList(), r"store list\(value\)"),
        (np.str_("a"), r"store str\(value\)"),
        (bytearray(b"a"), "bytearray"),
        (print, "function"),
        (int, "class"),
        (object(), "object"),
        (DataLoader([1]), "StatefulDataLoader"),
        (defaultdict(lambda: 1), "defaultdict"),
        (np.datetime64("2024-01-01"), "datetime64"),
        (np.array(["a"]), "NumPy array of dtype"),
        (np.zeros(2, ">f4"), "native byte order"),
        (np.ma.masked_array([1.0]), "plain arrays"),
        (random.Random(1), "Random"),
        ({1, Colour.RED}, "Colour"),
    ],
)
def test_what_cannot_be_stored_is_refused_with_path_type_and_way_out(value: Any, way_out: str) -> None:
    with pytest.raises(
        StateMismatchError, match=rf"run\.cfg\.1: .*{way_out}|run\.cfg\.1: .*(?s:.)*{way_out}"
    ):
        capture({"run": {"cfg": [0, value]}})


def test_a_value_that_holds_itself_is_refused() -> None:
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(StateMismatchError, match="holds itself"):
        capture({"loop": loop})
    nest: Any = 1
    for _ in range(values.MAX_DEPTH):
        nest = [nest]
    assert same(through_json(nest), nest)
    with pytest.raises(StateMismatchError, match="nested deeper"):
        through_json([nest])


def deep(levels: int, wrap: Any) -> Any:
    node: Any = 1
    for _ in range(levels):
        node = wrap(node)
    return node


DAMAGED: list[Any] = [
    {"$": "nope"},
    {"$": 7},
    {"$": None},
    {"$": "tensor"},
    {"$": "int", "value": "12x"},
    {"$": "int", "value": 12},
    {"$": "int", "value": "9" * 5000},
    {"$": "int"},
    {"$": "float", "value": "1.5"},
    {"$": "float", "value": None},
    {"$": "str", "utf8": "!!"},
    {"$": "str", "utf8": "/w=="},
    {"$": "bytes", "base64": "a"},
    {"$": "bytes", "base64": "\u00e9"},
    {"$": "complex", "real": 1.0},
    {"$": "complex", "real": 1, "imag": 2.0},
    {"$": "complex", "real": {"$": "complex", "real": 1.0, "imag": 1.0}, "imag": 2.0},
    {"$": "dict", "items": [[1]]},
    {"$": "dict", "items": [[1, 2], [1, 3]]},
    {"$": "dict", "items": [[[], 2]]},
    {"$": "dict", "items": {"a": 1}},
    {"$": "dict", "items": [[{"$": "tensor", "name": "x"}, 1]]},
    {"$": "dict"},
    {"$": "defaultdict", "items": [], "factory": "eval"},
    {"$": "defaultdict", "items": []},
    {"$": "deque", "items": [1, 2], "maxlen": 1},
    {"$": "deque", "items": [], "maxlen": True},
    {"$": "deque", "items": []},
    {"$": "tuple", "items": "ab"},
    {"$": "namedtuple", "class": "a.b", "fields": ["x"], "items": []},
    {"$": "namedtuple", "fields": [], "items": []},
    {"$": "set", "items": [[1]]},
    {"$": "frozenset", "items": 3},
    {"$": "range", "start": 0, "stop": 1, "step": 0},
    {"$": "range", "start": 0, "stop": 1},
    {"$": "range", "start": 0.0, "stop": 1, "step": 1},
    {"$": "slice", "items": [1, 2]},
    {"$": "dtype", "value": "load"},
    {"$": "dtype", "value": "nothing"},
    {"$": "size", "items": [-1]},
    {"$": "size", "items": [True]},
    {"$": "device", "value": "moon:1"},
    {"$": "numpy", "dtype": "object", "value": 1},
    {"$": "numpy", "dtype": "int8", "value": 300},
    {"$": "numpy", "dtype": "float32", "value": 1},
    {"$": "numpy", "dtype": "float32"},
    float("nan"),
    float("inf"),
    object(),
    deep(150, lambda node: [node]),
    deep(150, lambda node: {"$": "tuple", "items": [node]}),
    deep(150, lambda node: {"$": "dict", "items": [[node, 1]]}),
    deep(150, lambda node: {"$": "slice", "items": [node, 1, 1]}),
    deep(150, lambda node: {"$": "frozenset", "items": [node]}),
    deep(150, lambda node: {"$": "range", "start": node, "stop": 1, "step": 1}),
]


@pytest.mark.parametrize(
    "node", DAMAGED, ids=[f"{i}-{type(node).__name__}" for i, node in enumerate(DAMAGED)]
)
def test_malformed_input_is_a_corrupt_checkpoint_and_nothing_else(node: Any) -> None:
    with pytest.raises(CorruptCheckpointError, match=r"damaged at v(\.|:)"):
        values.decode(node, "v", Reader())
    with pytest.raises(CorruptCheckpointError):
        prepare({"v": 1}, {"v": node}, None, {})


json_nodes = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=3)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(
            st.sampled_from(
                ["$", "items", "value", "state", "name", "maxlen", "real", "groups", "params", "a"]
            ),
            st.one_of(
                inner,
                st.sampled_from(
                    ["tuple", "dict", "tensor", "int", "object", "module", "optimizer", "numpy", "range"]
                ),
            ),
            max_size=4,
        ),
    ),
    max_leaves=10,
)


@settings(deadline=None, max_examples=120)
@given(json_nodes)
def test_no_json_whatever_raises_anything_but_our_errors(node: Any) -> None:
    model = nn.Linear(1, 1)
    state = {
        "a": model,
        "optim": torch.optim.SGD(model.parameters()),
        "gen": torch.Generator(),
        "p": PerRank(1),
        "x": 1,
    }
    for key in state:
        with contextlib.suppress(CorruptCheckpointError, StateMismatchError):
            prepare(state, {key: node}, {"objects": {"p": node}, "rng": node}, {}, strict=False)
