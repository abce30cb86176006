"""The timeline of a report: for each worker how many requests ran, and its requests as bars in lanes."""

from __future__ import annotations

from collections import defaultdict

import msgspec

from enginepool.batch.charts import Axis, Shape, Spot, Tick, rectangles, step_area, time_axis
from enginepool.batch.lanes import Lanes
from enginepool.batch.ledger import RunLedger
from enginepool.batch.sample import RequestBar
from enginepool.batch.summary import plural
from enginepool.batch.tally import WorkerTally
from enginepool.batch.throughput import slots_for
from enginepool.client.units import format_rate, format_seconds

MAX_BANDS = 64
MAX_LANE_PX, MIN_LANE_PX = 11.0, 2.0
ROOM_PX = 760.0
MIN_BAR = 1.2  # thousandths of the width
PHASES = ("wait", "prefill", "decode", "failed")


class Band(msgspec.Struct, frozen=True):
    """One worker: a strip with how many requests ran on it, and below its lanes."""

    index: int
    detail: str
    num_lanes: int
    height_px: float
    shapes: list[Shape]
    spots: list[Spot]
    load_path: str
    load_top: str
    load_spots: list[Spot]


class Timeline(msgspec.Struct, frozen=True):
    """All workers over one axis; `empty` says why there are none."""

    bands: list[Band]
    x_ticks: list[Tick]
    x_name: str
    notes: list[str]
    empty: str = ""


def make_timeline(ledger: RunLedger) -> Timeline:
    """Draw what the ledger's sample holds."""
    axis = time_axis(ledger.wall_s)
    bars = ledger.sample.bars()
    if not bars:
        return Timeline([], [], "", [], "No request of this run has timings on a worker.")
    of_worker: dict[int, list[RequestBar]] = defaultdict(list)
    for bar in bars:
        of_worker[bar.worker].append(bar)
    shown = sorted(of_worker)[:MAX_BANDS]
    packed = {worker: _pack(of_worker[worker], axis, ledger.started_wall) for worker in shown}
    max_lanes = max(6, int(ROOM_PX / MIN_LANE_PX / len(shown)))
    lanes_px = sum(min(max_lanes, len(lanes)) for lanes, _ in packed.values())
    lane_px = min(MAX_LANE_PX, max(MIN_LANE_PX, ROOM_PX / lanes_px))
    load_top = max(_running(ledger, worker)[1] for worker in shown)
    bands = [_band(ledger, worker, packed[worker], axis, lane_px, max_lanes, load_top) for worker in shown]
    cut = sum(lane >= max_lanes for _, placed in packed.values() for _, lane in placed)
    return Timeline(bands, axis.ticks, axis.name, _notes(ledger, len(bars), cut, len(of_worker) - len(shown)))


def _pack(bars: list[RequestBar], axis: Axis, origin: float) -> tuple[Lanes, list[tuple[RequestBar, int]]]:
    """Each bar's lane; a bar too short to be seen takes the room in which it is drawn."""
    lanes = Lanes()
    placed = []
    for bar in sorted(bars, key=lambda bar: bar.end):
        start = axis.x(bar.start - origin)
        placed.append((bar, lanes.place(start, max(start + MIN_BAR, axis.x(bar.end - origin)))[0]))
    return lanes, placed


def _band(
    ledger: RunLedger,
    worker: int,
    packed: tuple[Lanes, list[tuple[RequestBar, int]]],
    axis: Axis,
    lane_px: float,
    max_lanes: int,
    top: float,
) -> Band:
    lanes, placed = packed
    num_lanes = min(max_lanes, len(lanes))
    boxes: dict[str, list[tuple[float, float, float, float]]] = {phase: [] for phase in PHASES}
    gap = 0.16 if lane_px >= 4 else 0.0
    spots = []
    for bar, lane in placed:
        if lane >= num_lanes:
            continue
        parts = _parts(bar, axis, ledger.started_wall)
        for phase, x0, x1 in parts:
            boxes[phase].append((x0, lane + gap / 2, x1 - x0, 1 - gap))
        spots.append(Spot(round(parts[0][1], 2), round(parts[-1][2], 2), lane, _tell(bar)))
    tally = ledger.workers[worker]
    load, _ = _running(ledger, worker)
    edges, labels = _load_slots(ledger, tally, axis)
    return Band(
        worker,
        plural(tally.done, "line") + (f", busy {min(1.0, tally.busy_s / ledger.wall_s):.0%}" if ledger.wall_s else ""),
        num_lanes,
        round(num_lanes * lane_px, 1),
        [Shape(phase, rectangles(found)) for phase, found in boxes.items() if found],
        spots,
        step_area(edges, [value / top for value in load]),
        format_rate(top),
        [Spot(edges[at], edges[at + 1], 0, f"{label}: {format_rate(load[at])} running") for at, label in enumerate(labels)],
    )


def _running(ledger: RunLedger, worker: int) -> tuple[list[float], float]:
    """How many requests ran at once on the average of each slot, and the most of them."""
    running = ledger.workers[worker].running
    rates = slots_for(ledger.wall_s, running).rates(running)
    return rates, max(1.0, *rates)


def _load_slots(ledger: RunLedger, tally: WorkerTally, axis: Axis) -> tuple[list[float], list[str]]:
    slots = slots_for(ledger.wall_s, tally.running)
    return [axis.x(edge) for edge in slots.edges_s], slots.labels()


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


def _notes(ledger: RunLedger, num_bars: int, cut: int, workers_left_out: int) -> list[str]:
    sample = ledger.sample
    notes = []
    if sample.stride > 1:
        notes.append(f"{num_bars - cut:,} of {sample.seen:,} requests are drawn: one in {sample.stride:,}, and what failed.")
    if sample.failed_left_out:
        notes.append(f"{sample.failed_left_out:,} more failed requests are not drawn.")
    if cut:
        notes.append(f"{cut:,} requests found no room below the lanes shown.")
    if workers_left_out:
        notes.append(f"{workers_left_out:,} more workers are not drawn.")
    return notes
