"""Two pools on one machine: started at the same instant, at the same address, or one right after the other's death; no cross-talk ever."""

from __future__ import annotations

import json
import os
import signal
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
from conftest import Serve, wait_for, worker_pids
from surroundings import config

from enginepool import Pool, SamplingParams
from enginepool.errors import ExitCode

MARKED = "a prompt that only one of the two pools takes"


def _own_answers(pool: Pool, takes_long: bool) -> None:
    """The pool's workers are children of its dispatcher, and all answers come from engines of its own kind."""
    status = pool.status()
    assert {psutil.Process(pid).ppid() for pid in worker_pids(pool)} == {status.pid}
    outputs = [future.result(timeout=20) for future in [pool.submit(MARKED, SamplingParams(max_tokens=3)) for _ in range(20)]]
    assert {output.ok for output in outputs} == {takes_long}


def test_pools_started_at_the_same_instant_get_endpoints_of_their_own(serve: Serve, tmp_path: Path) -> None:
    """The short-sighted pool refuses the marked prompt, the other one takes it."""
    (tmp_path / "short").mkdir()
    (tmp_path / "long").mkdir()
    configs = {False: config(tmp_path / "short", max_model_len=10), True: config(tmp_path / "long")}
    for _ in range(3):
        served = {takes_long: serve("--engine", "echo", "--workers", "2", "--config", path) for takes_long, path in configs.items()}
        lines = {takes_long: json.loads(one.ready_line()) for takes_long, one in served.items()}
        assert [line.get("error") for line in lines.values()] == [None, None]
        endpoints = {takes_long: line["endpoint"] for takes_long, line in lines.items()}
        assert len(set(endpoints.values())) == 2
        for takes_long, endpoint in endpoints.items():
            with Pool.connect(endpoint) as pool:
                _own_answers(pool, takes_long)
        for one in served.values():
            one.process.terminate()
        assert {one.finish()[0] for one in served.values()} == {ExitCode.OK}


@pytest.mark.parametrize("scheme", ["ipc", "tcp"])
def test_one_address_for_two_goes_to_one_and_the_other_names_it(serve: Serve, tmp_path: Path, scheme: str) -> None:
    """Four at the same instant: no probing before the bind, so one wins, the others say who, before anything loads."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        endpoint = f"ipc://{tmp_path}/pool.sock" if scheme == "ipc" else f"tcp://127.0.0.1:{free.getsockname()[1]}"
    served = [serve("--engine", "echo", "--endpoint", endpoint) for _ in range(4)]
    with ThreadPoolExecutor() as threads:
        lines = [json.loads(text) for text in threads.map(lambda one: one.ready_line(), served)]
    (winner,) = [one for one, line in zip(served, lines, strict=True) if "error" not in line]
    losers = [line for line in lines if "error" in line]
    assert [line["exit_code"] for line in losers] == [ExitCode.USAGE] * 3
    assert all(str(winner.pid) in line["error"] for line in losers), losers
    with Pool.connect(endpoint) as pool:
        assert pool.status().pid == winner.pid
        _own_answers(pool, True)


@pytest.mark.parametrize("scheme", ["ipc", "tcp"])
def test_address_of_a_killed_pool_is_free_at_once(serve: Serve, tmp_path: Path, scheme: str) -> None:
    """With clients connected at the moment of the kill, and the port in TIME_WAIT."""
    endpoint = f"ipc://{tmp_path}/pool.sock" if scheme == "ipc" else "tcp://127.0.0.1:0"
    first = serve("--engine", "echo", "--endpoint", endpoint)
    endpoint = json.loads(first.ready_line())["endpoint"]
    orphan = Pool.connect(endpoint)
    try:
        future = orphan.submit("endless", SamplingParams(max_tokens=10_000_000, extra_args={"fault": "hang", "at": 1}))
        wait_for(lambda: orphan.status().in_flight == 1, "one in flight")
        os.kill(first.pid, signal.SIGKILL)
        second = serve("--engine", "echo", "--endpoint", endpoint)
        assert json.loads(second.ready_line())["endpoint"] == endpoint
        with Pool.connect(endpoint) as pool:
            assert pool.status().pid == second.pid
            _own_answers(pool, True)
        assert future.exception(timeout=5) is not None
    finally:
        orphan.close(drain=False)
