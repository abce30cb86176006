"""What the tests of AsyncPool share: both event loops, waiting on a loop, and what is in flight."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import uvloop

from enginepool import AsyncPool, SamplingParams

T = TypeVar("T")
Scenario = Callable[[AsyncPool], Coroutine[Any, Any, None]]
Play = Callable[[Scenario], None]
LOOPS: dict[str, Callable[[], asyncio.AbstractEventLoop]] = {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}
FIVE = SamplingParams(max_tokens=5)
HELLO = [{"role": "user", "content": "hello"}]
ENDLESS = SamplingParams(max_tokens=10_000_000)


def run_on(kind: str, main: Coroutine[Any, Any, T]) -> T:
    """Run to the end on a new loop of this kind."""
    with asyncio.Runner(loop_factory=LOOPS[kind]) as runner:
        return runner.run(asyncio.wait_for(main, 90))


def echo(**settings: Any) -> AsyncPool:
    """One echo worker that takes a millisecond a token; not started yet."""
    return AsyncPool(engine="echo", workers=1, **({"step_s": 0.001} | settings))


async def join_and_play(endpoint: str, scenario: Scenario) -> None:
    """Play a scenario with an AsyncPool that joins a pool; nothing may be left in hand."""
    async with AsyncPool.connect(endpoint) as pool:
        await scenario(pool)
        await until_in_hand(pool, 0)


async def eventually(condition: Callable[[], bool], what: str) -> None:
    """Wait on the loop until a condition holds."""
    try:
        async with asyncio.timeout(20):
            while not condition():
                await asyncio.sleep(0.01)
    except TimeoutError:
        raise AssertionError(f"{what} did not happen") from None


async def in_hand(pool: AsyncPool) -> int:
    """How many items the dispatcher has, waiting or running."""
    status = await pool.status()
    return status.in_flight + status.backlog


async def until_in_hand(pool: AsyncPool, count: int) -> None:
    """Wait until the dispatcher has exactly so many items."""
    try:
        async with asyncio.timeout(20):
            while await in_hand(pool) != count:
                await asyncio.sleep(0.01)
    except TimeoutError:
        raise AssertionError(f"the dispatcher never had {count} items in hand") from None
