"""Plain Python values as JSON, with their exact types.

Invariants: ``decode(encode(value))`` has the type, the order and the bits of ``value`` at every depth (for a NaN: that it is
one), also after ``json.dumps`` and ``json.loads``; equal values give equal JSON on every rank; what cannot be stored is
refused when it is saved, and malformed input raises :class:`CorruptCheckpointError`, never anything else. No class is ever
imported by name.

``None``, ``bool``, ``str``, finite ``float`` and ``int`` up to 2**53 are themselves, a ``list`` is an array, and a ``dict``
whose keys are all ``str`` and do not begin with ``$`` is an object. Everything else is an object whose ``$`` is one of:

=============  =================================  ==============================================================
``$``          other fields                       value
=============  =================================  ==============================================================
int            value: text                        an int beyond 2**53: decimal, or ``0x`` and hex beyond 2048 bits
float          value: "nan", "inf", "-inf"        a float that JSON cannot say
str            utf8: base64                       a str with lone surrogates (kept as UTF-8 has them, "surrogatepass")
bytes          base64: text                       bytes
complex        real, imag: float                  complex
dict           items: [[key, value], ...]         a dict with other keys
OrderedDict    items                              collections.OrderedDict
defaultdict    items; factory: name or null       collections.defaultdict of int, float, list, dict, set, str or None
Counter        items                              collections.Counter
deque          items: [value, ...]; maxlen        collections.deque
tuple          items                              tuple
namedtuple     items; class, fields               a named tuple; rebuilt with the class of the live value in its place
set            items, sorted by their JSON        set
frozenset      items, sorted by their JSON        frozenset
range          start, stop, step: int             range
slice          items: [start, stop, step]         slice
dtype          value: "float32"                   torch.dtype
size           items: [int, ...]                  torch.Size
device         value: "cuda:0"                    torch.device
numpy          dtype: "float32"; value            a NumPy scalar
=============  =================================  ==============================================================

A float field or an item is itself such a value. Tensors, NumPy arrays and objects have tags of their own, written by
``capture`` and read by ``restore``, which both call this module and are handed what it does not know.
"""

from __future__ import annotations

import base64
import binascii
import enum
import importlib
import json
import math
import re
import reprlib
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from typing import Any, Final, NoReturn, Protocol, TypeAlias

import torch

from objckpt.errors import CorruptCheckpointError, StateMismatchError

JSON: TypeAlias = "None | bool | int | float | str | list[JSON] | dict[str, JSON]"
Node: TypeAlias = "dict[str, JSON]"

#: How deep values may be nested, saved or read.
MAX_DEPTH: Final = 100
_EXACT_INT: Final = 2**53  # what every JSON reader keeps
#: Python refuses to convert longer ints from and to decimal under its tightest setting.
_DECIMAL_BITS: Final = 2048
_FACTORIES: Final[dict[str, Callable[[], Any]]] = {t.__name__: t for t in (int, float, list, dict, set, str)}
_NUMPY_SCALARS: Final = frozenset(
    ["bool", "complex64", "complex128", "float16", "float32", "float64"]
    + [f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)]
)
_INT: Final = re.compile(r"-?(0x[0-9a-f]+|[0-9]+)")


class Reader(Protocol):
    """What :func:`decode` asks its caller."""

    def foreign(self, node: Node, path: str, live: Any) -> Any:
        """The value of a node whose tag is not in the table. :class:`CorruptCheckpointError` if the caller has none either."""

    def problem(self, path: str, text: str) -> None:
        """The state has no place for the value at ``path``; decoding goes on, so that the next problem is found too."""


def join(path: str, key: object) -> str:
    """``path`` and one more segment: dots and a leading bracket escaped, so that different keys give different paths."""
    if type(key) is str and key:
        text = key.encode("utf-8", "backslashreplace").decode().replace("\\", "\\\\").replace(".", "\\.")
        # A path begins neither as a generated segment, nor as the safetensors header's own key, nor as the name under which a
        # rank's own tensor is stored.
        escaped = text.startswith("[") or text == "__metadata__" or (not path and text.startswith("rank-"))
        segment = f"\\{text}" if escaped else text
    else:
        segment = "[" + repr(key).replace("\\", "\\\\").replace(".", "\\.") + "]"
    return f"{path}.{segment}" if path else segment


