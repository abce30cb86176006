"""Where a line that can't be decoded is wrong: the field and the byte, and the id it would have had."""

from __future__ import annotations

import re

import msgspec

_KEY = re.compile(rb'"((?:[^"\\]|\\.)*)"\s*:')
_CUSTOM_ID = re.compile(rb'"custom_id"\s*:\s*("(?:[^"\\]|\\.)*")')
_OFFSET = re.compile(r"\(byte (\d+)\)")
_SURROGATE = re.compile(rb"(?<!\\)(?:\\\\)*(\\u[dD](?:[89abAB][0-9a-fA-F]{2}(?!\\u[dD][c-fC-F][0-9a-fA-F]{2})|[c-fC-F][0-9a-fA-F]{2}))")
_PAIR = re.compile(rb"\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}")
_HUGE = re.compile(rb"[-+]?\d[\d.]*(?:[eE]\+?\d{3,})|\d{300,}")
_NOT_FINITE = re.compile(rb"NaN|-?Infinity")
LONGEST_LOOK = 1 << 20
"""Only that much of a line is looked through for what to call it."""


def find_custom_id(data: bytes) -> str | None:
    """The id in a line that can't be decoded as a whole."""
    found = _CUSTOM_ID.search(data[:LONGEST_LOOK])
    try:
        return None if found is None else msgspec.json.decode(found[1], type=str)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None


def describe_malformed(data: bytes, error: Exception) -> str:
    """One sentence with field and byte, as far as they can be told."""
    if isinstance(error, RecursionError):
        return "the JSON is nested too deeply"
    place = _offset(data, error)
    name = _key_before(data, place)
    where = (f" in {name!r}" if name else "") + ("" if place is None else f" at byte {place}")
    return f"{_reason(data, error, place)}{where}"


def find_fault(data: bytes, error: Exception) -> str | None:
    """The key whose value is wrong, or None."""
    return None if isinstance(error, RecursionError) else _key_before(data, _offset(data, error))


def _reason(data: bytes, error: Exception, place: int | None) -> str:
    if "UTF-8" in str(error):
        return "the line is not UTF-8: an invalid byte"
    if place is not None and _SURROGATE.match(data, place):
        return "a lone surrogate, which is no text"
    if place is not None and (_NOT_FINITE.match(data, place) or _HUGE.match(data, place)):
        return "a number must be finite"
    return "the JSON is broken: " + _OFFSET.sub("", str(error)).removeprefix("JSON is malformed: ").strip()


def _offset(data: bytes, error: Exception) -> int | None:
    if "UTF-8" in str(error):
        return _first_invalid(data)
    told = _OFFSET.search(str(error))
    surrogate = _first_surrogate(data)
    if surrogate is not None and (told is None or int(told[1]) >= surrogate):
        return surrogate
    if told is not None:
        return int(told[1])
    huge = _HUGE.search(data[:LONGEST_LOOK])
    return None if huge is None or "range" not in str(error) else huge.start()


def _first_surrogate(data: bytes) -> int | None:
    """Where the first half pair stands; whole pairs are blanked first, so that their second halves don't look alone."""
    blanked = _PAIR.sub(lambda pair: b" " * len(pair[0]), data[:LONGEST_LOOK])
    found = _SURROGATE.search(blanked)
    return None if found is None else found.start(1)


def _first_invalid(data: bytes) -> int | None:
    try:
        data.decode()
    except UnicodeDecodeError as error:
        return error.start
    return None


def _key_before(data: bytes, place: int | None) -> str | None:
    if place is None:
        return None
    keys = list(_KEY.finditer(data[max(0, place - LONGEST_LOOK) : place + 1]))
    return keys[-1][1].decode("utf-8", "replace") if keys else None
