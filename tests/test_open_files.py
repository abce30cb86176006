"""A dispatcher uses as many descriptors as it may, so that connections of whoever was not let in do not end it."""

from __future__ import annotations

import os
import resource
import signal
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from conftest import wait_for, worker_pids

from enginepool import Pool, PoolState, SamplingParams
from enginepool.dispatcher.descriptors import raised_limit

LOW = 256
FIVE = SamplingParams(max_tokens=5)


@pytest.fixture
def tcp_pool() -> Iterator[Pool]:
    """A pool whose program has a low soft limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 2048:
        pytest.skip("this machine's hard limit of open files is too low to be raised")
    resource.setrlimit(resource.RLIMIT_NOFILE, (LOW, hard))
    try:
        pool = Pool(engine="echo", workers=2, endpoint="tcp://127.0.0.1:0")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    with pool:
        yield pool


def _limit_of(pid: int) -> int:
    lines = Path(f"/proc/{pid}/limits").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("Max open files")).split()[3])


def test_connections_beyond_the_soft_limit_harm_nobody(tcp_pool: Pool) -> None:
    host, _, port = tcp_pool.endpoint.removeprefix("tcp://").rpartition(":")
    dispatcher = tcp_pool.status().pid
    with ExitStack() as opened:
        for _ in range(3 * LOW):
            opened.enter_context(socket.create_connection((host, int(port)), timeout=20))
        wait_for(lambda: len(os.listdir(f"/proc/{dispatcher}/fd")) > 3 * LOW, "the dispatcher to take them")
        victim = worker_pids(tcp_pool)[0]
        os.kill(victim, signal.SIGKILL)
        wait_for(lambda: tcp_pool.status().workers[0].restarts == 1, "the restart")
        wait_for(lambda: tcp_pool.status().state is PoolState.READY, "the new worker")
        with Pool.connect(tcp_pool.endpoint) as another:
            assert another.generate("hello", FIVE).text == "hello"
    wait_for(lambda: len(os.listdir(f"/proc/{dispatcher}/fd")) < LOW, "the end of the connections")


def test_workers_have_the_limit_that_the_pool_was_started_with(tcp_pool: Pool) -> None:
    assert _limit_of(tcp_pool.status().pid) > LOW
    assert [_limit_of(pid) for pid in worker_pids(tcp_pool)] == [LOW, LOW]


@pytest.mark.parametrize(
    ("soft", "hard", "raised"),
    [
        pytest.param(1024, 4096, 4096, id="as far as it goes"),
        pytest.param(1024, 1 << 20, 1 << 16, id="enough"),
        pytest.param(1024, resource.RLIM_INFINITY, 1 << 16, id="no hard limit"),
        pytest.param(1 << 18, 1 << 20, 1 << 18, id="more than enough"),
        pytest.param(resource.RLIM_INFINITY, resource.RLIM_INFINITY, resource.RLIM_INFINITY, id="no limit"),
    ],
)
def test_raised_limit(soft: int, hard: int, raised: int) -> None:
    assert raised_limit(soft, hard) == raised
