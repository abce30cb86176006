"""`run-batch --report`: a run as one page that needs nothing else, neither a network nor a second file."""

from __future__ import annotations

import base64
import hashlib
import math
import os
import secrets
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from enginepool.batch.ledger import RunLedger
from enginepool.batch.summary import exact_span
from enginepool.batch.throughput import latency_charts, lines_chart, tokens_chart
from enginepool.batch.timeline import make_timelines
from enginepool.client.units import format_rate

SHOWN_AS_THEY_ARE = "\n\t\u00a0\u3000\u200c\u200d"  # the last two join letters and emoji


class Tile(NamedTuple):
    """One headline number."""

    value: str
    label: str
    css: str = ""


def write_report(path: str | os.PathLike[str], ledger: RunLedger, facts: Mapping[str, str]) -> None:
    """Write the page in one piece: a reader finds the whole old one or the whole new one. Raises OSError.

    `facts` are the conditions of the run (model, endpoint, command, versions) as they are to be read.
    """
    target = Path(path).resolve()
    data = render_report(ledger, facts).encode("utf-8", "backslashreplace")
    if target.exists() and not target.is_file():  # a pipe or a device
        target.write_bytes(data)
        return
    temporary = target.with_name(f".{target.name[:100]}.{secrets.token_hex(4)}")
    try:
        with open(temporary, "xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def render_report(ledger: RunLedger, facts: Mapping[str, str]) -> str:
    """The page as text."""
    from jinja2 import Environment, StrictUndefined

    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    tiles = _tiles(ledger)
    charts = [tokens_chart(ledger), lines_chart(ledger)]
    latencies = latency_charts(ledger)
    timelines = make_timelines(ledger)
    planes = {chart.key: _plane(1, chart.spots) for chart in (*charts, *latencies) if chart.spots}
    for band in (band for timeline in timelines for band in timeline.bands):
        planes[f"lanes-{band.key}"] = _plane(band.num_lanes, band.spots)
        if band.load:
            planes[f"load-{band.key}"] = _plane(1, band.load.spots)
    script = _read("report.js")
    return environment.from_string(_read("report.html.jinja")).render(
        tiles=tiles,
        tile_columns=math.ceil(len(tiles) / 2),
        charts=charts,
        latencies=latencies,
        timelines=timelines,
        workers=_workers(ledger),
        ledger=ledger,
        codes=ledger.codes.most_common(),
        facts=[(name, visible(value)) for name, value in facts.items()],
        started=datetime.fromtimestamp(ledger.started_wall, UTC).strftime("%Y-%m-%d %H:%M:%S UTC"),
        visible=visible,
        data=_json_for_html(planes),
        script=script,
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
    )


def visible(text: str) -> str:
    """A text with its control characters shown instead of obeyed; line ends and tabs stay."""
    return "".join(char if char.isprintable() or char in SHOWN_AS_THEY_ARE else _escape(char) for char in text)


def _escape(char: str) -> str:
    code = ord(char)
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def _plane(lanes: int, spots: list[Any]) -> dict[str, Any]:
    return {"lanes": lanes, "spots": [[round(spot.x0, 2), round(spot.x1, 2), spot.lane, visible(spot.text)] for spot in spots]}


def _json_for_html(value: object) -> str:
    """JSON that no parser of HTML takes for markup."""
    text = msgspec.json.encode(value).decode()
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def _read(name: str) -> str:
    return files("enginepool.batch").joinpath(name).read_text(encoding="utf-8")


def _tiles(ledger: RunLedger) -> list[Tile]:
    left = ledger.num_lines - ledger.done
    return [
        Tile(f"{ledger.num_lines:,}", "lines"),
        Tile(f"{ledger.all_ok:,}", "ok"),
        Tile(f"{ledger.all_failed:,}", "failed", "bad" if ledger.all_failed else ""),
        *([Tile(f"{left:,}", "not done", "bad")] if left > 0 else []),
        *([Tile(f"{ledger.skipped:,}", "from an earlier run")] if ledger.skipped else []),
        Tile(f"{ledger.completion_tokens:,}", "tokens generated"),
        Tile(f"{ledger.prompt_tokens:,}", "prompt tokens"),
        Tile(format_rate(ledger.tokens_per_s), "tokens/s"),
        Tile(exact_span(ledger.wall_s), "wall time"),
        Tile(f"{len(ledger.workers):,}", "worker" if len(ledger.workers) == 1 else "workers"),
        *([Tile(f"{ledger.retried:,}", "took more than one attempt")] if ledger.retried else []),
    ]


def _workers(ledger: RunLedger) -> list[list[str]]:
    """The cells of the table of workers."""
    total = ledger.completion_tokens
    return [
        [
            str(tally.index),
            f"{tally.ok:,}",
            f"{tally.failed:,}",
            f"{tally.prompt_tokens:,}",
            f"{tally.completion_tokens:,}",
            f"{tally.completion_tokens / total:.0%}" if total else "–",
            exact_span(tally.busy_s) if tally.busy_s else "–",
            f"{min(1.0, tally.busy_s / ledger.wall_s):.0%}" if ledger.wall_s and tally.busy_s else "–",
            format_rate(tally.completion_tokens / tally.busy_s) if tally.busy_s else "–",
        ]
        for _, tally in sorted(ledger.workers.items())
    ]
