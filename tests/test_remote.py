"""Clients on other machines can not be watched by pid: silence counts for them, and for no client of this machine.

A client is on another machine when it does not see the pool's secret in its run directory. So a second run directory makes
a client on this machine one from elsewhere, with nothing else changed.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from conftest import Serve, Served, wait_for
from relay import Relay

from enginepool import Pool, PoolLost, SamplingParams
from enginepool.make_keys import make_keys

SILENCE_S = 1.0
ENDLESS = SamplingParams(max_tokens=10_000_000)
FIVE = SamplingParams(max_tokens=5)
CLIENT = """
import sys, time
from enginepool import Pool, PoolLost, SamplingParams
pool = Pool.connect(sys.argv[1], keys=sys.argv[2])
future = pool.submit("hello", SamplingParams(max_tokens=int(sys.argv[3])))
print("submitted", flush=True)
try:
    print(future.result().text[:5], flush=True)
except PoolLost as error:
    print("lost:", error, flush=True)
pool.close(drain=False)
"""
TIMES = """
import json, sys, time
here = time.monotonic
time.monotonic = lambda: here() + float(sys.argv[3])  # this machine was started at another time
from enginepool import Pool, SamplingParams
with Pool.connect(sys.argv[1], keys=sys.argv[2]) as pool:
    outputs = pool.generate_many(["hello"] * 50, SamplingParams(max_tokens=5))
