"""Copies what vLLM returns of an item into what travels: vLLM's own objects are live, and shared between outputs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from enginepool.clock import EngineStamps, from_raw
from enginepool.payload import CompletionOutput, Logprob, Logprobs

if TYPE_CHECKING:
    from vllm.outputs import RequestOutput
    from vllm.v1.metrics.stats import RequestStateStats


def parts_of(output: RequestOutput) -> list[CompletionOutput]:
    """The samples, by their index."""
    return [
        CompletionOutput(
            sample.index,
            sample.text,
            list(sample.token_ids),
            sample.finish_reason,
            sample.stop_reason,
            sample.cumulative_logprob,
            logprobs_of(sample.logprobs),
        )
        for sample in sorted(output.outputs, key=lambda sample: sample.index)
    ]


def stamps_of(metrics: RequestStateStats | None, arrived: float, finished: float) -> EngineStamps:
    """Copy at receipt, since the metrics object is live."""
    if metrics is None:
        return EngineStamps(arrived=arrived, finished=finished)
    return EngineStamps(
        arrived=arrived,
        queued=from_raw(metrics.queued_ts),
        scheduled=from_raw(metrics.scheduled_ts),
        first_token=from_raw(metrics.first_token_ts),
        last_token=from_raw(metrics.last_token_ts),
        finished=finished,
        num_tokens=metrics.num_generation_tokens,
    )


def logprobs_of(positions: Sequence[Any] | None) -> Logprobs | None:
    """The log probabilities at each position."""
    if positions is None:
        return None
    return [
        None if position is None else {token: Logprob(item.logprob, item.rank, item.decoded_token) for token, item in position.items()}
        for position in positions
    ]
