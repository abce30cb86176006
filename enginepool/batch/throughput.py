"""The charts of a run's throughput and latencies."""

from __future__ import annotations

from enginepool.batch.buckets import FINEST_S, TimeBuckets
from enginepool.batch.charts import (
    HEIGHT,
    Axis,
    Chart,
    Marker,
    Shape,
    Spot,
    log_ticks,
    log_x,
    rectangles,
    step_area,
    time_axis,
    value_ticks,
)
from enginepool.batch.histogram import HistogramBar, LogHistogram
from enginepool.batch.ledger import RunLedger
from enginepool.batch.summary import plural
from enginepool.client.units import format_rate, format_seconds

MAX_SLOTS = 120
MIN_SLOTS = 16
LINES_A_SLOT = 5
MIN_BARS = 8
NAME_WIDTH = 5.0  # percent
NO_TIMINGS = "No line of this run has timings."
QUANTILES = (("p50", 0.5), ("p90", 0.9), ("p99", 0.99))


class Slots:
    """The run cut into equal spans; the last takes a rest shorter than half a span along."""

    def __init__(self, span_s: float, slot_s: float) -> None:
        count = max(1, round(span_s / slot_s))
        self.slot_s = slot_s
        self.edges_s = [number * slot_s for number in range(count)] + [max(span_s, (count - 1) * slot_s + 1e-9)]

    def rates(self, buckets: TimeBuckets) -> list[float]:
        """Amounts a second."""
        sums = buckets.sums(self.slot_s, len(self.edges_s) - 1)
        return [amount / (self.edges_s[slot + 1] - self.edges_s[slot]) for slot, amount in enumerate(sums)]

    def labels(self) -> list[str]:
        """From when until when each one is."""
        digits = 1 if self.slot_s < 10 else 0
        return [f"{start:,.{digits}f}–{end:,.{digits}f} s" for start, end in zip(self.edges_s, self.edges_s[1:], strict=False)]


def slots_for(span_s: float, *buckets: TimeBuckets, max_slots: int = MAX_SLOTS) -> Slots:
    """Slots that every one of these can be summed up in."""
    slot_s = max([FINEST_S, *(bucket.width_s for bucket in buckets)])
    while span_s / slot_s > max_slots:
        slot_s *= 2
    return Slots(span_s, slot_s)


def tokens_chart(ledger: RunLedger) -> Chart:
    """Generated tokens a second."""
    title = "Generated tokens per second"
    if not ledger.completion_tokens or not ledger.wall_s:
        return Chart("tokens", title, empty="No tokens were generated in this run.")
    if ledger.untimed == ledger.ended_here:
        return Chart("tokens", title, empty=NO_TIMINGS)
    axis, slots = time_axis(ledger.wall_s), slots_for(ledger.wall_s, ledger.tokens_over_time)
    rates = slots.rates(ledger.tokens_over_time)
    ticks, top = value_ticks(max(rates))
    edges = [axis.x(edge) for edge in slots.edges_s]
    spots = [
        Spot(edges[slot], edges[slot + 1], 0, f"{label}: {format_rate(rates[slot])} tokens/s") for slot, label in enumerate(slots.labels())
    ]
    note = f"mean {format_rate(ledger.tokens_per_s)}, in spans of {slots.slot_s:g} s"
    shapes = [Shape("area", step_area(edges, [rate / top for rate in rates]))]
    return _over_time("tokens", title, axis, note=note, y_name="tokens/s", y_ticks=ticks, shapes=shapes, spots=spots)


