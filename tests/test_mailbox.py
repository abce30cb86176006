"""Mailboxes lose no wake-up, whatever the order of pushing, poking, taking and sleeping, and outlive the loop of their reader."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Iterator

import pytest

from enginepool.client.mailbox import LoopMailbox, Mailbox, ThreadMailbox

FOR_EVER_S = 30.0
NUM_THREADS = 4
NUM_EACH = 5000


@pytest.fixture(autouse=True)
def _restless_threads() -> Iterator[None]:
    """Let threads take turns as often as they can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


class Writers:
    """Threads that push numbers, each its own."""

    def __init__(self, mailbox: Mailbox[int], num_each: int = NUM_EACH) -> None:
        self.count = NUM_THREADS * num_each
        self.threads = [threading.Thread(target=self._write, args=(mailbox, first, num_each)) for first in range(NUM_THREADS)]
        for thread in self.threads:
            thread.start()

    def _write(self, mailbox: Mailbox[int], first: int, num_each: int) -> None:
        for number in range(num_each):
            mailbox.push(first + NUM_THREADS * number)

    def join(self) -> None:
        """Wait for their end."""
        for thread in self.threads:
            thread.join()


def test_mailbox_hands_out_everything_once_in_order() -> None:
    mailbox = ThreadMailbox[int]()
    for number in range(5):
        mailbox.push(number)
    assert (len(mailbox), mailbox.take(), mailbox.take(), len(mailbox)) == (5, [0, 1, 2, 3, 4], [], 0)


@pytest.mark.parametrize("most_wanted", [1, 2, 64])
def test_thread_reader_misses_no_wake_up(most_wanted: int) -> None:
    """A lost wake-up would make it sleep for the whole time limit, far longer than the test may take."""
    mailbox = ThreadMailbox[int]()
    writers = Writers(mailbox)
    got: list[int] = []
    while len(got) < writers.count:
        mailbox.wanted = min(most_wanted, writers.count - len(got))
        mailbox.wait(FOR_EVER_S * 100)
        got += mailbox.take()
    writers.join()
    assert sorted(got) == list(range(writers.count))


def test_thread_reader_sleeps_until_as_many_as_wanted_lie_there() -> None:
    mailbox = ThreadMailbox[int]()
    mailbox.wanted = 3
    mailbox.push(1)
    mailbox.push(2)
    assert mailbox._bell.locked()
    mailbox.push(3)
    assert not mailbox._bell.locked()
    mailbox.wait(FOR_EVER_S)
    assert mailbox.take() == [1, 2, 3]


def test_thread_reader_that_wants_less_than_lies_there_does_not_sleep() -> None:
    mailbox = ThreadMailbox[int]()
    mailbox.wanted = 10
    mailbox.push(1)
    mailbox.wanted = 1
    mailbox.wait(None)
    assert mailbox.take() == [1]


def test_thread_reader_is_woken_by_a_poke_with_nothing_there() -> None:
    mailbox = ThreadMailbox[int]()
    mailbox.wanted = 1000
    poker = threading.Thread(target=mailbox.poke)
    poker.start()
    mailbox.wait(None)
    poker.join()
    assert mailbox.take() == []


def test_thread_reader_poked_before_it_sleeps_does_not_sleep() -> None:
    mailbox = ThreadMailbox[int]()
    mailbox.poke()
    mailbox.wait(None)


def test_thread_reader_wakes_at_its_time_limit() -> None:
    mailbox = ThreadMailbox[int]()
    mailbox.wait(0.0)
    mailbox.wait(0.001)
    assert mailbox.take() == []


@pytest.mark.parametrize("most_wanted", [1, 2, 64])
def test_loop_reader_misses_no_wake_up(most_wanted: int) -> None:
    async def read() -> list[int]:
        mailbox = LoopMailbox[int]()
        writers = Writers(mailbox)
        got: list[int] = []
        while len(got) < writers.count:
            mailbox.wanted = min(most_wanted, writers.count - len(got))
            await mailbox.wait(FOR_EVER_S * 100)
            got += mailbox.take()
        writers.join()
        return got

    got = asyncio.run(asyncio.wait_for(read(), FOR_EVER_S))
    assert sorted(got) == list(range(NUM_THREADS * NUM_EACH))


def test_loop_reader_that_never_waits_is_called_for_everything() -> None:
    async def read() -> list[int]:
        mailbox, got, done = LoopMailbox[int](), list[int](), asyncio.Event()

        def take() -> None:
            got.extend(mailbox.take())
            if len(got) == NUM_THREADS * NUM_EACH:
                done.set()

        mailbox.on_news = take
        writers = Writers(mailbox)
        await asyncio.wait_for(done.wait(), FOR_EVER_S)
        writers.join()
        return got

    assert sorted(asyncio.run(read())) == list(range(NUM_THREADS * NUM_EACH))


def test_loop_reader_is_woken_by_a_poke_and_by_a_time_limit() -> None:
    async def read() -> None:
        mailbox = LoopMailbox[int]()
        mailbox.wanted = 1000
        poker = threading.Thread(target=mailbox.poke)
        poker.start()
        await mailbox.wait(None)
        poker.join()
        await mailbox.wait(0.001)
        assert mailbox.take() == []

    asyncio.run(asyncio.wait_for(read(), FOR_EVER_S))


def test_loop_reader_that_is_cancelled_leaves_everything_there() -> None:
    async def read() -> list[int]:
        mailbox = LoopMailbox[int]()
        reader = asyncio.ensure_future(mailbox.wait(None))
        await asyncio.sleep(0)
        reader.cancel()
        await asyncio.gather(reader, return_exceptions=True)
        mailbox.push(1)
        await mailbox.wait(None)
        return mailbox.take()

    assert asyncio.run(asyncio.wait_for(read(), FOR_EVER_S)) == [1]


def test_loop_mailbox_whose_loop_is_closed_takes_and_wakes_nobody() -> None:
    async def make() -> LoopMailbox[int]:
        return LoopMailbox[int]()

    mailbox = asyncio.run(make())
    mailbox.push(1)
    mailbox.push(2)
    mailbox.poke()
    assert mailbox.take() == [1, 2]
