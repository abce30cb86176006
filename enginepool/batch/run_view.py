"""What the live view of a run shows: a bar, its numbers and a line a worker, as lines of a given width and at most a given height."""

from __future__ import annotations

from typing import TYPE_CHECKING

from enginepool.batch.ledger import RunLedger
from enginepool.batch.pace import Pace
from enginepool.batch.summary import rate, span
from enginepool.client.columns import Column, lay_out, pack
from enginepool.client.status_view import STYLES
from enginepool.client.units import NONE, format_rate, shorten_exit
from enginepool.status import PoolState, PoolStatus, WorkerStatus

if TYPE_CHECKING:
    from rich.text import Text

MAX_BAR = 60
HOT_KV = 0.9
FULL, HALF, EMPTY = "━", "╸", "─"


def render_run(ledger: RunLedger, pace: Pace, status: PoolStatus | None, width: int, height: int) -> list[Text]:
    """The run as lines no wider than `width`; a low terminal loses workers, then numbers."""
    width = max(1, width - 1)  # a full last column makes some terminals wrap
    head = [_bar(ledger, width), *pack(_numbers(ledger, pace), width)]
    if status is not None and status.state in (PoolState.DEGRADED, PoolState.FAILED):
        head.append(_text(f"pool {status.state.value}: {status.reason or 'no reason told'}".splitlines()[0], STYLES[status.state.value]))
    table = _table(ledger, status.workers, width) if status and status.workers else []
    room = height - 1 - len(head)
    lines = head + (_cut(table, room) if room >= 2 else [])
    for line in lines:
        line.truncate(width, overflow="ellipsis")
    return lines[: max(1, height - 1)]


def _bar(ledger: RunLedger, width: int) -> Text:
    from rich.text import Text

    total = max(ledger.num_lines, ledger.done)
    share = ledger.done / total if total else 1.0
    count = f" {ledger.done:,}/{ledger.num_lines:,} lines  {int(share * 100)} %"
    if len(count) + 8 > width:
        count = f" {ledger.done:,}/{ledger.num_lines:,}"
    room = min(MAX_BAR, width - len(count))
    if room < 3:
        return Text(count.strip())
    halves = int(share * room * 2)
    full = FULL * (halves // 2) + HALF * (halves % 2)
    style = "red" if ledger.all_failed else "green" if ledger.done >= total else "cyan"
    return Text.assemble((full, style), (EMPTY * (room - len(full)), "dim"), (count, "bold"))


def _numbers(ledger: RunLedger, pace: Pace) -> list[Text]:
    left = ledger.num_lines - ledger.done
    left_s = pace.left_s(left)
    numbers = [
        _pair(f"{ledger.all_failed:,}", "failed", "bold red") if ledger.all_failed else None,
        _pair(rate(ledger, pace).partition(" ")[0], rate(ledger, pace).partition(" ")[2]),
        _pair(format_rate(pace.mean_tokens_per_s), "mean") if ledger.completion_tokens else None,
        _pair(span(left_s), "left") if left > 0 and left_s is not None else None,
        _pair(span(pace.elapsed_s), "elapsed"),
        _pair(f"{ledger.skipped:,}", "from an earlier run") if ledger.skipped else None,
        _pair(f"{ledger.retried:,}", "retried", "yellow") if ledger.retried else None,
    ]
    return [number for number in numbers if number is not None]


def _table(ledger: RunLedger, workers: list[WorkerStatus], width: int) -> list[Text]:
    tallies = [ledger.workers.get(worker.index) for worker in workers]
    return lay_out(
        [
            Column("worker", 0, [str(worker.index) for worker in workers]),
            Column("state", 0, [_state(worker) for worker in workers], is_left=True),
            Column("running", 1, [_of_process(worker, f"{worker.running:,}") for worker in workers]),
            Column("waiting", 5, [_of_process(worker, f"{worker.waiting:,}") for worker in workers]),
            Column("KV", 2, [_kv(worker) for worker in workers]),
            Column("tokens/s", 3, [_of_process(worker, format_rate(worker.generation_tokens_per_s)) for worker in workers]),
            Column("lines done", 1, [f"{tally.done if tally else 0:,}" for tally in tallies]),
            *(_restarts(workers) if any(worker.restarts or worker.last_exit for worker in workers) else []),
        ],
        width,
    )


def _state(worker: WorkerStatus) -> Text:
    return _text(worker.state.value, STYLES[worker.state.value])


def _of_process(worker: WorkerStatus, text: str) -> str:
    return NONE if worker.pid is None else text


def _kv(worker: WorkerStatus) -> Text:
    share = worker.kv_cache_usage
    if share is None or worker.pid is None:
        return _text(NONE)
    return _text(f"{share:.0%}", "yellow" if share > HOT_KV else "")


def _restarts(workers: list[WorkerStatus]) -> list[Column]:
    exits = [_text(shorten_exit(worker.last_exit), "yellow") if worker.last_exit else _text(NONE) for worker in workers]
    return [Column("restarts", 6, [str(worker.restarts) for worker in workers]), Column("last exit", 4, exits, is_left=True)]


def _cut(table: list[Text], room: int) -> list[Text]:
    if len(table) <= room:
        return table
    shown = table[: max(1, room - 1)]
    return [*shown, _text(f"… and {len(table) - len(shown)} more", "dim")]


def _pair(number: str, label: str, style: str = "bold") -> Text:
    from rich.text import Text

    return Text.assemble((number, style), f" {label}")


def _text(text: str, style: str = "") -> Text:
    from rich.text import Text

    return Text(text, style, no_wrap=True, overflow="ellipsis")
