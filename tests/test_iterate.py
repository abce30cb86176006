"""Endless inputs are pulled no faster than results leave, end where the iterable ends or fails, and keep order in bounds."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from typing import Any

import pytest
from conftest import wait_for
from fake_connection import FakeConnection

from enginepool import Code, InvalidRequest, ItemError, Output, Pool, PoolClosed, PoolLost, SamplingParams
from enginepool.client import flight as flight_module
from enginepool.client import iterate as iterate_module
from enginepool.client.calls import make_window
from enginepool.client.iterate import AsyncSource, Pair, Source, Window, iterate, iterate_async
from enginepool.client.mailbox import LoopMailbox, Mailbox, ThreadMailbox
from enginepool.client.progress import Progress, ProgressCallback, make_view
from enginepool.client.requests import encode_prompt

FIVE = SamplingParams(max_tokens=5)
ENDLESS = SamplingParams(max_tokens=400_000)


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flight_module, "RETRY_S", 0.001)


class Counted:
    """A generator of prompts that knows how far it is ahead of whoever takes the results."""

    def __init__(self, count: int | None = None) -> None:
        self.num_pulled = 0
        self.num_taken = 0
        self.ahead = 0
        self._count = count

    def prompts(self) -> Iterator[str]:
        for number in itertools.count() if self._count is None else range(self._count):
            self.num_pulled += 1
            self.ahead = max(self.ahead, self.num_pulled - self.num_taken)
            yield f"p{number}"

    async def prompts_async(self) -> AsyncIterator[str]:
        for prompt in self.prompts():
            yield prompt


def _window(
    connection: FakeConnection,
    mailbox: Mailbox[Output],
    *,
    params: Any = FIVE,
    size: int | None = None,
    in_order: bool = False,
    progress: ProgressCallback | bool = False,
) -> Window:
    view = make_view(None, progress)
    return make_window(connection.real, encode_prompt, mailbox, view, params, priority=0, deadline_s=None, window=size, in_order=in_order)


def _pairs(connection: FakeConnection, items: Iterable[Any], **how: Any) -> Iterator[Pair]:
    mailbox = ThreadMailbox[Output]()
    return iterate(_window(connection, mailbox, **how), Source(iter(items)), mailbox)


def _texts(pairs: Iterable[Pair]) -> list[tuple[int, str | None]]:
    return [(index, output.text) for index, output in pairs]


def _note(pairs: Iterable[Pair], got: list[int]) -> None:
    for index, output in pairs:
        assert output.ok
        got.append(index)


# All of them, and no more at a time than the window.


@pytest.mark.parametrize("in_order", [False, True], ids=["as they end", "in order"])
@pytest.mark.parametrize("count", [0, 1, 63, 64, 65, 3000])
def test_iterate_yields_each_item_once(count: int, in_order: bool) -> None:
    pairs = _texts(_pairs(FakeConnection(), (f"p{number}" for number in range(count)), in_order=in_order))
    assert sorted(pairs) == [(index, f"text of p{index}") for index in range(count)]


def test_iterate_of_nothing_sends_nothing() -> None:
    connection = FakeConnection()
    assert list(_pairs(connection, [])) == []
    assert connection.messages == []


@pytest.mark.parametrize("in_order", [False, True], ids=["as they end", "in order"])
@pytest.mark.parametrize("size", [1, 2, 7, 100, 5000])
def test_iterate_pulls_no_further_ahead_than_its_window(size: int, in_order: bool) -> None:
    source = Counted(2000)
    for _ in _pairs(FakeConnection(), source.prompts(), size=size, in_order=in_order):
        source.num_taken += 1
    assert source.num_taken == 2000
    assert source.ahead <= size


def test_iterate_pulls_nothing_before_it_is_asked() -> None:
    source = Counted()
    _pairs(FakeConnection(), source.prompts())
    assert source.num_pulled == 0


def test_iterate_pulls_nothing_while_the_caller_is_busy_with_a_result() -> None:
    source = Counted()
    pairs = _pairs(FakeConnection(), source.prompts(), size=10)
    for _ in range(200):
        next(pairs)
        source.num_taken += 1
        assert source.num_pulled - source.num_taken <= 10
    pairs.close()  # type: ignore[attr-defined]


def test_iterate_in_order_holds_back_no_more_than_its_window() -> None:
    """The first item never ends; everything that can be pulled meanwhile waits for it, and then nothing is pulled any more."""
    connection, source = FakeConnection(is_silent=True), Counted()
    mailbox = ThreadMailbox[Output]()
    window = _window(connection, mailbox, size=20, in_order=True)
    pull = Source(source.prompts())
    for _ in range(500):
        assert window.ready() == []
        if window.can_pull:
            pull.pull_into(window)
        else:
            window.flush()
        connection.answer(*(range(1, 10_000)))
    assert (source.num_pulled, len(window._early)) == (20, 19)
    connection.answer(0)
    assert [index for index, _ in window.ready()] == list(range(20))


def test_iterate_not_in_order_goes_on_past_an_item_that_does_not_end() -> None:
    connection, source = FakeConnection(is_silent=True), Counted()
    mailbox = ThreadMailbox[Output]()
    window = _window(connection, mailbox, size=20)
    pull = Source(source.prompts())
    while window.num_taken < 500:
        for _ in window.ready():
            window.took()
        if window.can_pull:
            pull.pull_into(window)
        else:
            window.flush()
        connection.answer(*(range(1, 10_000)))
    assert source.num_pulled - window.num_taken <= 20
    assert 0 in [ticket.index for ticket in connection.held.values()]


def test_iterate_in_order_yields_in_order_whatever_ends_first() -> None:
    connection = FakeConnection(is_silent=True)
    mailbox = ThreadMailbox[Output]()
    window = _window(connection, mailbox, in_order=True)
    pull = Source(iter(["a", "b", "c"]))
    while not pull.is_over:
        pull.pull_into(window)
    window.flush()
    seen = []
    for index in (2, 0, 1):
        connection.answer(index)
        for pair in window.ready():
            window.took()
            seen.append(pair[0])
    assert (seen, window.is_empty) == ([0, 1, 2], True)


def test_iterate_stays_within_the_pools_submit_window() -> None:
    connection, source = FakeConnection(submit_window=8), Counted(100)
    for _ in _pairs(connection, source.prompts(), size=50):
        source.num_taken += 1
    assert max(connection.sizes) <= 8


def test_iterate_gets_through_a_full_backlog() -> None:
    connection = FakeConnection(max_backlog_items=5)
    assert len(_texts(_pairs(connection, (f"p{number}" for number in range(300))))) == 300


@pytest.mark.parametrize("size", [0, -1, True, 2.5, "many"])
def test_window_that_is_no_number_of_items_is_refused(size: Any) -> None:
    with pytest.raises(InvalidRequest, match="window is a number of items"):
        _window(FakeConnection(), ThreadMailbox[Output](), size=size)


# Slow iterables.


def test_iterate_sends_the_items_of_a_slow_iterable_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(iterate_module, "LINGER_S", 0.0)
    connection = FakeConnection()
    sent_when_pulled: list[int] = []

    def slow() -> Iterator[str]:
        for number in range(5):
            sent_when_pulled.append(sum(connection.sizes))
            yield f"p{number}"

    assert len(list(_pairs(connection, slow()))) == 5
    assert sent_when_pulled == [0, 1, 2, 3, 4]


def test_iterate_sends_the_first_item_before_it_asks_for_the_second() -> None:
    connection = FakeConnection()
    pairs = _pairs(connection, itertools.chain(["first"], _fail_unless(lambda: connection.messages == [[0]])))
    assert len(list(pairs)) == 2


def _fail_unless(condition: Callable[[], bool]) -> Iterator[str]:
    assert condition()
    yield "second"


def test_iterate_sends_a_quick_iterable_in_chunks() -> None:
    connection = FakeConnection()
    list(_pairs(connection, (f"p{number}" for number in range(5000))))
    assert len(connection.sizes) < 2500


# What fails.


class Broken(Exception):
    """What the caller's own code raises."""


