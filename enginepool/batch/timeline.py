"""The timeline of a report: for each worker how many requests ran, and its requests as bars in lanes."""

from __future__ import annotations

from collections import defaultdict
from typing import NamedTuple

import msgspec

from enginepool.batch.charts import Axis, Shape, Spot, Tick, rectangles, step_area, time_axis
from enginepool.batch.lanes import Lanes
from enginepool.batch.ledger import RunLedger
from enginepool.batch.sample import RequestBar, RequestSample
from enginepool.batch.summary import exact_span, plural
from enginepool.batch.throughput import Slots, slots_for
from enginepool.client.units import format_rate, format_seconds

MAX_BANDS = 64
MAX_LANE_PX, MIN_LANE_PX = 11.0, 2.0
ROOM_PX = 760.0
MIN_BAR = 1.2  # thousandths of the width
PHASES = ("wait", "prefill", "decode", "failed")


class Size(NamedTuple):
    """How high a lane is, and how many a worker may have."""

    lane_px: float
    max_lanes: int


class Load(NamedTuple):
    """How many requests ran on a worker over time."""

    path: str
    top: str
    spots: list[Spot]


class Band(msgspec.Struct, frozen=True):
    """One worker: a strip with how many requests ran on it, and below its lanes."""

    key: str
    index: int
    detail: str
    num_lanes: int
    height_px: float
    shapes: list[Shape]
    spots: list[Spot]
    load: Load | None


class Timeline(msgspec.Struct, frozen=True):
    """All workers over one axis; `empty` says why there are none."""

    key: str
    title: str
    bands: list[Band]
    x_ticks: list[Tick]
    x_name: str
    notes: list[str]
    empty: str = ""


def make_timelines(ledger: RunLedger) -> list[Timeline]:
    """The whole run; where that had to be thinned out, its end in full too."""
    bars = ledger.sample.bars()
    title = "Requests on each worker"
    if not bars or not ledger.wall_s:
        return [Timeline("whole", title, [], [], "", [], "No request of this run has timings on a worker.")]
    whole = _draw("whole", title, ledger, bars, time_axis(ledger.wall_s), _thinned(ledger.sample))
    return [whole, _last_stretch(ledger)] if ledger.sample.is_thinned else [whole]


def _last_stretch(ledger: RunLedger) -> Timeline:
    """From the first end within the latest requests: before it, not all that ran are among them."""
    bars = list(ledger.sample.latest)
    start_s = min(max(0.0, bars[0].end - ledger.started_wall), ledger.wall_s)
    axis = time_axis(ledger.wall_s - start_s)
    unit = axis.name.partition(" ")[0]
    axis = axis._replace(origin_s=start_s, name=f"{unit}, from {exact_span(start_s)} after the start")
    return _draw("end", "The end of the run, every request", ledger, bars, axis, [])


def _draw(key: str, title: str, ledger: RunLedger, bars: list[RequestBar], axis: Axis, notes: list[str]) -> Timeline:
    of_worker: dict[int, list[RequestBar]] = defaultdict(list)
    for bar in bars:
        of_worker[bar.worker].append(bar)
    shown = sorted(of_worker)[:MAX_BANDS]
    packed = {worker: _pack(of_worker[worker], axis, ledger.started_wall) for worker in shown}
    max_lanes = max(6, int(ROOM_PX / MIN_LANE_PX / len(shown)))
    lanes_px = sum(min(max_lanes, len(lanes)) for lanes, _ in packed.values())
    size = Size(min(MAX_LANE_PX, max(MIN_LANE_PX, ROOM_PX / lanes_px)), max_lanes)
    load_top = max(max(1.0, *_running(ledger, worker).rates(ledger.workers[worker].running)) for worker in shown)
    bands = [
        _band(f"{key}{worker}", ledger, worker, packed[worker], axis, size, load_top if axis.origin_s == 0 else None) for worker in shown
    ]
    cut = sum(lane >= max_lanes for _, placed in packed.values() for _, lane in placed)
    notes = [*notes, *([f"{plural(cut, 'request')} found no room below the lanes shown."] if cut else [])]
    if len(of_worker) > len(shown):
        notes.append(f"{plural(len(of_worker) - len(shown), 'more worker')} not drawn.")
    return Timeline(key, title, bands, axis.ticks, axis.name, notes)


def _pack(bars: list[RequestBar], axis: Axis, origin: float) -> tuple[Lanes, list[tuple[RequestBar, int]]]:
    """Each bar's lane; a bar too short to be seen takes the room in which it is drawn."""
    lanes = Lanes()
    placed = []
    for bar in sorted(bars, key=lambda bar: bar.end):
        start = axis.x(bar.start - origin)
        placed.append((bar, lanes.place(start, max(start + MIN_BAR, axis.x(bar.end - origin)))[0]))
    return lanes, placed


