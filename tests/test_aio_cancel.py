"""Whoever stops waiting for an AsyncPool aborts what it waited for: cancelled tasks, timeouts, loops that are left early."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import aclosing
from typing import Any

import pytest
from aio_help import ENDLESS, FIVE, HELLO, Play, until_in_hand

from enginepool import AsyncPool, Output, SamplingParams

A_WHILE = SamplingParams(max_tokens=300)
Wait = Callable[[AsyncPool], Awaitable[Any]]


async def _endless_source() -> AsyncIterator[str]:
    for _ in range(3):
        yield "item"
    await asyncio.Event().wait()


async def _read(things: AsyncIterator[Any]) -> list[Any]:
    return [thing async for thing in things]


async def _status_for_ever(pool: AsyncPool) -> None:
    async with asyncio.TaskGroup() as group:
        for _ in range(3):
            group.create_task(pool.generate("item", ENDLESS))
        while True:
            await pool.status()


WAITS: dict[str, tuple[int, Wait]] = {
    "generate": (1, lambda pool: pool.generate("item", ENDLESS)),
    "generate-timeout_s": (1, lambda pool: pool.generate("item", ENDLESS, timeout_s=1000)),
    "chat": (1, lambda pool: pool.chat(HELLO, ENDLESS)),
    "generate_many": (3, lambda pool: pool.generate_many(["item"] * 3, ENDLESS)),
    "generate_many-beyond-the-workers": (60, lambda pool: pool.generate_many(["item"] * 60, ENDLESS)),
    "chat_many": (3, lambda pool: pool.chat_many([HELLO] * 3, ENDLESS)),
    "iter_many": (3, lambda pool: _read(pool.iter_many(["item"] * 3, ENDLESS))),
    "iter_many-async-source": (3, lambda pool: _read(pool.iter_many(_endless_source(), ENDLESS))),
    "iter_chat_many": (3, lambda pool: _read(pool.iter_chat_many([HELLO] * 3, ENDLESS, in_order=True))),
    "stream": (1, lambda pool: _read(pool.stream("item", ENDLESS))),
    "stream_chat": (1, lambda pool: _read(pool.stream_chat(HELLO, ENDLESS))),
    "submit": (1, lambda pool: pool.submit("item", ENDLESS)),
    "submit_chat": (1, lambda pool: pool.submit_chat(HELLO, ENDLESS)),
    "status-beside-others": (3, _status_for_ever),
}


async def _wait(wait: Wait, pool: AsyncPool) -> Any:
    return await wait(pool)


@pytest.mark.parametrize(("count", "wait"), WAITS.values(), ids=WAITS)
def test_cancelled_task_aborts_its_items_and_no_others(play: Play, count: int, wait: Wait) -> None:
    async def scenario(pool: AsyncPool) -> None:
        task = asyncio.create_task(_wait(wait, pool))
        await until_in_hand(pool, count)
        neighbour = asyncio.create_task(pool.generate("neighbour", A_WHILE))
        await until_in_hand(pool, count + 1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        output = await neighbour
        assert output.ok
        assert len(output.token_ids) == 300

    play(scenario)  # which ends by waiting until nothing is in hand


@pytest.mark.parametrize("name", ["generate", "generate_many", "iter_many-async-source", "stream", "submit"])
def test_asyncio_timeout_around_a_verb_aborts(play: Play, name: str) -> None:
    count, wait = WAITS[name]

    async def limited(pool: AsyncPool) -> None:
        async def expire() -> None:
            await until_in_hand(pool, count)
            limit.reschedule(asyncio.get_running_loop().time())

        async with asyncio.TaskGroup() as group, asyncio.timeout(None) as limit:
            group.create_task(expire())
            await wait(pool)

    async def scenario(pool: AsyncPool) -> None:
        with pytest.raises(ExceptionGroup) as caught:
            await limited(pool)
        assert caught.group_contains(TimeoutError)

    play(scenario)


def test_cancelled_future_of_submit_aborts(play: Play) -> None:
    async def scenario(pool: AsyncPool) -> None:
        futures = [pool.submit("item", ENDLESS) for _ in range(3)]
        await until_in_hand(pool, 3)
        assert all(future.cancel() for future in futures)
        await until_in_hand(pool, 0)
        finished = pool.submit("item", FIVE)
        assert (await finished).ok
        assert not finished.cancel()

    play(scenario)


def test_some_of_many_tasks_cancelled_the_others_finish(play: Play) -> None:
    async def scenario(pool: AsyncPool) -> None:
        tasks = [asyncio.create_task(pool.generate(f"item {index}", SamplingParams(max_tokens=10))) for index in range(400)]
        await asyncio.sleep(0)
        for task in tasks[::2]:
            task.cancel()
        ended = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(one, asyncio.CancelledError) for one in ended[::2])
        outputs = [one for one in ended if isinstance(one, Output)]
        assert [output.prompt for output in outputs] == [f"item {index}" for index in range(1, 400, 2)]

    play(scenario)


def test_task_cancelled_before_it_has_run_sends_nothing(play: Play) -> None:
    async def scenario(pool: AsyncPool) -> None:
        task = asyncio.create_task(pool.generate("item", ENDLESS))
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await until_in_hand(pool, 0)

    play(scenario)


def test_stream_that_is_left_early_is_aborted_unnamed_and_named(play: Play) -> None:
    async def scenario(pool: AsyncPool) -> None:
        async for _ in pool.stream("item", ENDLESS):
            break
        await until_in_hand(pool, 0)
        named = pool.stream("item", ENDLESS)
        async for _ in named:
            break
        await until_in_hand(pool, 0)
        assert named.output is None
        assert [delta async for delta in named] == []

    play(scenario)


def test_stream_ends_by_block_close_exception_and_collection(play: Play) -> None:
    async def scenario(pool: AsyncPool) -> None:
        async with pool.stream("item", ENDLESS) as block:
            await anext(block)
        await until_in_hand(pool, 0)
        closed = pool.stream("item", ENDLESS)
        assert (await anext(closed)).text == "i"
        assert (await anext(closed)).text == "t"
        await closed.aclose()
        await until_in_hand(pool, 0)
        failing = pool.stream("item", ENDLESS)

        async def fail() -> None:
            async for _ in failing:
                raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            await fail()
        await until_in_hand(pool, 0)
        texts = (delta.text async for delta in pool.stream("item", ENDLESS))  # what a web framework is given
        assert await anext(texts) == "i"
        await texts.aclose()
        await until_in_hand(pool, 0)
        dropped = pool.stream("item", ENDLESS)
        await until_in_hand(pool, 1)
        del dropped
        gc.collect()
        await until_in_hand(pool, 0)

    play(scenario)


def _sync_source() -> Iterator[str]:
    while True:
        yield "item"


@pytest.mark.parametrize("make", [_sync_source, _endless_source], ids=["iterable", "async-iterable"])
def test_iteration_that_is_left_early_aborts_the_rest(play: Play, make: Callable[[], Any]) -> None:
    def params(index: int, _: Any) -> SamplingParams:
        return ENDLESS if index else FIVE

    async def scenario(pool: AsyncPool) -> None:
        async for _ in pool.iter_many(make(), params, window=3):
            break
        await until_in_hand(pool, 0)
        named = pool.iter_many(make(), params, window=3)
        async for _ in named:
            break
        await named.aclose()
        await until_in_hand(pool, 0)
        async with aclosing(pool.iter_many(make(), params, window=3)) as pairs:
            async for index, output in pairs:
                assert (index, output.text) == (0, "itemi")
                break
        await until_in_hand(pool, 0)

    play(scenario)


def test_iteration_that_is_never_begun_sends_nothing(play: Play) -> None:
    async def scenario(pool: AsyncPool) -> None:
        pool.iter_many(_endless_source(), ENDLESS)
        await until_in_hand(pool, 0)

    play(scenario)


def test_failing_source_after_the_loop_was_left_is_not_heard_of(play: Play) -> None:
    heard: list[dict[str, Any]] = []

    async def scenario(pool: AsyncPool) -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: heard.append(context))

        async def source() -> AsyncIterator[str]:
            yield "item"
            try:
                await asyncio.Event().wait()
            finally:
                raise ZeroDivisionError

        async for _ in pool.iter_many(source(), FIVE):
            break
        for _ in range(5):
            await asyncio.sleep(0)
        gc.collect()

    play(scenario)
    assert heard == []
