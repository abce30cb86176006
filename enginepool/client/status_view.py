"""What `status` shows: a PoolStatus as lines of a given width, and with a given height as many of them as fit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from enginepool.client.columns import Column, lay_out, pack
from enginepool.client.units import NONE, format_bytes, format_cpus, format_rate, format_seconds, format_span, shorten_exit
from enginepool.status import LatencySummary, PoolState, PoolStatus, WorkerState, WorkerStatus

if TYPE_CHECKING:
    from rich.text import Text

STYLES = {
    "ready": "green",
    "starting": "yellow",
    "backoff": "yellow",
    "degraded": "yellow",
    "draining": "cyan",
    "stopped": "dim",
    "lost": "red",
    "failed": "bold red",
}
MIN_STAGE, MAX_STAGE = 8, 28
HOT_KV = 0.9


def render(status: PoolStatus, width: int, height: int | None = None, hint: str = "") -> list[Text]:
    """The status as lines no wider than `width`; with `height`, blocks lose their gaps, then detail, then workers."""
    hint_text = _text(hint, "dim") if hint else None
    head = [_head(status, width, hint_text), *_reason(status, width, height)]
    place, totals, latency = [_place(status)], _totals(status, width), _latency(status.latency, width)
    table = _table(status.workers, width)
    full = [head + place, totals, latency]
    tight = [head, totals, [_latency_line(status.latency, width)]]
    if height is None or _count(full, gaps=True) + len(table) <= height:
        return _stack([*full, table], gaps=True)
    for blocks, gaps in ((full, True), (full, False), (tight, True)):
        room = height - _count(blocks, gaps=gaps)
        if room >= min(len(table), 5):
            return _stack([*blocks, _cut(table, room)], gaps=gaps)
    room = height - _count(tight, gaps=False)
    return _stack([*tight, _cut(table, room) if room >= 2 else []], gaps=False)[:height]


def _head(status: PoolStatus, width: int, hint: Text | None) -> Text:
    from rich.text import Text

    line = Text.assemble(
        (status.model, "bold"), "  ", _state(status.state), f"  up {format_span(status.uptime_s)}", no_wrap=True, overflow="ellipsis"
    )
    if hint is None or line.cell_len + hint.cell_len + 2 > width:
        return line
    return Text.assemble(line, " " * (width - line.cell_len - hint.cell_len), hint, no_wrap=True)


def _reason(status: PoolStatus, width: int, height: int | None) -> list[Text]:
    """Why the pool is not what it should be; on a small terminal its beginning only."""
    if not status.reason:
        return []
    lines = [_text(line, "red") for line in status.reason.splitlines()]
    return lines if height is None else lines[: max(1, height // 6)]


def _place(status: PoolStatus) -> Text:
    others = max(0, status.clients - 1)
    noun = "client" if others == 1 else "clients"
    paused = f" ({status.paused_clients} paused)" if status.paused_clients else ""
    return _text(f"dispatcher {status.pid}, {format_bytes(status.rss_bytes)}, {others} other {noun}{paused}, {status.endpoint}", "dim")


def _totals(status: PoolStatus, width: int) -> list[Text]:
    workers = status.workers
    items_per_s = status.latency.items_per_s if status.latency else 0.0
    out, into = (sum(getattr(worker, name) for worker in workers) for name in ("generation_tokens_per_s", "prompt_tokens_per_s"))
    numbers = [
        (f"{status.backlog:,}", "in backlog", ""),
        (f"{status.in_flight:,}", "in flight", ""),
        (f"{status.finished:,}", "ended", ""),
        (f"{status.failed:,}", "failed", "bold red" if status.failed else ""),
        *([(f"{status.aborted:,}", "aborted", "")] if status.aborted else []),
        (format_rate(items_per_s), "items/s", ""),
        (format_rate(out), "tokens/s out", ""),
        (format_rate(into), "tokens/s in", ""),
    ]
    return pack([_pair(number, label, style or "bold") for number, label, style in numbers], width)


def _latency(latency: LatencySummary | None, width: int) -> list[Text]:
    title = "last minute" if latency is None else f"last minute, {latency.ended:,} items"
    rows = [("waiting", latency and latency.waiting_s), ("first token", latency and latency.ttft_s), ("total", latency and latency.total_s)]
    columns = [Column(title, 0, [name for name, _ in rows], is_left=True)]
    for share in ("p50", "p90", "p99"):
        columns.append(Column(share, 0, [format_seconds(getattr(found, share, None)) for _, found in rows]))
    return lay_out(columns, width)


def _latency_line(latency: LatencySummary | None, width: int) -> Text:
    found = latency and latency.total_s
    values = " · ".join(f"{share} {format_seconds(getattr(found, share, None))}" for share in ("p50", "p90", "p99"))
    return _text(f"last minute: {values}")


def _table(workers: Sequence[WorkerStatus], width: int) -> list[Text]:
    columns = [
        Column("#", 0, [str(worker.index) for worker in workers]),
        Column("pid", 5, [str(worker.pid or NONE) for worker in workers]),
        Column("state", 0, [_worker_state(worker, width // 4) for worker in workers], is_left=True),
        Column("in hand", 2, [f"{worker.in_flight:,}" for worker in workers]),
        Column("run", 1, [_of_process(worker, f"{worker.running:,}") for worker in workers]),
        Column("wait", 4, [_of_process(worker, f"{worker.waiting:,}") for worker in workers]),
        Column("tok/s out", 1, [_of_process(worker, format_rate(worker.generation_tokens_per_s)) for worker in workers]),
        Column("in", 6, [_of_process(worker, format_rate(worker.prompt_tokens_per_s)) for worker in workers]),
        Column("KV", 1, [_kv(worker.kv_cache_usage) for worker in workers]),
        Column("memory", 7, [format_bytes(worker.rss_bytes) for worker in workers]),
        Column("restarts", 3, [str(worker.restarts) for worker in workers]),
        Column("last exit", 2, [_last_exit(worker) for worker in workers], is_left=True),
        Column("cpus", 8, [format_cpus(worker.cpus) for worker in workers], is_left=True),
    ]
    if any(worker.devices for worker in workers):
        columns.append(Column("devices", 7, [",".join(worker.devices) or NONE for worker in workers], is_left=True))
    return lay_out(columns, width)


def _worker_state(worker: WorkerStatus, room: int) -> Text:
    """The state, and the stage that a start has come to, or what seems wrong with a ready worker."""
    state = _state(worker.state)
    limit = max(MIN_STAGE, min(room, MAX_STAGE))
    if worker.state in (WorkerState.STARTING, WorkerState.READY) and worker.stage not in ("", worker.state.value):
        stage = worker.stage if len(worker.stage) <= limit else worker.stage[: limit - 1] + "…"
        state.append(f": {stage}")
    return state


def _of_process(worker: WorkerStatus, text: str) -> str:
    return NONE if worker.pid is None else text


def _last_exit(worker: WorkerStatus) -> Text:
    if worker.last_exit is None:
        return _text(NONE)
    ago = "" if worker.since_last_exit_s is None else f", {format_span(worker.since_last_exit_s)} ago"
    return _text(shorten_exit(worker.last_exit) + ago, "yellow")


def _kv(share: float | None) -> Text:
    if share is None:
        return _text(NONE)
    return _text(f"{share:.0%}", "yellow" if share > HOT_KV else "")


def _state(state: PoolState | WorkerState) -> Text:
    return _text(state.value, STYLES[state.value])


def _pair(number: str, label: str, style: str) -> Text:
    from rich.text import Text

    return Text.assemble((number, style), f" {label}")


def _text(text: str, style: str = "") -> Text:
    from rich.text import Text

    return Text(text, style, no_wrap=True, overflow="ellipsis")


def _cut(table: list[Text], room: int) -> list[Text]:
    """As many workers as there is room for; the last line tells how many are not shown."""
    if len(table) <= room:
        return table
    shown = table[: max(1, room - 1)]
    return [*shown, _text(f"… and {len(table) - len(shown)} more", "dim")]


def _count(blocks: list[list[Text]], *, gaps: bool) -> int:
    return sum(map(len, blocks)) + (len(blocks) if gaps else 0)


def _stack(blocks: list[list[Text]], *, gaps: bool) -> list[Text]:
    lines: list[Text] = []
    for block in blocks:
        if lines and block and gaps:
            lines.append(_text(""))
        lines += block
    return lines