def _band(
    key: str,
    ledger: RunLedger,
    worker: int,
    packed: tuple[Lanes, list[tuple[RequestBar, int]]],
    axis: Axis,
    size: Size,
    load_top: float | None,
) -> Band:
    num_lanes = min(size.max_lanes, len(packed[0]))
    shapes, spots = _bars([(bar, lane) for bar, lane in packed[1] if lane < num_lanes], axis, ledger.started_wall, size.lane_px)
    tally = ledger.workers[worker]
    detail = f"{plural(tally.done, 'line')}, busy {min(1.0, tally.busy_s / ledger.wall_s):.0%}" if load_top else ""
    load = _load(ledger, worker, axis, load_top) if load_top else None
    return Band(key, worker, detail, num_lanes, round(num_lanes * size.lane_px, 1), shapes, spots, load)


def _bars(placed: list[tuple[RequestBar, int]], axis: Axis, origin: float, lane_px: float) -> tuple[list[Shape], list[Spot]]:
    boxes: dict[str, list[tuple[float, float, float, float]]] = {phase: [] for phase in PHASES}
    gap = 0.16 if lane_px >= 4 else 0.0
    spots = []
    for bar, lane in placed:
        parts = _parts(bar, axis, origin)
        for phase, x0, x1 in parts:
            boxes[phase].append((x0, lane + gap / 2, x1 - x0, 1 - gap))
        spots.append(Spot(parts[0][1], parts[-1][2], lane, _tell(bar)))
    return [Shape(phase, rectangles(found)) for phase, found in boxes.items() if found], spots


def _running(ledger: RunLedger, worker: int) -> Slots:
    return slots_for(ledger.wall_s, ledger.workers[worker].running)


def _load(ledger: RunLedger, worker: int, axis: Axis, top: float) -> Load:
    """How many requests ran at once on the average of each slot."""
    slots = _running(ledger, worker)
    rates = slots.rates(ledger.workers[worker].running)
    edges = [axis.x(edge) for edge in slots.edges_s]
    spots = [Spot(edges[at], edges[at + 1], 0, f"{label}: {format_rate(rates[at])} running") for at, label in enumerate(slots.labels())]
    return Load(step_area(edges, [rate / top for rate in rates]), format_rate(top), spots)


def _parts(bar: RequestBar, axis: Axis, origin: float) -> list[tuple[str, float, float]]:
    """The phases of a bar from left to right, each with its ends in the plane."""
    marks = [("wait", bar.scheduled), ("prefill", bar.first_token), ("decode", bar.last_token)]
    x0 = start = axis.x(bar.start - origin)
    parts = []
    for phase, moment in marks:
        if moment is not None:
            x1 = max(x0, axis.x(moment - origin))
            parts.append((phase, x0, x1))
            x0 = x1
    end = max(x0, axis.x(bar.end - origin), start + MIN_BAR)
    if bar.code is not None:
        return [*(part for part in parts if part[0] == "wait"), ("failed", parts[0][2] if parts else start, end)]
    if not parts:
        return [("decode", start, end)]
    phase, x0, _ = parts[-1]
    return [*parts[:-1], (phase, x0, end)]


def _tell(bar: RequestBar) -> str:
    """What a bar says when it is pointed at."""
    name = f"line {bar.line}" if bar.custom_id is None else f"line {bar.line}, {bar.custom_id}"
    ends = [bar.start, bar.scheduled, bar.first_token, bar.last_token]
    phases = [
        f"{label} {format_seconds(max(0.0, end - start))}"
        for label, start, end in zip(("queued", "prefill", "decode"), ends, ends[1:], strict=False)
        if start is not None and end is not None
    ]
    tries = f", attempt {bar.attempts}" if bar.attempts > 1 else ""
    outcome = f"{bar.tokens:,} tokens" if bar.code is None else f"failed: {bar.code}"
    return f"{name}\n{outcome}{tries}\n{', '.join(phases)}".rstrip()


def _thinned(sample: RequestSample) -> list[str]:
    if not sample.is_thinned:
        return []
    kinds = [(kept, what) for kept, what in ((sample.ok, "are ok"), (sample.failed, "failed")) if kept.seen]
    parts = [f"{'all' if kept.stride == 1 else f'one in {kept.stride:,} of the'} {kept.seen:,} that {what}" for kept, what in kinds]
    return [f"Drawn: {' and '.join(parts)}."]
