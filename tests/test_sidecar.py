"""Sidecar: started, waited for, drained and stopped by its program, blocking or driven by an event loop."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import is_alive, tree_of, wait_for

from enginepool import (
    Code,
    EndpointInUse,
    EnginePoolError,
    ForkedPool,
    InvalidRequest,
    Output,
    Pool,
    PoolState,
    SamplingParams,
    SettingsError,
    Sidecar,
    StartError,
    StartTimeout,
)
from enginepool.client.futures import OutputFuture
from enginepool.errors import ExitCode

FIVE = SamplingParams(max_tokens=5)
ENDLESS = SamplingParams(max_tokens=10_000_000)


@pytest.fixture
def sidecar(fresh_run_dir: Path) -> Iterator[Sidecar]:
    """A slow echo sidecar that is not started yet; killed at the end."""
    sidecar = Sidecar(engine="echo", workers=1, step_s=0.005, drain_timeout_s=30.0)
    yield sidecar
    sidecar.kill()
    assert list(fresh_run_dir.glob("*")) == []


def _in_flight(pool: Pool, params: SamplingParams) -> OutputFuture:
    future = pool.submit("in flight", params)
    wait_for(lambda: pool.status().in_flight == 1, "the item to run")
    return future


def _code(output: Output) -> Code | None:
    return None if output.error is None else output.error.code


def _forked(child: int) -> int:
    """The exit code of a forked child."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_sidecar_starts_serves_and_drains(sidecar: Sidecar) -> None:
    sidecar.start()
    ready = sidecar.wait_until_up()
    assert (ready["state"], ready["pid"], ready["endpoint"]) == ("ready", sidecar.pid, sidecar.endpoint)
    tree = tree_of(ready["pid"])
    with Pool.connect(sidecar.endpoint) as pool:
        assert pool.generate("hello", FIVE).text == "hello"
    assert sidecar.poll() is None
    assert sidecar.drain() == sidecar.exit_code == ExitCode.OK
    assert not [pid for pid in tree if is_alive(pid)]


def test_with_block_is_up_inside_and_gone_after(fresh_run_dir: Path) -> None:
    with Sidecar(engine="echo", workers=1) as sidecar, Pool.connect(sidecar.endpoint) as pool:
        assert pool.generate("hello", FIVE).ok
    assert sidecar.exit_code == ExitCode.OK
    assert list(fresh_run_dir.iterdir()) == []


def test_with_block_that_raises_does_not_wait_for_items() -> None:
    sidecar = Sidecar(engine="echo", workers=1, step_s=0.01)
    futures: list[OutputFuture] = []

    def fail() -> None:
        with sidecar:
            pool = Pool.connect(sidecar.endpoint)
            futures.append(_in_flight(pool, ENDLESS))
            futures[0].add_done_callback(lambda _: pool.close())
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert sidecar.exit_code == ExitCode.OK
    assert _code(futures[0].result(timeout=5)) is Code.DRAINING


def test_drain_finishes_what_is_in_flight(sidecar: Sidecar) -> None:
    sidecar.start()
    sidecar.wait_until_up()
    with Pool.connect(sidecar.endpoint) as pool:
        future = _in_flight(pool, SamplingParams(max_tokens=50))
        assert sidecar.drain() == ExitCode.OK
        assert future.result(timeout=5).ok


def test_drain_limit_returns_the_rest_and_its_own_code(sidecar: Sidecar) -> None:
    sidecar.start()
    sidecar.wait_until_up()
    with Pool.connect(sidecar.endpoint) as pool:
        future = _in_flight(pool, ENDLESS)
        assert sidecar.drain(0.2) == ExitCode.DRAIN_LIMIT
        assert _code(future.result(timeout=5)) is Code.DRAINING


def test_begin_drain_returns_at_once(sidecar: Sidecar) -> None:
    sidecar.start()
    sidecar.wait_until_up()
    with Pool.connect(sidecar.endpoint) as pool:
        future = _in_flight(pool, SamplingParams(max_tokens=50))
        sidecar.begin_drain()
        assert future.result(timeout=5).ok
    assert sidecar.wait(10)
    assert sidecar.exit_code == ExitCode.OK


