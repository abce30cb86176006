"""`enginepool serve` as a process: the ready line, endpoints, signals, drains, start failures and exit codes."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from conftest import ENGINEPOOL, Serve, is_alive, tree_of, wait_for

from enginepool import Code, Draining, NoDispatcher, Pool, PoolState, SamplingParams, rundir
from enginepool.client.connection import Connection
from enginepool.errors import ExitCode


def test_ready_line_is_one_json_object_once_the_pool_is_up(serve: Serve) -> None:
    served = serve("--engine", "echo", "--workers", "2")
    text = served.ready_line()
    line = json.loads(text)
    assert text.count("\n") == 1
    assert (line["pid"], line["model"], line["state"]) == (served.pid, "echo", "ready")
    assert [plan["worker"] for plan in line["plan"]] == [0, 1]
    with Pool.connect(line["endpoint"]) as pool:
        assert pool.pool_id == line["pool_id"]
        assert pool.generate("hello", SamplingParams(max_tokens=3)).text == "hel"


def test_serve_prints_the_line_to_paste(serve: Serve) -> None:
    served = serve("--engine", "echo")
    endpoint = json.loads(served.ready_line())["endpoint"]
    served.process.terminate()
    code, stderr = served.finish()
    assert code == ExitCode.OK
    assert f"Pool.connect({endpoint!r})" in stderr


def test_tcp_port_zero_reports_what_the_kernel_chose(serve: Serve) -> None:
    served = serve("--engine", "echo", "--endpoint", "tcp://127.0.0.1:0")
    endpoint = json.loads(served.ready_line())["endpoint"]
    assert endpoint.startswith("tcp://127.0.0.1:")
    assert not endpoint.endswith(":0")
    with Pool.connect(endpoint) as pool:
        assert pool.generate("hello", SamplingParams(max_tokens=3)).ok


def test_taken_endpoint_is_told_at_once_with_its_holder(serve: Serve) -> None:
    first = serve("--engine", "echo")
    endpoint = json.loads(first.ready_line())["endpoint"]
    second = serve("--engine", "echo", "--endpoint", endpoint)
    code, stderr = second.finish()
    assert code == ExitCode.USAGE
    assert f"held by the pool with pid {first.pid}" in stderr
    assert json.loads(second.ready_line())["exit_code"] == ExitCode.USAGE
    assert is_alive(first.pid)


def test_taken_tcp_port_is_told(serve: Serve) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        served = serve("--engine", "echo", "--endpoint", f"tcp://127.0.0.1:{taken.getsockname()[1]}")
        code, stderr = served.finish()
    assert code == ExitCode.USAGE
    assert "in use" in stderr


def test_sockets_and_secret_are_the_users_alone(serve: Serve, fresh_run_dir: Path) -> None:
    serve("--engine", "echo").ready_line()
    assert fresh_run_dir.stat().st_mode & 0o777 == 0o700
    assert {path.name: path.stat().st_mode & 0o777 for path in fresh_run_dir.iterdir()} == {
        "default.sock": 0o600,
        "default.sock.back": 0o600,
        "default.sock.lock": 0o600,
        "default.sock.secret": 0o600,
    }


def test_run_directory_is_empty_after_a_stop(serve: Serve, fresh_run_dir: Path) -> None:
    served = serve("--engine", "echo")
    served.ready_line()
    served.process.terminate()
    assert served.finish()[0] == ExitCode.OK
    assert list(fresh_run_dir.iterdir()) == []


def test_wrong_secret_is_refused(serve: Serve, fresh_run_dir: Path) -> None:
    endpoint = json.loads(serve("--engine", "echo").ready_line())["endpoint"]
    secret = fresh_run_dir / "default.sock.secret"
    right = secret.read_bytes()
    secret.write_bytes(b"x" * 32)  # in place: the lock stays
    with pytest.raises(NoDispatcher, match="secret"):
        Connection(endpoint)
    secret.write_bytes(right)
    with Pool.connect(endpoint) as pool:
        assert pool.status().state is PoolState.READY


def test_a_stopped_pool_is_not_found(serve: Serve) -> None:
    served = serve("--engine", "echo")
    endpoint = json.loads(served.ready_line())["endpoint"]
    served.process.kill()
    served.finish()
    with pytest.raises(NoDispatcher):
        Pool.connect(endpoint)
    assert serve("--engine", "echo").ready_line().count(endpoint) == 1


def test_sigterm_finishes_what_is_in_flight_and_exits_0(serve: Serve) -> None:
    served = serve("--engine", "echo", "--config", str(_slow_echo(served_dir())))
    served.ready_line()
    with Pool.connect() as pool:
        futures = [pool.submit("in flight", SamplingParams(max_tokens=100)) for _ in range(6)]
        wait_for(lambda: pool.status().in_flight == 6, "all six in flight")
        served.process.terminate()
        wait_for(lambda: pool.status().state is PoolState.DRAINING, "the drain")
        with pytest.raises(Draining, match="takes no new work"):
            pool.generate("too late", SamplingParams(max_tokens=3))
        assert all(future.result(timeout=20).ok for future in futures)
    code, stderr = served.finish()
    assert code == ExitCode.OK
    assert "Traceback" not in stderr


def test_group_sigterm_does_not_cut_the_drain_short(serve: Serve) -> None:
    served = serve("--engine", "echo", "--config", str(_slow_echo(served_dir())))
    served.ready_line()
    with Pool.connect() as pool:
        future = pool.submit("in flight", SamplingParams(max_tokens=100))
        wait_for(lambda: pool.status().in_flight == 1, "one in flight")
        for pid in tree_of(served.pid)[1:]:
            os.kill(pid, signal.SIGTERM)
        served.process.terminate()
        assert future.result(timeout=20).attempts == 1
    assert served.finish()[0] == ExitCode.OK


def test_drain_limit_returns_the_rest_as_retryable(serve: Serve) -> None:
    served = serve("--engine", "echo", "--config", str(_slow_echo(served_dir())), "--drain-timeout-s", "0.3")
    served.ready_line()
    with Pool.connect() as pool:
        future = pool.submit("endless", SamplingParams(max_tokens=10_000_000))
        wait_for(lambda: pool.status().in_flight == 1, "one in flight")
        served.process.terminate()
        error = future.result(timeout=20).error
    assert error is not None
    assert error.code is Code.DRAINING
    assert served.finish()[0] == ExitCode.DRAIN_LIMIT


def test_later_drain_may_shorten_the_limit(serve: Serve) -> None:
    """`enginepool drain` tells how it went, and exits as `serve` does."""
    served = serve("--engine", "echo", "--config", str(_slow_echo(served_dir())))
    served.ready_line()
    with Pool.connect() as pool:
        future = pool.submit("endless", SamplingParams(max_tokens=10_000_000))
        wait_for(lambda: pool.status().in_flight == 1, "one in flight")
        served.process.terminate()
        wait_for(lambda: pool.status().state is PoolState.DRAINING, "the drain")
        asked = subprocess.run([*ENGINEPOOL, "drain", "--timeout-s", "0.2"], capture_output=True, text=True, timeout=60)
        error = future.result(timeout=20).error
    assert error is not None
    assert error.code is Code.DRAINING
    assert served.finish()[0] == asked.returncode == ExitCode.DRAIN_LIMIT
    assert "the limit was reached: stopped; 1 unfinished item returned as retryable" in asked.stderr


def test_second_sigint_kills_the_tree(serve: Serve) -> None:
    served = serve("--engine", "echo", "--config", str(_slow_echo(served_dir())))
    served.ready_line()
    tree = tree_of(served.pid)
    with Pool.connect() as pool:
        pool.submit("endless", SamplingParams(max_tokens=10_000_000))
        wait_for(lambda: pool.status().in_flight == 1, "one in flight")
        served.process.send_signal(signal.SIGINT)
        wait_for(lambda: pool.status().state is PoolState.DRAINING, "the drain")
        served.process.send_signal(signal.SIGINT)
        assert served.finish()[0] == ExitCode.INTERRUPTED
        pool.close(drain=False)
    assert not [pid for pid in tree if is_alive(pid)]


def test_sigterm_while_loading_stops_at_once(serve: Serve) -> None:
    served = serve("--engine", "echo", "--config", str(_toml(served_dir(), hang_start=[0])))
    wait_for(lambda: len(tree_of(served.pid)) > 1, "the worker's start")
    served.process.terminate()
    assert served.finish(10)[0] == ExitCode.OK


def test_worker_that_hangs_in_close_is_killed_at_the_shutdown_limit(serve: Serve) -> None:
    served = serve("--engine", "echo", "--config", str(_toml(served_dir(), hang_close=True)), "--shutdown-timeout-s", "0.3")
    served.ready_line()
    served.process.terminate()
    code, stderr = served.finish(10)
    assert code == ExitCode.OK
    assert "killing them" in stderr


def test_refused_start_exits_3_with_the_cause_and_does_not_retry(serve: Serve) -> None:
    served = serve("--engine", "echo", "--workers", "2", "--config", str(_toml(served_dir(), fail_start=[0, 1])))
    line = json.loads(served.ready_line())
    code, stderr = served.finish()
    assert code == line["exit_code"] == ExitCode.START_FAILED
    assert "the script refuses this worker's start" in line["error"]
    assert "restart" not in stderr


def test_crash_in_start_is_retried_within_the_budget_then_exits_3(serve: Serve) -> None:
    served = serve("--engine", "echo", "--config", str(_toml(served_dir(), crash_start=[0])), "--max-restarts", "2")
    line = json.loads(served.ready_line())
    code, stderr = served.finish()
    assert code == ExitCode.START_FAILED
    assert stderr.count("started") == 3
    assert "exited with code 9" in line["error"]


def test_one_worker_failing_is_degraded_service_when_min_ready_allows_it(serve: Serve) -> None:
    served = serve(
        "--engine", "echo", "--workers", "2", "--min-ready", "1", "--config", str(_toml(served_dir(), fail_start=[1], start_s=0.2))
    )
    assert json.loads(served.ready_line())["state"] == "degraded"
    with Pool.connect() as pool:
        status = pool.status()
        assert status.state is PoolState.DEGRADED
        assert "worker 1: the script refuses" in str(status.reason)
        assert pool.generate("still served", SamplingParams(max_tokens=3)).worker == 0


def test_one_worker_failing_fails_the_pool_by_default(serve: Serve) -> None:
    served = serve("--engine", "echo", "--workers", "2", "--max-restarts", "0", "--config", str(_toml(served_dir(), fail_start=[1])))
    code, _ = served.finish()
    assert code == ExitCode.START_FAILED


def test_silent_start_is_ended_at_the_start_limit(serve: Serve) -> None:
    config = _toml(served_dir(), hang_start=[0])
    served = serve("--engine", "echo", "--config", str(config), "--start-timeout-s", "0.5", "--max-restarts", "0")
    line = json.loads(served.ready_line())
    assert served.finish()[0] == ExitCode.START_FAILED
    assert "no sign of life for 0.5 s" in line["error"]


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        pytest.param(["--engine", "echo", "--workers", "0"], ExitCode.USAGE, "at least 1", id="no workers"),
        pytest.param(["--engine", "gpu"], ExitCode.USAGE, "`engine`", id="unknown engine"),
        pytest.param(["--max-model-len", "5"], ExitCode.USAGE, "go after `--`", id="vLLM flag before the dashes"),
        pytest.param(["--worker", "2"], ExitCode.USAGE, "did you mean --workers?", id="nearly a flag"),
        pytest.param(["--engine", "echo", "--", "--max-model-len", "5"], ExitCode.USAGE, "takes no vLLM flags", id="flags for echo"),
        pytest.param(["--batch-timeout-s", "1"], ExitCode.USAGE, "batch_size", id="timeout without size"),
        pytest.param(["--endpoint", "tcp://0.0.0.0:5"], ExitCode.USAGE, "loopback", id="open address"),
        pytest.param(["--config", "/nonexistent.toml"], ExitCode.USAGE, "/nonexistent.toml", id="no config file"),
        pytest.param(["/nonexistent/model"], ExitCode.START_FAILED, "/nonexistent/model", id="no such model"),
    ],
)
def test_bad_start_says_why(serve: Serve, arguments: list[str], code: ExitCode, text: str) -> None:
    served = serve(*arguments)
    got, stderr = served.finish()
    assert got == code
    assert text in stderr
    assert len(stderr.strip().splitlines()) <= 2


def test_vllm_missing_names_the_extra_and_exits_6(serve: Serve, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import importlib.util as u\nfind = u.find_spec\nu.find_spec = lambda name, *a: None if name == 'vllm' else find(name, *a)\n"
    )
    served = serve(env={"PYTHONPATH": str(tmp_path)})
    code, stderr = served.finish()
    assert code == ExitCode.ENGINE_MISSING
    assert "pip install 'enginepool[" in stderr


def test_die_with_parent_stops_when_the_starter_is_killed(fresh_run_dir: Path, tmp_path: Path) -> None:
    starter = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import subprocess, sys, time\n"
            "subprocess.Popen([sys.executable, '-m', 'enginepool', 'serve', '--engine', 'echo', '--die-with-parent'])\n"
            "time.sleep(600)",
        ],
        stderr=subprocess.DEVNULL,
    )
    wait_for(lambda: (fresh_run_dir / "default.sock.secret").exists(), "the pool's start")
    with Pool.connect() as pool:
        wait_for(lambda: pool.status().state is PoolState.READY, "the pool")
        tree = tree_of(pool.status().pid)
        starter.kill()
        starter.wait()
        wait_for(lambda: not [pid for pid in tree if is_alive(pid)], "the end of dispatcher and workers", 5)
        pool.close(drain=False)


def test_dispatcher_reads_stderr_that_nobody_reads(serve: Serve) -> None:
    """A full log pipe must not block generation; the dispatcher drops lines and counts them."""
    read_fd, write_fd = os.pipe()
    process = subprocess.Popen(
        [*ENGINEPOOL, "serve", "--engine", "echo", "--config", str(_toml(served_dir(), stdout="x" * 300_000))],
        stderr=write_fd,
        stdin=subprocess.DEVNULL,
    )
    os.close(write_fd)
    try:
        wait_for(lambda: _has_secret(), "the pool's start")
        with Pool.connect() as pool:
            wait_for(lambda: pool.status().state is PoolState.READY, "the pool")
            assert pool.generate("hello", SamplingParams(max_tokens=3)).ok
    finally:
        process.terminate()
        process.wait(10)
        os.close(read_fd)


def test_titles_tell_the_roles(serve: Serve) -> None:
    served = serve("--engine", "echo", "--workers", "2")
    served.ready_line()
    titles = sorted(" ".join(psutil.Process(pid).cmdline()).strip() for pid in tree_of(served.pid))
    assert [title for title in titles if title.startswith("enginepool")] == [
        "enginepool dispatcher",
        "enginepool worker 0",
        "enginepool worker 1",
    ]


def served_dir() -> Path:
    """The run directory of the test, where its settings file may lie too."""
    folder = rundir.run_dir().parent
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _has_secret() -> bool:
    return (rundir.run_dir() / "default.sock.secret").exists()


def _slow_echo(folder: Path) -> Path:
    return _toml(folder, step_s=0.005)


def _toml(folder: Path, **engine_args: object) -> Path:
    path = folder / "pool.toml"
    path.write_text("[engine_args]\n" + "".join(f"{name} = {json.dumps(value)}\n" for name, value in engine_args.items()))
    return path