def at(path: str, index: int) -> str:
    """``path`` and the place in a sequence."""
    return f"{path}.{index}"


def is_namedtuple(value: object) -> bool:
    """Whether ``value`` is an instance of a class made by ``namedtuple`` or ``NamedTuple``."""
    return isinstance(value, tuple) and hasattr(value, "_fields") and hasattr(value, "_make")


def qualified(kind: type) -> str:
    """The full name of a class, for messages."""
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def _no_foreign(_value: Any, _path: str) -> None:
    """Keys and set members are plain values."""


def encode(value: Any, path: str, foreign: Callable[[Any, str], JSON], depth: int = 0) -> JSON:
    """``value`` as JSON. ``foreign`` is asked for all but plain scalars and answers None for what is not its own.

    :class:`StateMismatchError` names ``path`` and type of what cannot be stored, with the way out.
    """
    kind = type(value)
    scalar = _SCALARS.get(kind)
    if scalar is not None:
        return scalar(value)
    node = foreign(value, path)
    if node is not None:
        return node
    if depth >= MAX_DEPTH:
        raise StateMismatchError(f"{path}: nested deeper than {MAX_DEPTH}, or holds itself: store it flatter")
    if kind in _MAPPINGS:
        return _encode_mapping(value, path, foreign, depth)
    if kind is list:
        return [encode(item, at(path, i), foreign, depth + 1) for i, item in enumerate(value)]
    if kind in (set, frozenset):
        items = [encode(item, path, _no_foreign, depth + 1) for item in value]
        return {"$": kind.__name__, "items": sorted(items, key=lambda item: json.dumps(item, sort_keys=True))}
    if kind in (tuple, deque) or is_namedtuple(value):
        tagged: Node = {"$": kind.__name__}
        tagged["items"] = [encode(item, at(path, i), foreign, depth + 1) for i, item in enumerate(value)]
        if kind is deque:
            tagged["maxlen"] = value.maxlen
        elif kind is not tuple:
            tagged |= {"$": "namedtuple", "class": qualified(kind), "fields": list(value._fields)}
        return tagged
    if kind is slice:
        parts = (value.start, value.stop, value.step)
        return {"$": "slice", "items": [encode(item, path, _no_foreign, depth + 1) for item in parts]}
    return _encode_numpy(value, path)


def _encode_mapping(
    value: dict[Any, Any], path: str, foreign: Callable[[Any, str], JSON], depth: int
) -> JSON:
    kind = type(value)
    if kind is dict and all(type(key) is str and key[:1] != "$" and _is_unicode(key) for key in value):
        return {key: encode(item, join(path, key), foreign, depth + 1) for key, item in value.items()}
    node: Node = {"$": kind.__name__}
    if isinstance(value, defaultdict):
        names = {factory: name for name, factory in _FACTORIES.items()}
        if value.default_factory is not None and value.default_factory not in names:
            raise StateMismatchError(
                f"{path}: a defaultdict of {value.default_factory!r} cannot be stored: use one of {', '.join(_FACTORIES)}, or dict()"
            )
        node["factory"] = None if value.default_factory is None else names[value.default_factory]
    node["items"] = [
        [encode(key, path, _no_foreign, depth + 1), encode(item, join(path, key), foreign, depth + 1)]
        for key, item in value.items()
    ]
    return node


def _encode_numpy(value: Any, path: str) -> JSON:
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.generic) and value.dtype.name in _NUMPY_SCALARS:
        return {"$": "numpy", "dtype": value.dtype.name, "value": encode(value.item(), path, _no_foreign)}
    return _refuse(value, path)


def _refuse(value: Any, path: str) -> NoReturn:
    kind = type(value)
    way_out = "store plain values, or give it state_dict() and load_state_dict()"
    if isinstance(value, enum.Enum):
        way_out = "store its .value or .name"
    elif kind.__module__ == "datetime":
        way_out = "store .isoformat() or .timestamp()"
    elif isinstance(value, torch.utils.data.DataLoader):
        way_out = "use torchdata.stateful_dataloader.StatefulDataLoader, which can say where it is"
    elif callable(value):
        way_out = "store what it is made from, not the function or class"
    elif isinstance(value, (str, int, float, bytes, dict, list, tuple, set)):
        base = next(
            base for base in (str, int, float, bytes, dict, list, tuple, set) if isinstance(value, base)
        )
        way_out = f"store {base.__name__}(value), for its class would be lost"
    raise StateMismatchError(
        f"{path or 'state'}: a value of type {qualified(kind)} cannot be stored: {way_out}"
    )


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _encode_int(value: int) -> JSON:
    if -_EXACT_INT <= value <= _EXACT_INT:
        return value
    return {"$": "int", "value": str(value) if value.bit_length() <= _DECIMAL_BITS else hex(value)}


