"""What benchmarks and the engine processes they start send each other (pickled, so defined in a module of both)."""

from __future__ import annotations

import msgspec
from mixed_work import Work


class Job(msgspec.Struct, frozen=True):
    """Run `work` from the monotonic moment `start_at` on, in calls of `batch_size` prompts (None: everything at once)."""

    work: Work
    start_at: float
    batch_size: int | None = None


class Ran(msgspec.Struct, frozen=True):
    """When the work ended (monotonic) and how many tokens it made."""

    ended: float
    num_tokens: int


class Step(msgspec.Struct, frozen=True):
    """Wall clock around one `llm_engine.step()`."""

    before: float
    after: float


class Seen(msgspec.Struct, frozen=True):
    """One item: the engine's stamps in wall seconds by both methods, and the steps that returned its first and last token."""

    lease: int
    ours: dict[str, float]
    by_arrival: dict[str, float]
    first_step: Step
    last_step: Step
