"""Where in nested values something lies, told as a path."""

from __future__ import annotations

import math
from typing import Any

import pytest

from enginepool.pinpoint import is_beyond_64_bits, is_lone_surrogate, is_not_finite, pinpoint


@pytest.mark.parametrize(
    ("value", "path"),
    [
        pytest.param("\udc00", "", id="the value itself"),
        pytest.param({"a": [{"b": "x"}, {"b": "\ud800"}]}, "a[1].b", id="in a list of dicts"),
        pytest.param({"a": {"\ud800": 1}}, "a", id="a key"),
        pytest.param({"a": ("x", "\ud83d")}, "a[1]", id="in a tuple"),
        pytest.param({"a": "\U0001f600", "b": 5}, None, id="a whole pair"),
    ],
)
def test_place_of_a_lone_surrogate(value: Any, path: str | None) -> None:
    assert pinpoint(value, is_lone_surrogate) == path


def test_first_place_is_told() -> None:
    assert pinpoint({"a": [1.0], "b": [math.nan], "c": math.inf}, is_not_finite) == "b[0]"


def test_value_that_holds_itself_ends() -> None:
    value: list[Any] = []
    value += [value, value, [value, 1 << 64]]
    assert pinpoint(value, is_beyond_64_bits) == "[2][1]"


def test_value_nested_beyond_all_reason_is_not_followed() -> None:
    value: Any = math.nan
    for _ in range(100_000):
        value = [value]
    assert pinpoint(value, is_not_finite) is None
