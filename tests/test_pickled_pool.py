"""A pickled Pool is a handle: it connects where it is first used, never owns, and many processes share one pool by it."""

from __future__ import annotations

import copy
import multiprocessing
import pickle
import subprocess
import sys
import threading
from collections.abc import Iterator
from multiprocessing.queues import SimpleQueue
from pathlib import Path

import pytest
from conftest import REPO, wait_for

from enginepool import ForkedPool, NoDispatcher, Pool, PoolClosed, SamplingParams

FIVE = SamplingParams(max_tokens=5)


@pytest.fixture
def handle(echo_pool: Pool) -> Iterator[Pool]:
    """A handle of the module's pool."""
    handle: Pool = pickle.loads(pickle.dumps(echo_pool))
    yield handle
    handle.close()


@pytest.fixture(autouse=True)
def alone(echo_pool: Pool) -> None:
    """The goodbyes of the test before have arrived: the module's pool has one client, itself."""
    wait_for(lambda: _num_clients(echo_pool) == 1, "the goodbyes")


def _num_clients(pool: Pool) -> int:
    return pool.status().clients


EXECUTOR = """
import multiprocessing, os, sys
from concurrent.futures import ProcessPoolExecutor
from enginepool import Pool, SamplingParams

def take(pool):
    global shared
    shared = pool

def ask(prompt):
    return os.getpid(), shared.pool_id, shared.generate(prompt, SamplingParams(max_tokens=200)).text[:9]

if __name__ == "__main__":
    with Pool.connect(sys.argv[1]) as pool:
        with ProcessPoolExecutor(2, multiprocessing.get_context("spawn"), take, (pool,)) as executor:
            answers = list(executor.map(ask, ["over here"] * 40))
        assert pool.generate("still here").ok
    pids, *rest = (set(values) for values in zip(*answers))
    print(len(pids), *map(sorted, rest))
"""


def _answer(pool: Pool, answers: SimpleQueue[object]) -> None:
    try:
        with pool:
            answers.put(pool.generate("hello", FIVE).text)
    except ForkedPool as error:
        answers.put(type(error).__name__)


def test_handle_connects_on_first_use_only(echo_pool: Pool, handle: Pool) -> None:
    assert handle.endpoint == echo_pool.endpoint
    assert "handle" in repr(handle)
    assert _num_clients(echo_pool) == 1
    assert handle.generate("hello", FIVE).text == "hello"
    assert _num_clients(echo_pool) == 2
    assert (handle.pool_id, handle.model) == (echo_pool.pool_id, "echo")


def test_closed_handle_leaves_the_pool_running(echo_pool: Pool, handle: Pool) -> None:
    with handle:
        assert [output.text for output in handle.generate_many(["hello"] * 3, FIVE)] == ["hello"] * 3
    wait_for(lambda: _num_clients(echo_pool) == 1, "the handle's goodbye")
    assert echo_pool.generate("hello", FIVE).ok
    with pytest.raises(PoolClosed):
        handle.generate("too late")


def test_handle_closed_before_its_first_use_never_connects(handle: Pool) -> None:
    handle.close()
    for use in (lambda: handle.generate("x"), lambda: handle.model, lambda: handle.status()):
        with pytest.raises(PoolClosed):
            use()


def test_handle_of_a_handle_and_copies_are_handles(echo_pool: Pool, handle: Pool) -> None:
    for other in (pickle.loads(pickle.dumps(handle)), copy.copy(echo_pool), copy.deepcopy(handle)):
        with other as again:
            assert again.pool_id == echo_pool.pool_id
    assert echo_pool.generate("hello", FIVE).ok


@pytest.mark.usefixtures("fresh_run_dir")
def test_handle_of_a_closed_pool_finds_nobody() -> None:
    pool = Pool(engine="echo", workers=1)
    pool.close()
    handle = pickle.loads(pickle.dumps(pool))
    with pytest.raises(NoDispatcher, match="no pool at"):
        handle.generate("hello")


@pytest.mark.usefixtures("fresh_run_dir")
def test_handle_that_found_nobody_may_try_again(tmp_path: Path) -> None:
    endpoint = f"ipc://{tmp_path}/pool.sock"
    with Pool(engine="echo", workers=1, endpoint=endpoint) as pool:
        handle: Pool = pickle.loads(pickle.dumps(pool))
    with pytest.raises(NoDispatcher):
        handle.status()
    with Pool(engine="echo", workers=1, endpoint=endpoint), handle:
        assert handle.generate("hello", FIVE).ok


def test_threads_that_use_a_handle_at_once_share_its_connection(echo_pool: Pool, handle: Pool) -> None:
    barrier = threading.Barrier(4)
    texts: list[str | None] = []

    def ask() -> None:
        barrier.wait()
        texts.append(handle.generate("hello", FIVE).text)

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert texts == ["hello"] * 4
    assert _num_clients(echo_pool) == 2


def test_worker_processes_of_an_executor_share_one_pool(echo_pool: Pool, tmp_path: Path) -> None:
    script = tmp_path / "executor.py"
    script.write_text(EXECUTOR)
    command = [sys.executable, str(script), echo_pool.endpoint]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == f"2 ['{echo_pool.pool_id}'] ['over here']\n"
    assert done.stderr == ""
    wait_for(lambda: _num_clients(echo_pool) == 1, "the end of the workers' connections")
    assert echo_pool.generate("still here", FIVE).ok


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of a fork beside threads
@pytest.mark.parametrize(("is_used", "answer"), [(False, "hello"), (True, "ForkedPool")], ids=["unused", "used"])
def test_handle_in_a_forked_child(handle: Pool, is_used: bool, answer: str) -> None:
    if is_used:
        handle.status()
    context = multiprocessing.get_context("fork")
    answers: SimpleQueue[object] = context.SimpleQueue()
    child = context.Process(target=_answer, args=(handle, answers))
    child.start()
    child.join(20)
    assert answers.get() == answer
    assert handle.generate("hello", FIVE).ok


@pytest.mark.usefixtures("fresh_run_dir")
def test_example_of_a_shared_pool_runs() -> None:
    command = [sys.executable, str(REPO / "docs" / "examples" / "shared_pool.py")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.splitlines() == [
        "{'question'} from the one pool: True",
        "this process asked nothing itself: True",
        "the pool runs on: True",
    ]
    assert done.stderr == ""
