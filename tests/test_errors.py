"""Errors travel between ranks and processes: each pickles whole, and is what its built-in base class promises."""

from __future__ import annotations

import copy
import pickle
import re

import pytest

from objckpt import errors


def classes(root: type = errors.ObjckptError) -> list[type]:
    return [
        root,
        *(
            c
            for child in root.__subclasses__()
            if child.__module__ == errors.__name__
            for c in classes(child)
        ),
    ]


ALL = list(dict.fromkeys(classes()))
BUILT_IN = {
    "CheckpointNotFoundError": FileNotFoundError,
    "StateMismatchError": ValueError,
    "ConfigError": ValueError,
    "SpoolError": OSError,
    "WorldError": TimeoutError,
    "StoreError": OSError,
    "StoreNotFoundError": FileNotFoundError,
    "StorePermissionError": PermissionError,
}
MESSAGE = "s3://bucket/run/index: 'what' happened, and what to do next"


def made(kind):
    if issubclass(kind, errors.StoreError):
        return kind(MESSAGE, uri="s3://bucket/run", key="index/x.json", attempts=7)
    return kind(MESSAGE)


def test_the_tree_is_the_one_that_the_docstring_draws():
    picture = errors.__doc__.split("::\n")[1]
    drawn = re.findall(r"^([ │├└─]*)(\w+Error)\b(?: +\((\w+)\))?", picture, re.MULTILINE)
    assert [name for _, name, _ in drawn] == [kind.__name__ for kind in ALL]
    parents = {}
    for branch, name, base in drawn:
        depth = len(branch) // 3
        parents[depth] = name
        kind = getattr(errors, name)
        if name != "ObjckptError":
            assert kind.__bases__[0].__name__ == parents[depth - 1]
        assert (kind.__bases__[1].__name__ if len(kind.__bases__) > 1 else "") == base


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
@pytest.mark.parametrize("kind", ALL)
def test_each_pickles_with_text_and_attributes(kind, protocol):
    error = made(kind)
    error.note = "added on the way"
    again = pickle.loads(pickle.dumps(error, protocol))
    assert type(again) is kind
    assert str(again) == str(error) == MESSAGE
    assert again.args == error.args
    assert vars(again) == vars(error)
    assert str(copy.copy(error)) == MESSAGE


@pytest.mark.parametrize("kind", [c for c in ALL if issubclass(c, errors.StoreError)])
def test_store_errors_say_where_and_how_often(kind):
    again = pickle.loads(pickle.dumps(made(kind)))
    assert (again.uri, again.key, again.attempts) == ("s3://bucket/run", "index/x.json", 7)


@pytest.mark.parametrize(("name", "base"), BUILT_IN.items())
def test_built_in_handlers_catch_them(name, base):
    with pytest.raises(base):
        raise made(getattr(errors, name))


def test_fenced_and_preempted_have_exit_codes_of_their_own():
    assert errors.FencedError.exit_code == errors.FENCED_EXIT_CODE == 77
    assert pickle.loads(pickle.dumps(errors.FencedError(MESSAGE))).exit_code == 77
    assert errors.PREEMPTED_EXIT_CODE == 75
