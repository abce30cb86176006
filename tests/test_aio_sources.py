"""What AsyncPool's `iter_many` takes its inputs from: iterables and async iterables, slow, endless and failing ones."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest
from aio_help import FIVE, Play

from enginepool import AsyncPool


def _growing(index: int, _: Any) -> dict[str, int]:
    return {"max_tokens": index % 20 + 1}


async def _numbers(count: int) -> AsyncIterator[str]:
    for number in range(count):
        await asyncio.sleep(0)
        yield f"item {number}"


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda: [f"item {number}" for number in range(200)], id="list"),
        pytest.param(lambda: (f"item {number}" for number in range(200)), id="generator"),
        pytest.param(lambda: _numbers(200), id="async-generator"),
    ],
)
@pytest.mark.parametrize("in_order", [False, True], ids=["as-finished", "in-order"])
def test_iter_many_takes_any_iterable(play: Play, make: Callable[[], Any], in_order: bool) -> None:
    async def scenario(pool: AsyncPool) -> None:
        pairs = [(index, output.prompt) async for index, output in pool.iter_many(make(), _growing, in_order=in_order, window=20)]
        assert (pairs if in_order else sorted(pairs)) == [(number, f"item {number}") for number in range(200)]

    play(scenario)


def test_iter_many_pulls_no_further_than_its_window(play: Play) -> None:
    async def scenario(pool: AsyncPool) -> None:
        num_pulled = num_taken = 0
        ahead: list[int] = []

        async def endless() -> AsyncIterator[str]:
            nonlocal num_pulled
            while True:
                num_pulled += 1
                ahead.append(num_pulled - num_taken)
                yield "item"

        async for _ in pool.iter_many(endless(), FIVE, window=7):
            num_taken += 1
            if num_taken == 50:
                break
        assert max(ahead) <= 7

    play(scenario)


def test_slow_async_source_holds_no_result_back(play: Play) -> None:
    async def scenario(pool: AsyncPool) -> None:
        is_taken = asyncio.Event()

        async def source() -> AsyncIterator[str]:
            for name in ("first", "second", "third"):
                yield name
                await is_taken.wait()  # the next item comes only after this one's result was taken
                is_taken.clear()

        taken = []
        async for _, output in pool.iter_many(source(), FIVE):
            taken.append(output.prompt)
            is_taken.set()
        assert taken == ["first", "second", "third"]

    play(scenario)


@pytest.mark.parametrize("is_async", [False, True], ids=["iterable", "async-iterable"])
def test_failing_source_is_raised_after_the_results_before_it(play: Play, is_async: bool) -> None:
    async def scenario(pool: AsyncPool) -> None:
        def failing() -> Iterator[str]:
            yield from ["a", "b"]
            raise ZeroDivisionError

        async def failing_async() -> AsyncIterator[str]:
            for one in failing():
                yield one

        taken: list[str | None] = []

        async def take() -> None:
            async for _, output in pool.iter_many(failing_async() if is_async else failing(), FIVE):
                taken.append(output.prompt)

        with pytest.raises(ZeroDivisionError):
            await take()
        assert sorted(map(str, taken)) == ["a", "b"]

    play(scenario)


def test_async_source_runs_in_one_task_to_its_end(play: Play) -> None:
    variable: contextvars.ContextVar[int] = contextvars.ContextVar("variable")

    async def scenario(pool: AsyncPool) -> None:
        async def source() -> AsyncIterator[str]:
            token = variable.set(1)
            async with asyncio.timeout(60):
                for _ in range(5):
                    yield "item"
            variable.reset(token)  # raises where another task's context is current

        assert len([pair async for pair in pool.iter_many(source(), FIVE)]) == 5

    play(scenario)


def test_leaving_the_loop_ends_what_the_source_waits_for(play: Play) -> None:
    async def scenario(pool: AsyncPool) -> None:
        ended = []

        async def source() -> AsyncIterator[str]:
            try:
                yield "item"
                await asyncio.Event().wait()
            finally:
                ended.append("source")

        pairs = pool.iter_many(source(), FIVE)
        async for _ in pairs:
            break
        await pairs.aclose()
        assert ended == ["source"]

    play(scenario)
