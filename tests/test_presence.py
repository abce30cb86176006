"""Silence counts while the listener ran, and for nobody else; pings tell how the other machine's clock goes."""

from __future__ import annotations

import pytest

from enginepool.client.far_clock import MAX_ROUNDS, FarClock
from enginepool.client.pulse import BEATS, Pulse
from enginepool.clock import ClockAnchor
from enginepool.presence import Presence
from enginepool.protocol import DEFAULT_SILENCE_S

TURN_S = 0.25


def _run(presence: Presence[str], start: float, seconds: float) -> float:
    """Turn as a busy loop does; returns when that ends."""
    for _ in range(round(seconds / TURN_S)):
        start += TURN_S
        presence.advance(start)
    return start


def test_presence_silent_for_the_limit_and_not_before() -> None:
    presence = Presence[str](15)
    presence.advance(100.0)
    presence.heard("a")
    now = _run(presence, 100.0, 15)
    assert presence.silent() == []
    _run(presence, now, TURN_S)
    assert presence.silent() == ["a"]


def test_presence_anything_heard_begins_anew() -> None:
    presence = Presence[str](15)
    presence.advance(0.0)
    presence.heard("a")
    presence.heard("b")
    now = _run(presence, 0.0, 10)
    presence.heard("a")
    _run(presence, now, 10)
    assert presence.silent() == ["b"]


@pytest.mark.parametrize("paused_s", [1.0, 60.0, 1e6])
def test_presence_pause_of_the_listener_counts_as_one_second_at_most(paused_s: float) -> None:
    presence = Presence[str](15)
    presence.advance(0.0)
    presence.heard("a")
    now = _run(presence, 0.0, 14)
    presence.advance(now + paused_s)
    assert presence.silent() == []
    _run(presence, now + paused_s, 0.5)
    assert presence.silent() == ["a"]


def test_presence_pause_does_not_reach_a_short_limit() -> None:
    presence = Presence[str](1)
    presence.advance(0.0)
    presence.heard("a")
    presence.advance(1000.0)
    presence.advance(2000.0)
    assert presence.silent() == []


def test_presence_clock_that_steps_back_counts_nothing() -> None:
    presence = Presence[str](15)
    presence.advance(1000.0)
    presence.heard("a")
    for _ in range(100):
        presence.advance(0.0)
    assert presence.silent() == []


def test_presence_forgotten_peer_is_not_judged() -> None:
    presence = Presence[str](1)
    presence.advance(0.0)
    presence.heard("a")
    presence.forget("a")
    presence.forget("never seen")
    _run(presence, 0.0, 10)
    assert presence.silent() == []


def test_pulse_pings_fifteen_times_in_the_limit() -> None:
    pulse = Pulse()
    assert (pulse.limit_s, pulse.interval_s) == (DEFAULT_SILENCE_S, DEFAULT_SILENCE_S / BEATS)
    pings = [pulse.beat(step * 0.01, has_news=True) for step in range(1000)]
    tokens = [ping.token for ping in pings if ping]
    assert tokens == list(range(10))


def test_pulse_is_lost_without_news_only() -> None:
    pulse = Pulse(15)
    for second in range(60):
        pulse.beat(float(second), has_news=second % 14 == 0)
        assert not pulse.is_lost
    for second in range(60, 80):
        pulse.beat(float(second), has_news=False)
    assert pulse.is_lost


def test_pulse_of_a_stopped_program_is_not_lost_when_it_wakes() -> None:
    pulse = Pulse(15)
    pulse.beat(0.0, has_news=True)
    pulse.beat(3600.0, has_news=False)
    assert not pulse.is_lost


def test_far_clock_the_quickest_round_tells_most() -> None:
    clock = FarClock()
    assert clock.best is None
    for token, (there_s, back_s) in enumerate([(0.4, 0.1), (0.01, 0.012), (0.3, 0.3)]):
        clock.sent(token, 1000.0 + token)
        clock.answered(token, 5.0 + token + there_s, 1000.0 + token + there_s + back_s)
    assert clock.best == pytest.approx((995.001, 0.011))


def test_far_clock_drift_is_followed() -> None:
    clock = FarClock()
    for token in range(MAX_ROUNDS + 1):
        ahead = 50.0 if token == 0 else 51.0
        clock.sent(token, token + ahead)
        clock.answered(token, token + 0.01, token + ahead + 0.02 + (token > 0) * 0.001)
    assert clock.best == pytest.approx((51.0005, 0.0105))


def test_far_clock_answers_that_nobody_asked_for_are_dropped() -> None:
    clock = FarClock()
    for token in range(1000):
        clock.sent(token, 0.0)
    clock.answered(5, 1.0, 2.0)
    clock.answered(5000, 1.0, 2.0)
    assert clock.best is None
    assert len(clock._sent) == MAX_ROUNDS


def test_anchor_seen_from_another_machine_converts_its_stamps_alone() -> None:
    anchor = ClockAnchor(100.0, 1_700_000_000.0, 1e-6)
    far = anchor.seen_from(995.0, 0.011)
    assert far.own_to_wall(1100.0) == 1_700_000_005.0
    assert far.to_wall(105.0) == 1_700_000_005.0
    assert far.uncertainty_s == 0.011
    assert anchor.own_to_wall(105.0) == 1_700_000_005.0