def _failing(count: int) -> Iterator[str]:
    for number in range(count):
        yield f"p{number}"
    raise Broken("the file ended in the middle")


@pytest.mark.parametrize("in_order", [False, True], ids=["as they end", "in order"])
@pytest.mark.parametrize("count", [0, 1, 10, 200])
def test_iterable_that_fails_raises_after_what_it_gave(count: int, in_order: bool) -> None:
    connection, got = FakeConnection(), list[int]()
    with pytest.raises(Broken, match="in the middle"):
        _note(_pairs(connection, _failing(count), in_order=in_order), got)
    assert sorted(got) == list(range(count))


def test_params_callable_is_asked_with_index_and_value() -> None:
    asked = []

    def params(index: int, value: Any) -> SamplingParams:
        asked.append((index, value))
        return SamplingParams(max_tokens=index + 1)

    list(_pairs(FakeConnection(), ["a", "b"], params=params))
    assert asked == [(0, "a"), (1, "b")]


def test_params_callable_that_fails_raises_after_what_came_before() -> None:
    def params(index: int, value: Any) -> SamplingParams:
        if index == 3:
            raise Broken("no params for this one")
        return FIVE

    source, got = Counted(), list[int]()
    with pytest.raises(Broken, match="no params"):
        _note(_pairs(FakeConnection(), source.prompts(), params=params), got)
    assert (sorted(got), source.num_pulled) == ([0, 1, 2], 4)


