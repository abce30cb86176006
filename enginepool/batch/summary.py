"""A run in a few words: the end summary, and the plain lines on the way."""

from __future__ import annotations

from collections.abc import Sequence

from enginepool.batch.ledger import RunLedger
from enginepool.batch.pace import Pace
from enginepool.client.units import format_rate, format_seconds
from enginepool.status import PoolStatus, WorkerState, WorkerStatus

MAX_CODES = 5
MAX_WORKERS = 4
OUT_OF_ACTION = (WorkerState.LOST, WorkerState.BACKOFF, WorkerState.FAILED, WorkerState.STARTING)


def summary_lines(ledger: RunLedger) -> list[str]:
    """What to say at the end of a run."""
    return ["; ".join(part for part in (_lines(ledger), _tokens(ledger), _latencies(ledger), _retried(ledger)) if part)]


def progress_line(ledger: RunLedger, pace: Pace, status: PoolStatus | None) -> str:
    """How far a run is, and what its workers do."""
    failed = f", {ledger.all_failed:,} failed" if ledger.all_failed else ""
    is_under_way = ledger.done < ledger.num_lines
    left_s = pace.left_s(ledger.num_lines - ledger.done)
    left = f", about {span(left_s)} left" if is_under_way and left_s is not None else ""
    workers = f"; {_workers(status.workers)}" if status and status.workers else ""
    return f"{ledger.done:,}/{ledger.num_lines:,} lines{failed}, {rate(ledger, pace)}{left}{workers}"


def rate(ledger: RunLedger, pace: Pace) -> str:
    """Tokens a second, or lines where nothing is generated (embeddings)."""
    if ledger.ok and not ledger.completion_tokens:
        return f"{format_rate(pace.lines_per_s)} lines/s"
    return f"{format_rate(pace.tokens_per_s)} tokens/s"


def span(seconds: float) -> str:
    """A duration to two units: 12 s, 3 min 20 s, 5 h 2 min, 2 d 3 h."""
    whole = round(seconds)
    for unit_s, unit, small_s, small in ((86_400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s")):
        if whole >= unit_s:
            rest = whole % unit_s // small_s
            return f"{whole // unit_s} {unit}" + (f" {rest} {small}" if rest else "")
    return f"{whole} s"


def exact_span(seconds: float) -> str:
    """The same with a digit more below two minutes: 31.2 s."""
    return f"{seconds:.1f} s" if seconds < 119.95 else span(seconds)


def plural(count: int, noun: str) -> str:
    """A count and its noun."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def codes(ledger: RunLedger) -> str:
    """The most frequent codes of failed lines."""
    named = [f"{count:,} {code}" for code, count in ledger.codes.most_common(MAX_CODES)]
    rest = ledger.failed - sum(count for _, count in ledger.codes.most_common(MAX_CODES))
    named += [f"{rest:,} others"] if rest else []
    return ", ".join([*named, f"{ledger.failed_earlier:,} in an earlier run"] if ledger.failed_earlier else named)


def _lines(ledger: RunLedger) -> str:
    failed = f", {ledger.all_failed:,} failed ({codes(ledger)})" if ledger.all_failed else ""
    earlier = f", {ledger.skipped:,} of them from an earlier run" if ledger.skipped else ""
    left = ledger.num_lines - ledger.done
    rest = f", {left:,} not done" if left > 0 else ""
    return f"{plural(ledger.num_lines, 'line')}: {ledger.all_ok:,} ok{failed}{earlier}{rest}"


def _tokens(ledger: RunLedger) -> str:
    if not ledger.ended_here:
        return ""
    if not ledger.completion_tokens and ledger.prompt_tokens:
        speed = f", {format_rate(ledger.prompt_tokens / ledger.wall_s)} tokens/s" if ledger.wall_s else ""
        return f"{plural(ledger.prompt_tokens, 'prompt token')} in {exact_span(ledger.wall_s)}{speed}"
    speed = f", {format_rate(ledger.tokens_per_s)} tokens/s" if ledger.wall_s else ""
    return f"{plural(ledger.completion_tokens, 'token')} in {exact_span(ledger.wall_s)}{speed}"


def _latencies(ledger: RunLedger) -> str:
    found = ledger.latencies.ttft
    name = "time to first token"
    if not found.count:
        found, name = ledger.latencies.e2e, "time to answer"
    if not found.count:
        return ""
    return f"{name} p50 {format_seconds(found.quantile(0.5))}, p99 {format_seconds(found.quantile(0.99))}"


def _retried(ledger: RunLedger) -> str:
    return f"{plural(ledger.retried, 'line')} took more than one attempt" if ledger.retried else ""


def _workers(workers: Sequence[WorkerStatus]) -> str:
    """Few workers one by one; of many the sum, and those that are out of action."""
    if len(workers) <= MAX_WORKERS:
        return ", ".join(f"worker {worker.index}: {_worker(worker)}" for worker in workers)
    out = [worker for worker in workers if worker.state in OUT_OF_ACTION]
    named = [f"worker {worker.index}: {worker.state.value}" for worker in out[:MAX_WORKERS]]
    if len(out) > MAX_WORKERS:
        named.append(f"{len(out) - MAX_WORKERS} more out of action")
    return ", ".join([f"{len(workers)} workers: {sum(worker.running for worker in workers):,} running", *named])


def _worker(worker: WorkerStatus) -> str:
    if worker.state in OUT_OF_ACTION:
        return worker.state.value
    waiting = f", {worker.waiting:,} waiting" if worker.waiting else ""
    return f"{worker.running:,} running{waiting}"