def lines_chart(ledger: RunLedger) -> Chart:
    """Lines that ended a second, the failed ones on top."""
    title = "Lines ended per second"
    if not ledger.ended_here or not ledger.wall_s:
        return Chart("lines", title, empty="No line ended in this run.")
    if ledger.untimed == ledger.ended_here:
        return Chart("lines", title, empty=NO_TIMINGS)
    num_slots = min(MAX_SLOTS, max(MIN_SLOTS, ledger.ended_here // LINES_A_SLOT))
    axis, slots = time_axis(ledger.wall_s), slots_for(ledger.wall_s, ledger.ok_over_time, ledger.failed_over_time, max_slots=num_slots)
    ok, failed = slots.rates(ledger.ok_over_time), slots.rates(ledger.failed_over_time)
    both = [first + second for first, second in zip(ok, failed, strict=True)]
    ticks, top = value_ticks(max(both))
    edges = [axis.x(edge) for edge in slots.edges_s]
    spots = [
        Spot(edges[slot], edges[slot + 1], 0, f"{label}: {format_rate(ok[slot])} ok/s, {format_rate(failed[slot])} failed/s")
        for slot, label in enumerate(slots.labels())
    ]
    low = [rate / top for rate in ok]
    shapes = [Shape("area", step_area(edges, low))]
    if ledger.failed:
        shapes.append(Shape("failed", step_area(edges, [rate / top for rate in both], low)))
    note = f"mean {format_rate(ledger.lines_per_s)}, in spans of {slots.slot_s:g} s"
    legend = [("area", "ok"), ("failed", "failed")] if ledger.failed else []
    return _over_time("lines", title, axis, note=note, y_name="lines/s", y_ticks=ticks, shapes=shapes, spots=spots, legend=legend)


def latency_charts(ledger: RunLedger) -> list[Chart]:
    """The four histograms."""
    found = ledger.latencies
    return [
        histogram_chart("ttft", "Time to first token", found.ttft),
        histogram_chart("e2e", "End to end", found.e2e),
        histogram_chart("queue", "Waiting until first scheduled", found.queue),
        histogram_chart("tpot", "Per output token after the first", found.tpot),
    ]


def histogram_chart(key: str, title: str, histogram: LogHistogram) -> Chart:
    """Lines over a logarithmic axis of seconds, with the percentiles as upright lines."""
    bars = histogram.bars()
    if not bars:
        return Chart(key, title, empty="No line that is ok has this timing.")
    while len(bars) < MIN_BARS:  # one value alone would fill the plane
        ratio = bars[0].high_s / bars[0].low_s
        below = HistogramBar(bars[0].low_s / ratio, bars[0].low_s, 0)
        bars = [below, *bars, HistogramBar(bars[-1].high_s, bars[-1].high_s * ratio, 0)]
    low_s, high_s = bars[0].low_s, bars[-1].high_s
    ticks, top = value_ticks(max(bar.count for bar in bars))
    places = [(log_x(bar.low_s, low_s, high_s), log_x(bar.high_s, low_s, high_s), bar) for bar in bars]
    boxes = [(x0 + 1, HEIGHT * (1 - bar.count / top), x1 - x0 - 2, HEIGHT * bar.count / top) for x0, x1, bar in places if bar.count]
    spots = [
        Spot(x0, x1, 0, f"{format_seconds(bar.low_s)} – {format_seconds(bar.high_s)}: {plural(bar.count, 'line')}")
        for x0, x1, bar in places
    ]
    quantiles = [(name, histogram.quantile(share) or 0.0) for name, share in QUANTILES]
    return Chart(
        key,
        title,
        note=" · ".join(f"{name} {format_seconds(value)}" for name, value in quantiles),
        y_name="lines",
        x_name=f"seconds, logarithmic; {plural(histogram.count, 'line')}",
        y_ticks=ticks,
        x_ticks=log_ticks(low_s, high_s),
        shapes=[Shape("area", rectangles(boxes))],
        markers=_markers([(name, log_x(value, low_s, high_s) / 10) for name, value in quantiles]),
        spots=spots,
    )


def _markers(places: list[tuple[str, float]]) -> list[Marker]:
    """Lines that stand close to one another share the name of the first."""
    markers: list[Marker] = []
    for name, at in places:
        named = [marker.at for marker in markers if not marker.is_bare]
        markers.append(Marker(at, name, bool(named) and at - named[-1] < NAME_WIDTH))
    return markers


def _over_time(key: str, title: str, axis: Axis, **parts: object) -> Chart:
    return Chart(key, title, x_name=axis.name, x_ticks=axis.ticks, **parts)  # type: ignore[arg-type]
