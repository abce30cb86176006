"""What the echo engine does with an item, without the engine: the same work for the raw loop and the process pool."""

from __future__ import annotations

import msgspec

from enginepool.payload import CompletionOutput, GenerateRequest, GenerateResult, Request, decode_params

PROMPT_BYTES = 400
MAX_TOKENS = 32
PARAMS = {"max_tokens": MAX_TOKENS}
RAW_PARAMS = msgspec.Raw(msgspec.msgpack.encode(PARAMS))


def make_prompts(count: int) -> list[str]:
    """Prompts of 400 bytes that differ from each other."""
    return [f"prompt {number:08d} ".ljust(PROMPT_BYTES, "x") for number in range(count)]


def make_request(prompt: str) -> GenerateRequest:
    """The request that the pool's client makes of a prompt."""
    return GenerateRequest(prompt, None, RAW_PARAMS)


def echo(request: Request) -> GenerateResult:
    """The result that the echo engine makes of a prompt."""
    assert isinstance(request, GenerateRequest)
    wanted: int = (decode_params(request.params) or PARAMS)["max_tokens"]
    text, token_ids, prompt_ids = echo_text(request.prompt or "", wanted)
    return GenerateResult([CompletionOutput(0, text, token_ids, "length")], prompt_ids)


def echo_text(prompt: str, wanted: int = MAX_TOKENS) -> tuple[str, list[int], list[int]]:
    """Text, token ids and prompt ids; plain values, as a function for a process pool would return them."""
    prompt_ids = list(prompt.encode())
    return prompt[:wanted], prompt_ids[:wanted], prompt_ids
