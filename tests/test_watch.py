"""`status --watch` on a real pseudo-terminal: drawn in place, resized, quit by key and by signal, and the terminal given back."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import signal
import struct
import subprocess
import termios
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from conftest import ENGINEPOOL, Serve, Served, wait_for

from enginepool import Pool, SamplingParams
from enginepool.errors import ExitCode

CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
START_S = 40.0
ENTER, LEAVE, HOME, SHOW_CURSOR = "\x1b[?1049h", "\x1b[?1049l", "\x1b[H", "\x1b[?25h"


class Terminal:
    """A pseudo-terminal with a program in it, which has it as its controlling terminal."""

    def __init__(self, *arguments: str, columns: int = 100, rows: int = 30) -> None:
        self.master, self.slave = pty.openpty()
        self.resize(columns, rows)
        self.modes = termios.tcgetattr(self.slave)
        self._output = b""
        self.process = subprocess.Popen(
            [*ENGINEPOOL, *arguments],
            stdin=self.slave,
            stdout=self.slave,
            stderr=self.slave,
            env=os.environ | {"TERM": "xterm-256color"},
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def resize(self, columns: int, rows: int) -> None:
        fcntl.ioctl(self.master, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def type(self, keys: bytes) -> None:
        os.write(self.master, keys)

    @property
    def output(self) -> str:
        return self._output.decode("utf-8", "replace")

    @property
    def frame(self) -> list[str]:
        """The lines of the last frame; the terminal may be in the middle of it."""
        frames = self.output.rpartition(ENTER)[2].split(HOME)
        return [line.rstrip() for line in CONTROL.sub("", frames[-1]).replace("\r", "").split("\n")]

    def shows(self, text: str) -> bool:
        return any(text in line for line in self.frame)

    def finish(self) -> int:
        code = self.process.wait(START_S)
        wait_for(lambda: LEAVE in self.output or ENTER not in self.output, "the last output")
        return code

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        os.close(self.slave)
        self._reader.join(10)
        os.close(self.master)

    def _read(self) -> None:
        with suppress(OSError):
            while data := os.read(self.master, 65536):
                self._output += data


@pytest.fixture
def served(serve: Serve, tmp_path: Path) -> Served:
    (tmp_path / "pool.toml").write_text("[engine_args]\nstep_s = 0.001\n")
    pool = serve("--engine", "echo", "--workers", "2", "--config", str(tmp_path / "pool.toml"))
    pool.ready_line()
    return pool


@pytest.fixture
def terminal(served: Served) -> Iterator[Terminal]:
    started = Terminal("status", "--watch", "--interval-s", "0.05")
    try:
        wait_for(lambda: started.shows("last minute"), "the first frame", START_S)
        yield started
    finally:
        started.end()


def check_given_back(terminal: Terminal) -> None:
    assert termios.tcgetattr(terminal.slave) == terminal.modes
    assert terminal.output.count(ENTER) == terminal.output.count(LEAVE)
    assert terminal.output.rindex(SHOW_CURSOR) > terminal.output.rindex(HOME)
    assert "Traceback" not in terminal.output


def test_q_quits_and_gives_the_terminal_back(terminal: Terminal) -> None:
    assert termios.tcgetattr(terminal.slave) != terminal.modes
    terminal.type(b"q")
    assert terminal.finish() == ExitCode.OK
    check_given_back(terminal)


def test_ctrl_c_quits_as_interrupted(terminal: Terminal) -> None:
    terminal.type(b"\x03")
    assert terminal.finish() == ExitCode.INTERRUPTED
    check_given_back(terminal)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP], ids=["term", "hup"])
def test_ending_signal_ends_it_after_giving_the_terminal_back(terminal: Terminal, number: signal.Signals) -> None:
    terminal.process.send_signal(number)
    assert terminal.finish() == -number
    check_given_back(terminal)


def test_other_keys_do_nothing(terminal: Terminal) -> None:
    terminal.type(b"x\x1b[A \x0c")
    frames = terminal.output.count(HOME)
    wait_for(lambda: terminal.output.count(HOME) > frames + 3, "more frames")
    assert terminal.process.poll() is None


def test_numbers_change_in_place(terminal: Terminal) -> None:
    assert terminal.shows("0 ended")
    with Pool.connect() as pool:
        pool.generate_many(["hello"] * 30, SamplingParams(max_tokens=3))
        wait_for(lambda: terminal.shows("30 ended") and terminal.shows("last minute, 30 items"), "the new numbers")
    wait_for(lambda: len(terminal.frame) == 30, "a whole frame")
    assert terminal.output.count(ENTER) == 1


@pytest.mark.parametrize(("columns", "rows"), [(60, 15), (200, 50), (20, 4)], ids=["small", "large", "tiny"])
def test_new_size_is_taken_at_once_and_filled_exactly(terminal: Terminal, columns: int, rows: int) -> None:
    terminal.resize(columns, rows)
    wait_for(lambda: len(terminal.frame) == rows and terminal.frame[0].startswith("echo"), "a frame of the new size")
    assert max(map(len, terminal.frame)) <= columns
    terminal.type(b"q")
    assert terminal.finish() == ExitCode.OK
    check_given_back(terminal)


def test_ctrl_z_gives_the_terminal_back_until_it_goes_on(terminal: Terminal) -> None:
    terminal.type(b"\x1a")
    wait_for(lambda: is_stopped(terminal.process.pid), "the stop")
    assert termios.tcgetattr(terminal.slave) == terminal.modes
    wait_for(lambda: terminal.output.count(LEAVE) == 1, "the leaving of the screen")
    terminal.process.send_signal(signal.SIGCONT)
    wait_for(lambda: terminal.output.count(ENTER) == 2 and terminal.shows("q quits"), "the next frame")
    terminal.type(b"q")
    assert terminal.finish() == ExitCode.OK
    check_given_back(terminal)


def is_stopped(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


def test_pool_that_is_killed_ends_it_with_a_message(terminal: Terminal, served: Served) -> None:
    served.process.kill()
    assert terminal.finish() == ExitCode.ALL_WORKERS_FAILED
    check_given_back(terminal)
    wait_for(lambda: f"dispatcher (pid {served.pid})" in terminal.output.rpartition(LEAVE)[2], "the message")


def test_pool_that_is_drained_ends_it_with_a_message(terminal: Terminal, served: Served) -> None:
    with Pool.connect() as pool:
        slow = pool.submit("slow", SamplingParams(max_tokens=2000))
        wait_for(lambda: terminal.shows("1 in flight"), "the item")
        served.process.terminate()
        wait_for(lambda: terminal.shows("draining"), "the drain")
        assert slow.result(timeout=20).ok
    assert terminal.finish() == ExitCode.ALL_WORKERS_FAILED
    wait_for(lambda: "has stopped; it was draining" in terminal.output.rpartition(LEAVE)[2], "the message")


def test_silent_dispatcher_is_told_and_holds_up_no_key(terminal: Terminal, served: Served) -> None:
    os.kill(served.pid, signal.SIGSTOP)
    try:
        wait_for(lambda: terminal.shows("no answer for"), "the notice")
        terminal.type(b"q")
        assert terminal.finish() == ExitCode.OK
    finally:
        os.kill(served.pid, signal.SIGCONT)
    check_given_back(terminal)


@pytest.mark.usefixtures("fresh_run_dir")
def test_no_pool_is_told_without_touching_the_terminal() -> None:
    terminal = Terminal("status", "--watch")
    try:
        assert terminal.finish() == ExitCode.NO_DISPATCHER
        assert ENTER not in terminal.output
    finally:
        terminal.end()


# Without a terminal.


def watch_piped(*arguments: str) -> subprocess.Popen[str]:
    command = [*ENGINEPOOL, "status", "--watch", "--interval-s", "0.05", *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.usefixtures("served")
def test_pipe_gets_one_json_object_a_line_until_it_is_interrupted() -> None:
    process = watch_piped()
    assert process.stdout is not None
    lines: list[dict[str, Any]] = [json.loads(process.stdout.readline()) for _ in range(3)]
    assert {line["state"] for line in lines} == {"ready"}
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=20)
    assert (process.returncode, stderr) == (ExitCode.INTERRUPTED, "")


@pytest.mark.usefixtures("served")
def test_reader_that_goes_away_ends_it_quietly() -> None:
    process = watch_piped("--json")
    assert process.stdout is not None
    process.stdout.readline()
    process.stdout.close()
    assert process.wait(20) == ExitCode.OK
    assert process.stderr is not None
    with process.stderr as stderr:
        assert stderr.read() == ""


@pytest.mark.usefixtures("served")
def test_status_once_in_a_pipe_leaves_no_column_out() -> None:
    text = subprocess.run([*ENGINEPOOL, "status"], capture_output=True, text=True, timeout=30, check=True).stdout
    assert "restarts" in text
    assert "cpus" in text
    assert "dispatcher" in text
