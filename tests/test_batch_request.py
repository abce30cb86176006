"""Lines of a batch file that the client itself finds fault with: whose, where, and no other line with it."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from enginepool.batch.lines import Line
from enginepool.batch.request import BatchRequest, LineFault, read_head, read_request

LIMIT = 1 << 20
ENVELOPE = b'{"custom_id":"a","method":"POST","url":"/v1/completions","body":%s}'


def _read(data: bytes) -> BatchRequest | LineFault:
    return read_request(Line(1, data), LIMIT)


def _fault(data: bytes) -> LineFault:
    found = _read(data)
    assert isinstance(found, LineFault)
    msgspec.json.encode(found)
    return found


def _request(body: bytes) -> BatchRequest:
    found = _read(ENVELOPE % body)
    assert isinstance(found, BatchRequest)
    return found


def _line(**changes: Any) -> bytes:
    whole = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "p"}} | changes
    return json.dumps({name: value for name, value in whole.items() if value is not ...}).encode()


@pytest.mark.parametrize("value", [b"NaN", b"Infinity", b"-Infinity", b"1e999", b"-1e999", b"[1,1e999]", b"1" * 5000])
def test_number_that_is_not_finite_is_named(value: bytes) -> None:
    data = ENVELOPE % (b'{"prompt":"1e999 \\" NaN","temperature":%s}' % value)
    fault = _fault(data)
    place = data.rindex(value) + {b"[1,1e999]": 3, b"-Infinity": 1}.get(value, 0)
    assert (fault.custom_id, fault.param) == ("a", "temperature")
    assert fault.message == f"a number must be finite in 'temperature' at byte {place}"


@pytest.mark.parametrize(
    ("body", "field"),
    [
        pytest.param(rb'{"prompt":"half \ud83d"}', "prompt", id="at the end"),
        pytest.param(rb'{"prompt":"half \ud83d and more"}', "prompt", id="in the middle"),
        pytest.param(rb'{"stop":["\udc00"]}', "stop", id="second half alone"),
        pytest.param(rb'{"messages":[{"content":"\ud800\ud800"}]}', "content", id="twice the first half"),
        pytest.param(rb'{"messages":[{"tool_calls":[{"function":{"arguments":"{\"a\":\"\ud800\"}"}}]}]}', "arguments", id="arguments"),
        pytest.param(rb'{"prompt":"\\\ud800"}', "prompt", id="after a backslash"),
        pytest.param(rb'{"a":"\\ud800","prompt":"\ud83d\ude00 \udead"}', "prompt", id="after what only looks like one"),
    ],
)
def test_lone_surrogate_is_named_with_its_byte(body: bytes, field: str) -> None:
    fault = _fault(ENVELOPE % body)
    assert (fault.custom_id, fault.param) == ("a", field)
    assert fault.message.startswith(f"a lone surrogate, which is no text in {field!r} at byte ")
    place = int(fault.message.rpartition(" ")[2])
    assert (ENVELOPE % body)[place : place + 4].lower() in (rb"\ud8", rb"\udc", rb"\ude")


def test_lone_surrogate_in_the_id_leaves_no_id() -> None:
    fault = _fault(rb'{"custom_id":"x\ud800","method":"POST","url":"/v1/completions","body":{}}')
    assert (fault.custom_id, fault.param) == (None, "custom_id")


@pytest.mark.parametrize("text", [rb"ok \ud83d\ude00", rb"a\u0000b", rb"\\ud800", rb"\uD83D\uDE00", rb"\"{\\\"a\\\":1}"])
def test_text_that_only_looks_odd_passes_unchanged(text: bytes) -> None:
    body = b'{"prompt":"%s"}' % text
    assert _request(body).body == body


@pytest.mark.parametrize("raw", [b"\xff\xfe", b"\xc3", b"\xed\xa0\x80"])
def test_invalid_utf8_is_a_fault_of_its_line_with_its_byte(raw: bytes) -> None:
    fault = _fault(b'{"custom_id":"r","prompt":"%s"}' % raw)
    assert (fault.custom_id, fault.param) == ("r", "prompt")
    assert fault.message == "the line is not UTF-8: an invalid byte in 'prompt' at byte 27"


@pytest.mark.parametrize("closed", [True, False])
def test_deep_nesting_is_a_fault_of_its_line(closed: bool) -> None:
    fault = _fault(ENVELOPE % (b'{"prompt":' + b"[" * 20_000 + b"]" * 20_000 * closed + b"}"))
    assert fault.custom_id == "a"
    assert "nested too deeply" in fault.message


@pytest.mark.parametrize(
    ("data", "custom_id"),
    [
        pytest.param(b'{"custom_id":"t", "body":', "t", id="cut off"),
        pytest.param(b'{"body":{"custom_id":"inner"},"custom_id":"t",', "t", id="another object's id before it"),
        pytest.param(b'{"body":{"prompt":"\\"custom_id\\": \\"no\\"", ', None, id="an id inside a text"),
        pytest.param(b'{"custom_id": 7, "body":', None, id="an id that is no text"),
        pytest.param(b'{"custom_id":"t', None, id="cut off in the id"),
        pytest.param(b"{'custom_id':'t'}", None, id="single quotes"),
        pytest.param(b'{"custom_id":"t"} {"custom_id":"u"}', "t", id="two on a line"),
    ],
)
def test_broken_json_keeps_the_id_that_can_be_read(data: bytes, custom_id: str | None) -> None:
    fault = _fault(data)
    assert fault.custom_id == custom_id == read_head(Line(1, data)).custom_id
    assert fault.message.startswith("the JSON is broken: ")


@pytest.mark.parametrize(
    ("data", "kind"),
    [(b"[1,2]", "an array"), (b'"just a string"', "text"), (b"null", "null"), (b"7", "a number"), (b"true", "true or false")],
)
def test_line_that_is_no_object_is_told_what_it_is(data: bytes, kind: str) -> None:
    assert _fault(data).message == f"the line must be a JSON object, not {kind}"


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        pytest.param({"url": "/v1/completion"}, "url", id="url misspelt"),
        pytest.param({"url": "http://x/v1/completions"}, "url", id="url with a host"),
        pytest.param({"url": ["/v1/completions"]}, "url", id="url a list"),
        pytest.param({"url": ...}, "url", id="no url"),
        pytest.param({"method": "GET"}, "method", id="GET"),
        pytest.param({"method": ...}, "method", id="no method"),
        pytest.param({"body": "{}"}, "body", id="body as text"),
        pytest.param({"body": []}, "body", id="body a list"),
        pytest.param({"body": None}, "body", id="body null"),
        pytest.param({"body": ...}, "body", id="no body"),
        pytest.param({"body": {"prompt": "p", "stream": True}}, "stream", id="stream"),
    ],
)
def test_envelope_fault_names_its_field_and_keeps_the_id(changes: dict[str, Any], param: str) -> None:
    fault = _fault(_line(**changes))
    assert (fault.custom_id, fault.param) == ("a", param)


@pytest.mark.parametrize("custom_id", [..., None, 7, 1.5, ["a"], True])
def test_id_that_is_missing_or_no_text_is_a_fault(custom_id: Any) -> None:
    fault = _fault(_line(custom_id=custom_id))
    assert (fault.custom_id, fault.param) == (None, "custom_id")


@pytest.mark.parametrize("custom_id", ["", "x" * 5000, 'a "quoted"\nline', "\0", "é\u2028"])
def test_odd_id_is_carried_as_it_is(custom_id: str) -> None:
    request = _read(_line(custom_id=custom_id))
    assert isinstance(request, BatchRequest)
    assert request.custom_id == custom_id == read_head(Line(1, _line(custom_id=custom_id))).custom_id


def test_of_doubled_keys_the_last_counts() -> None:
    assert _request(b'{"max_tokens":4,"max_tokens":9}').body == b'{"max_tokens":4,"max_tokens":9}'
    request = _read(b'{"custom_id":"a","custom_id":"b","method":"POST","url":"/v1/completions","body":{"p":1},"body":{"p":2}}')
    assert isinstance(request, BatchRequest)
    assert (request.custom_id, request.body) == ("b", b'{"p":2}')


def test_key_that_is_written_with_an_escape_is_the_same_key() -> None:
    request = _read(rb'{"custom_id":"a","method":"POST","url":"/v1/completions","b\u006fdy":{"p":1}}')
    assert isinstance(request, BatchRequest)
    assert request.body == b'{"p":1}'


@pytest.mark.parametrize("value", [b"99999999999999999999999", b"-99999999999999999999999", b"1" * 400, b"1e-999"])
def test_large_integer_is_the_workers_to_judge(value: bytes) -> None:
    assert _request(b'{"seed":%s}' % value).body == b'{"seed":%s}' % value


@pytest.mark.parametrize(
    ("body", "sequences"),
    [
        (b'{"prompt":"p"}', 1),
        (b'{"prompt":"p","n":3}', 3),
        (b'{"prompt":["p","q"],"n":3}', 6),
        (b'{"prompt":[1,2,3]}', 1),
        (b'{"prompt":[[1],[2,3]]}', 2),
        (b'{"prompt":[],"n":0}', 1),
        (b'{"n":true}', 1),
        (b'{"n":"3"}', 1),
        (b'{"n":-1}', 1),
        (b'{"n":1000000000000}', 1),
        (b'{"n":null,"prompt":null}', 1),
    ],
)
def test_sequences_are_counted_and_nonsense_counts_as_one(body: bytes, sequences: int) -> None:
    assert _request(body).sequences == sequences


def test_line_over_the_limit_keeps_its_id() -> None:
    fault = read_request(Line(1, b'{"custom_id":"big","body":{"prompt":"xxx', is_cut=True), LIMIT)
    assert fault == LineFault("big", f"the line has more than {LIMIT} bytes (--max-line-bytes)", status=413)


@pytest.mark.parametrize(
    "text",
    [
        pytest.param(b'\\"' * 200_000, id="quotes in a text without an end"),
        pytest.param(b"\\" * 400_001, id="backslashes"),
        pytest.param(b"1.1" * 100_000 + b'","temperature":1e999}', id="digits in a text before a number that is too large"),
        pytest.param(b'{"a":' * 100_000, id="keys in a text"),
        pytest.param(b" " * 400_000 + b'" : "custom_id"' + b" " * 400_000, id="blanks"),
    ],
)
def test_line_made_to_be_slow_is_not(text: bytes) -> None:
    """Each of these took minutes, or would have, where a pattern tries again from each byte."""
    assert _fault(b'{"custom_id":"t","body":{"prompt":"' + text).custom_id == "t"