def test_params_callable_whose_answer_is_at_fault_fails_that_item_alone() -> None:
    answers = [FIVE, {"temperature": float("nan")}, None, {"nonsense": 1}, {"max_tokens": 3}]
    outputs = dict(_pairs(FakeConnection(), ["p"] * 5, params=lambda index, value: answers[index]))
    assert [outputs[index].ok for index in range(5)] == [True, False, True, False, True]
    assert "temperature" in str(outputs[1].error)
    assert "nonsense" in str(outputs[3].error)


def test_params_for_all_that_are_at_fault_are_refused_before_anything_is_pulled() -> None:
    source = Counted()
    with pytest.raises(InvalidRequest, match="temperature"):
        _pairs(FakeConnection(), source.prompts(), params={"temperature": float("nan")})
    assert source.num_pulled == 0


def test_bad_items_fail_alone_between_good_ones() -> None:
    items: list[Any] = ["good", None, "half \ud83d", [1, "2"], {"prompt": "a", "image": 1}, [1], "good"]
    outputs = dict(_pairs(FakeConnection(), items))
    assert [outputs[index].ok for index in range(7)] == [True, False, False, False, False, True, True]
    assert [output.index for output in (outputs[0], outputs[6])] == [0, 6]


@pytest.mark.parametrize("error", [PoolLost("gone"), PoolClosed("closed")], ids=["lost", "closed"])
def test_pool_that_goes_raises_after_what_had_finished(error: PoolLost | PoolClosed) -> None:
    connection = FakeConnection(is_silent=True)
    mailbox = ThreadMailbox[Output]()
    pairs = iterate(_window(connection, mailbox), Source(iter(["a", "b"])), mailbox)
    mailbox_wait = mailbox.wait

    def lose(timeout_s: float | None) -> None:
        connection.answer(0)
        connection.lose(error)
        mailbox_wait(timeout_s)

    mailbox.wait = lose  # type: ignore[method-assign]
    assert next(pairs)[0] == 0
    with pytest.raises(type(error)):
        next(pairs)


def test_pool_that_goes_right_after_an_end_still_yields_it(monkeypatch: pytest.MonkeyPatch) -> None:
    connection = FakeConnection(is_silent=True)
    mailbox = ThreadMailbox[Output]()
    window = _window(connection, mailbox)
    Source(iter(["a"])).pull_into(window)
    window.flush()
    take = mailbox.take

    def just_before() -> list[Output]:
        taken = take()
        end = next(iter(connection.held.values()), None)
        connection.answer()
        if end is not None:
            end.sink.lose(PoolLost("gone"))
        return taken

    monkeypatch.setattr(mailbox, "take", just_before)
    assert window.ready() == []
    assert [index for index, _ in window.ready()] == [0]
    with pytest.raises(PoolLost, match="gone"):
        window.ready()


# Leaving early.


def test_leaving_the_loop_aborts_what_is_open() -> None:
    connection = FakeConnection(is_silent=True)
    mailbox = ThreadMailbox[Output]()
    pairs = iterate(_window(connection, mailbox, size=10), Source(Counted().prompts()), mailbox)
    mailbox_wait = mailbox.wait

    def answer_one(timeout_s: float | None) -> None:
        connection.answer(3)
        mailbox_wait(timeout_s)

    mailbox.wait = answer_one  # type: ignore[method-assign]
    assert next(pairs)[0] == 3
    pairs.close()
    assert len(connection.aborted) == 9
    assert connection.held == {}


def test_view_is_told_what_was_taken() -> None:
    told: list[Progress] = []
    connection, mailbox = FakeConnection(), ThreadMailbox[Output]()
    view = make_view(None, told.append)
    window = make_window(connection.real, encode_prompt, mailbox, view, FIVE, priority=0, deadline_s=None, window=None, in_order=False)
    with view:
        list(iterate(window, Source(iter(["a", None, "b"])), mailbox))
    assert (told[-1].done, told[-1].total, told[-1].failed, told[-1].tokens) == (3, None, 1, 2)


# On an event loop.


async def _collect(connection: FakeConnection, items: Any, counted: Counted | None = None, **how: Any) -> list[Pair]:
    mailbox = LoopMailbox[Output]()
    source = AsyncSource(aiter(items)) if hasattr(items, "__aiter__") else Source(iter(items))
    got = []
    async for pair in iterate_async(_window(connection, mailbox, **how), source, mailbox):
        got.append(pair)
        if counted is not None:
            counted.num_taken += 1
    return got


