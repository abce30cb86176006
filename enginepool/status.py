"""The states of a pool, its workers and its items, and the structs in which `status` reports them."""

from __future__ import annotations

import enum

import msgspec


class PoolState(enum.StrEnum):
    """STARTING → READY ⇄ DEGRADED → DRAINING → STOPPED, or FAILED."""

    STARTING = "starting"
    READY = "ready"
    DEGRADED = "degraded"
    DRAINING = "draining"
    STOPPED = "stopped"
    FAILED = "failed"


class WorkerState(enum.StrEnum):
    """STARTING → READY → DRAINING → STOPPED; LOST → BACKOFF → STARTING; FAILED for good."""

    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    STOPPED = "stopped"
    LOST = "lost"
    BACKOFF = "backoff"
    FAILED = "failed"


class ItemState(enum.Enum):
    """QUEUED → LEASED → FINISHED; a death of the worker leads back to QUEUED."""

    QUEUED = 0
    LEASED = 1
    FINISHED = 2


class Iteration(msgspec.Struct, frozen=True):
    """What one engine step held: requests in prefill ("context") and in decode ("generation"), and their tokens in it."""

    index: int
    num_context_requests: int
    num_context_tokens: int
    num_generation_requests: int
    num_generation_tokens: int
    elapsed_s: float


class Load(msgspec.Struct, frozen=True, array_like=True):
    """What a worker's engine is doing, as its heartbeat tells. `kv_cache_usage` is a share of 1."""

    running: int = 0
    waiting: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    kv_cache_usage: float | None = None
    iteration: Iteration | None = None


class Percentiles(msgspec.Struct, frozen=True):
    """Half, 90 % and 99 % of the items were not slower; in seconds."""

    p50: float
    p90: float
    p99: float


class LatencySummary(msgspec.Struct, frozen=True):
    """The items that ended within the last 60 seconds.

    `ended` counts all, `failed` those with an error, `items_per_s` all over the last five full seconds. The percentiles
    are of items without an error, from samples: `waiting_s` received → leased, `ttft_s` received → first token (None
    where engines tell no such stamp), `total_s` received → end.
    """

    ended: int
    failed: int
    items_per_s: float
    waiting_s: Percentiles | None
    ttft_s: Percentiles | None
    total_s: Percentiles | None


class WorkerStatus(msgspec.Struct, frozen=True):
    """One worker: counts are since its process started, rates in tokens/s over the last few seconds.

    `iteration` is its engine's last step, told where vLLM's `enable_logging_iteration_details` is on.
    `since_last_exit_s` is how long ago its last process ended. `window` is how many sequences it wants in hand.
    """

    index: int
    pid: int | None
    state: WorkerState
    stage: str
    in_flight: int
    running: int
    waiting: int
    restarts: int
    last_exit: str | None
    cpus: list[int]
    devices: list[str]
    prompt_tokens: int
    generation_tokens: int
    prompt_tokens_per_s: float
    generation_tokens_per_s: float
    kv_cache_usage: float | None
    rss_bytes: int | None
    iteration: Iteration | None = None
    since_last_exit_s: float | None = None
    window: int = 0


class PoolStatus(msgspec.Struct, frozen=True):
    """The whole pool. `pid` is the dispatcher's; `backlog` counts items that wait for a worker; `latency` is None in an idle minute.

    `finished` counts all items that have ended: among them `failed` with an error, and `aborted` because their client wanted it.
    `paused_clients` do not read their results, so no more of their items are handed out until they do.
    """

    pool_id: str
    pid: int
    state: PoolState
    reason: str | None
    model: str
    endpoint: str
    uptime_s: float
    backlog: int
    backlog_bytes: int
    in_flight: int
    finished: int
    failed: int
    clients: int
    clock_drift_s: float
    rss_bytes: int
    dropped_log_lines: int
    workers: list[WorkerStatus]
    latency: LatencySummary | None = None
    aborted: int = 0
    paused_clients: int = 0
