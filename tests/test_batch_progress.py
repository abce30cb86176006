"""The live view of a batch run: plain lines without a terminal, and on one a picture that fits any size."""

from __future__ import annotations

import fcntl
import io
import os
import pty
import struct
import subprocess
import sys
import termios
from typing import Any

import msgspec
import pytest
from batch_run import STARTED, make_record
from conftest import REPO, wait_for
from rich.console import Console
from test_status_view import make_status, make_worker

from enginepool.batch import progress
from enginepool.batch.ledger import RunLedger
from enginepool.batch.live import LiveLines
from enginepool.batch.pace import Pace
from enginepool.batch.progress import make_batch_view
from enginepool.batch.run_view import render_run
from enginepool.batch.summary import progress_line
from enginepool.status import PoolState, WorkerState

DRAW = """
import sys
sys.path.insert(0, "tests")
from batch_run import STARTED, make_record
from test_status_view import make_status
from enginepool.batch import progress
from enginepool.batch.ledger import RunLedger
progress.REDRAW_S = 0.0
view = progress.make_batch_view(200, quiet=False)
ledger = RunLedger(200, STARTED)
view.open()
try:
    for line in range(200):
        if line in (50, 100, 150):
            print(f"warning at {line}", file=sys.stderr)
            sys.stdin.readline()
        ledger.add(make_record(line, end=line / 10, code="timeout" if line % 70 == 1 else None))
        view.status(make_status(2))
        view.update(ledger)
finally:
    view.close()
print("the end", file=sys.stderr)
"""


def make_half(num_lines: int = 200, done: int = 120, failed: int = 3, skipped: int = 0) -> tuple[RunLedger, Pace]:
    ledger, pace = RunLedger(num_lines, STARTED), Pace(100.0)
    ledger.skip(skipped)
    for line in range(done):
        ledger.add(make_record(line, end=line / 10, tokens=40, code="timeout" if line < failed else None))
        pace.update(100.0 + line / 10, ledger.ended_here, ledger.completion_tokens)
    return ledger, pace


def show(width: int, height: int = 40, **changes: Any) -> list[str]:
    lines = render_run(*make_half(), make_status(2, **changes), width, height)
    console = Console(width=width, record=True, file=io.StringIO())
    for line in lines:
        console.print(line)
    return console.export_text().splitlines()


# Pace.


def test_pace_without_lines_knows_no_time_left() -> None:
    pace = Pace(0.0)
    pace.update(5.0, 0, 0)
    assert (pace.left_s(10), pace.left_s(0), pace.tokens_per_s) == (None, 0.0, 0.0)


def test_pace_follows_the_recent_rate() -> None:
    pace = Pace(0.0)
    for second in range(1, 201):
        lines = second if second <= 100 else 100 + 10 * (second - 100)
        pace.update(float(second), lines, lines * 7)
    assert (pace.lines_per_s, pace.tokens_per_s, pace.left_s(50)) == (10.0, 70.0, 5.0)
    assert pace.mean_tokens_per_s == 1100 * 7 / 200