def _encode_float(value: float) -> JSON:
    return value if math.isfinite(value) else {"$": "float", "value": str(value)}


def _encode_str(value: str) -> JSON:
    if _is_unicode(value):
        return value
    return {"$": "str", "utf8": base64.b64encode(value.encode("utf-8", "surrogatepass")).decode()}


_SCALARS: Final[dict[type, Callable[[Any], JSON]]] = {
    type(None): lambda value: value,
    bool: lambda value: value,
    int: _encode_int,
    float: _encode_float,
    str: _encode_str,
    bytes: lambda value: {"$": "bytes", "base64": base64.b64encode(value).decode()},
    complex: lambda value: {
        "$": "complex",
        "real": _encode_float(value.real),
        "imag": _encode_float(value.imag),
    },
    range: lambda value: {
        "$": "range",
        "start": _encode_int(value.start),
        "stop": _encode_int(value.stop),
        "step": _encode_int(value.step),
    },
    torch.dtype: lambda value: {"$": "dtype", "value": str(value).removeprefix("torch.")},
    torch.Size: lambda value: {"$": "size", "items": list(value)},
    torch.device: lambda value: {"$": "device", "value": str(value)},
}
_MAPPINGS: Final = (dict, OrderedDict, defaultdict, Counter)


def corrupt(path: str, text: str) -> NoReturn:
    """Raise :class:`CorruptCheckpointError` for the value at ``path``."""
    raise CorruptCheckpointError(
        f"the stored state is damaged at {path or 'its root'}: {text}. Restore another checkpoint"
    )


def field(node: Node, name: str, kind: type | tuple[type, ...], path: str) -> Any:
    """One field of a tagged node, of type ``kind`` (a bool is no int). :class:`CorruptCheckpointError` otherwise."""
    value = node.get(name)
    kinds = kind if isinstance(kind, tuple) else (kind,)
    if name not in node or type(value) not in kinds:
        expected = " or ".join("null" if k is type(None) else k.__name__ for k in kinds)
        corrupt(
            path, f"field {name!r} of a {node.get('$')!r} should be {expected}, it is {reprlib.repr(value)}"
        )
    return value


def items_of(node: JSON, path: str, depth: int = 0) -> list[tuple[Any, JSON]]:
    """Keys and undecoded values of a stored dict. :class:`CorruptCheckpointError` if it is none, or a key is there twice."""
    if not isinstance(node, dict):
        corrupt(path, f"a dict was expected, not {reprlib.repr(node)}")
    if "$" not in node:
        return list(node.items())
    pairs: list[tuple[Any, JSON]] = []
    seen = set()
    for pair in field(node, "items", list, path):
        if type(pair) is not list or len(pair) != 2:  # noqa: PLR2004 # a pair
            corrupt(
                path, f"an item of a {node['$']!r} should be a key and a value, it is {reprlib.repr(pair)}"
            )
        key = _hashable(decode(pair[0], path, _NO_READER, None, depth + 1), path)
        if key in seen:
            corrupt(path, f"the key {key!r} is there twice")
        seen.add(key)
        pairs.append((key, pair[1]))
    return pairs


