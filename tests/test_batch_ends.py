"""Batch runs that are ended early, by signals, kills and pools that stop: what is done is kept, the rest goes on later."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from batch_help import ECHO, Run, doubled, ids, line, run_command, write_input
from conftest import ENGINEPOOL, processes_of, wait_for, worker_pids

from enginepool import Pool
from enginepool.errors import ExitCode

SLOW = "[engine_args]\nstep_s = 0.02\nmax_num_seqs = 2\n"
NAMES = [f"r{number}" for number in range(200)]
pytestmark = pytest.mark.usefixtures("fresh_run_dir")


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """Where results go."""
    return tmp_path / "out.jsonl"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """An input of 200 lines of 4 tokens."""
    return write_input(tmp_path / "in.jsonl", NAMES)


@pytest.fixture
def slow(tmp_path: Path) -> tuple[str, ...]:
    """Flags of a pool that makes about 50 of these lines a second."""
    (tmp_path / "slow.toml").write_text(SLOW)
    return (*ECHO, "--workers", "2", "--config", str(tmp_path / "slow.toml"))


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    """A running pool of that speed."""
    with Pool(engine="echo", workers=2, step_s=0.02, max_num_seqs=2) as pool:
        yield pool


def _endpoint(pool: Pool) -> tuple[str, ...]:
    return ("--endpoint", pool.endpoint)


def _finish_later(source: Path, out: Path, *arguments: str) -> None:
    """The same command again, at full speed, ends with every id once."""
    done = run_command(source, out, *arguments)
    assert done.returncode == ExitCode.OK, done.stderr
    assert sorted(ids(out)) == sorted(NAMES)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_first_signal_finishes_what_is_in_flight(source: Path, out: Path, slow: tuple[str, ...], number: signal.Signals) -> None:
    run = Run(source, out, "--window", "8", pool=slow)
    run.wait_until(10)
    run.signal(number)
    code, stderr = run.finish()
    assert code == 128 + number
    assert "interrupted: finishing " in stderr
    assert f"{200 - run.num_done} lines are left; the same command goes on from here" in stderr
    assert 10 <= run.num_done < 200
    assert list(run.temp.iterdir()) == []
    if number == signal.SIGINT:
        _finish_later(source, out, "--config", slow[-1])


def test_second_signal_stops_at_once_and_leaves_nothing(tmp_path: Path, out: Path, fresh_run_dir: Path) -> None:
    source = write_input(tmp_path / "in.jsonl", NAMES)
    with source.open("a") as file:
        file.write(line("endless", max_tokens=1_000_000))
    (tmp_path / "slow.toml").write_text("[engine_args]\nstep_s = 0.02\n")
    run = Run(source, out, pool=(*ECHO, "--config", str(tmp_path / "slow.toml")))
    run.wait_until(200)
    run.signal(signal.SIGINT)
    told = run.process.stderr
    assert told is not None
    before = _line_with(told, "interrupted: finishing")
    run.signal(signal.SIGINT)
    code, stderr = run.finish(10)
    assert code == ExitCode.INTERRUPTED, before + stderr
    assert "1 line is left" in stderr
    assert not processes_of(fresh_run_dir)
    assert not fresh_run_dir.exists() or not list(fresh_run_dir.iterdir())
    assert list(run.temp.iterdir()) == []


def test_terminal_is_left_as_it_was_after_an_interrupt(source: Path, out: Path, pool: Pool) -> None:
    ours, terminal = os.openpty()
    run = Run(source, out, "--window", "8", pool=_endpoint(pool), stderr=terminal, env=os.environ | {"TERM": "xterm"})
    os.close(terminal)
    run.wait_until(10)
    run.signal(signal.SIGINT)
    shown = b""
    with suppress(OSError):  # its end
        while more := os.read(ours, 65536):
            shown += more
    os.close(ours)
    assert run.finish()[0] == ExitCode.INTERRUPTED
    assert shown.count(b"\x1b[?25l") == shown.count(b"\x1b[?25h") == 1
    assert shown.index(b"interrupted: finishing") < shown.index(b"\x1b[?25h") < shown.index(b"the same command goes on from here")


def _line_with(stream: Any, words: str) -> str:
    for text in stream:
        if words in text:
            return str(text)
    raise AssertionError(f"{words!r} was not told")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("seed", range(3))
def test_signal_while_it_starts_ends_it_and_leaves_nothing(
    source: Path, out: Path, slow: tuple[str, ...], fresh_run_dir: Path, seed: int, number: signal.Signals
) -> None:
    run = Run(source, out, pool=slow)
    threading.Event().wait(random.Random(seed).uniform(0.2, 1.2))  # the moment of the fault, not a condition
    run.signal(number)
    code, stderr = run.finish()
    assert code in (ExitCode.INTERRUPTED, -signal.SIGINT, 128 + number, -number), stderr
    assert "Traceback" not in stderr or "init_import_site" in stderr
    wait_for(lambda: not processes_of(fresh_run_dir), "the end of its pool", 10)
    assert list(run.temp.iterdir()) == []


def test_killed_ten_times_it_ends_with_every_id_once(source: Path, out: Path, slow: tuple[str, ...], fresh_run_dir: Path) -> None:
    moments = random.Random(1)
    seen: list[int] = []
    for _ in range(10):
        run = Run(source, out, pool=slow)
        threading.Event().wait(moments.uniform(0.3, 1.6))  # the moment of the fault, not a condition
        run.process.kill()
        run.finish()
        seen.append(run.num_done)
        assert doubled(ids(out)) == []
        wait_for(lambda: not processes_of(fresh_run_dir), "the end of the killed run's pool", 10)
    assert seen == sorted(seen)
    _finish_later(source, out, "--config", slow[-1])


def test_killed_worker_loses_nothing(source: Path, out: Path, pool: Pool) -> None:
    run = Run(source, out, pool=_endpoint(pool))
    run.wait_until(20)
    os.kill(worker_pids(pool)[0], signal.SIGKILL)
    code, stderr = run.finish()
    assert code == ExitCode.OK, stderr
    assert sorted(ids(out)) == sorted(NAMES)


@pytest.fixture
def served(fresh_run_dir: Path, slow: tuple[str, ...]) -> Iterator[tuple[str, int]]:
    """`enginepool serve` with the slow pool: its endpoint and its pid."""
    read_fd, write_fd = os.pipe()
    process = subprocess.Popen([*ENGINEPOOL, "serve", *slow, "--ready-fd", str(write_fd)], pass_fds=(write_fd,), stderr=subprocess.DEVNULL)
    os.close(write_fd)
    with os.fdopen(read_fd) as ready:
        endpoint = json.loads(ready.read())["endpoint"]
    yield endpoint, process.pid
    process.kill()
    process.wait()
    wait_for(lambda: not processes_of(fresh_run_dir), "the end of the pool", 10)


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        pytest.param("kill", ExitCode.ALL_WORKERS_FAILED, id="dispatcher killed"),
        pytest.param("drain", ExitCode.NO_DISPATCHER, id="drained"),
        pytest.param("stop", ExitCode.NO_DISPATCHER, id="stopped"),
    ],
)
def test_pool_that_ends_meanwhile_is_told_and_what_is_done_is_kept(
    source: Path, out: Path, served: tuple[str, int], how: str, expected: ExitCode
) -> None:
    endpoint, pid = served
    run = Run(source, out, pool=("--endpoint", endpoint))
    run.wait_until(20)
    if how == "kill":
        os.kill(pid, signal.SIGKILL)
    else:
        subprocess.run([*ENGINEPOOL, how, "--endpoint", endpoint], check=True, timeout=30, capture_output=True)
    code, stderr = run.finish()
    assert code == expected, stderr
    assert 20 <= run.num_done < 200
    assert f"{200 - run.num_done} lines are left; the same command goes on from here" in stderr
    assert doubled(ids(out)) == []


def test_second_signal_in_the_last_moments_does_not_cut_the_end_off(tmp_path: Path, out: Path) -> None:
    run = Run(write_input(tmp_path / "in.jsonl", [f"item {number}" for number in range(20_000)]), out)
    run.wait_until(100)
    run.signal(signal.SIGINT)
    run.signal(signal.SIGINT)
    code, stderr = run.finish(20)
    assert code == ExitCode.INTERRUPTED
    assert "the same command goes on from here" in stderr
