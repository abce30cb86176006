"""OpenAI requests to the echo engine: read as far as a rehearsal needs, answered in the shape that vLLM's server gives."""

from __future__ import annotations

from typing import Any

import msgspec

from enginepool.chat_format import join_plain
from enginepool.errors import Code
from enginepool.payload import Answer, CompletionOutput, OpenAIRequest
from enginepool.worker.engine import RefusedItem

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
PARAMS = ("max_tokens", "n", "temperature")


def read_openai(request: OpenAIRequest) -> tuple[str, dict[str, Any]]:
    """The prompt and the params of a request; `vllm_xargs` are the echo engine's `extra_args`. Raises RefusedItem."""
    if request.url not in (CHAT, COMPLETIONS):
        raise RefusedItem(Code.INVALID_REQUEST, f"Model does not support endpoint: {request.url}")
    body: dict[str, Any] = msgspec.json.decode(request.body, type=dict[str, Any])
    params = {name: body[name] for name in PARAMS if body.get(name) is not None}
    if body.get("max_completion_tokens") is not None:
        params["max_tokens"] = body["max_completion_tokens"]
    if body.get("vllm_xargs"):
        params["extra_args"] = body["vllm_xargs"]
    name = "messages" if request.url == CHAT else "prompt"
    if not isinstance(body.get(name), list if request.url == CHAT else str | list):
        raise RefusedItem(Code.INVALID_REQUEST, f"{name} is missing or of another kind", status=400, kind="BadRequestError", param=name)
    text = join_plain(body[name]) if request.url == CHAT else body[name]
    if not isinstance(text, str):
        raise RefusedItem(Code.INVALID_REQUEST, "the echo engine takes one prompt as text")
    return text, params


def answer_openai(request: OpenAIRequest, name: str, prompt_tokens: int, parts: list[CompletionOutput]) -> Answer:
    """The response, as vLLM's own server words it."""
    is_chat = request.url == CHAT
    completion_tokens = sum(len(part.token_ids) for part in parts)
    usage = {"prompt_tokens": prompt_tokens, "total_tokens": prompt_tokens + completion_tokens, "completion_tokens": completion_tokens}
    body = {
        "id": name,
        "object": "chat.completion" if is_chat else "text_completion",
        "created": 0,
        "model": "echo",
        "choices": [_choice(part, is_chat=is_chat) for part in parts],
        "usage": usage,
    }
    return Answer(msgspec.json.encode(body), prompt_tokens, completion_tokens)


def _choice(part: CompletionOutput, *, is_chat: bool) -> dict[str, Any]:
    said: dict[str, Any] = {"message": {"role": "assistant", "content": part.text}} if is_chat else {"text": part.text}
    return {"index": part.index, **said, "logprobs": None, "finish_reason": part.finish_reason, "stop_reason": None}
