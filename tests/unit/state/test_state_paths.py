"""Paths are spelled without ambiguity, and patterns select what they say."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckstore.errors import InvalidInputError, NotFoundError
from ckstore.state.paths import Part, Path, Selection, spell
from ckstore.testing.states import there_and_back

KEYS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary()
PATHS = st.lists(KEYS, max_size=4).map(tuple)
BIG = 10**5000


def selects(pattern: str, path: Path) -> bool:
    """Whether `pattern` selects `path`."""
    selection = Selection(pattern)
    state = selection.start()
    for step in path:
        state = selection.advance(state, step)
    return state is Selection.ALL


@pytest.mark.parametrize(
    ("path", "spelled"),
    [
        ((), ""),
        (("model", "layers.0.weight"), "model/layers.0.weight"),
        (("0.weight",), "0.weight"),
        (("state", 0, "exp_avg"), "state/0/exp_avg"),
        (("0", "1.5", "1e3", "1j", "nan", "inf", "1_0"), '"0"/"1.5"/"1e3"/"1j"/"nan"/"inf"/"1_0"'),
        (("None", "True", None, True), '"None"/"True"/None/True'),
        (("a/b", "x*", "", " ", 'q"', ".p"), '"a/b"/"x*"/""/" "/"q\\""/".p"'),
        ((b"raw\xff", 1.5, -math.inf, 2j, -3), 'b"raw\\u00ff"/1.5/-inf/2j/-3'),
        (("w", Part("indices")), "w/.indices"),
        (("größe", "\ud800"), 'größe/"\\ud800"'),
        ((BIG, hex(BIG), -BIG, 2**255), f'{hex(BIG)}/"{hex(BIG)}"/{hex(-BIG)}/{2**255}'),
    ],
)
def test_spelling(path: tuple[object, ...], spelled: str) -> None:
    assert spell(path) == spelled
    assert path == () or selects(spelled, path)


@given(PATHS, PATHS)
def test_different_paths_are_spelled_differently(a: tuple[object, ...], b: tuple[object, ...]) -> None:
    same = [(type(x), repr(x)) for x in a] == [(type(x), repr(x)) for x in b]
    assert (spell(a) == spell(b)) == same


@given(PATHS.filter(bool), PATHS)
def test_a_spelled_path_selects_itself_and_what_is_below(path: tuple[object, ...], more: tuple[object, ...]) -> None:
    assert selects(spell(path), path + more)
    assert not selects(spell(path), path[:-1])


@pytest.mark.parametrize(
    ("pattern", "path", "expected"),
    [
        ("model", ("model", "a", 0), True),
        ("model/*", ("model",), False),
        ("model/*/weight", ("model", "l1", "weight"), True),
        ("model/*/weight", ("model", "l1", "b", "weight"), False),
        ("model/**/weight", ("model", "weight"), True),
        ("model/**/weight", ("model", "a", "b", "weight", 3), True),
        ("**/step", ("optim", 0, "step"), True),
        ("**", (), True),
        ("layers.*.weight", ("layers.0.weight",), True),
        ("layers.*.weight", ("layersX0.weight",), False),
        ("*", ("a/b",), True),
        ('"a/b"', ("a/b",), True),
        ('"x*"', ("xy",), False),
        ('"x*"', ("x*",), True),
        ('"abc"', ("abc",), True),
        ("0", ("0",), False),
        ("0", (0,), True),
        ('b"k"', (b"k",), True),
        ("[ab]?", ("a1",), False),
        ("**/**/a", ("a",), True),
    ],
)
def test_patterns(pattern: str, path: tuple[object, ...], expected: bool) -> None:
    assert selects(pattern, path) is expected


@pytest.mark.parametrize("pattern", ["", "a//b", "/a", "a/", '"open', 'a"b"', '"a"b', '"\\x"', 'b"\u4e00"'])
def test_a_malformed_pattern_is_refused(pattern: str) -> None:
    with pytest.raises(InvalidInputError):
        selects(pattern, ("a",))


@pytest.mark.parametrize("keys", ["nothing", ["a", "a/nothing"], "a/*", ["**", "typo/**"]])
def test_a_pattern_that_selects_nothing_is_an_error_that_names_it(keys: object) -> None:
    with pytest.raises(NotFoundError, match=r"nothing in the snapshot matches '(nothing|a/nothing|a/\*|typo/\*\*)'"):
        there_and_back({"a": 1, "b": [2]}, keys)


def test_a_pattern_within_what_another_selects_is_no_error() -> None:
    assert there_and_back({"a": {"x": 1, "y": 2}, "b": 3}, ["a", "a/x"]) == {"a": {"x": 1, "y": 2}}
