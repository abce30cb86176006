"""Charts of a report as shapes and ticks: a plane of 1000 by 100 that is stretched to its place, and what each spot of it tells.

Labels are kept apart from shapes, because text must not be stretched with them. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import msgspec

WIDTH, HEIGHT = 1000.0, 100.0
TIME_STEPS_S = [0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 60, 120, 300, 600, 1200, 3600, 7200, 18_000, 36_000, 86_400]
MAX_TIME_TICKS = 9
MAX_LOG_TICKS = 7


class Tick(NamedTuple):
    """A label `at` percent of an axis; a minor one goes first where there is little room."""

    at: float
    label: str
    is_minor: bool = False


class Shape(NamedTuple):
    """An SVG path and its class."""

    css: str
    path: str


class Spot(NamedTuple):
    """What a part of the plane tells when it is pointed at: from x to x, in which lane from the top."""

    x0: float
    x1: float
    lane: int
    text: str


class Marker(NamedTuple):
    """An upright line at a percentage of the x axis; a bare one has no room for its name."""

    at: float
    css: str
    is_bare: bool = False


class Axis(NamedTuple):
    """A time axis: `name` tells the unit of its labels, `origin_s` where it begins."""

    span_s: float
    ticks: list[Tick]
    name: str
    origin_s: float = 0.0

    def x(self, seconds: float) -> float:
        """Where a moment lies in the plane."""
        return min(WIDTH, max(0.0, (seconds - self.origin_s) / self.span_s * WIDTH))


class Chart(msgspec.Struct, frozen=True):
    """One chart; `empty` says why there is nothing to draw."""

    key: str
    title: str
    note: str = ""
    empty: str = ""
    y_name: str = ""
    x_name: str = ""
    y_ticks: list[Tick] = []
    x_ticks: list[Tick] = []
    shapes: list[Shape] = []
    markers: list[Marker] = []
    spots: list[Spot] = []
    legend: list[tuple[str, str]] = []


def time_axis(span_s: float) -> Axis:
    """An axis from 0 to `span_s`, in the unit that suits it."""
    span_s = max(span_s, 2 * TIME_STEPS_S[0])
    step = next((step for step in TIME_STEPS_S if span_s / step <= MAX_TIME_TICKS), None)
    if step is None:
        step = 86_400.0 * math.ceil(span_s / 86_400 / MAX_TIME_TICKS)
    unit_s, name = (
        (1, "seconds") if step < 60 else (60, "minutes") if step < 3600 else (3600, "hours") if step < 86_400 else (86_400, "days")
    )
    ticks = [
        Tick(number * step / span_s * 100, f"{number * step / unit_s:g}", number % 2 == 1)
        for number in range(int(span_s / step + 1e-9) + 1)
    ]
    return Axis(span_s, ticks, f"{name} since the start")


def value_ticks(highest: float, max_ticks: int = 4) -> tuple[list[Tick], float]:
    """Ticks from 0 to a round number that is not below `highest`, and that number."""
    if highest <= 0:
        return [Tick(0, "0")], 1.0
    power = 10 ** math.floor(math.log10(highest / max_ticks))
    step = next(factor * power for factor in (1, 2, 5, 10) if highest <= factor * power * max_ticks * (1 + 1e-9))
    count = max(1, math.ceil(highest / step - 1e-9))
    return [Tick(number / count * 100, _short(number * step, count * step)) for number in range(count + 1)], count * step


def log_ticks(low_s: float, high_s: float) -> list[Tick]:
    """Ticks of a logarithmic axis in seconds: as many round numbers of each decade as stay few."""
    decades = [10.0**exponent for exponent in range(math.floor(math.log10(low_s)), math.ceil(math.log10(high_s)) + 1)]
    found: list[float] = []
    for factors in ((1, 1.5, 2, 3, 4, 5, 7), (1, 2, 5), (1,)):
        found = [factor * decade for decade in decades for factor in factors if low_s * 0.999 <= factor * decade <= high_s * 1.001]
        if len(found) <= MAX_LOG_TICKS:
            break
    return [Tick(log_x(value, low_s, high_s) / WIDTH * 100, seconds_label(value), number % 2 == 1) for number, value in enumerate(found)]


def log_x(value_s: float, low_s: float, high_s: float) -> float:
    """Where a value lies on a logarithmic axis."""
    share = math.log(max(value_s, low_s) / low_s) / math.log(high_s / low_s)
    return min(1.0, share) * WIDTH


def seconds_label(seconds: float) -> str:
    """A round number of seconds: 500 µs, 2 ms, 5 s."""
    for unit_s, unit in ((1.0, "s"), (1e-3, "ms")):
        if seconds >= unit_s * 0.9999:
            return f"{seconds / unit_s:,.6g} {unit}"
    return f"{seconds * 1e6:.4g} µs"


def step_area(edges: Sequence[float], tops: Sequence[float], bottoms: Sequence[float] | None = None) -> str:
    """An area with a flat top from each edge to the next, values in 0–1 of the height."""
    if not tops:
        return ""
    lower = bottoms if bottoms is not None else [0.0] * len(tops)
    path = [f"M{_n(edges[0])} {_y(lower[0])}"]
    path += [f"V{_y(top)}H{_n(edge)}" for top, edge in zip(tops, edges[1:], strict=True)]
    path += [f"V{_y(low)}H{_n(edge)}" for low, edge in zip(reversed(lower), reversed(edges[:-1]), strict=True)]
    return "".join(path) + "Z"


def rectangles(boxes: Iterable[tuple[float, float, float, float]]) -> str:
    """Rectangles as one path: each x, y, width, height of the plane."""
    return "".join(f"M{_n(x)} {_n(y)}h{_n(width)}v{_n(height)}h-{_n(width)}z" for x, y, width, height in boxes)


def _y(share: float) -> str:
    return _n(HEIGHT * (1 - share))


def _n(value: float) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".")


def _short(value: float, highest: float) -> str:
    for limit, scale, unit in ((1e9, 1e9, " G"), (1e6, 1e6, " M"), (1e4, 1e3, " k")):
        if highest >= limit:
            return f"{value / scale:g}{unit}" if value else "0"
    return f"{value:,.6g}"
