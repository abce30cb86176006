"""A worker hangs when it achieves nothing for too long while the dispatcher itself was awake; being slow is no fault."""

from __future__ import annotations

import pytest

from enginepool.dispatcher.vigil import LONGEST_TURN_S, AwakeClock, Hang, Limits, Watch
from enginepool.recorder import Record

LIMITS = Limits(mute_s=15.0, admit_s=60.0, stall_s=300.0)


class Scene:
    """One worker, looked at once a second; what it does is set between looks."""

    def __init__(self) -> None:
        self.clock = AwakeClock()
        self.now = 1000.0
        self.watch = Watch(LIMITS, self.clock.advance(self.now))
        self.beats = 0
        self.cpu_s = 0.0
        self.progress = 0
        self.num_admissions = 0
        self.admitting: int | None = None

    def live(self, seconds: int, *, beats: bool = True, progresses: bool = False, computes: bool = False, in_hand: int = 5) -> Hang | None:
        """Let time pass; returns the first limit that is passed."""
        for _ in range(seconds):
            self.now += 1.0
            self.beats += beats
            self.progress += progresses
            self.cpu_s += 0.5 * computes
            record = Record(self.progress, self.num_admissions, self.admitting)
            hang = self.watch.look(self.beats, record, in_hand, self.cpu_s, self.clock.advance(self.now))
            if hang is not None:
                return hang
        return None


def test_worker_that_makes_progress_is_left_alone() -> None:
    assert Scene().live(4000, progresses=True) is None


def test_idle_worker_is_left_alone() -> None:
    assert Scene().live(4000, in_hand=0) is None


@pytest.mark.parametrize(("seconds", "expected"), [(299, None), (300, Hang.STALL)])
def test_work_in_hand_without_progress_is_a_stall_at_the_limit(seconds: int, expected: Hang | None) -> None:
    assert Scene().live(seconds) is expected


@pytest.mark.parametrize(("seconds", "expected"), [(13, None), (16, Hang.MUTE)])
def test_silence_is_mute_at_the_limit_even_with_progress(seconds: int, expected: Hang | None) -> None:
    scene = Scene()
    scene.live(1)
    assert scene.live(seconds, beats=False, progresses=True) is expected


def test_silent_process_that_computes_is_left_to_the_other_limits() -> None:
    """Native code may hold the interpreter for long, so that no heartbeat can be sent."""
    scene = Scene()
    scene.live(1, progresses=True)
    assert scene.live(298, beats=False, computes=True) is None
    assert scene.live(2, beats=False, computes=True) in (Hang.STALL, Hang.MUTE)


def test_idle_process_that_computes_in_silence_is_mute_at_the_stall_limit() -> None:
    """Nothing is in hand and nothing will be, for it is given no work."""
    scene = Scene()
    scene.live(1, in_hand=0)
    assert scene.live(298, beats=False, computes=True, in_hand=0) is None
    assert scene.live(3, beats=False, computes=True, in_hand=0) is Hang.MUTE


@pytest.mark.parametrize("beats", [True, False], ids=["alive", "interpreter held"])
@pytest.mark.parametrize(("seconds", "expected"), [(59, None), (62, Hang.ADMIT)])
def test_admission_has_its_own_limit(seconds: int, expected: Hang | None, beats: bool) -> None:
    scene = Scene()
    scene.num_admissions, scene.admitting = 1, 7
    assert scene.live(seconds, beats=beats, computes=True) is expected
    assert scene.watch.lives is beats


def test_process_that_is_stopped_in_an_admission_is_mute() -> None:
    scene = Scene()
    scene.live(1)
    scene.num_admissions, scene.admitting = 1, 7
    assert scene.live(13, beats=False) is None
    assert scene.live(3, beats=False) is Hang.MUTE


def test_pause_of_the_process_does_not_count_for_its_admission() -> None:
    scene = Scene()
    scene.num_admissions, scene.admitting = 1, 7
    assert scene.live(55) is None
    assert scene.live(10, beats=False) is None
    assert scene.live(4) is None
    assert scene.live(3) is Hang.ADMIT


def test_admissions_one_after_the_other_are_progress() -> None:
    scene = Scene()
    for lease in range(100):
        scene.num_admissions, scene.admitting = lease, lease + 1
        assert scene.live(10) is None


def test_continued_worker_is_forgiven() -> None:
    scene = Scene()
    assert scene.live(10, beats=False) is None
    assert scene.live(5, progresses=True) is None
    assert scene.live(14, beats=False) is None


def test_dispatcher_that_was_stopped_kills_nobody_when_it_wakes() -> None:
    scene = Scene()
    scene.live(10)
    scene.now += 3600.0
    assert scene.live(10, beats=False) is None


def test_long_turns_count_as_one_and_the_rest_as_absence() -> None:
    clock = AwakeClock()
    seen = [(clock.advance(now), clock.away_s) for now in (5.0, 5.25, 105.25, 105.5)]
    assert seen == [(0.0, 0.0), (0.25, 0.0), (0.25 + LONGEST_TURN_S, 100.0 - LONGEST_TURN_S), (0.5 + LONGEST_TURN_S, 0.0)]


@pytest.mark.parametrize(
    ("seconds", "admitting", "beats", "is_held", "doubt"),
    [
        pytest.param(1, None, True, False, None, id="lively"),
        pytest.param(1, 7, True, False, None, id="short admission"),
        pytest.param(5, 7, True, True, "taking one item in for 4 s", id="long admission"),
        pytest.param(5, None, False, True, "no heartbeat for 5 s", id="silent"),
        pytest.param(6, None, True, False, "no progress for 5 s", id="stalled"),
    ],
)
def test_worker_in_doubt_gets_no_new_work_and_status_tells_why(
    seconds: int, admitting: int | None, beats: bool, is_held: bool, doubt: str | None
) -> None:
    scene = Scene()
    scene.live(1)
    scene.num_admissions, scene.admitting = 1, admitting
    scene.live(seconds, beats=beats)
    assert (scene.watch.is_held, scene.watch.doubt) == (is_held, doubt)
