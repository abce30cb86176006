"""The opaque half of a message: what one request carries to the worker and what comes back for it.

The dispatcher forwards these frames unread, so only clients and workers import this module.
"""

from __future__ import annotations

from typing import Any

import msgspec

from enginepool.clock import EngineStamps


class GenerateRequest(msgspec.Struct, frozen=True, array_like=True):
    """One item on its way to an engine. `params` is an encoded map of the non-default SamplingParams, or nil."""

    prompt: str | None
    prompt_token_ids: list[int] | None
    params: msgspec.Raw


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


class GenerateResult(msgspec.Struct, frozen=True, array_like=True):
    """What an engine made of one item."""

    outputs: list[CompletionOutput]
    stamps: EngineStamps
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: Logprobs | None = None
    num_cached_tokens: int | None = None


encode = msgspec.msgpack.Encoder().encode
decode_request = msgspec.msgpack.Decoder(GenerateRequest).decode
decode_result = msgspec.msgpack.Decoder(GenerateResult).decode
decode_params = msgspec.msgpack.Decoder(dict[str, Any] | None, strict=False).decode
