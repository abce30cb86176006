"""Listens to vLLM's per-step statistics: what one step held, where `enable_logging_iteration_details` asks for it."""

from __future__ import annotations

from typing import Any

from vllm.v1.metrics.loggers import AggregateStatLoggerBase

from enginepool.status import Iteration


class IterationTap(AggregateStatLoggerBase):  # type: ignore[misc]
    """Keeps the last step's details, and counts what shows that tokens are being computed."""

    def __init__(self) -> None:
        self.last: Iteration | None = None
        self.progress = 0
        self.num_blocked = 0
        self._scheduled: tuple[int, float] = (0, 0.0)

    def record(self, scheduler_stats: Any, iteration_stats: Any, mm_cache_stats: Any = None, engine_idx: int = 0) -> None:
        """Called by vLLM after a step."""
        self._note_progress(scheduler_stats, iteration_stats)
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

    def _note_progress(self, scheduler_stats: Any, iteration_stats: Any) -> None:
        """A chunk of a long prompt yields no token, but it takes KV blocks; a step that ran nothing changes neither."""
        if scheduler_stats is not None:
            before, self._scheduled = self._scheduled, (scheduler_stats.num_running_reqs, scheduler_stats.kv_cache_usage)
            self.progress += self._scheduled != before
            self.num_blocked = scheduler_stats.num_skipped_waiting_reqs
        if iteration_stats is not None:
            self.progress += iteration_stats.num_generation_tokens

    def log_engine_initialized(self) -> None:
        """Nothing to tell."""
