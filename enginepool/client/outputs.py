"""What a caller gets for one prompt: `Output`, with vLLM's names where vLLM has one."""

from __future__ import annotations

import msgspec

from enginepool.clock import Timings
from enginepool.errors import ItemError
from enginepool.payload import CompletionOutput, Logprobs


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
    to. A stream that failed has in `outputs` what had come before.
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
