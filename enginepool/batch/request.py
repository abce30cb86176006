"""One line of a batch file as a request: what is wrong with its envelope is told here, its body is vLLM's business."""

from __future__ import annotations

from typing import Any

import msgspec

from enginepool.batch.lines import Line
from enginepool.batch.pinpoint import describe_malformed, find_custom_id, find_fault

MOST_SEQUENCES = 100_000
URLS = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings")
_UNREADABLE = (msgspec.DecodeError, RecursionError)


class BatchRequest(msgspec.Struct, frozen=True):
    """A request that may be sent: its body as JSON text, and how many sequences it asks for."""

    custom_id: str
    url: str
    body: bytes
    sequences: int = 1


class LineFault(msgspec.Struct, frozen=True):
    """Why a line is no request; `custom_id` where one can be read all the same. `vllm run-batch` words some faults as text alone."""

    custom_id: str | None
    message: str
    param: str | None = None
    status: int = 400
    is_text: bool = False


class _Body(msgspec.Struct):
    """The body as it stands in the line, which is what travels."""

    body: msgspec.Raw = msgspec.Raw(b"null")


_decode = msgspec.json.Decoder().decode
_decode_body = msgspec.json.Decoder(_Body).decode


class Head(msgspec.Struct, frozen=True):
    """What the first pass wants to know of a line."""

    custom_id: str | None
    is_chat: bool = False


def read_head(line: Line) -> Head:
    """The id of a line, also of one that is no good otherwise, and whether it is a conversation."""
    if line.is_cut:
        return Head(find_custom_id(line.data))
    try:
        envelope = _decode(line.data)
    except _UNREADABLE:
        return Head(find_custom_id(line.data))
    if not isinstance(envelope, dict):
        return Head(None)
    custom_id = envelope.get("custom_id")
    return Head(custom_id if isinstance(custom_id, str) else None, envelope.get("url") == URLS[0])


def read_request(line: Line, max_line_bytes: int) -> BatchRequest | LineFault:
    """Read one line; a fault of its own never touches another."""
    if line.is_cut:
        return LineFault(find_custom_id(line.data), f"the line has more than {max_line_bytes} bytes (--max-line-bytes)", status=413)
    try:
        envelope = _decode(line.data)  # as a whole: a number out of range or half a surrogate pair is found nowhere else
    except _UNREADABLE as error:
        return LineFault(find_custom_id(line.data), describe_malformed(line.data, error), find_fault(line.data, error))
    if not isinstance(envelope, dict):
        return LineFault(None, f"the line must be a JSON object, not {_name(envelope)}")
    custom_id = envelope.get("custom_id")
    if not isinstance(custom_id, str):
        what = "is missing" if custom_id is None else f"must be text, not {custom_id!r:.40}"
        return LineFault(None, f"custom_id {what}", "custom_id")
    return _read_rest(line, custom_id, envelope)


def _read_rest(line: Line, custom_id: str, envelope: dict[str, Any]) -> BatchRequest | LineFault:
    method, url, body = (envelope.get(name) for name in ("method", "url", "body"))
    if method != "POST":
        return LineFault(custom_id, f"method must be POST, not {method!r:.40}", "method")
    if url not in URLS:
        return LineFault(custom_id, f"URL {url!s:.80} was used. Supported endpoints: {', '.join(URLS)}.", "url", is_text=True)
    if not isinstance(body, dict):
        return LineFault(custom_id, f"body must be a JSON object, not {_name(body)}", "body")
    if body.get("stream"):
        return LineFault(custom_id, "Request must not be sent in stream mode", "stream", is_text=True)
    return BatchRequest(custom_id, url, bytes(_decode_body(line.data).body), _count_sequences(body))


def _count_sequences(body: dict[str, Any]) -> int:
    """How many sequences the engine will run; what is nonsense counts as one, and the worker says what is wrong with it."""
    n, prompt = body.get("n"), body.get("prompt")
    count = n if isinstance(n, int) and 0 < n < MOST_SEQUENCES else 1
    is_many = isinstance(prompt, list) and bool(prompt) and isinstance(prompt[0], str | list)
    return int(count) * (len(prompt) if is_many and prompt is not None else 1)


def _name(value: Any) -> str:
    kinds = {type(None): "null", str: "text", list: "an array", bool: "true or false"}
    return kinds.get(type(value), "a number")
