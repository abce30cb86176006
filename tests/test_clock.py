"""One anchor turns every monotonic stamp into wall-clock time; durations follow from the stamps that exist."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from enginepool import clock
from enginepool.clock import ClockAnchor, Timings

ANCHOR = ClockAnchor(monotonic_s=100.0, wall_s=1_700_000_000.0, uncertainty_s=1e-6)
FULL = Timings(
    submitted=10.0,
    received=10.25,
    leased=10.5,
    arrived=11.0,
    queued=11.25,
    scheduled=11.5,
    first_token=12.0,
    last_token=14.0,
    finished=14.25,
    delivered=14.5,
    num_tokens=5,
)


@pytest.mark.parametrize(
    ("stamp", "wall"),
    [
        pytest.param(100.0, 1_700_000_000.0, id="at-the-anchor"),
        pytest.param(101.5, 1_700_000_001.5, id="after"),
        pytest.param(40.0, 1_699_999_940.0, id="before"),
        pytest.param(None, None, id="not-reached"),
    ],
)
def test_to_wall_shifts_by_the_pair(stamp: float | None, wall: float | None) -> None:
    assert ANCHOR.to_wall(stamp) == wall


@pytest.mark.parametrize("step_s", [0.0, 3600.0, -3600.0], ids=["none", "forward", "backward"])
def test_drift_is_the_step_of_the_wall_clock(step_s: float) -> None:
    later = ClockAnchor(160.0, 1_700_000_060.0 + step_s, 1e-6)
    assert ANCHOR.drift_s(later) == step_s


def test_take_keeps_the_tightest_triple(monkeypatch: pytest.MonkeyPatch) -> None:
    monotonic = iter([0.0, 4.0, 10.0, 10.5, 20.0, 22.0])
    wall = iter([1000.0, 1010.25, 1021.0])
    monkeypatch.setattr(clock, "monotonic", lambda: next(monotonic))
    monkeypatch.setattr(clock, "time", SimpleNamespace(time=lambda: next(wall)))
    assert ClockAnchor.take(3) == ClockAnchor(10.25, 1010.25, 0.25)


def test_take_on_this_machine_is_tight() -> None:
    assert ClockAnchor.take().uncertainty_s < 0.001


FIRST, OTHER = "time:[4026531834]", "time:[4026532178]"


@pytest.mark.parametrize(
    ("links", "offsets", "ahead_s"),
    [
        pytest.param((OTHER, OTHER), "monotonic        1000         0\nboottime            5         0\n", 1000.0, id="in-a-namespace"),
        pytest.param((OTHER, OTHER), "monotonic          -8 500000000\n", -7.5, id="behind"),
        pytest.param((FIRST, FIRST), "monotonic           0         0\n", 0.0, id="in-none"),
        pytest.param((FIRST, OTHER), "monotonic        1000         0\n", 0.0, id="children-only"),
        pytest.param((OTHER, OTHER), "strange\n", 0.0, id="unreadable"),
        pytest.param((), "", 0.0, id="no-such-kernel"),
    ],
)
def test_time_namespace_is_read(tmp_path: Path, links: tuple[str, ...], offsets: str, ahead_s: float) -> None:
    (tmp_path / "ns").mkdir()
    for name, target in zip(("time", "time_for_children"), links, strict=False):
        (tmp_path / "ns" / name).symlink_to(target)
    (tmp_path / "timens_offsets").write_text(offsets)
    assert clock.read_ahead_s(tmp_path) == ahead_s


@pytest.mark.parametrize(
    ("name", "seconds"),
    [("queue_s", 1.5), ("ttft_s", 2.0), ("engine_ttft_s", 1.0), ("tpot_s", 0.5), ("e2e_s", 4.5)],
)
def test_timings_derived_value(name: str, seconds: float) -> None:
    assert getattr(FULL, name) == seconds


@pytest.mark.parametrize("name", ["queue_s", "ttft_s", "engine_ttft_s", "tpot_s", "e2e_s"])
def test_timings_without_milestones_derive_nothing(name: str) -> None:
    assert getattr(Timings(submitted=1.0, arrived=2.0, num_tokens=9), name) is None


def test_timings_at_the_epoch_are_not_taken_for_missing() -> None:
    assert Timings(submitted=0.0, delivered=2.0).e2e_s == 2.0


@pytest.mark.parametrize(("num_tokens", "tpot_s"), [(0, None), (1, None), (2, 2.0)])
def test_tpot_needs_two_tokens(num_tokens: int, tpot_s: float | None) -> None:
    assert Timings(first_token=12.0, last_token=14.0, num_tokens=num_tokens).tpot_s == tpot_s