def decode(node: JSON, path: str, reader: Reader, live: Any = None, depth: int = 0) -> Any:
    """The value of ``node``, newly made. ``live`` is what the running state has in its place (None: nothing), untouched.

    :class:`CorruptCheckpointError` for anything that :func:`encode` cannot have written.
    """
    if depth > MAX_DEPTH + 1:
        corrupt(path, f"nested deeper than {MAX_DEPTH}")
    if node is None or isinstance(node, (bool, int, str)):
        return node
    if isinstance(node, float):
        return node if math.isfinite(node) else corrupt(path, f"{node} is not JSON")
    if isinstance(node, list):
        return [decode(item, at(path, i), reader, _nth(live, i), depth + 1) for i, item in enumerate(node)]
    if not isinstance(node, dict):
        corrupt(path, f"{type(node).__name__} is not JSON")
    if "$" not in node:
        return {
            key: decode(item, join(path, key), reader, _get(live, key), depth + 1)
            for key, item in node.items()
        }
    tag = field(node, "$", str, path)
    if tag in _DECODERS:
        return _DECODERS[tag](node, path)
    if tag in _MAPPING_TAGS:
        return _decode_mapping(node, path, reader, live, depth)
    if tag in _SEQUENCE_TAGS:
        return _decode_sequence(node, path, reader, live, depth)
    if tag in _CLOSED_TAGS:
        members = [
            decode(item, path, _NO_READER, None, depth + 1) for item in field(node, "items", list, path)
        ]
        return _CLOSED_TAGS[tag](members, path)
    return reader.foreign(node, path, live)


def _decode_mapping(node: Node, path: str, reader: Reader, live: Any, depth: int) -> Any:
    pairs = [
        (key, decode(item, join(path, key), reader, _get(live, key), depth + 1))
        for key, item in items_of(node, path, depth)
    ]
    if node["$"] == "defaultdict":
        factory = field(node, "factory", (str, type(None)), path)
        if factory is not None and factory not in _FACTORIES:
            corrupt(path, f"a defaultdict of {factory!r} is unknown")
        return defaultdict(None if factory is None else _FACTORIES[factory], pairs)
    made: dict[str, Callable[[Any], Any]] = {"dict": dict, "OrderedDict": OrderedDict, "Counter": Counter}
    return made[str(node["$"])](dict(pairs))  # of pairs, Counter would make a count


def _decode_sequence(node: Node, path: str, reader: Reader, live: Any, depth: int) -> Any:
    items = [
        decode(item, at(path, i), reader, _nth(live, i), depth + 1)
        for i, item in enumerate(field(node, "items", list, path))
    ]
    if node["$"] == "tuple":
        return tuple(items)
    if node["$"] == "deque":
        maxlen = field(node, "maxlen", (int, type(None)), path)
        if maxlen is not None and maxlen < len(items):
            corrupt(path, f"a deque of {len(items)} items with maxlen {maxlen}")
        return deque(items, maxlen)
    fields = field(node, "fields", list, path)
    if len(fields) != len(items):
        corrupt(path, f"a named tuple of {len(fields)} fields with {len(items)} items")
    if not is_namedtuple(live) or list(live._fields) != fields:
        name = field(node, "class", str, path)
        there = qualified(type(live)) if live is not None else "nothing"
        reader.problem(
            path,
            f"the checkpoint has a named tuple {name}{tuple(fields)}, the state has {there}: "
            f"put an instance of {name} there before restoring, for no class is imported by name",
        )
        return tuple(items)
    return type(live)._make(items)


def _make_slice(parts: list[Any], path: str) -> slice:
    return slice(*parts) if len(parts) == 3 else corrupt(path, f"a slice of {len(parts)} parts")  # noqa: PLR2004 # start, stop, step


def _make_set(members: list[Any], path: str) -> set[Any]:
    return {_hashable(member, path) for member in members}


def _decode_int(node: Node, path: str) -> int:
    text = field(node, "value", str, path)
    if not _INT.fullmatch(text) or ("x" not in text and len(text) > _DECIMAL_BITS):
        corrupt(path, f"{reprlib.repr(text)} is no int")
    try:
        return int(text, 16 if "x" in text else 10)
    except ValueError as error:
        corrupt(path, str(error))


def _decode_float(node: Node, path: str) -> float:
    text = field(node, "value", str, path)
    return (
        float(text) if text in ("nan", "inf", "-inf") else corrupt(path, f"{reprlib.repr(text)} is no float")
    )


