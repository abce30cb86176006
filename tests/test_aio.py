"""AsyncPool's verbs on echo workers, on asyncio's loop and on uvloop: Pool's results, awaited."""

from __future__ import annotations

import asyncio
import inspect
import threading
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from aio_help import ENDLESS, FIVE, HELLO, Play

from enginepool import (
    AsyncPool,
    Code,
    Delta,
    EnginePoolWarning,
    InvalidRequest,
    ItemFailed,
    Output,
    OutputFuture,
    Overloaded,
    Pool,
    Progress,
    SamplingParams,
)
from enginepool.client.aio_verbs import AsyncVerbs
from enginepool.client.verbs import Verbs

MIXED: list[Any] = ["good", "", "x" * 600, {"prompt_token_ids": [1, 2]}, "good"]
NAMED = {"request_id": "r", "priority": 1, "deadline_s": 60}


def _growing(index: int, _: Any) -> dict[str, int]:
    return {"max_tokens": index % 20 + 1}


def _verbs(kind: type) -> dict[str, Any]:
    return {name: verb for name, verb in vars(kind).items() if not name.startswith("_")}


def _call(pool: Pool, name: str, *args: Any, **keywords: Any) -> Any:
    made = getattr(pool, name)(*args, **keywords)
    if isinstance(made, Iterator):
        return list(made)
    return made.result() if isinstance(made, OutputFuture) else made


async def _await(pool: AsyncPool, name: str, *args: Any, **keywords: Any) -> Any:
    made = getattr(pool, name)(*args, **keywords)
    return [thing async for thing in made] if hasattr(made, "__aiter__") else await made


def _plain(made: Any) -> Any:
    """What must be the same: all but times and workers; of a stream its whole text and its end."""
    if isinstance(made, Output):
        return (made.index, made.request_id, made.prompt, made.prompt_token_ids, made.outputs, made.error)
    if isinstance(made, list) and made and isinstance(made[0], Delta):
        return "".join(delta.text for delta in made), _plain(made[-1].output)
    return [_plain(one) for one in made] if isinstance(made, list | tuple) else made


@pytest.mark.parametrize(
    ("name", "args", "keywords"),
    [
        pytest.param("generate", ("hello world", FIVE), NAMED | {"timeout_s": 60}, id="generate"),
        pytest.param("generate", ("", FIVE), NAMED, id="generate-error"),
        pytest.param("chat", (HELLO, FIVE), NAMED | {"timeout_s": 60, "chat_template_kwargs": {"a": 1}}, id="chat"),
        pytest.param("generate_many", (MIXED, FIVE), {"request_ids": list("abcde"), "priorities": 1}, id="generate_many"),
        pytest.param("generate_many", ("one prompt", FIVE), {"timeout_s": 60}, id="generate_many-of-one"),
        pytest.param("generate_many", ([],), {}, id="generate_many-of-nothing"),
        pytest.param("chat_many", ([HELLO, HELLO, []], FIVE), {"deadline_s": [60, None, 60]}, id="chat_many"),
        pytest.param("iter_many", (MIXED, FIVE), {"in_order": True, "window": 2}, id="iter_many"),
        pytest.param(
            "iter_chat_many", ([HELLO, [], HELLO], lambda index, _: {"max_tokens": index + 1}), {"in_order": True}, id="iter_chat_many"
        ),
        pytest.param("stream", ("hello world", FIVE), NAMED, id="stream"),
        pytest.param("stream", ("", FIVE), NAMED, id="stream-error"),
        pytest.param("stream_chat", (HELLO, FIVE), NAMED, id="stream_chat"),
        pytest.param("submit", ("hello world", FIVE), NAMED, id="submit"),
        pytest.param("submit", ("", FIVE), NAMED, id="submit-error"),
        pytest.param("submit_chat", (HELLO, FIVE), NAMED, id="submit_chat"),
    ],
)
@pytest.mark.filterwarnings("ignore::enginepool.EnginePoolWarning")
def test_result_is_that_of_the_same_verb_of_pool(play: Play, echo_pool: Pool, name: str, args: Any, keywords: dict[str, Any]) -> None:
    expected = _plain(_call(echo_pool, name, *args, **keywords))

    async def scenario(pool: AsyncPool) -> None:
        assert _plain(await _await(pool, name, *args, **keywords)) == expected

    play(scenario)


