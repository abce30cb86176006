"""Shared fixtures: private run directories, pools on the echo engine, one real vLLM pool, and the hunt for leftovers."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from aio_help import LOOPS, Play, join_and_play, run_on
from vllm_work import CONVERSATIONS, ENGINE_ARGS, GREEDY, KV_BYTES, PROMPTS, SHORT

from enginepool import Pool
from enginepool.demo.model import ensure_model

REPO = Path(__file__).resolve().parent.parent
ENGINEPOOL = [sys.executable, "-m", "enginepool"]


if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a shell does that to what it runs in the background, and children inherit it
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With several test processes (`-n`) a file stays in one of them, and nearly all that needs real engines in one."""
    from xdist.scheduler import LoadScopeScheduling

    class Scheduling(LoadScopeScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            return "vllm" if "/test_vllm" in file or "::test_vllm_example" in nodeid else file

    return Scheduling(config, log)


def wait_for(condition: Callable[[], object], what: str, timeout_s: float = 20.0) -> None:
    """Wait until `condition` holds, or fail saying what did not come."""
    pause = threading.Event()
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not happen within {timeout_s:g} s"
        pause.wait(0.01)


def kill_when(condition: Callable[[], object], what: str, *pids: int, number: signal.Signals = signal.SIGKILL) -> threading.Thread:
    """Start a thread that signals these processes as soon as `condition` holds; the caller joins it."""

    def kill() -> None:
        wait_for(condition, what, 60)
        for pid in pids:
            os.kill(pid, number)

    thread = threading.Thread(target=kill)
    thread.start()
    return thread


def is_alive(pid: int) -> bool:
    """Whether the process exists and is not a zombie (an init that does not reap keeps those)."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def wait_for_end(pids: list[int]) -> None:
    """Wait until all these processes are gone."""
    wait_for(lambda: not [pid for pid in pids if is_alive(pid)], "the end of the processes", 5)


def worker_pids(pool: Pool) -> list[int]:
    """The pids of all workers that run now."""
    return [worker.pid for worker in pool.status().workers if worker.pid is not None]


def tree_of(pid: int) -> list[int]:
    """The process and all its descendants."""
    process = psutil.Process(pid)
    return [pid, *(child.pid for child in process.children(recursive=True))]


@pytest.fixture(scope="session", autouse=True)
def run_directory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A run directory of the test session's own; at the end nothing of ours may be left in it, in /proc or in a thread."""
    folder = tmp_path_factory.mktemp("run", numbered=True)
    os.environ["ENGINEPOOL_RUN_DIR"] = str(folder)
    os.environ.pop("ENGINEPOOL_ENDPOINT", None)
    os.environ["SPT_NOENV"] = "1"  # or setproctitle writes its titles over the environment, and nobody of ours is found by it
    yield folder
    wait_for(lambda: not processes_of(folder), f"the end of {processes_of(folder)}", 10)
    wait_for(lambda: not _leftover_threads(), f"the end of threads {_leftover_threads()}", 10)


def processes_of(folder: Path) -> list[psutil.Process]:
    """Every process that was started with this run directory, except this one."""
    marker = f"ENGINEPOOL_RUN_DIR={folder}\0".encode()
    found = []
    for process in psutil.process_iter():
        try:
            if process.pid != os.getpid() and marker in Path(f"/proc/{process.pid}/environ").read_bytes():
                found.append(process)
        except OSError:
            continue
    return [process for process in found if is_alive(process.pid)]


def _leftover_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("enginepool")]


@pytest.fixture
def fresh_run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run directory for one test, so that its default endpoint is free."""
    folder = tmp_path / "run"
    monkeypatch.setenv("ENGINEPOOL_RUN_DIR", str(folder))
    return folder


@pytest.fixture(scope="module")
def echo_pool() -> Iterator[Pool]:
    """Two echo workers that take a millisecond a token, shared by a module's tests."""
    with Pool(engine="echo", workers=2, step_s=0.001, max_num_seqs=8, max_model_len=512) as pool:
        yield pool