def _decode_base64(text: str, path: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        corrupt(path, f"{error} in base64")


def _decode_str(node: Node, path: str) -> str:
    try:
        return _decode_base64(field(node, "utf8", str, path), path).decode("utf-8", "surrogatepass")
    except UnicodeDecodeError as error:
        corrupt(path, str(error))


def _decode_bytes(node: Node, path: str) -> bytes:
    return _decode_base64(field(node, "base64", str, path), path)


def _part(node: Node, name: str, kind: type, path: str) -> Any:
    """A number that is a field of a node: plain, or with the tag of its own kind."""
    value = node.get(name)
    if isinstance(value, dict) and value.get("$") == kind.__name__ and kind in (int, float, complex):
        value = _DECODERS[kind.__name__](value, path)
    return value if type(value) is kind else corrupt(path, f"{reprlib.repr(value)} is no {kind.__name__}")


def _decode_complex(node: Node, path: str) -> complex:
    return complex(_part(node, "real", float, path), _part(node, "imag", float, path))


def _decode_range(node: Node, path: str) -> range:
    start, stop, step = (_part(node, name, int, path) for name in ("start", "stop", "step"))
    return range(start, stop, step) if step else corrupt(path, "a range of step 0")


def _decode_dtype(node: Node, path: str) -> torch.dtype:
    name = field(node, "value", str, path)
    dtype = getattr(torch, name, None)
    return (
        dtype
        if isinstance(dtype, torch.dtype)
        else corrupt(path, f"this torch has no dtype {reprlib.repr(name)}")
    )


def _decode_size(node: Node, path: str) -> torch.Size:
    items = field(node, "items", list, path)
    if not all(type(item) is int and item >= 0 for item in items):
        corrupt(path, f"{items} is no size")
    return torch.Size(items)


def _decode_device(node: Node, path: str) -> torch.device:
    name = field(node, "value", str, path)
    try:
        return torch.device(name)
    except RuntimeError as error:
        corrupt(path, f"{reprlib.repr(name)} is no device ({str(error).splitlines()[0]})")


def import_numpy(path: str) -> Any:
    """NumPy. :class:`StateMismatchError` if it is not installed."""
    try:
        return importlib.import_module("numpy")
    except ImportError as error:
        raise StateMismatchError(
            f"{path}: the checkpoint has NumPy values here: install numpy to restore it"
        ) from error


def _decode_numpy(node: Node, path: str) -> Any:
    name = field(node, "dtype", str, path)
    if name not in _NUMPY_SCALARS:
        corrupt(path, f"a NumPy scalar of {reprlib.repr(name)} is unknown")
    kinds = {"b": bool, "i": int, "u": int, "f": float, "c": complex}
    try:
        return import_numpy(path).dtype(name).type(_part(node, "value", kinds[name[0]], path))
    except OverflowError as error:
        corrupt(path, str(error))


def _hashable(value: Any, path: str) -> Any:
    try:
        hash(value)
    except TypeError:
        corrupt(path, f"a {type(value).__name__} can be neither a key nor a member of a set")
    return value


def _get(live: Any, key: Any) -> Any:
    return live.get(key) if isinstance(live, dict) else None


def _nth(live: Any, index: int) -> Any:
    return live[index] if isinstance(live, (list, tuple, deque)) and index < len(live) else None


class _NoReader:
    """For keys, members and parts: nothing foreign may stand there."""

    def foreign(self, node: Node, path: str, _live: Any) -> Any:
        corrupt(path, f"the tag {reprlib.repr(node.get('$'))} is unknown here (written by a newer objckpt?)")

    def problem(self, path: str, text: str) -> None:
        raise StateMismatchError(f"{path}: {text}")


_NO_READER: Final = _NoReader()
unknown_tag: Final = _NO_READER.foreign
_MAPPING_TAGS: Final = ("dict", "OrderedDict", "defaultdict", "Counter")
_SEQUENCE_TAGS: Final = ("tuple", "deque", "namedtuple")
_CLOSED_TAGS: Final[dict[str, Callable[[list[Any], str], Any]]] = {
    "set": _make_set,
    "frozenset": lambda members, path: frozenset(_make_set(members, path)),
    "slice": _make_slice,
}
_DECODERS: Final[dict[str, Callable[[Node, str], Any]]] = {
    "int": _decode_int,
    "float": _decode_float,
    "str": _decode_str,
    "bytes": _decode_bytes,
    "complex": _decode_complex,
    "range": _decode_range,
    "dtype": _decode_dtype,
    "size": _decode_size,
    "device": _decode_device,
    "numpy": _decode_numpy,
}