@pytest.mark.parametrize("in_order", [False, True], ids=["as they end", "in order"])
@pytest.mark.parametrize("kind", ["async", "sync"])
@pytest.mark.parametrize("count", [0, 1, 500])
def test_loop_yields_each_item_once_within_its_window(count: int, kind: str, in_order: bool) -> None:
    source = Counted(count)
    items = source.prompts_async() if kind == "async" else source.prompts()
    pairs = asyncio.run(_collect(FakeConnection(), items, source, size=9, in_order=in_order))
    assert sorted(_texts(pairs)) == [(index, f"text of p{index}") for index in range(count)]
    assert source.ahead <= 9


def test_loop_with_an_async_iterable_that_fails_raises_after_what_it_gave() -> None:
    async def failing() -> AsyncIterator[str]:
        yield "a"
        yield "b"
        raise Broken("upstream is gone")

    got: list[int] = []

    async def run() -> None:
        mailbox = LoopMailbox[Output]()
        async for index, _ in iterate_async(_window(FakeConnection(), mailbox), AsyncSource(failing()), mailbox):
            got.append(index)

    with pytest.raises(Broken, match="upstream"):
        asyncio.run(run())
    assert sorted(got) == [0, 1]


def test_loop_sends_what_it_has_while_it_waits_for_the_next_item() -> None:
    connection, more = FakeConnection(), list[int]()

    async def slow() -> AsyncIterator[str]:
        yield "first"
        while not more:
            await asyncio.sleep(0)
        yield "second"

    async def run() -> None:
        mailbox = LoopMailbox[Output]()
        async for index, _ in iterate_async(_window(connection, mailbox), AsyncSource(slow()), mailbox):
            more.append(index)

    asyncio.run(asyncio.wait_for(run(), 20))
    assert more == [0, 1]


def test_loop_that_is_left_stops_pulling_and_aborts() -> None:
    connection, ended = FakeConnection(is_silent=True), list[str]()

    async def endless() -> AsyncIterator[str]:
        try:
            yield "first"
            await asyncio.Event().wait()
        finally:
            ended.append("yes")

    async def run() -> None:
        mailbox = LoopMailbox[Output]()
        pairs = iterate_async(_window(connection, mailbox), AsyncSource(endless()), mailbox)
        task = asyncio.ensure_future(anext(pairs))
        while not connection.held:
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await asyncio.sleep(0)

    asyncio.run(asyncio.wait_for(run(), 20))
    assert (connection.aborted, ended) == ([0], ["yes"])


# On a real pool.


def test_iter_many_yields_as_items_end_and_in_order_when_asked(echo_pool: Pool) -> None:
    def params(index: int, prompt: Any) -> SamplingParams:
        return SamplingParams(max_tokens=200 if index == 0 else 5)

    prompts = [f"item {index:03}" for index in range(40)]
    ended = [index for index, _ in echo_pool.iter_many(iter(prompts), params)]
    ordered = [(index, output.prompt) for index, output in echo_pool.iter_many(iter(prompts), params, in_order=True)]
    assert sorted(ended) == list(range(40))
    assert ended[0] != 0
    assert ordered == list(enumerate(prompts))


def test_iter_many_left_early_aborts_the_rest(echo_pool: Pool) -> None:
    for index, _ in echo_pool.iter_many(Counted().prompts(), lambda index, _: ENDLESS if index else FIVE, window=10):
        assert index == 0
        break
    wait_for(lambda: echo_pool.status().in_flight == echo_pool.status().backlog == 0, "the abort of the rest")


def test_iter_many_of_what_is_no_iterable_is_refused(echo_pool: Pool) -> None:
    items: list[Any] = ["text", {"prompt": "a"}, b"bytes", 5, None]
    for item in items:
        with pytest.raises(InvalidRequest, match="an iterable of items is needed"):
            echo_pool.iter_many(item)


def test_iter_many_ends_an_item_at_its_deadline(echo_pool: Pool) -> None:
    outputs = dict(echo_pool.iter_many(["a", "b"], lambda index, _: FIVE if index else ENDLESS, deadline_s=0.3))
    assert outputs[1].ok
    assert isinstance(outputs[0].error, ItemError)
    assert outputs[0].error.code is Code.DEADLINE_EXCEEDED


def test_iter_many_over_twenty_thousand_items_counts_exactly_and_stays_within_its_window() -> None:
    source, seen = Counted(20_000), bytearray(20_000)
    with Pool(engine="echo", workers=2) as pool:
        for index, output in pool.iter_many(source.prompts(), FIVE, window=500):
            source.num_taken += 1
            seen[index] += 1
            assert output.text == (f"p{index}" * 3)[:5]
        status = pool.status()
    assert seen == b"\x01" * 20_000
    assert source.num_pulled == source.num_taken == 20_000
    assert source.ahead <= 500
    assert (status.finished, status.backlog, status.in_flight) == (20_000, 0, 0)
