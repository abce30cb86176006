"""What the demo shows of its outputs: the texts, a table per worker, and percentiles of the waiting times."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from typing import Protocol

from rich import box
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

PLAIN_WIDTH = 100
_TEXT_CHARS = 90
_UNKNOWN = "–"
_MEASURES = ("queue_s", "ttft_s", "e2e_s")


class TimingsLike(Protocol):
    """The durations of one output in seconds, None where a milestone was not reached."""

    @property
    def queue_s(self) -> float | None: ...
    @property
    def ttft_s(self) -> float | None: ...
    @property
    def e2e_s(self) -> float | None: ...


class OutputLike(Protocol):
    """What the report reads of an output."""

    @property
    def ok(self) -> bool: ...
    @property
    def error(self) -> object: ...
    @property
    def index(self) -> int: ...
    @property
    def text(self) -> str | None: ...
    @property
    def token_ids(self) -> Sequence[int]: ...
    @property
    def prompt_token_ids(self) -> Sequence[int] | None: ...
    @property
    def worker(self) -> int | None: ...
    @property
    def attempts(self) -> int: ...
    @property
    def timings(self) -> TimingsLike: ...


def output_lines(outputs: Sequence[OutputLike]) -> Group:
    """Return one line per output: index, worker, generated tokens, and the start of its text or its error; cut at the console's width."""
    # A group, not one joined text: printing joins texts and forgets their no_wrap.
    lines = [_line(f"{'#':>3} {'worker':>6} {'tokens':>6}  text", style="bold")]
    for output in outputs:
        start = single_line(output.text or "") if output.ok else single_line(f"failed: {output.error}")
        line = _line(f"{output.index:>3} {_name(output.worker):>6} {len(output.token_ids):>6}  ")
        lines.append(line.append(start, style="" if output.ok else "red"))
    return Group(*lines)


def worker_table(outputs: Sequence[OutputLike], wall_s: float) -> Table:
    """Return one line per worker; tokens/s counts generated tokens over the whole run of `wall_s` seconds, share is of all of them."""
    total = _generated(outputs)
    rows: list[list[str]] = []
    groups: dict[int | None, list[OutputLike]] = {}
    for output in outputs:
        groups.setdefault(output.worker, []).append(output)
    for worker in sorted(groups, key=lambda index: (index is None, index or 0)):
        mine = groups[worker]
        generated = _generated(mine)
        share = f"{generated / total:.0%}" if total else _UNKNOWN
        rows.append([_name(worker), str(len(mine)), _prompt_tokens(mine), f"{generated:,}", rate(generated, wall_s), share])
    return _table(["worker", "items", "prompt tokens", "generated tokens", "tokens/s", "share"], rows)


def latency_table(outputs: Sequence[OutputLike]) -> Table:
    """Return p50 and p95 of `queue_s`, `ttft_s` and `e2e_s`, in seconds, over the outputs that have them."""
    rows: list[list[str]] = []
    for measure in _MEASURES:
        found = [getattr(output.timings, measure) for output in outputs]
        values = [value for value in found if value is not None]
        cells = [f"{percentile(values, percent):.3f}" if values else _UNKNOWN for percent in (50, 95)]
        rows.append([measure, *cells, str(len(values))])
    return _table(["seconds", "p50", "p95", "items"], rows)


def summary(outputs: Sequence[OutputLike], wall_s: float) -> str:
    """Return the run in one sentence: items, failures, repeated attempts, tokens, seconds, tokens/s."""
    generated = _generated(outputs)
    num_failed = sum(not output.ok for output in outputs)
    num_repeated = sum(output.attempts > 1 for output in outputs)
    failed = f", {num_failed} failed" if num_failed else ""
    repeated = f", {num_repeated} with more than one attempt" if num_repeated else ""
    return f"{len(outputs)} items{failed}{repeated}: {generated:,} tokens in {wall_s:.1f} s, {rate(generated, wall_s)} tokens/s"


def percentile(values: Sequence[float], percent: float) -> float:
    """Return the nearest-rank percentile: the smallest value that at least `percent` % of the values do not exceed.

    It is always one of the values, never between two. Raises `ValueError` when there are none, or for a percent outside 0–100.
    """
    if not values or not 0 <= percent <= 100:
        raise ValueError(f"a percentile needs values and a percent in 0–100, got {len(values)} values and {percent}")
    return sorted(values)[max(math.ceil(len(values) * percent / 100), 1) - 1]


def rate(tokens: int, seconds: float) -> str:
    """Return tokens/s as text, or a dash when no time has passed."""
    return f"{tokens / seconds:,.0f}" if seconds > 0 else _UNKNOWN


def single_line(text: str, limit: int = _TEXT_CHARS) -> str:
    """Return the start of `text` on one line, without anything a terminal would obey (models do print escape codes)."""
    line = " ".join("".join(char if char.isprintable() else " " for char in text).split())
    return line if len(line) <= limit else line[: limit - 1].rstrip() + "…"


def make_console() -> Console:
    """Return a console on stdout: the terminal as it is, or plain text of 100 columns where there is none."""
    console = Console()
    return console if console.is_terminal else Console(width=PLAIN_WIDTH, color_system=None)


def to_text(renderable: RenderableType, width: int = PLAIN_WIDTH) -> str:
    """Return `renderable` as plain text of at most `width` columns, without control codes."""
    stream = io.StringIO()
    Console(file=stream, width=width, force_terminal=False, force_interactive=False, color_system=None).print(renderable)
    return stream.getvalue()


def _line(text: str, style: str = "") -> Text:
    return Text(text, style=style, no_wrap=True, overflow="ellipsis")


def _table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    table = Table(box=box.SIMPLE, pad_edge=False, padding=(0, 1, 0, 0))
    for column, header in enumerate(headers):
        # In a narrow terminal the headers fold; a number cut in two lines would be read as two numbers.
        table.add_column(header, justify="right", min_width=max((len(row[column]) for row in rows), default=1), overflow="fold")
    for row in rows:
        table.add_row(*row)
    return table


def _name(worker: int | None) -> str:
    return _UNKNOWN if worker is None else str(worker)


def _generated(outputs: Sequence[OutputLike]) -> int:
    return sum(len(output.token_ids) for output in outputs)


def _prompt_tokens(outputs: Sequence[OutputLike]) -> str:
    known = [len(output.prompt_token_ids) for output in outputs if output.prompt_token_ids is not None]
    return f"{sum(known):,}" if known else _UNKNOWN