@pytest.mark.parametrize(
    ("name", "args", "keywords"),
    [
        pytest.param("generate", ("a", {"temprature": 1}), {}, id="unknown-field"),
        pytest.param("generate", ("a",), {"timeout_s": -1}, id="negative-timeout"),
        pytest.param("chat", (HELLO,), {"chat_template_kwargs": {"tools": []}}, id="reserved-name"),
        pytest.param("generate_many", (["a", "b"], [FIVE]), {}, id="too-few-params"),
        pytest.param("generate_many", (["a"],), {"on_error": "ignore"}, id="on_error"),
        pytest.param("iter_many", ("text",), {}, id="text-as-iterable"),
        pytest.param("iter_many", (5,), {}, id="no-iterable"),
        pytest.param("iter_many", (["a"],), {"window": 0}, id="no-window"),
        pytest.param("stream", ("a",), {"priority": "high"}, id="priority"),
        pytest.param("submit", ("a",), {"request_id": 5}, id="id-as-number"),
    ],
)
def test_call_without_meaning_raises_what_pool_raises(play: Play, echo_pool: Pool, name: str, args: Any, keywords: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest) as expected:
        getattr(echo_pool, name)(*args, **keywords)

    async def scenario(pool: AsyncPool) -> None:
        verb = getattr(pool, name)
        if inspect.iscoroutinefunction(verb):
            with pytest.raises(InvalidRequest) as caught:
                await verb(*args, **keywords)
        else:
            with pytest.raises(InvalidRequest) as caught:  # at once, before anything is awaited
                verb(*args, **keywords)
        assert str(caught.value) == str(expected.value)

    play(scenario)


def test_verbs_and_parameters_are_those_of_pool() -> None:
    assert set(_verbs(AsyncVerbs)) == set(_verbs(Verbs))
    for name, verb in _verbs(Verbs).items():
        ours, theirs = (inspect.signature(one).parameters.values() for one in (_verbs(AsyncVerbs)[name], verb))
        assert [(one.name, one.kind, one.default) for one in ours] == [(one.name, one.kind, one.default) for one in theirs], name
    assert {name for name in dir(Pool) if not name.startswith("_")} <= set(dir(AsyncPool))


def test_thousand_at_once(play: Play) -> None:
    async def scenario(pool: AsyncPool) -> None:
        outputs = await asyncio.gather(*(pool.generate(f"prompt {index}", {"max_tokens": 1}) for index in range(1000)))
        assert [output.prompt for output in outputs] == [f"prompt {index}" for index in range(1000)]
        assert all(output.ok for output in outputs)

    play(scenario)


def test_all_verbs_at_once_mix_nothing_up(play: Play) -> None:
    async def scenario(pool: AsyncPool) -> None:
        many, pairs, deltas, futures, status = await asyncio.gather(
            pool.generate_many([f"m{index}" for index in range(100)], FIVE),
            _await(pool, "iter_many", [f"i{index}" for index in range(100)], FIVE),
            _await(pool, "stream", "streamed", SamplingParams(max_tokens=8)),
            asyncio.gather(*(pool.submit(f"s{index}", FIVE) for index in range(100))),
            pool.status(),
        )
        assert [output.prompt for output in many] == [f"m{index}" for index in range(100)]
        assert sorted((index, output.prompt) for index, output in pairs) == [(index, f"i{index}") for index in range(100)]
        assert "".join(delta.text for delta in deltas) == "streamed"
        assert [output.prompt for output in futures] == [f"s{index}" for index in range(100)]
        assert status.model == pool.model == "echo"

    play(scenario)


