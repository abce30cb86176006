"""Log lines leave without ever blocking the loop; a worker's output is split into lines and its tail is kept."""

from __future__ import annotations

import fcntl
import json
import os
import re
from collections.abc import Iterator

import pytest

from enginepool.dispatcher import logs
from enginepool.dispatcher.logs import TAIL_LINES, LogWriter, WorkerLog

PIPE_BYTES = 4096


class Pipe:
    """A small pipe whose reader is in no hurry."""

    def __init__(self) -> None:
        self.reader, self.writer = os.pipe()
        fcntl.fcntl(self.writer, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
        os.set_blocking(self.reader, False)

    def read(self) -> bytes:
        try:
            return os.read(self.reader, 1 << 20)
        except BlockingIOError:
            return b""

    def close_reader(self) -> None:
        if self.reader >= 0:
            os.close(self.reader)
            self.reader = -1


@pytest.fixture
def pipe() -> Iterator[Pipe]:
    pipe = Pipe()
    yield pipe
    pipe.close_reader()
    os.close(pipe.writer)


def test_writer_writes_a_line_at_once(pipe: Pipe) -> None:
    LogWriter(pipe.writer).line("hello")
    assert pipe.read() == b"hello\n"


def test_writer_escapes_what_is_no_utf_8(pipe: Pipe) -> None:
    LogWriter(pipe.writer).line("a\udc80b")
    assert pipe.read() == b"a\\udc80b\n"


@pytest.mark.timeout(20)
def test_writer_on_a_full_pipe_queues_and_catches_up_in_order(pipe: Pipe) -> None:
    writer = LogWriter(pipe.writer)
    lines = [f"line {number} " + "x" * 100 for number in range(500)]
    for line in lines:
        writer.line(line)
    data = b""
    while writer.flush():
        data += pipe.read()
    assert (data + pipe.read()).decode().splitlines() == lines
    assert writer.num_dropped == 0


@pytest.mark.timeout(20)
def test_writer_with_a_full_queue_counts_what_it_drops(pipe: Pipe, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "MAX_QUEUED_LINES", 10)
    writer = LogWriter(pipe.writer)
    for _ in range(200):
        writer.line("x" * 100)
    data = b""
    while writer.flush():
        data += pipe.read()
    written = (data + pipe.read()).splitlines()
    assert writer.num_dropped > 0
    assert len(written) + writer.num_dropped == 200


@pytest.mark.timeout(20)
def test_writer_sends_a_line_larger_than_the_pipe_in_parts(pipe: Pipe) -> None:
    writer = LogWriter(pipe.writer)
    writer.line("y" * 20_000)
    data = b""
    while writer.flush():
        data += pipe.read()
    assert data + pipe.read() == b"y" * 20_000 + b"\n"


def test_writer_whose_reader_is_gone_goes_quiet(pipe: Pipe) -> None:
    writer = LogWriter(pipe.writer)
    pipe.close_reader()
    for _ in range(3):
        writer.line("nobody reads this")
    assert writer.flush() is False


@pytest.mark.parametrize(
    ("chunks", "lines"),
    [
        pytest.param([b"one\ntwo\n"], ["one", "two"], id="two-lines"),
        pytest.param([b"on", b"e\ntw", b"o\n"], ["one", "two"], id="torn-lines"),
        pytest.param([b"one\r\ntwo\r\n"], ["one", "two"], id="windows-ends"),
        pytest.param([b"10%\r50%\r100%\n"], ["100%"], id="progress-bar"),
        pytest.param([b"\n  \n\r\n"], [], id="blank-lines"),
        pytest.param([b"caf\xc3", b"\xa9\n"], ["café"], id="torn-character"),
        pytest.param([b"\xff\xfe\n"], ["\ufffd\ufffd"], id="not-utf-8"),
        pytest.param([b"  indented\n"], ["  indented"], id="indentation-stays"),
    ],
)
def test_worker_log_lines(chunks: list[bytes], lines: list[str]) -> None:
    log = WorkerLog()
    assert [line for chunk in chunks for line in log.feed(chunk)] == lines


def test_worker_log_does_not_gather_an_endless_line() -> None:
    log = WorkerLog()
    lines = [line for _ in range(4) for line in log.feed(b"z" * 40_000)]
    assert [len(line) for line in lines] == [80_000, 80_000]


def test_worker_log_finish_gives_the_last_line_without_its_end() -> None:
    log = WorkerLog()
    log.feed(b"done\nSegmentation fault")
    assert log.finish() == ["Segmentation fault"]
    assert log.finish() == []
    assert list(log.tail) == ["done", "Segmentation fault"]


def test_worker_log_keeps_the_last_lines() -> None:
    log = WorkerLog()
    log.feed(b"".join(b"%d\n" % number for number in range(200)))
    assert list(log.tail) == [str(number) for number in range(200 - TAIL_LINES, 200)]


def test_writer_tells_time_role_and_pid(pipe: Pipe) -> None:
    LogWriter(pipe.writer).tell("info", "ready", pid=42, worker=1)
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d worker 1\[42\] ready\n", pipe.read().decode())


def test_writer_of_json_tells_an_object_a_line(pipe: Pipe) -> None:
    writer = LogWriter(pipe.writer, as_json=True)
    writer.tell("warning", "warning: two\nlines", pid=7)
    told = json.loads(pipe.read())
    assert (told["level"], told["message"], told["role"], told["worker"], told["pid"]) == ("warning", "two\nlines", "dispatcher", None, 7)