def test_stop_returns_items_as_retryable(sidecar: Sidecar) -> None:
    sidecar.start()
    sidecar.wait_until_up()
    with Pool.connect(sidecar.endpoint) as pool:
        future = _in_flight(pool, ENDLESS)
        assert sidecar.stop() == ExitCode.OK
        assert _code(future.result(timeout=5)) is Code.DRAINING


@pytest.mark.parametrize("end", ["drain", "stop", "kill"])
def test_end_while_starting(fresh_run_dir: Path, end: str) -> None:
    sidecar = Sidecar(engine="echo", workers=1, hang_start=[0])
    sidecar.start()
    wait_for(lambda: (fresh_run_dir / "default.sock.secret").exists(), "the dispatcher's start")
    getattr(sidecar, end)()
    assert sidecar.exit_code == ExitCode.OK
    with pytest.raises(StartError):
        sidecar.wait_until_up()
    wait_for(lambda: not list(fresh_run_dir.iterdir()), "the clean-up", 5)


@pytest.mark.usefixtures("fresh_run_dir")
def test_end_of_a_dead_sidecar_tells_how_it_died() -> None:
    sidecar = Sidecar(engine="echo", workers=1)
    sidecar.start()
    os.kill(sidecar.wait_until_up()["pid"], signal.SIGKILL)
    assert sidecar.wait(10)
    assert sidecar.drain() == sidecar.stop() == -signal.SIGKILL


def test_wait_at_its_limit_leaves_it_starting(fresh_run_dir: Path) -> None:
    sidecar = Sidecar(engine="echo", workers=1, start_s=1.0)
    sidecar.start()
    with pytest.raises(StartTimeout, match="goes on starting") as caught:
        sidecar.wait_until_up(0.05)
    assert isinstance(caught.value, TimeoutError)
    assert sidecar.exit_code is None
    assert sidecar.wait_until_up(30)["state"] == "ready"
    assert sidecar.stop() == ExitCode.OK


@pytest.mark.parametrize(
    ("settings", "error", "text", "code"),
    [
        pytest.param({"fail_start": [0]}, StartError, "refuses this worker's start", ExitCode.START_FAILED, id="worker refused"),
        pytest.param({"no_such": 1}, SettingsError, "no_such", ExitCode.USAGE, id="unknown engine argument"),
        pytest.param({"endpoint": "tcp://0.0.0.0:5"}, SettingsError, "loopback", ExitCode.USAGE, id="open address"),
    ],
)
def test_failed_start_raises_its_cause(
    fresh_run_dir: Path, settings: dict[str, Any], error: type[EnginePoolError], text: str, code: ExitCode
) -> None:
    sidecar = Sidecar(engine="echo", workers=1, **settings)
    sidecar.start()
    for _ in range(2):
        with pytest.raises(error, match=text):
            sidecar.wait_until_up()
    assert sidecar.exit_code == code
    assert sidecar.fds == ()
    assert list(fresh_run_dir.glob("*")) == []


def test_taken_endpoint_raises_endpoint_in_use(sidecar: Sidecar) -> None:
    sidecar.start()
    other = Sidecar(engine="echo", workers=1, endpoint=sidecar.wait_until_up()["endpoint"])
    with pytest.raises(EndpointInUse, match=f"held by the pool with pid {sidecar.pid}"), other:
        pass
    assert other.exit_code == ExitCode.USAGE


def test_dispatcher_killed_while_starting_is_told(fresh_run_dir: Path) -> None:
    sidecar = Sidecar(engine="echo", workers=1, hang_start=[0])
    sidecar.start()
    assert sidecar.pid is not None
    os.kill(sidecar.pid, signal.SIGKILL)
    with pytest.raises(StartError, match="ended with status -9"):
        sidecar.wait_until_up()


def test_two_threads_may_wait(sidecar: Sidecar) -> None:
    sidecar.start()
    lines: list[str] = []
    waiters = [threading.Thread(target=lambda: lines.append(sidecar.wait_until_up()["pool_id"])) for _ in range(3)]
    for waiter in waiters:
        waiter.start()
    for waiter in waiters:
        waiter.join()
    assert len(lines) == 3
    assert len(set(lines)) == 1


