"""Finds where in nested values something lies that can't travel, so that an error can name the place."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import msgspec

LONGEST_PATH = 1000


def pinpoint(value: Any, is_wanted: Callable[[Any], bool]) -> str | None:
    """The path of the first wanted leaf, such as `stop[0]` or `tools[1].function.name`; None where there is none.

    A key is a leaf too, and stands for the mapping that it is in. A value that holds itself is looked at once.
    """
    waiting: list[tuple[str, Any]] = [("", value)]
    seen: set[int] = set()
    while waiting:
        path, item = waiting.pop()
        if isinstance(item, Mapping | list | tuple | msgspec.Struct):
            if id(item) not in seen and len(path) < LONGEST_PATH:  # nothing that an engine takes is nested so deep
                seen.add(id(item))
                if isinstance(item, Mapping) and any(is_wanted(key) for key in item):
                    return path
                waiting += reversed(list(_children(path, item)))
        elif is_wanted(item):
            return path
    return None


def _children(path: str, item: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(item, list | tuple):
        yield from ((f"{path}[{index}]", child) for index, child in enumerate(item))
        return
    pairs = item.items() if isinstance(item, Mapping) else ((name, getattr(item, name)) for name in item.__struct_fields__)
    yield from ((f"{path}.{key}" if path else str(key), child) for key, child in pairs)


def is_lone_surrogate(value: Any) -> bool:
    """Whether it is text that has no UTF-8 form."""
    return isinstance(value, str) and any("\ud800" <= character <= "\udfff" for character in value)


def is_beyond_64_bits(value: Any) -> bool:
    """Whether it is an integer that msgpack has no form for."""
    return isinstance(value, int) and not -(1 << 63) <= value < 1 << 64


def is_not_finite(value: Any) -> bool:
    """Whether it is NaN or infinite."""
    return isinstance(value, float) and not math.isfinite(value)


def describe_encoding_error(error: Exception, value: Any = None) -> str:
    """Say in the caller's terms what msgpack could not encode; `value` is what it was given, to name the place in it."""
    if isinstance(error, UnicodeEncodeError):
        place = pinpoint(value, is_lone_surrogate)
        of = f"`{place}`" if place else "the text"
        return f"character {error.start} of {of} is a lone surrogate (U+{ord(error.object[error.start]):04X})"
    if isinstance(error, OverflowError):
        place = pinpoint(value, is_beyond_64_bits)
        return f"{f'`{place}`' if place else 'an integer'} does not fit into 64 bits"
    return str(error) or type(error).__name__
