"""Where a line that can't be decoded is wrong: the field and the byte, and the id it would have had."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator

import msgspec

# Read from the left and string by string, so that what stands inside a text is never taken for a key or a number. Every part is
# possessive: a line that was made to be slow costs one pass all the same.
_TOKEN = re.compile(rb'"(?:[^"\\]|\\.)*+"?|[{}\[\]]|-?[0-9][0-9.eE+-]*+|-?Infinity|NaN', re.DOTALL)
_COLON = re.compile(rb"\s*+:\s*+")
_OFFSET = re.compile(r"\(byte (\d+)\)")
_ESCAPE = re.compile(rb"\\(?:[uU]([0-9a-fA-F]{4})|.)", re.DOTALL)
_NOT_FINITE = re.compile(rb"NaN|-?Infinity")
LONGEST_LOOK = 1 << 20
"""Only that much of a line is looked through for what to call it."""


def find_custom_id(data: bytes) -> str | None:
    """The id in a line that can't be decoded as a whole; one inside another object is none."""
    depth = 0
    for token in _tokens(data):
        depth += (token[0] in (b"{", b"[")) - (token[0] in (b"}", b"]"))
        if depth == 1 and token[0] == b'"custom_id"' and (colon := _COLON.match(data, token.end())):
            value = _TOKEN.match(data, colon.end())
            return None if value is None else _text(value[0])
    return None


def describe_malformed(data: bytes, error: Exception) -> str:
    """One sentence with field and byte, as far as they can be told."""
    if isinstance(error, RecursionError):
        return "the JSON is nested too deeply"
    place = _offset(data, error)
    name = _key_before(data, place)
    where = (f" in {name!r:.80}" if name else "") + ("" if place is None else f" at byte {place}")
    return f"{_reason(data, error, place)}{where}"


def find_fault(data: bytes, error: Exception) -> str | None:
    """The key whose value is wrong, or None."""
    return None if isinstance(error, RecursionError) else _key_before(data, _offset(data, error))


def _reason(data: bytes, error: Exception, place: int | None) -> str:
    if "UTF-8" in str(error):
        return "the line is not UTF-8: an invalid byte"
    if place is not None and place == _first_surrogate(data):
        return "a lone surrogate, which is no text"
    if place is not None and (_NOT_FINITE.match(data, place) or place == _first_huge(data)):
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
    return _first_huge(data) if "range" in str(error) else None


def _tokens(data: bytes) -> Iterator[re.Match[bytes]]:
    return _TOKEN.finditer(data, 0, LONGEST_LOOK)


def _text(token: bytes) -> str | None:
    try:
        return msgspec.json.decode(token, type=str)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None


def _first_surrogate(data: bytes) -> int | None:
    """Where the first half of a pair stands without its other half."""
    for token in _tokens(data):
        if token[0].startswith(b'"') and b"\\" in token[0] and (place := _lone_half(token[0])) is not None:
            return token.start() + place
    return None


def _lone_half(text: bytes) -> int | None:
    high: re.Match[bytes] | None = None
    for escape in _ESCAPE.finditer(text):
        code = int(escape[1], 16) if escape[1] else 0
        is_low = 0xDC00 <= code < 0xE000
        if high is not None and not (is_low and high.end() == escape.start()):
            return high.start()
        if high is None and is_low:
            return escape.start()
        high = escape if 0xD800 <= code < 0xDC00 else None
    return None if high is None else high.start()


def _first_huge(data: bytes) -> int | None:
    """Where the first number stands that no float can hold."""
    for token in _tokens(data):
        if token[0][:1].isdigit() or token[0][:1] == b"-":
            try:
                if math.isinf(float(token[0])):
                    return token.start()
            except ValueError:
                continue
    return None


def _first_invalid(data: bytes) -> int | None:
    try:
        data.decode()
    except UnicodeDecodeError as error:
        return error.start
    return None


def _key_before(data: bytes, place: int | None) -> str | None:
    key, depth = None, 0
    for token in _tokens(data) if place is not None else ():
        if place is None or token.end() > place:
            break
        depth += (token[0] in (b"{", b"[")) - (token[0] in (b"}", b"]"))
        if depth and token[0].startswith(b'"') and _COLON.match(data, token.end()):
            key = token[0]
        elif not depth:
            key = None
    return None if key is None else key[1:-1].decode("utf-8", "replace")
