"""Embedded pools begin and end cleanly however the host program is written or dies."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from conftest import is_alive, kill_when, tree_of, wait_for

from enginepool import EnginePoolWarning, Pool, PoolClosed, PoolLost, SamplingParams, StartError

FIVE = SamplingParams(max_tokens=5)
SCRIPT = """
from enginepool import Pool, SamplingParams
pool = Pool(engine="echo", workers=1)
print(pool.generate("hello", SamplingParams(max_tokens=5)).text, pool.status().pid, flush=True)
"""


def _pids(pool: Pool) -> list[int]:
    return tree_of(pool.status().pid)


def _all_gone(pids: list[int]) -> bool:
    return not [pid for pid in pids if is_alive(pid)]


def test_close_twice_then_use_raises(fresh_run_dir: Path) -> None:
    pool = Pool(engine="echo", workers=2)
    pids = _pids(pool)
    pool.close()
    pool.close(drain=False)
    assert _all_gone(pids)
    assert list(fresh_run_dir.iterdir()) == []
    for use in (lambda: pool.generate("x"), lambda: pool.generate_many(["x"]), lambda: pool.submit("x"), lambda: pool.status()):
        with pytest.raises(PoolClosed):
            use()


def test_close_with_drain_finishes_what_was_submitted() -> None:
    pool = Pool(engine="echo", workers=1, step_s=0.002)
    futures = [pool.submit(f"item {index}", SamplingParams(max_tokens=50)) for index in range(5)]
    pool.close(drain=True)
    assert all(future.result(timeout=0).ok for future in futures)


def test_close_without_drain_returns_at_once() -> None:
    pool = Pool(engine="echo", workers=1, step_s=0.01)
    future = pool.submit("endless", SamplingParams(max_tokens=10_000_000))
    wait_for(lambda: pool.status().in_flight == 1, "the item to run")
    pool.close(drain=False)
    with pytest.raises(PoolClosed):
        future.result(timeout=0)


def test_exception_in_the_with_block_does_not_wait_for_items() -> None:
    pids: list[int] = []

    def fail() -> None:
        with Pool(engine="echo", workers=1, step_s=0.01) as pool:
            pids.extend(_pids(pool))
            pool.submit("endless", SamplingParams(max_tokens=10_000_000))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert _all_gone(pids)


def test_garbage_collection_stops_an_embedded_pool() -> None:
    pool = Pool(engine="echo", workers=1)
    pids = _pids(pool)
    sidecar = pool._held.sidecar
    assert sidecar is not None
    del pool
    gc.collect()
    assert _all_gone(pids)
    assert sidecar.exit_code == 0  # it left by itself when its lifeline ended, it was not killed


def test_connected_pool_leaves_the_dispatcher_running(fresh_run_dir: Path) -> None:
    with Pool(engine="echo", workers=1) as owner:
        Pool.connect().close()
        assert owner.generate("still here", FIVE).ok


@pytest.mark.parametrize("form", ["file", "stdin", "dash c"])
def test_script_without_main_guard_ends_with_nothing_left(tmp_path: Path, form: str) -> None:
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    argv = {"file": [str(path)], "stdin": ["-"], "dash c": ["-c", SCRIPT]}[form]
    done = subprocess.run(
        [sys.executable, *argv], input=SCRIPT if form == "stdin" else None, capture_output=True, text=True, timeout=60, check=True
    )
    text, pid = done.stdout.split()
    assert text == "hello"
    assert done.stderr == ""
    wait_for(lambda: not is_alive(int(pid)), "the dispatcher's end", 5)


def test_pool_made_on_a_short_lived_thread_outlives_it() -> None:
    made: list[Pool] = []
    maker = threading.Thread(target=lambda: made.append(Pool(engine="echo", workers=1)))
    maker.start()
    maker.join()
    with made[0] as pool:
        assert pool.generate("hello", FIVE).text == "hello"


def test_pool_installs_no_signal_handler() -> None:
    before = {number: signal.getsignal(number) for number in signal.valid_signals()}
    with Pool(engine="echo", workers=1):
        assert {number: signal.getsignal(number) for number in signal.valid_signals()} == before


def test_ctrl_c_of_the_terminal_reaches_only_the_host() -> None:
    with Pool(engine="echo", workers=1) as pool:
        for pid in _pids(pool):
            assert os.getpgid(pid) != os.getpgid(0)
        os.kill(pool.status().pid, signal.SIGINT)
        assert pool.generate("unimpressed", FIVE).ok


def test_host_killed_hard_leaves_nothing() -> None:
    host = subprocess.Popen([sys.executable, "-c", SCRIPT + "\nimport time; time.sleep(600)"], stdout=subprocess.PIPE, text=True)
    assert host.stdout is not None
    pids = tree_of(int(host.stdout.readline().split()[1]))
    assert len(pids) >= 2
    host.kill()
    host.wait()
    host.stdout.close()
    wait_for(lambda: _all_gone(pids), "the end of dispatcher and worker", 5)


def test_host_killed_while_a_forked_child_keeps_its_pipes() -> None:
    script = SCRIPT + "\nimport os, time\nif os.fork() == 0:\n    print(os.getpid(), flush=True)\ntime.sleep(600)"
    host = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert host.stdout is not None
    pids = tree_of(int(host.stdout.readline().split()[1]))
    child = int(host.stdout.readline())
    host.kill()
    host.wait()
    try:
        wait_for(lambda: _all_gone(pids), "the end of dispatcher and worker", 5)
        assert is_alive(child)
    finally:
        os.kill(child, signal.SIGKILL)
        host.stdout.close()


def test_dispatcher_killed_raises_pool_lost_and_leaves_nothing(fresh_run_dir: Path) -> None:
    with Pool(engine="echo", workers=2, step_s=0.01) as pool:
        pids = _pids(pool)
        future = pool.submit("endless", SamplingParams(max_tokens=10_000_000))
        wait_for(lambda: pool.status().in_flight == 1, "the item to run")
        os.kill(pids[0], signal.SIGKILL)
        with pytest.raises(PoolLost, match="dispatcher"):
            future.result(timeout=5)
        with pytest.raises(PoolLost):
            pool.generate("too late", FIVE)
        wait_for(lambda: _all_gone(pids), "the end of the workers", 5)
    with Pool(engine="echo", workers=1) as again:
        assert again.generate("undisturbed by leftovers", FIVE).ok


def test_pool_lost_keeps_what_had_finished() -> None:
    with Pool(engine="echo", workers=1, step_s=0.002, max_num_seqs=4) as pool:
        dispatcher = pool.status().pid
        killer = kill_when(lambda: pool.status().finished >= 4, "some results", dispatcher)
        params = [SamplingParams(max_tokens=5 if index < 8 else 10_000_000) for index in range(12)]
        with pytest.raises(PoolLost, match="items had finished") as caught:
            pool.generate_many([f"item {index}" for index in range(12)], params)
        killer.join()
    assert len(caught.value.outputs) >= 4


def test_failed_start_leaves_nothing(fresh_run_dir: Path) -> None:
    with pytest.raises(StartError, match="the script refuses this worker's start"):
        Pool(engine="echo", workers=2, fail_start=[0, 1])
    assert list(fresh_run_dir.iterdir()) == []


def test_interrupted_start_leaves_nothing(fresh_run_dir: Path) -> None:
    main_thread = threading.get_ident()

    def interrupt() -> None:
        wait_for(lambda: (fresh_run_dir / "default.sock.secret").exists(), "the dispatcher's start")
        signal.pthread_kill(main_thread, signal.SIGINT)

    helper = threading.Thread(target=interrupt)
    helper.start()
    with pytest.raises(KeyboardInterrupt):
        Pool(engine="echo", workers=1, hang_start=[0])
    helper.join()
    wait_for(lambda: not list(fresh_run_dir.iterdir()), "the clean-up", 5)


def test_close_waits_for_a_call_that_still_submits() -> None:
    pool = Pool(engine="echo", workers=1, submit_window=2)
    outputs: list[object] = []
    started = threading.Event()

    def call() -> None:
        started.set()
        outputs.extend(pool.generate_many([f"item {index}" for index in range(500)], FIVE))

    caller = threading.Thread(target=call)
    caller.start()
    started.wait()
    wait_for(lambda: pool.status().finished > 0, "a first result")
    pool.close()
    caller.join()
    assert len(outputs) == 500


def test_close_without_drain_ends_another_threads_call_as_closed() -> None:
    pool = Pool(engine="echo", workers=1, step_s=0.01)
    raised: list[BaseException] = []

    def call() -> None:
        try:
            pool.generate_many(["endless"] * 4, SamplingParams(max_tokens=10_000_000))
        except PoolClosed as error:
            raised.append(error)

    caller = threading.Thread(target=call)
    caller.start()
    wait_for(lambda: pool.status().in_flight == 4, "the call to run")
    pool.close(drain=False)
    caller.join()
    assert len(raised) == 1


def test_interrupted_close_still_stops_the_pool() -> None:
    pool = Pool(engine="echo", workers=1, step_s=0.01)
    pids = _pids(pool)
    future = pool.submit("endless", SamplingParams(max_tokens=10_000_000))
    main_thread = threading.get_ident()
    with Pool.connect(pool.endpoint) as watcher:
        wait_for(lambda: watcher.status().in_flight == 1, "the item to run")
        interrupter = threading.Timer(0.2, lambda: signal.pthread_kill(main_thread, signal.SIGINT))
        interrupter.start()
        with pytest.raises(KeyboardInterrupt):
            pool.close(drain=True)
        interrupter.join()
        watcher.close(drain=False)
    assert future.done()
    assert _all_gone(pids)


def test_close_does_not_wait_for_what_a_call_has_given_up() -> None:
    pool = Pool(engine="echo", workers=1, step_s=0.001, drain_timeout_s=60.0)
    hang = SamplingParams(max_tokens=10, extra_args={"fault": "hang", "at": 3})
    with pytest.warns(EnginePoolWarning, match="1 timeout"):
        pool.generate_many(["hung"], hang, timeout_s=0.3)
    assert pool._connection.num_pending == 0
    pool.close(drain=True)


def test_pool_in_a_host_without_standard_descriptors() -> None:
    command = f'exec "{sys.executable}" -c "$0" <&- >&-'
    script = SCRIPT.replace("print(", "assert (").replace(", flush=True)", ")")
    subprocess.run(["bash", "-c", command, script], check=True, timeout=60)


def test_pool_does_not_import_from_the_current_folder(tmp_path: Path) -> None:
    for name in ("zmq", "selectors", "enginepool"):
        (tmp_path / f"{name}.py").write_text("raise RuntimeError('a file of the current folder was imported')")
    script = tmp_path / "elsewhere" / "script.py"
    script.parent.mkdir()
    script.write_text(SCRIPT)
    done = subprocess.run([sys.executable, str(script)], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.startswith("hello")


def test_worker_that_is_still_starting_dies_with_its_dispatcher(fresh_run_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import sys, time\nif 'enginepool.worker.main' in sys.orig_argv: time.sleep(600)\n")
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    command = [sys.executable, "-m", "enginepool", "serve", "--engine", "echo"]
    process = subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL)
    wait_for(lambda: len(tree_of(process.pid)) == 2, "the worker's start")
    worker = tree_of(process.pid)[1]
    process.kill()
    process.wait()
    wait_for(lambda: not is_alive(worker), "the worker's end", 5)
