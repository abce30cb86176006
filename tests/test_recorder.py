"""The flight record tells which items were new to the engine when its process ended, and whether it got anywhere."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from enginepool.recorder import CAPACITY, FlightRecorder, Record


@pytest.fixture
def recorder() -> Iterator[FlightRecorder]:
    made = FlightRecorder.make()
    yield made
    made.close()


def _admit(recorder: FlightRecorder, *leases: int) -> None:
    for lease in leases:
        recorder.begin_admission(lease)
        recorder.end_admission()


def test_fresh_page_says_nothing(recorder: FlightRecorder) -> None:
    assert recorder.read() == Record()


def test_admission_is_noted_from_its_begin_to_its_end(recorder: FlightRecorder) -> None:
    recorder.begin_admission(7)
    assert recorder.read() == Record(num_admissions=1, admitting=7, fresh=(7,))
    recorder.end_admission()
    assert recorder.read() == Record(num_admissions=2, fresh=(7,))


def test_completed_step_clears_the_newcomers(recorder: FlightRecorder) -> None:
    _admit(recorder, 1, 2)
    recorder.completed_step()
    _admit(recorder, 3)
    assert recorder.read().fresh == (3,)


def test_with_a_lag_newcomers_stay_for_as_many_steps() -> None:
    page = FlightRecorder.make()
    recorder = FlightRecorder(os.dup(page.fd), lag=2)
    _admit(recorder, 1, 2)
    recorder.completed_step()
    _admit(recorder, 3)
    assert page.read().fresh == (1, 2, 3)
    recorder.completed_step()
    assert page.read().fresh == (3,)
    recorder.completed_step()
    assert page.read().fresh == ()
    recorder.close()
    page.close()


def test_progress_grows_by_itself_only(recorder: FlightRecorder) -> None:
    _admit(recorder, 1)
    recorder.completed_step()
    assert recorder.read().progress == 0
    recorder.progressed()
    assert recorder.read().progress == 1


def test_more_newcomers_than_the_page_holds_are_none(recorder: FlightRecorder) -> None:
    _admit(recorder, *range(1, CAPACITY + 10))
    assert recorder.read().fresh == ()
    recorder.completed_step()
    _admit(recorder, 5)
    assert recorder.read().fresh == (5,)


def test_record_outlives_a_killed_writer(recorder: FlightRecorder) -> None:
    script = "import os, sys; from enginepool.recorder import FlightRecorder as F; r = F.join(int(sys.argv[1])); r.progressed()"
    script += "; r.begin_admission(41); r.end_admission(); r.begin_admission(42); os.kill(os.getpid(), 9)"
    done = subprocess.run([sys.executable, "-c", script, str(recorder.fd)], pass_fds=(recorder.fd,), check=False)
    assert done.returncode == -9
    assert recorder.read() == Record(progress=1, num_admissions=3, admitting=42, fresh=(41, 42))
