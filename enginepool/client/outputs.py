"""What a caller gets for one prompt: `Output`, with vLLM's names where vLLM has one."""

from __future__ import annotations

import math
from typing import Any

import msgspec

from enginepool.clock import Timings
from enginepool.errors import ItemError
from enginepool.payload import Answer, CompletionOutput, Logprobs

LEAST_LOGPROB = -9999.0
"""What stands for −inf in JSON, as vLLM's own server writes it."""


def _plain(value: Any) -> Any:
    if isinstance(value, ItemError):
        return msgspec.structs.asdict(value) if value.status else {"code": str(value.code), "message": value.message}
    if isinstance(value, msgspec.Struct):
        return {name: _plain(getattr(value, name)) for name in value.__struct_fields__}
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if isinstance(value, bytes):
        return value.decode()
    return LEAST_LOGPROB if value == -math.inf else value


class Usage(msgspec.Struct, frozen=True):
    """Token counts of one item; the prompt is counted once, the samples together."""

    prompt_tokens: int
    completion_tokens: int

    @property
    def total_tokens(self) -> int:
        """Both together."""
        return self.prompt_tokens + self.completion_tokens


class Output(msgspec.Struct, kw_only=True):
    """The end of one item: `outputs` as in vLLM's RequestOutput, or an `error`.

    `index` is the item's place in the call, `worker` the one that finished it (None when none did), `attempts` how many
    leases it took. `timings` has the milestones that were reached. Of a conversation, `prompt` is the text it was rendered
    to. A stream that failed has in `outputs` what had come before. `answer` is only there for requests of OpenAI's API.
    """

    index: int
    request_id: str
    prompt: str | None
    prompt_token_ids: list[int] | None
    outputs: list[CompletionOutput]
    timings: Timings
    error: ItemError | None = None
    worker: int | None = None
    attempts: int = 0
    prompt_logprobs: Logprobs | None = None
    num_cached_tokens: int | None = None
    answer: Answer | None = None

    def to_dict(self) -> dict[str, Any]:
        """The same as plain values, ready for `json.dumps`: fields by name, token ids as text keys, −inf logprobs as −9999.0."""
        plain: dict[str, Any] = _plain(self)
        return plain

    @property
    def ok(self) -> bool:
        """Whether there is a text."""
        return self.error is None

    @property
    def text(self) -> str | None:
        """The first sample's text; None on error (of a stream: what had come before)."""
        return self.outputs[0].text if self.outputs else None

    @property
    def token_ids(self) -> list[int]:
        """The first sample's token ids; empty on error (of a stream: what had come before)."""
        return self.outputs[0].token_ids if self.outputs else []

    @property
    def finish_reason(self) -> str | None:
        """The first sample's finish reason; `"error"` on error."""
        return self.outputs[0].finish_reason if self.outputs and self.error is None else "error"

    @property
    def usage(self) -> Usage:
        """Prompt and completion token counts."""
        return Usage(len(self.prompt_token_ids or ()), sum(len(sample.token_ids) for sample in self.outputs))