def test_kill_wakes_a_waiting_thread(fresh_run_dir: Path) -> None:
    sidecar = Sidecar(engine="echo", workers=1, hang_start=[0])
    sidecar.start()
    raised: list[StartError] = []

    def wait() -> None:
        try:
            sidecar.wait_until_up()
        except StartError as error:
            raised.append(error)

    waiter = threading.Thread(target=wait)
    waiter.start()
    wait_for(lambda: (fresh_run_dir / "default.sock.secret").exists(), "the dispatcher's start")
    sidecar.kill()
    waiter.join(10)
    assert len(raised) == 1
    assert sidecar.exit_fd == -1


@pytest.mark.parametrize("fails", [False, True], ids=["comes-up", "fails"])
def test_event_loop_drives_it_without_a_thread(fresh_run_dir: Path, fails: bool) -> None:
    stages: list[str] = []

    async def start(sidecar: Sidecar) -> None:
        loop = asyncio.get_running_loop()
        settled = loop.create_future()
        watched = set(sidecar.fds)

        def on_readable(fd: int) -> None:
            if sidecar.feed(fd) and not settled.done():
                settled.set_result(None)
            for ended in watched - set(sidecar.fds):
                loop.remove_reader(ended)
                watched.discard(ended)

        for fd in sidecar.fds:
            loop.add_reader(fd, on_readable, fd)
        await settled
        assert watched == set()
        exited = asyncio.Event()
        if not fails:
            loop.add_reader(sidecar.exit_fd, exited.set)
            sidecar.begin_drain()
            await exited.wait()
            loop.remove_reader(sidecar.exit_fd)

    sidecar = Sidecar(engine="echo", workers=1, fail_start=[0] if fails else [])
    sidecar.on_stage = lambda _, text: stages.append(text)
    sidecar.start()
    asyncio.run(start(sidecar))
    if fails:
        with pytest.raises(StartError, match="refuses"):
            sidecar.outcome()
    else:
        assert sidecar.outcome()["state"] == "ready"
        assert sidecar.stop() == ExitCode.OK
        assert stages[-1] == "ready"
    assert sidecar.exit_fd == -1


def test_calls_in_the_wrong_order_say_so(sidecar: Sidecar) -> None:
    for call in (sidecar.wait_until_up, sidecar.drain, sidecar.stop, sidecar.outcome, lambda: sidecar.endpoint):
        with pytest.raises(InvalidRequest, match=r"start|up"):
            call()
    sidecar.kill()
    sidecar.start()
    with pytest.raises(InvalidRequest, match="started before"):
        sidecar.start()
    with pytest.raises(InvalidRequest, match="still starting"):
        sidecar.outcome()


def test_garbage_collection_leaves_nothing(fresh_run_dir: Path) -> None:
    sidecar = Sidecar(engine="echo", workers=1)
    sidecar.start()
    tree = tree_of(sidecar.wait_until_up()["pid"])
    del sidecar
    wait_for(lambda: not [pid for pid in tree if is_alive(pid)], "the end", 5)


def test_script_that_ends_without_a_stop_leaves_nothing() -> None:
    script = "from enginepool import Sidecar\ns = Sidecar(engine='echo', workers=1)\ns.start()\nprint(s.wait_until_up()['pid'])"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert done.stderr == ""
    wait_for(lambda: not is_alive(int(done.stdout)), "the dispatcher's end", 5)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of a fork beside threads
def test_forked_child_neither_uses_nor_ends_it(sidecar: Sidecar) -> None:
    sidecar.start()
    sidecar.wait_until_up()
    child = os.fork()
    if child == 0:
        try:
            sidecar.kill()
            sidecar.drain()
        except ForkedPool:
            os._exit(0)
        os._exit(1)
    assert _forked(child) == 0
    assert sidecar.exit_code is None
    with Pool.connect(sidecar.endpoint) as pool:
        assert pool.status().state is PoolState.READY


def test_no_descriptor_is_left_open(fresh_run_dir: Path) -> None:
    def opened() -> int:
        return len(os.listdir("/proc/self/fd"))

    before = opened()
    with Sidecar(engine="echo", workers=1):
        assert opened() > before
    failed = Sidecar(engine="echo", workers=1, fail_start=[0])
    failed.start()
    with pytest.raises(StartError):
        failed.wait_until_up()
    failed.kill()
    assert opened() == before