names = ["submitted", "received", "leased", "arrived", "finished", "delivered"]
print(json.dumps([time.monotonic(), time.time(), [[getattr(o.timings, name) for name in names] for o in outputs]]))
"""


class Far(NamedTuple):
    """A pool that takes silent clients for gone after a second, as it is seen from another machine."""

    served: Served
    endpoint: str
    client_file: str
    run_dir: Path

    def start(self, code: str, *arguments: str, is_local: bool = False) -> subprocess.Popen[str]:
        """Start a client that runs this code."""
        env = os.environ | ({"ENGINEPOOL_RUN_DIR": str(self.run_dir)} if is_local else {})
        command = [sys.executable, "-c", code, self.endpoint, self.client_file, *arguments]
        return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env)


def _serve(start: Callable[..., Served], folder: Path, step_s: float = 0.001) -> Far:
    pool_file, client_file = make_keys(folder / "keys")
    config = folder / "pool.toml"
    config.write_text(f"client_silence_s = {SILENCE_S}\nengine_args = {{step_s = {step_s}}}\n")
    env = {"ENGINEPOOL_RUN_DIR": str(folder / "far")}
    served = start("--engine", "echo", "--endpoint", "tcp://127.0.0.1:0", "--keys", str(pool_file), "--config", str(config), env=env)
    return Far(served, json.loads(served.ready_line())["endpoint"], str(client_file), folder / "far")


@pytest.fixture(scope="module")
def far(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Far]:
    far = _serve(Served, tmp_path_factory.mktemp("far"))
    yield far
    far.served.end()


@pytest.fixture
def pool(far: Far) -> Iterator[Pool]:
    """A client that watches, once those of the test before have gone."""
    with Pool.connect(far.endpoint, keys=far.client_file) as pool:
        wait_for(lambda: pool.status().clients == 1, "the end of other clients")
        yield pool


@pytest.fixture
def clients() -> Iterator[list[subprocess.Popen[str]]]:
    """Client processes to be ended with the test."""
    started: list[subprocess.Popen[str]] = []
    yield started
    for process in started:
        process.kill()
        process.communicate()


def _line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline()


def _pass_time(seconds: float) -> None:
    """Time that passes is what these tests are about."""
    until = time.monotonic() + seconds
    wait_for(lambda: time.monotonic() >= until, "that moment")


def test_remote_client_that_is_killed_has_its_items_aborted(far: Far, pool: Pool, clients: list[subprocess.Popen[str]]) -> None:
    clients.append(far.start(CLIENT, str(ENDLESS.max_tokens)))
    wait_for(lambda: pool.status().in_flight == 1, "its item in flight")
    aborted = pool.status().aborted
    clients[0].kill()
    wait_for(lambda: pool.status().clients == 1, "the end of its session", 10 * SILENCE_S)
    wait_for(lambda: pool.status().in_flight == 0, "the end of its item")
    assert pool.status().aborted == aborted + 1
    assert pool.generate("hello", FIVE).ok


def test_remote_client_that_is_stopped_is_taken_for_gone_and_told_when_it_wakes(
    far: Far, pool: Pool, clients: list[subprocess.Popen[str]]
) -> None:
    clients.append(far.start(CLIENT, str(ENDLESS.max_tokens)))
    wait_for(lambda: pool.status().in_flight == 1, "its item in flight")
    clients[0].send_signal(signal.SIGSTOP)
    wait_for(lambda: pool.status().in_flight == 0, "the end of its item", 10 * SILENCE_S)
    clients[0].send_signal(signal.SIGCONT)
    assert _line(clients[0]) == "submitted\n"
    assert "nothing came from this client for 1 s, so it was taken for gone; connect again" in _line(clients[0])


def test_client_of_this_machine_that_is_stopped_is_not_taken_for_gone(far: Far, pool: Pool, clients: list[subprocess.Popen[str]]) -> None:
    clients.append(far.start(CLIENT, "1500", is_local=True))
    wait_for(lambda: pool.status().in_flight == 1, "its item in flight")
    clients[0].send_signal(signal.SIGSTOP)
    aborted = pool.status().aborted
    _pass_time(2.5 * SILENCE_S)
    assert (pool.status().clients, pool.status().aborted) == (2, aborted)
    clients[0].send_signal(signal.SIGCONT)
    assert (_line(clients[0]), _line(clients[0])) == ("submitted\n", "hello\n")


def test_remote_client_that_waits_for_long_is_not_silent(far: Far, pool: Pool, clients: list[subprocess.Popen[str]]) -> None:
    """It has nothing to say but its pings, for longer than the limit."""
    clients.append(far.start(CLIENT, "2500"))
    assert (_line(clients[0]), _line(clients[0])) == ("submitted\n", "hello\n")


def test_both_sides_paused_together_lose_nothing(tmp_path: Path, serve: Serve, clients: list[subprocess.Popen[str]]) -> None:
    far = _serve(serve, tmp_path)
    clients.append(far.start(CLIENT, "800"))
    assert _line(clients[0]) == "submitted\n"
    for process in (far.served.process, clients[0]):
        process.send_signal(signal.SIGSTOP)
    _pass_time(2.5 * SILENCE_S)
    for process in (far.served.process, clients[0]):
        process.send_signal(signal.SIGCONT)
    assert _line(clients[0]) == "hello\n"


def test_remote_pool_that_is_stopped_is_lost_after_the_limit(tmp_path: Path, serve: Serve) -> None:
    far = _serve(serve, tmp_path)
    with Pool.connect(far.endpoint, keys=far.client_file) as pool:
        future = pool.submit("hello", ENDLESS)
        wait_for(lambda: pool.status().in_flight == 1, "the item in flight")
        far.served.process.send_signal(signal.SIGSTOP)
        with pytest.raises(PoolLost, match=r"nothing came from the pool at .* for 1 s; connect again once it answers"):
            future.result(timeout=20)
        pool.close(drain=False)
    far.served.process.send_signal(signal.SIGCONT)


def test_remote_pool_that_is_killed_is_lost_at_once(tmp_path: Path, serve: Serve) -> None:
    far = _serve(serve, tmp_path)
    with Pool.connect(far.endpoint, keys=far.client_file) as pool:
        future = pool.submit("hello", ENDLESS)
        wait_for(lambda: pool.status().in_flight == 1, "the item in flight")
        far.served.process.kill()
        killed_at = time.monotonic()
        with pytest.raises(PoolLost, match=r"the connection to the pool at .* broke"):
            future.result(timeout=20)
        assert time.monotonic() - killed_at < SILENCE_S / 2
        pool.close(drain=False)


def test_remote_pool_that_stops_says_so(tmp_path: Path, serve: Serve) -> None:
    far = _serve(serve, tmp_path)
    with Pool.connect(far.endpoint, keys=far.client_file) as pool:
        future = pool.submit("hello", SamplingParams(max_tokens=300))
        wait_for(lambda: pool.status().in_flight == 1, "the item in flight")
        far.served.process.terminate()
        assert future.result(timeout=20).ok
        wait_for(lambda: pool._connection.is_lost, "the end")
        with pytest.raises(PoolLost, match="has stopped, as it was asked to"):
            pool.generate("too late")
        pool.close(drain=False)


def test_connection_that_breaks_is_lost_at_once_and_its_items_end(far: Far, pool: Pool) -> None:
    with Relay(int(far.endpoint.rpartition(":")[2])) as relay, Pool.connect(relay.endpoint, keys=far.client_file) as other:
        future = other.submit("hello", ENDLESS)
        wait_for(lambda: pool.status().in_flight == 1, "the item in flight")
        relay.cut()
        with pytest.raises(PoolLost, match=r"the connection to the pool at .* broke"):
            future.result(timeout=20)
        other.close(drain=False)
    wait_for(lambda: pool.status().in_flight == 0, "the end of its item", 10 * SILENCE_S)


def test_message_that_was_tampered_with_ends_the_connection(far: Far, pool: Pool) -> None:
    """Nothing hangs, and nothing that was changed on its way is read."""
    with Relay(int(far.endpoint.rpartition(":")[2])) as relay, Pool.connect(relay.endpoint, keys=far.client_file) as other:
        relay.tamper = True
        with pytest.raises(PoolLost):
            other.generate("hello", FIVE)
        other.close(drain=False)
    assert pool.generate("hello", FIVE).ok


@pytest.mark.parametrize("ahead_s", [0, 1000, -1000])
def test_times_of_a_remote_client_are_in_order_whatever_its_clock_says(far: Far, ahead_s: int) -> None:
    output, _ = far.start(TIMES, str(ahead_s)).communicate(timeout=60)
    monotonic_s, wall_s, times = json.loads(output)
    assert abs(monotonic_s - time.monotonic() - ahead_s) < 60
    for stamps in times:
        assert stamps == sorted(stamps)
        assert wall_s - 60 < stamps[0] <= stamps[-1] < wall_s + 1
