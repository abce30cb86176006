"""Listens to vLLM's per-step statistics: what one step held, where `enable_logging_iteration_details` asks for it."""

from __future__ import annotations

from typing import Any

from vllm.v1.metrics.loggers import AggregateStatLoggerBase

from enginepool.status import Iteration


class IterationTap(AggregateStatLoggerBase):  # type: ignore[misc]
    """Keeps the last step's details."""

    def __init__(self) -> None:
        self.last: Iteration | None = None

    def record(self, scheduler_stats: Any, iteration_stats: Any, mm_cache_stats: Any = None, engine_idx: int = 0) -> None:
        """Called by vLLM after a step."""
        details = None if scheduler_stats is None else scheduler_stats.iteration_details
        if details is not None:
            self.last = Iteration(
                index=details.iteration_index,
                num_context_requests=details.num_ctx_requests,
                num_context_tokens=details.num_ctx_tokens,
                num_generation_requests=details.num_generation_requests,
                num_generation_tokens=details.num_generation_tokens,
                elapsed_s=details.elapsed_ms / 1000,
            )

    def log_engine_initialized(self) -> None:
        """Nothing to tell."""
