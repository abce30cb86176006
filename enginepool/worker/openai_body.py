"""What is looked at in the JSON body of an OpenAI request before vLLM's own models read it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import msgspec

from enginepool.chat_format import RESERVED
from enginepool.errors import Code
from enginepool.pinpoint import is_lone_surrogate, is_not_finite, pinpoint
from enginepool.worker.engine import RefusedItem, check_messages

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
EMBEDDINGS = "/v1/embeddings"

_KEPT_NULLS = {"tool_choice"}  # vLLM tells a null tool choice, which means none, from an absent one


def read_body(data: bytes) -> dict[str, Any]:
    """The body without what is null, checked for what an engine does not survive. Raises RefusedItem."""
    try:
        body = msgspec.json.decode(data)
    except RecursionError:
        raise bad_request("the body is nested too deeply") from None
    except (msgspec.DecodeError, ValueError) as error:
        raise bad_request(*_fault(data, error)) from None
    if not isinstance(body, dict):
        raise bad_request("the body is not a JSON object")
    body = {name: value for name, value in body.items() if value is not None or name in _KEPT_NULLS}
    _check(body)
    return body


def bad_request(message: str, param: str | None = None) -> RefusedItem:
    """A refusal in the shape of vLLM's own."""
    return RefusedItem(Code.INVALID_REQUEST, message, status=400, kind="BadRequestError", param=param)


def plain_refusal(message: str) -> RefusedItem:
    """A refusal that `vllm run-batch` words as text alone, without kind and param."""
    return RefusedItem(Code.INVALID_REQUEST, message, status=400)


def _fault(data: bytes, error: Exception) -> tuple[str, str | None]:
    """What keeps the body from being JSON, with the field's name where Python's laxer reader finds it."""
    try:
        body = json.loads(data)
    except (ValueError, RecursionError):
        return f"the body is not JSON: {error}", None
    if place := pinpoint(body, is_not_finite):
        return f"`{place}` must be a finite number", place
    if place := pinpoint(body, is_lone_surrogate):
        return f"`{place}` holds a lone surrogate, which is no text", place
    return f"the body is not JSON: {error}", None


def _check(body: dict[str, Any]) -> None:
    if body.get("use_beam_search"):
        raise bad_request("beam search is not supported", "use_beam_search")
    for name in ("messages", "input"):
        try:
            check_messages(list(_messages(body.get(name))))
        except RefusedItem as refused:
            raise bad_request(refused.error.message, name) from None
    keywords = body.get("chat_template_kwargs")
    reserved = sorted(RESERVED.intersection(keywords) - {"chat_template"}) if isinstance(keywords, dict) else []
    if reserved:
        raise bad_request(f"chat_template_kwargs: {reserved[0]!r} is reserved", "chat_template_kwargs")


def _messages(value: Any) -> Iterator[dict[str, Any]]:
    """The messages of a conversation, or of the several ones that an embeddings request may hold."""
    for item in value if isinstance(value, list) else ():
        if isinstance(item, dict):
            yield item
        elif isinstance(item, list):
            yield from (message for message in item if isinstance(message, dict))