def test_pace_takes_the_whole_run_while_few_lines_end() -> None:
    pace = Pace(0.0)
    for second in range(1, 201):
        pace.update(float(second), second // 20, second)
    assert pace.lines_per_s == 10 / 200


def test_pace_remembers_its_window_only() -> None:
    pace = Pace(0.0)
    for step in range(100_000):
        pace.update(step / 100, step, step)
    assert len(pace._marks) <= 42


# Plain lines.


def test_line_tells_lines_failures_rate_time_left_and_workers() -> None:
    status = make_status(workers=[make_worker(0, waiting=0), make_worker(1, running=31)])
    assert progress_line(*make_half(), status) == (
        "120/200 lines, 3 failed, 393 tokens/s, about 8 s left; worker 0: 32 running, worker 1: 31 running, 8 waiting"
    )


def test_line_does_not_count_lines_of_an_earlier_run_into_the_rate() -> None:
    assert "1,120/1,200 lines, 3 failed, 393 tokens/s, about 8 s left" in progress_line(*make_half(1200, 120, 3, 1000), None)


def test_line_of_many_workers_names_those_out_of_action() -> None:
    workers = [make_worker(index) for index in range(8)]
    workers[5] = make_worker(5, state=WorkerState.BACKOFF, running=0, pid=None)
    assert progress_line(*make_half(), make_status(workers=workers)).endswith("; 8 workers: 224 running, worker 5: backoff")


def test_line_before_anything_has_ended() -> None:
    assert progress_line(RunLedger(10, STARTED), Pace(0.0), None) == "0/10 lines, 0 tokens/s"


def test_line_of_embeddings_tells_lines_per_second() -> None:
    ledger, pace = RunLedger(100, STARTED), Pace(0.0)
    for line in range(20):
        ledger.add(make_record(line, tokens=0))
    pace.update(4.0, 20, 0)
    assert progress_line(ledger, pace, None) == "20/100 lines, 5.0 lines/s, about 16 s left"


def test_view_without_a_terminal_prints_a_line_an_interval(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    now = 0.0
    monkeypatch.setattr(progress, "monotonic", lambda: now)
    ledger, view = RunLedger(100, STARTED), make_batch_view(100, quiet=False)
    view.open()
    for second in range(12):
        now = float(second)
        ledger.add(make_record(second))
        view.update(ledger)
    view.close()
    out, err = capsys.readouterr()
    assert out == ""
    assert [line.split(",")[0] for line in err.splitlines()] == ["enginepool: 6/100 lines", "enginepool: 11/100 lines"]
    assert "\r" not in err
    assert "\x1b" not in err


def test_view_goes_on_while_only_the_status_comes(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    now = 0.0
    monkeypatch.setattr(progress, "monotonic", lambda: now)
    view = make_batch_view(100, quiet=False)
    view.open()
    for second in range(11):
        now = float(second)
        view.status(make_status(1))
    view.close()
    assert capsys.readouterr().err.count("0/100 lines, 0 tokens/s; worker 0: 32 running, 8 waiting\n") == 2


def test_quiet_view_prints_nothing(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    view = make_batch_view(100, quiet=True)
    view.open()
    view.update(RunLedger(100, STARTED))
    view.status(make_status(1))
    view.close()
    assert capfd.readouterr() == ("", "")


def test_dumb_terminal_gets_plain_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "dumb")
    assert isinstance(make_batch_view(1, quiet=False), progress._Lines)


# The picture.


def test_picture_has_bar_numbers_and_workers() -> None:
    lines = show(100)
    assert lines[0].endswith(" 120/200 lines  60 %")
    assert lines[1] == "3 failed   393 tokens/s   393 mean   8 s left   12 s elapsed"
    assert lines[2].split() == ["worker", "state", "running", "waiting", "KV", "tokens/s", "lines", "done"]
    assert lines[3].split() == ["0", "ready", "32", "8", "43%", "1,830", "120"]


@pytest.mark.parametrize("width", [1, 5, 12, 20, 40, 60, 80, 120, 300])
@pytest.mark.parametrize("height", [1, 2, 5, 24])
def test_picture_fits(width: int, height: int) -> None:
    lines = render_run(*make_half(), make_status(20), width, height)
    assert 1 <= len(lines) <= max(1, height - 1)
    assert all(line.cell_len <= max(1, width - 1) for line in lines)


def test_picture_of_forty_columns_keeps_what_matters() -> None:
    lines = show(40)
    assert lines[0].endswith("120/200 lines  60 %")
    assert "━" in lines[0]
    assert any("8 s left" in line for line in lines)
    assert lines[-1].split()[:3] == ["1", "ready", "32"]


def test_picture_of_a_low_terminal_tells_how_many_workers_are_not_shown() -> None:
    lines = render_run(*make_half(), make_status(20), 80, 8)
    assert lines[-1].plain == "… and 17 more"


def test_picture_tells_why_a_pool_is_degraded() -> None:
    assert "pool degraded: worker 1 keeps dying" in show(80, state=PoolState.DEGRADED, reason="worker 1 keeps dying\nmore")


@pytest.mark.parametrize(("num_lines", "skipped"), [(0, 0), (5, 5), (5, 0)])
def test_picture_of_nothing_to_do(num_lines: int, skipped: int) -> None:
    ledger = RunLedger(num_lines, STARTED)
    ledger.skip(skipped)
    assert f"{skipped}/{num_lines} lines" in render_run(ledger, Pace(0.0), None, 80, 24)[0].plain


def test_wrapped_rows_of_a_narrower_terminal_are_erased() -> None:
    stream = io.StringIO()
    console = Console(file=stream, width=80, height=24, force_terminal=True, color_system=None)
    live = LiveLines(console)
    live.start()
    live.draw(render_run(*make_half(), make_status(2), 80, 24))
    console.size = (40, 24)
    stream.truncate(0)
    live.draw(render_run(*make_half(), make_status(2), 40, 24))
    live.stop()
    before_first_line = stream.getvalue().partition("━")[0]
    wide = [line.cell_len for line in render_run(*make_half(), make_status(2), 80, 24)]
    assert before_first_line.count("\x1b[1A") == sum(max(1, -(-length // 40)) for length in wide) - 1


def test_no_color_is_respected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    stream = io.StringIO()
    live = LiveLines(Console(file=stream, width=80, force_terminal=True))
    live.start()
    live.draw(render_run(*make_half(), make_status(2), 80, 24))
    live.stop()
    assert "\x1b[3" not in stream.getvalue().replace("\x1b[39", "")


def test_view_in_a_real_terminal_that_is_resized() -> None:
    master, slave = pty.openpty()
    set_size(master, 30, 100)
    env = {**os.environ, "PYTHONPATH": str(REPO), "TERM": "xterm-256color", "COLUMNS": "200"}
    child = subprocess.Popen([sys.executable, "-c", DRAW], stdin=subprocess.PIPE, stdout=slave, stderr=slave, cwd=REPO, env=env)
    os.close(slave)
    seen = b""

    def read_until(mark: bytes) -> bool:
        nonlocal seen
        seen += os.read(master, 65536)
        return mark in seen

    try:
        assert child.stdin is not None
        for mark, columns in ((b"warning at 50", 40), (b"warning at 100", 20), (b"warning at 150", 120)):
            wait_for(lambda mark=mark: read_until(mark), mark.decode())  # type: ignore[misc]
            set_size(master, 10, columns)
            child.stdin.write(b"\n")
            child.stdin.flush()
        wait_for(lambda: read_until(b"the end"), "the end")
        assert child.wait(10) == 0
    finally:
        child.kill()
        child.wait()
        if child.stdin is not None:
            child.stdin.close()
        os.close(master)
    text = seen.decode()
    assert "Traceback" not in text
    assert "200/200 lines" in text
    assert text.rstrip().endswith("the end")


def set_size(fd: int, rows: int, columns: int) -> None:
    fcntl.ioctl(fd, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))


def test_status_of_a_worker_that_is_away_shows_dashes() -> None:
    away = make_worker(1, pid=None, state=WorkerState.BACKOFF, last_exit="was killed by SIGKILL (perhaps out of memory)")
    lines = show(120, workers=[make_worker(0), away])
    assert lines[-1].split() == ["1", "backoff", "-", "-", "-", "-", "0", "0", "SIGKILL"]


def test_status_struct_is_not_kept_longer_than_the_next(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    now = 0.0
    monkeypatch.setattr(progress, "monotonic", lambda: now)
    view = make_batch_view(10, quiet=False)
    view.open()
    view.status(make_status(1))
    now = 6.0
    view.status(msgspec.structs.replace(make_status(1), workers=[make_worker(0, running=5, waiting=0)]))
    view.close()
    assert "worker 0: 5 running\n" in capsys.readouterr().err
