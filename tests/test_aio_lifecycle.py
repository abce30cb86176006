"""AsyncPool's life: starting and closing only wait on the loop, one thread, and nothing is left however it ends."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from aio_help import ENDLESS, FIVE, LOOPS, echo, eventually, run_on, until_in_hand
from conftest import is_alive, tree_of, wait_for, wait_for_end
from surroundings import deaf_to_its_host

from enginepool import (
    AsyncPool,
    InvalidRequest,
    NoDispatcher,
    Pool,
    PoolClosed,
    SamplingParams,
    SettingsError,
    StartError,
)
from enginepool.client import aio, aio_sidecar
from enginepool.client.child import Child

KEPT: list[AsyncPool] = []
TASKS: list[asyncio.Future[Any]] = []


@pytest.fixture(params=LOOPS)
def loop_kind(request: pytest.FixtureRequest) -> str:
    """Both event loops, by name."""
    return str(request.param)


@pytest.fixture(autouse=True)
def nothing_is_left(fresh_run_dir: Path) -> Any:
    """No thread, and no dispatcher's files, within a few seconds of a test's end."""
    yield
    KEPT.clear()
    TASKS.clear()
    gc.collect()
    wait_for(lambda: not _threads(), f"the end of {_threads()}", 5)
    wait_for(lambda: not list(fresh_run_dir.glob("*")), "the clean-up of the run directory", 5)


def _threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("enginepool")]


async def _tree(pool: AsyncPool) -> list[int]:
    return tree_of((await pool.status()).pid)


class _NoExecutor(ThreadPoolExecutor):
    def submit(self, *_: Any, **__: Any) -> Any:
        raise AssertionError("the default executor was used")


class _Ticker:
    """Counts turns of the loop, and notes the threads that there were."""

    def __init__(self) -> None:
        self.count = 0
        self.num_threads: set[int] = set()
        self._task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        while True:
            self.num_threads.add(threading.active_count())
            self.count += 1
            await asyncio.sleep(0.01)

    def stop(self) -> None:
        """Count no more."""
        self._task.cancel()


def test_start_work_and_close_leave_the_loop_free(loop_kind: str) -> None:
    policy, before = asyncio.get_event_loop_policy(), threading.active_count()
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD)]

    async def main() -> list[int]:
        asyncio.get_running_loop().set_default_executor(_NoExecutor())
        ticker = _Ticker()
        pool = await echo(start_s=0.5)
        assert ticker.count >= 5
        tree = await _tree(pool)
        outputs = await pool.generate_many([f"item {index}" for index in range(50)], FIVE)
        assert all(output.ok for output in outputs)
        last = asyncio.ensure_future(pool.generate("last", SamplingParams(max_tokens=300)))
        await until_in_hand(pool, 1)
        count = ticker.count
        await pool.close()
        assert last.done()  # it was drained
        assert ticker.count >= count + 5
        assert ticker.num_threads == {before, before + 1}
        assert threading.active_count() == before
        ticker.stop()
        return tree

    wait_for_end(run_on(loop_kind, main()))
    assert asyncio.get_event_loop_policy() is policy
    assert handlers[1:] == [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGCHLD)]


def test_loop_that_ends_without_a_close_leaves_nothing(loop_kind: str) -> None:
    async def main() -> list[int]:
        KEPT.append(await echo())
        TASKS.append(asyncio.ensure_future(KEPT[0].generate("item", ENDLESS)))
        await until_in_hand(KEPT[0], 1)
        return await _tree(KEPT[0])

    tree = run_on(loop_kind, main())
    assert not is_alive(tree[0])  # the loop's own end has taken the dispatcher with it
    wait_for_end(tree)
    wait_for(lambda: not _threads(), "the end of the thread", 5)
    with pytest.raises(PoolClosed, match="event loop"):
        run_on(loop_kind, KEPT[0].generate("item"))
    run_on(loop_kind, KEPT[0].close())
    assert KEPT[0].model == "echo"


def test_bare_close_of_the_loop_leaves_nothing(loop_kind: str) -> None:
    loop = LOOPS[loop_kind]()

    async def main() -> list[int]:
        KEPT.append(await echo())
        return await _tree(KEPT[0])

    tree = loop.run_until_complete(main())
    loop.close()
    wait_for_end(tree)
    wait_for(lambda: not _threads(), "the end of the thread", 5)


def test_dropped_pool_leaves_nothing_and_does_not_block(loop_kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    waiting: set[threading.Thread] = set()
    wait = Child.wait

    def noted(child: Child, timeout_s: float | None) -> bool:
        waiting.add(threading.current_thread())
        return wait(child, timeout_s)

    monkeypatch.setattr(Child, "wait", noted)

    async def main() -> None:
        pool = await echo()
        tree = await _tree(pool)
        del pool
        gc.collect()
        await eventually(lambda: not [pid for pid in tree if is_alive(pid)], "the end of the processes")

    run_on(loop_kind, main())
    assert threading.main_thread() not in waiting


@pytest.mark.parametrize("how", ["cancel", "timeout", "close", "close-drain-false", "end-of-loop"])
def test_start_that_is_ended_leaves_nothing(loop_kind: str, fresh_run_dir: Path, how: str) -> None:
    pids: list[int] = []

    async def main() -> None:
        pool = echo(hang_start=[0])
        starting = asyncio.ensure_future(pool)
        await eventually(lambda: (fresh_run_dir / "default.sock.secret").exists(), "the dispatcher's start")
        assert pool._sidecar is not None
        assert pool._sidecar.pid is not None
        pids.extend(tree_of(pool._sidecar.pid))
        if how == "end-of-loop":
            KEPT.append(pool)
            return
        if how == "cancel":
            starting.cancel()
        elif how.startswith("close"):
            await pool.close(drain=how == "close")
        expected = {"cancel": asyncio.CancelledError, "timeout": TimeoutError}.get(how, PoolClosed)
        with pytest.raises(expected):
            await asyncio.wait_for(starting, 0.1 if how == "timeout" else None)
        await eventually(lambda: not [pid for pid in pids if is_alive(pid)], "the end of the processes")
        with pytest.raises(PoolClosed):
            await pool.generate("item")

    run_on(loop_kind, main())
    wait_for_end(pids)


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        pytest.param({"fail_start": [0]}, StartError, id="worker-refused"),
        pytest.param({"no_such": 1}, SettingsError, id="unknown-engine-argument"),
    ],
)
def test_failed_start_raises_its_cause(settings: dict[str, Any], error: type[Exception]) -> None:
    async def main() -> None:
        pool = echo(**settings)
        with pytest.raises(error, match=r"refuses|no_such"):
            await pool
        with pytest.raises(PoolClosed, match="could not be started"):
            await pool.generate("item")
        with pytest.raises(InvalidRequest, match="started before"):
            await pool
        await pool.close()

    asyncio.run(main())


def test_pool_that_was_closed_first_does_not_start() -> None:
    async def main() -> None:
        pool = echo()
        await pool.close()
        with pytest.raises(PoolClosed, match="before"):
            await pool

    asyncio.run(main())


def test_connect_to_nobody_raises() -> None:
    async def main() -> None:
        with pytest.raises(NoDispatcher):
            await AsyncPool.connect()

    asyncio.run(main())


def test_connect_to_a_frozen_dispatcher_leaves_the_loop_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aio, "HELLO_TIMEOUT_S", 0.5)

    async def main(served: Pool) -> None:
        ticker, before = _Ticker(), threading.active_count()
        os.kill(served.status().pid, signal.SIGSTOP)
        with pytest.raises(NoDispatcher, match="does not answer"):
            await AsyncPool.connect(served.endpoint)
        assert ticker.count >= 5
        await eventually(lambda: threading.active_count() == before, "the end of the thread")
        ticker.stop()

    with Pool(engine="echo", workers=1) as served:
        pid = served.status().pid
        try:
            asyncio.run(main(served))
        finally:
            os.kill(pid, signal.SIGCONT)


def test_close_twice_at_once_and_after_a_cancelled_close(loop_kind: str) -> None:
    async def main() -> None:
        pool = await echo()
        tree = await _tree(pool)
        item = asyncio.ensure_future(pool.generate("item", SamplingParams(max_tokens=300)))
        await until_in_hand(pool, 1)
        cancelled = asyncio.create_task(pool.close())
        await asyncio.sleep(0)
        cancelled.cancel()
        with pytest.raises(asyncio.CancelledError):
            await cancelled
        with pytest.raises(PoolClosed):
            await pool.generate("item")
        await asyncio.gather(pool.close(), pool.close(), pool.close())
        assert (await item).ok
        assert not [pid for pid in tree if is_alive(pid)]
        await pool.close()
        await pool.close(drain=False)

    run_on(loop_kind, main())


def test_close_without_drain_ends_one_that_drains() -> None:
    async def main() -> None:
        pool = await echo()
        waits: list[asyncio.Future[Any]] = [
            asyncio.ensure_future(pool.generate("item", ENDLESS)),
            asyncio.ensure_future(pool.generate_many(["item"] * 3, ENDLESS)),
            asyncio.ensure_future(anext(pool.iter_many(["item"] * 3, ENDLESS))),
            pool.submit("item", ENDLESS),
        ]
        await until_in_hand(pool, 8)
        draining = asyncio.create_task(pool.close())
        await asyncio.sleep(0)
        assert not draining.done()
        await pool.close(drain=False)
        await draining
        ended = await asyncio.gather(*waits, return_exceptions=True)
        assert [type(one) for one in ended] == [PoolClosed] * 4

    asyncio.run(main())


def test_block_that_raises_does_not_wait_for_items() -> None:
    async def main() -> None:
        async with echo() as pool:
            pool.submit("item", ENDLESS).add_done_callback(lambda done: done.exception())
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        asyncio.run(main())


def test_close_of_a_frozen_dispatcher_waits_on_the_loop_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", deaf_to_its_host(tmp_path)["PYTHONPATH"])
    monkeypatch.setattr(aio_sidecar, "KILL_WAIT_S", 0.3)
    waited: list[int | None] = []
    wait = Child.wait

    def noted(child: Child, timeout_s: float | None) -> bool:
        waited.append(child.exit_code)
        return wait(child, timeout_s)

    monkeypatch.setattr(Child, "wait", noted)

    async def main() -> list[int]:
        pool = await echo(shutdown_timeout_s=0.1)
        tree = await _tree(pool)
        os.kill(tree[0], signal.SIGSTOP)
        await pool.close(drain=False)
        return tree

    wait_for_end(asyncio.run(main()))
    assert None not in waited  # a process that still ran was never waited for by blocking
    folder = Path(os.environ["ENGINEPOOL_RUN_DIR"])
    for left in folder.iterdir():  # a dispatcher that was killed hard cleans nothing up
        left.unlink()
