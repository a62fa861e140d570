"""JSON without the json module says what the json module says."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distlaunch.agent import lean
from tests.unit.samples import bounded

SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
VALUES = st.recursive(SCALARS, lambda each: st.lists(each) | st.dictionaries(st.text(), each), max_leaves=20)
PAIRS = [pytest.param(pair, id=pair.__name__.strip("_")) for pair in (lean._by_c, lean._by_json)]


@pytest.mark.parametrize("pair", PAIRS)
@given(value=VALUES)
@bounded()
def test_values_are_written_and_read_as_json_has_them(pair: Any, value: Any) -> None:
    encode, decode = pair()
    if "inf" not in repr(value):
        assert encode(value) == json.dumps(value, separators=(",", ":"))
        assert decode(encode(value)) == value
        assert decode(json.dumps(value, indent=1)) == value


@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize(
    "text", ["", "{", '{"a":', "nul", '"\x01"', "[1,]", "1 2", "NaN", '{"a":Infinity}', "-Infinity"]
)
def test_what_is_no_json_is_refused(pair: Any, text: str) -> None:
    with pytest.raises(ValueError, match=r"JSON|Expecting|Extra|Invalid|Illegal"):
        pair()[1](text)


def test_nesting_without_end_is_refused() -> None:
    with pytest.raises(RecursionError):
        lean.decode("[" * 1_000_000)


def test_what_json_can_not_have_is_refused() -> None:
    with pytest.raises(TypeError):
        lean.encode({"a": object()})
