"""Where an AsyncPool can be used and where not, and what programs that end in any way leave: nothing."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Coroutine
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from aio_help import FIVE, echo, eventually
from conftest import is_alive, tree_of, wait_for, wait_for_end

from enginepool import AsyncPool, ForkedPool, InvalidRequest, PoolClosed

pytestmark = pytest.mark.usefixtures("fresh_run_dir")


def test_use_outside_its_life_says_so() -> None:
    async def main() -> None:
        pool = echo()
        assert "not started" in repr(pool)
        with pytest.raises(InvalidRequest, match="await this AsyncPool first"):
            await pool.generate("item")
        with pytest.raises(InvalidRequest, match="await this AsyncPool first"):
            pool.stream("item")
        async with pool as entered:
            assert entered is pool
            assert pool.endpoint.startswith("ipc://")
            async with AsyncPool.connect(pool.endpoint) as other:
                assert other.pool_id == pool.pool_id
            with pytest.raises(PoolClosed):
                await other.generate("item")
            assert (await pool.generate("item", FIVE)).ok  # the one that joined did not stop it
        for use in (pool.stream, pool.submit, lambda item: pool.iter_many([item])):
            with pytest.raises(PoolClosed):
                use("item")
        with pytest.raises(PoolClosed):
            await pool.status()
        assert "closed" in repr(pool)

    asyncio.run(main())


def _raised_by(call: Callable[[], Any]) -> list[BaseException]:
    try:
        call()
    except Exception as error:
        return [error]
    return []


def _in_thread(make: Callable[[], Coroutine[Any, Any, Any]]) -> list[BaseException]:
    """Run in a loop of another thread; returns what it raised."""
    raised: list[BaseException] = []
    thread = threading.Thread(target=lambda: raised.extend(_raised_by(lambda: asyncio.run(asyncio.wait_for(make(), 20)))))
    thread.start()
    thread.join()
    return raised


def test_use_in_another_loop_or_in_none_is_refused() -> None:
    async def call(use: Callable[[], Any]) -> None:
        made = use()
        await (made if hasattr(made, "__await__") else anext(aiter(made)))

    async def main() -> AsyncPool:
        async with echo() as pool:
            uses: list[Callable[[], Any]] = [
                lambda: pool.generate("item"),
                lambda: pool.generate_many(["item"]),
                lambda: pool.iter_many(["item"]),
                lambda: pool.stream("item"),
                lambda: pool.submit("item"),
                pool.status,
                pool.close,
            ]
            for use in uses:
                (error,) = _in_thread(lambda use=use: call(use))  # type: ignore[misc]
                assert isinstance(error, InvalidRequest), error
                assert "another event loop" in str(error)
            raised: list[BaseException] = []
            thread = threading.Thread(target=lambda: raised.extend(_raised_by(lambda: pool.stream("item"))))
            thread.start()
            thread.join()
            assert isinstance(raised[0], InvalidRequest)  # there is no loop in that thread
            assert (await pool.generate("item", FIVE)).ok
        return pool

    asyncio.run(main())


def test_two_pools_in_one_loop_and_one_in_each_of_two(tmp_path: Path) -> None:
    async def ask(pool: AsyncPool, text: str) -> str | None:
        return (await pool.generate(text, FIVE)).text

    async def main() -> None:
        endpoint = f"ipc://{tmp_path}/second.sock"
        async with echo() as first, echo(endpoint=endpoint) as second:
            assert first.pool_id != second.pool_id
            texts = await asyncio.gather(*(ask(pool, f"{index:05}") for index in range(50) for pool in (first, second)))
            assert texts == [f"{index:05}" for index in range(50) for _ in range(2)]

            async def elsewhere() -> None:
                async with AsyncPool.connect(endpoint) as third:
                    assert await ask(third, "third") == "third"

            assert _in_thread(elsewhere) == []

    asyncio.run(main())


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of a fork beside threads
def test_forked_child_is_refused_and_ends_nothing() -> None:
    async def child_uses(pool: AsyncPool) -> None:
        await pool.close()
        with pytest.raises(ForkedPool):
            pool.stream("item")
        with pytest.raises(ForkedPool):
            await pool.generate("item")

    async def main() -> None:
        async with echo() as pool:
            child = os.fork()
            if child == 0:
                code = 1
                with suppress(BaseException):
                    asyncio.Runner(loop_factory=asyncio.new_event_loop).run(child_uses(pool))
                    code = 0
                os._exit(code)
            await eventually(lambda: _has_ended(child), "the child's end")
            assert CODES[child] == 0
            assert (await pool.generate("item", FIVE)).ok

    asyncio.run(main())


CODES: dict[int, int] = {}


def _has_ended(child: int) -> bool:
    pid, status = os.waitpid(child, os.WNOHANG)
    if pid == child:
        CODES[child] = os.waitstatus_to_exitcode(status)
    return pid == child


SCRIPT = """
import asyncio, sys
from enginepool import AsyncPool, SamplingParams

async def main():
    asyncio.get_running_loop().slow_callback_duration = 60.0  # nothing about time is claimed here
    {how}

async def work(pool):
    print((await pool.status()).pid, flush=True)
    many = await pool.generate_many(["item"] * 20, SamplingParams(max_tokens=5))
    async for index, output in pool.iter_many((text for text in ["a", "b"]), SamplingParams(max_tokens=5)):
        assert output.ok
    async for delta in pool.stream("item", SamplingParams(max_tokens=1000)):
        break
    task = asyncio.create_task(pool.generate("item", SamplingParams(max_tokens=10**7)))
    if sys.argv[1:] == ["wait"]:
        print("working", flush=True)
        await task
    await asyncio.sleep(0.05)
    task.cancel()

asyncio.run(main())
"""
BLOCK = """
    async with AsyncPool(engine="echo", workers=1, step_s=0.001) as pool:
        await work(pool)
"""
BARE = """
    await work(await AsyncPool(engine="echo", workers=1, step_s=0.001))
"""
GLOBAL = """
    global pool
    pool = await AsyncPool(engine="echo", workers=1, step_s=0.001)
    await work(pool)
"""
STRICT = ["-X", "dev", "-W", "error"]


@pytest.mark.parametrize("how", [BLOCK, BARE, GLOBAL], ids=["block", "never-closed", "global"])
def test_debug_mode_and_strict_warnings_have_nothing_to_say(how: str) -> None:
    env = os.environ | {"PYTHONASYNCIODEBUG": "1"}
    command = [sys.executable, *STRICT, "-c", SCRIPT.format(how=how)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=env)
    assert (done.returncode, done.stderr) == (0, "")
    wait_for(lambda: not is_alive(int(done.stdout)), "the dispatcher's end", 5)


@pytest.mark.parametrize("how", [BLOCK, GLOBAL], ids=["block", "global"])
def test_keyboard_interrupt_ends_program_and_pool(how: str) -> None:
    command = [sys.executable, *STRICT, "-c", SCRIPT.format(how=how), "wait"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        pids = tree_of(int(process.stdout.readline()))
        assert process.stdout.readline() == "working\n"
        process.send_signal(signal.SIGINT)
        _, stderr = process.communicate(timeout=30)
    assert process.returncode == -signal.SIGINT
    assert "KeyboardInterrupt" in stderr
    assert "never" not in stderr
    wait_for_end(pids)


def test_killed_program_leaves_nothing() -> None:
    command = [sys.executable, "-c", SCRIPT.format(how=BLOCK), "wait"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        pids = tree_of(int(process.stdout.readline()))
        assert process.stdout.readline() == "working\n"
        process.kill()
    wait_for_end(pids)