@pytest.fixture(scope="session")
def vllm_reference() -> list[dict[str, Any]]:
    """Plain vLLM's answers to vllm_work's prompts, then to its conversations, on one core like a worker."""
    asked = {
        "model": str(ensure_model()),
        "prompts": PROMPTS,
        "conversations": list(CONVERSATIONS.values()),
        "max_tokens": GREEDY.max_tokens,
        "chat_max_tokens": SHORT.max_tokens,
        "engine_args": ENGINE_ARGS | {"kv_cache_memory_bytes": KV_BYTES, "distributed_executor_backend": "uni"},
    }
    environment = os.environ | {"OMP_NUM_THREADS": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR"}
    core = min(os.sched_getaffinity(0))
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("vllm_reference.py"))],
        input=json.dumps(asked),
        capture_output=True,
        text=True,
        env=environment,
        preexec_fn=lambda: os.sched_setaffinity(0, {core}),
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    answers: list[dict[str, Any]] = json.loads(done.stdout.strip().splitlines()[-1])
    return answers


@pytest.fixture(scope="session")
def vllm_pool(run_directory: Path, vllm_reference: list[dict[str, Any]]) -> Iterator[Pool]:
    """Two real workers with the embedded model, shared by all tests that need no other; started after the reference has ended."""
    with Pool(workers=2, kv_cache_budget_bytes=2 * KV_BYTES, **ENGINE_ARGS) as pool:
        yield pool


@pytest.fixture(params=LOOPS)
def play(request: pytest.FixtureRequest, echo_pool: Pool) -> Play:
    """Play a scenario on a new event loop, with an AsyncPool that has joined the module's pool."""
    return lambda scenario: run_on(request.param, join_and_play(echo_pool.endpoint, scenario))


class Served:
    """An `enginepool serve` process under test."""

    def __init__(self, *arguments: str, env: dict[str, str] | None = None, preexec_fn: Callable[[], object] | None = None) -> None:
        read_fd, write_fd = os.pipe()
        self.ready_fd = read_fd
        self.process = subprocess.Popen(
            [*ENGINEPOOL, "serve", "--ready-fd", str(write_fd), *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            pass_fds=(write_fd,),
            env=os.environ | (env or {}),
            preexec_fn=preexec_fn,
        )
        os.close(write_fd)
        self._output: tuple[str, str] | None = None

    @property
    def pid(self) -> int:
        """The dispatcher's pid."""
        return self.process.pid

    def ready_line(self) -> str:
        """Everything written to the ready descriptor until its end."""
        read_fd, self.ready_fd = self.ready_fd, -1
        with os.fdopen(read_fd) as file:
            return file.read()

    def finish(self, timeout_s: float = 30) -> tuple[int, str]:
        """Wait for the exit; returns the code and what was printed to stderr."""
        if self._output is None:
            self._output = self.process.communicate(timeout=timeout_s)
        return self.process.returncode, self._output[1]

    @property
    def output(self) -> tuple[str, str]:
        """What was printed to stdout and stderr, once it has ended."""
        assert self._output is not None
        return self._output

    def end(self) -> None:
        """Make sure that it is gone, and its descriptors with it."""
        if self.process.poll() is None:
            self.process.kill()
        self.finish()
        if self.ready_fd != -1:
            os.close(self.ready_fd)
            self.ready_fd = -1


Serve = Callable[..., Served]


@pytest.fixture
def serve(fresh_run_dir: Path) -> Iterator[Serve]:
    """Start `enginepool serve` with arguments; whatever is left at the end is killed."""
    started: list[Served] = []

    def start(*arguments: str, env: dict[str, str] | None = None, preexec_fn: Callable[[], object] | None = None) -> Served:
        started.append(Served(*arguments, env=env, preexec_fn=preexec_fn))
        return started[-1]

    yield start
    for served in started:
        served.end()
