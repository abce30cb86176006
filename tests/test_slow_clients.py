"""Clients that read slowly or die: nobody else waits for them, they lose nothing while they live and leave nothing when they die."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from conftest import wait_for, worker_pids

from enginepool import Pool, SamplingParams
from enginepool.clock import monotonic

FIVE = SamplingParams(max_tokens=5)
NUM_LARGE = 2000
MB = 1e6

Join = Callable[[Pool, str, int], "subprocess.Popen[str]"]


@pytest.fixture
def join() -> Iterator[Join]:
    """Start other clients; whatever is left at the end is killed."""
    started: list[subprocess.Popen[str]] = []

    def start(pool: Pool, role: str, count: int) -> subprocess.Popen[str]:
        command = [sys.executable, str(Path(__file__).with_name("other_client.py")), pool.endpoint, role, str(count)]
        started.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate()


def _line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline()


def _pause(pool: Pool, join: Join) -> subprocess.Popen[str]:
    """A client that is stopped before the first of its many large results comes, and paused once enough wait for it."""
    workers = worker_pids(pool)
    for pid in workers:
        os.kill(pid, signal.SIGSTOP)
    client = join(pool, "large results", NUM_LARGE)
    assert _line(client) == "submitted\n"
    wait_for(lambda: pool.status().backlog + pool.status().in_flight == NUM_LARGE, "its items")
    client.send_signal(signal.SIGSTOP)
    for pid in workers:
        os.kill(pid, signal.SIGCONT)
    wait_for(lambda: pool.status().paused_clients == 1, "the pause")
    wait_for(lambda: pool.status().in_flight == 0, "the end of what it has in flight")
    return client


def _make_pool() -> Pool:
    return Pool(engine="echo", workers=2, max_num_seqs=8, max_client_output_bytes=1 << 20)


def test_stopped_client_is_paused_others_go_on_and_it_loses_nothing(join: Join) -> None:
    with _make_pool() as pool:
        before = pool.status()
        client = _pause(pool, join)
        held_back = pool.status().backlog
        assert held_back > NUM_LARGE // 4
        for index in range(100):
            started = monotonic()
            assert pool.generate(f"quick {index}", FIVE).ok
            assert monotonic() - started < 1.0
        assert all(output.ok for output in pool.generate_many(["many"] * 500, FIVE))
        assert (pool.status().backlog, pool.status().paused_clients) == (held_back, 1)
        assert psutil.Process(before.pid).memory_info().rss - before.rss_bytes < 30 * MB  # its results have 64 MB
        client.send_signal(signal.SIGCONT)
        assert json.loads(_line(client)) == {"right": NUM_LARGE}
        assert client.wait(20) == 0
        wait_for(lambda: pool.status().clients == 1, "its goodbye")
        after = pool.status()
        assert (after.finished - before.finished, after.failed, after.aborted) == (NUM_LARGE + 600, 0, 0)
        assert (after.backlog, after.in_flight, after.paused_clients) == (0, 0, 0)


def test_paused_client_that_is_killed_leaves_nothing(join: Join) -> None:
    with _make_pool() as pool:
        client = _pause(pool, join)
        client.kill()
        wait_for(lambda: pool.status().clients == 1, "the end of its session", 5)
        status = pool.status()
        assert (status.backlog, status.in_flight, status.paused_clients) == (0, 0, 0)
        assert pool.generate("still there", FIVE).ok


def test_paused_client_that_is_stopped_and_never_goes_on_does_not_hold_up_a_stop(join: Join) -> None:
    with _make_pool() as pool:
        _pause(pool, join)
        started = monotonic()
    assert monotonic() - started < 4.0


@pytest.mark.parametrize("role", ["submit", "stream", "iter_many", "generate_many"])
@pytest.mark.parametrize("is_stopped", [False, True], ids=["killed", "stopped-and-killed"])
def test_client_that_dies_has_all_its_items_aborted(echo_pool: Pool, join: Join, role: str, is_stopped: bool) -> None:
    client = join(echo_pool, role, 30)
    wait_for(lambda: echo_pool.status().in_flight == 18, "its items")
    if is_stopped:
        client.send_signal(signal.SIGSTOP)
    client.kill()
    wait_for(lambda: echo_pool.status().clients == 1, "the end of its session", 5)
    wait_for(lambda: echo_pool.status().in_flight == 0, "the abort", 5)
    assert echo_pool.status().backlog == 0


def test_two_clients_share_a_pool_by_turns(join: Join) -> None:
    with Pool(engine="echo", workers=2, max_num_seqs=8, step_s=0.0002) as pool:
        first = join(pool, "many", 20_000)
        wait_for(lambda: pool.status().finished > 200, "the first client's results")
        second = join(pool, "many", 200)
        assert _line(second) == "submitting\n"
        before = pool.status().finished
        assert json.loads(_line(second)) == {"right": 200}
        num_others = pool.status().finished - before - 200
        assert num_others < 600, "the second client waited for the first one's long queue"
        assert _line(first) == "submitting\n"
        assert json.loads(_line(first)) == {"right": 20_000}