def test_time_limits_end_items_with_their_codes(play: Play) -> None:
    async def scenario(pool: AsyncPool) -> None:
        one = await pool.generate("a", ENDLESS, timeout_s=0.05)
        with pytest.warns(EnginePoolWarning, match="1 of 2"):
            many = await pool.generate_many(["a", "b"], [ENDLESS, FIVE], timeout_s=1)
        deltas = [delta async for delta in pool.stream("abc", ENDLESS, timeout_s=0.5)]
        late = await pool.generate("a", ENDLESS, deadline_s=0.05)
        assert [one.error and one.error.code, many[0].error and many[0].error.code] == [Code.TIMEOUT] * 2
        assert many[1].ok
        assert late.error is not None
        assert late.error.code is Code.DEADLINE_EXCEEDED
        last = deltas[-1].output
        assert last is not None
        assert last.error is not None
        assert last.error.code is Code.TIMEOUT
        assert last.text == "".join(delta.text for delta in deltas)

    play(scenario)


def test_on_error_raise_and_a_warning_that_names_the_callers_line(play: Play) -> None:
    async def scenario(pool: AsyncPool) -> None:
        with pytest.raises(ItemFailed) as failed:
            await pool.generate_many(["a", ""], FIVE, on_error="raise")
        assert len(failed.value.outputs) == 2
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            await pool.chat_many([HELLO, []], FIVE)
        assert [warning.filename for warning in caught] == [__file__]

    play(scenario)


def test_progress_is_told_on_the_loops_thread(play: Play) -> None:
    async def scenario(pool: AsyncPool) -> None:
        told: list[tuple[threading.Thread, Progress]] = []
        await pool.generate_many(["a"] * 20, FIVE, progress=lambda progress: told.append((threading.current_thread(), progress)))
        assert {thread for thread, _ in told} == {threading.current_thread()}
        assert (told[-1][1].done, told[-1][1].total) == (20, 20)

        def fail(_: Progress) -> None:
            raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            await pool.generate_many(["a"] * 20, ENDLESS, progress=fail)

    play(scenario)


class _NoExecutor(ThreadPoolExecutor):
    def submit(self, *_: Any, **__: Any) -> Any:
        raise AssertionError("the default executor was used")


def test_no_thread_of_the_executor_is_used(play: Play) -> None:
    async def scenario(pool: AsyncPool) -> None:
        executor = _NoExecutor()
        asyncio.get_running_loop().set_default_executor(executor)
        num_threads = threading.active_count()
        await asyncio.gather(pool.generate("a", FIVE), pool.chat_many([HELLO] * 3, FIVE), _await(pool, "iter_many", ["a"], FIVE))
        await _await(pool, "stream", "a", FIVE)
        await pool.status()
        async with AsyncPool.connect(pool.endpoint) as other:
            await other.generate("a", FIVE)
            assert threading.active_count() == num_threads + 1
        assert threading.active_count() == num_threads

    play(scenario)


def test_full_backlog_is_overloaded_for_one_and_waited_for_by_many(fresh_run_dir: Any) -> None:
    async def main() -> None:
        async with AsyncPool(engine="echo", workers=1, max_num_seqs=1, step_s=0.001, max_backlog_items=2) as pool:
            verbs = (pool.submit, pool.generate)
            futures = [asyncio.ensure_future(verbs[index % 2]("a", ENDLESS)) for index in range(50)]
            for verb in (0, 1):
                await asyncio.wait(futures[verb::2], return_when=asyncio.FIRST_EXCEPTION)
            for future in futures:
                future.cancel()
            ended = await asyncio.gather(*futures, return_exceptions=True)
            assert {type(one) for one in ended} <= {Overloaded, asyncio.CancelledError}
            assert all(output.ok for output in await pool.generate_many(["a"] * 20, FIVE))
            assert len([pair async for pair in pool.iter_many(["a"] * 20, FIVE)]) == 20

    asyncio.run(main())
