"""AsyncSidecar: a dispatcher process that tasks of an event loop start, wait for and end."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from aio_help import ENDLESS, FIVE, LOOPS, eventually, run_on, until_in_hand
from conftest import is_alive, tree_of, wait_for
from surroundings import deaf_to_its_host

from enginepool import AsyncPool, AsyncSidecar, InvalidRequest, Output, PoolLost, SamplingParams, StartError
from enginepool.errors import ExitCode


@pytest.fixture(params=LOOPS)
def loop_kind(request: pytest.FixtureRequest) -> str:
    """Both event loops, by name."""
    return str(request.param)


@pytest.fixture
def sidecar(fresh_run_dir: Path) -> Iterator[AsyncSidecar]:
    """A slow echo sidecar that is not started yet; nothing may be left of it."""
    sidecar = AsyncSidecar(engine="echo", workers=1, step_s=0.001, drain_timeout_s=30.0)
    yield sidecar
    sidecar.kill()
    wait_for(lambda: not list(fresh_run_dir.glob("*")), "the clean-up", 5)


def test_block_is_up_inside_drains_and_is_gone_after(loop_kind: str, sidecar: AsyncSidecar) -> None:
    async def main() -> None:
        before = (threading.active_count(), len(os.listdir("/proc/self/fd")))
        async with sidecar, AsyncPool.connect(sidecar.endpoint) as pool:
            assert sidecar.pid is not None
            tree = tree_of(sidecar.pid)
            assert sidecar.poll() is None
            assert threading.active_count() == before[0] + 1
            future = pool.submit("item", SamplingParams(max_tokens=300))
            await until_in_hand(pool, 1)
            sidecar.begin_drain()
            assert (await future).ok
        assert sidecar.exit_code == ExitCode.OK
        assert not [pid for pid in tree if is_alive(pid)]
        assert (threading.active_count(), len(os.listdir("/proc/self/fd"))) == before

    run_on(loop_kind, main())


def test_several_tasks_may_wait_for_the_same(loop_kind: str, sidecar: AsyncSidecar) -> None:
    async def main() -> None:
        sidecar.start()
        lines = await asyncio.gather(sidecar.up(), sidecar.up(), sidecar.up())
        assert {line["state"] for line in lines} == {"ready"}
        assert await sidecar.up() == lines[0]
        waits = [asyncio.create_task(sidecar.exited()) for _ in range(3)]
        assert not await sidecar.exited(0.05)
        assert await sidecar.drained() == ExitCode.OK
        assert await asyncio.gather(*waits) == [True] * 3
        assert await sidecar.drained() == ExitCode.OK
        await sidecar.killed()

    run_on(loop_kind, main())


def test_cancelled_wait_leaves_it_starting(sidecar: AsyncSidecar) -> None:
    async def main() -> None:
        sidecar.start()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(sidecar.up(), 0.01)
        assert sidecar.exit_code is None
        assert (await sidecar.up())["state"] == "ready"
        await sidecar.killed()

    asyncio.run(main())


def test_failed_start_raises_its_cause_for_all(fresh_run_dir: Path) -> None:
    async def main() -> None:
        sidecar = AsyncSidecar(engine="echo", workers=1, fail_start=[0])
        sidecar.start()
        raised = await asyncio.gather(sidecar.up(), sidecar.up(), return_exceptions=True)
        assert [type(error) for error in raised] == [StartError] * 2
        assert sidecar.exit_fd == -1
        with pytest.raises(StartError, match="refuses"):
            async with AsyncSidecar(engine="echo", workers=1, fail_start=[0]):
                raise AssertionError("it is not up")

    asyncio.run(main())


@pytest.mark.parametrize("ends_at", ["start", "work"])
def test_cancelled_block_leaves_nothing(fresh_run_dir: Path, ends_at: str) -> None:
    others = set(tree_of(os.getpid()))  # a pool that several tests share may be among them
    trees: list[set[int]] = []

    def started() -> set[int]:
        return set(tree_of(os.getpid())) - others

    async def hold() -> None:
        sidecar = AsyncSidecar(engine="echo", workers=1, hang_start=[0] if ends_at == "start" else [])
        async with sidecar:
            await asyncio.Event().wait()

    async def main() -> None:
        task = asyncio.create_task(hold())
        secret = fresh_run_dir / "default.sock.secret"
        await eventually(lambda: secret.exists() and len(started()) > 1, "the start of a worker")
        trees.append(started())
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    assert not [pid for pid in trees[0] if is_alive(pid)]


def test_block_that_raises_waits_for_no_item(sidecar: AsyncSidecar) -> None:
    async def main() -> None:
        async with sidecar:
            pools.append(pool := await AsyncPool.connect(sidecar.endpoint))
            lost.append(pool.submit("item", ENDLESS))
            await until_in_hand(pool, 1)
            raise ZeroDivisionError

    pools: list[AsyncPool] = []
    lost: list[asyncio.Future[Output]] = []

    async def outer() -> None:
        with pytest.raises(ZeroDivisionError):
            await main()
        with pytest.raises(PoolLost):
            await lost[0]
        await pools[0].close()

    asyncio.run(outer())


def test_frozen_one_is_killed_hard(sidecar: AsyncSidecar, fresh_run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", deaf_to_its_host(tmp_path)["PYTHONPATH"])
    monkeypatch.setattr("enginepool.client.aio_sidecar.KILL_WAIT_S", 0.2)

    async def main() -> None:
        sidecar.start()
        tree = tree_of((await sidecar.up())["pid"])
        os.kill(tree[0], signal.SIGSTOP)
        await sidecar.killed()
        assert sidecar.exit_code == -signal.SIGKILL
        wait_for(lambda: not [pid for pid in tree if is_alive(pid)], "the end of the workers", 5)

    asyncio.run(main())
    for left in fresh_run_dir.iterdir():  # a dispatcher that was killed hard cleans nothing up
        left.unlink()


def test_calls_in_the_wrong_order_say_so(sidecar: AsyncSidecar) -> None:
    async def main() -> None:
        for call in (sidecar.up, sidecar.exited, sidecar.drained):
            with pytest.raises(InvalidRequest, match="start"):
                await call()
        await sidecar.killed()
        async with sidecar:
            with pytest.raises(InvalidRequest, match="started before"):
                await sidecar.__aenter__()
            async with AsyncPool.connect(sidecar.endpoint) as pool:
                assert (await pool.generate("item", FIVE)).ok

    asyncio.run(main())
