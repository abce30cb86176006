"""The opaque half of a message: what one request carries to the worker and what comes back for it.

The dispatcher forwards these frames unread, so only clients and workers import this module. A stream's frames are lists of
CompletionOutput that hold what is new, and its result holds the last of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec


class GenerateRequest(msgspec.Struct, frozen=True, array_like=True, tag=0):
    """A prompt on its way to an engine. `params` is an encoded map of the non-default SamplingParams, or nil."""

    prompt: str | None
    prompt_token_ids: list[int] | None
    params: msgspec.Raw
    is_stream: bool = False


class ChatRequest(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """A conversation on its way to an engine, rendered there. `options` is an encoded ChatOptions."""

    messages: list[dict[str, Any]]
    options: msgspec.Raw
    params: msgspec.Raw
    is_stream: bool = False


class ChatOptions(msgspec.Struct, frozen=True, omit_defaults=True):
    """How to render a conversation, with `LLM.chat`'s names. `request_format` None is the pool's own (enginepool/chat_format.py)."""

    request_format: str | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False


class OpenAIRequest(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """A request of OpenAI's API: its path and its JSON body, which the worker parses with vLLM's own request models.

    `is_strict` refuses keys that those models do not know.
    """

    url: str
    body: bytes
    is_strict: bool = False
    is_stream: bool = False


Request = GenerateRequest | ChatRequest | OpenAIRequest


class Logprob(msgspec.Struct, frozen=True, array_like=True):
    """The log probability of one token, as vLLM's `Logprob` has it (−inf is a real value)."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


Logprobs = list[dict[int, Logprob] | None]
"""One entry a position: token id → Logprob; None where vLLM gives none (the first prompt token)."""


class CompletionOutput(msgspec.Struct, array_like=True):
    """One of the `n` samples of a request, with vLLM's field names."""

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    cumulative_logprob: float | None = None
    logprobs: Logprobs | None = None


class Answer(msgspec.Struct, frozen=True, array_like=True):
    """The response to an OpenAIRequest: its JSON body, its usage, and what the worker has to say of the request."""

    body: bytes
    prompt_tokens: int = 0
    completion_tokens: int = 0
    notices: list[str] = []


class GenerateResult(msgspec.Struct, frozen=True, array_like=True):
    """What an engine made of one item. `prompt` is the rendered text of a conversation; an OpenAIRequest has only an `answer`."""

    outputs: list[CompletionOutput]
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: Logprobs | None = None
    num_cached_tokens: int | None = None
    prompt: str | None = None
    answer: Answer | None = None


encode = msgspec.msgpack.Encoder().encode
decode_request: Callable[[bytes], Request] = msgspec.msgpack.Decoder(Request).decode
decode_options = msgspec.msgpack.Decoder(ChatOptions).decode
decode_parts = msgspec.msgpack.Decoder(list[CompletionOutput]).decode
decode_result = msgspec.msgpack.Decoder(GenerateResult).decode
decode_params = msgspec.msgpack.Decoder(dict[str, Any] | None, strict=False).decode
