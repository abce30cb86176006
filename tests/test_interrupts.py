"""Ctrl-C at any moment of any call: the pool stays usable, nothing runs on, and no late result is taken for one of the next call."""

from __future__ import annotations

import random
import signal
import threading
from collections.abc import Callable, Iterator
from functools import partial
from types import FrameType
from typing import Any

import pytest
from conftest import wait_for

from enginepool import Output, Pool, SamplingParams

ROUNDS = 30
LATEST_S = 0.012
LONG = SamplingParams(max_tokens=30)
SHORT = SamplingParams(max_tokens=8)
NUM_ITEMS = 40


def _chats(prompts: list[str]) -> list[Any]:
    return [[{"role": "user", "content": prompt}] for prompt in prompts]


def _read_streams(pool: Pool, prompts: list[str]) -> None:
    for prompt in prompts:
        for _ in pool.stream(prompt, LONG):
            pass


CALLS: dict[str, Callable[[Pool, list[str]], Any]] = {
    "generate": lambda pool, prompts: [pool.generate(prompt, LONG) for prompt in prompts],
    "generate_many": lambda pool, prompts: pool.generate_many(prompts, LONG),
    "chat_many": lambda pool, prompts: pool.chat_many(_chats(prompts), LONG),
    "iter_many": lambda pool, prompts: list(pool.iter_many(prompts, LONG)),
    "iter_many in order": lambda pool, prompts: list(pool.iter_many(iter(prompts), LONG, in_order=True, window=16)),
    "iter_chat_many": lambda pool, prompts: list(pool.iter_chat_many(_chats(prompts), LONG)),
    "stream": _read_streams,
}


class Interrupter:
    """Sends the main thread a real SIGINT a little later; it raises only while a call runs, so that the test itself is left alone."""

    def __init__(self) -> None:
        self.is_armed = False

    def handle(self, number: int, frame: FrameType | None) -> None:
        if self.is_armed:
            self.is_armed = False
            raise KeyboardInterrupt

    def interrupt(self, call: Callable[[], Any], after_s: float) -> bool:
        """Whether the call was interrupted, rather than over before."""
        over = threading.Event()
        main_thread = threading.get_ident()

        def strike() -> None:
            over.wait(after_s)
            signal.pthread_kill(main_thread, signal.SIGINT)

        helper = threading.Thread(target=strike)
        try:
            self.is_armed = True
            helper.start()
            call()
            self.is_armed = False
        except KeyboardInterrupt:
            return True
        finally:
            over.set()
            helper.join()
        return False


@pytest.fixture
def interrupter() -> Iterator[Interrupter]:
    one = Interrupter()
    before = signal.signal(signal.SIGINT, one.handle)
    yield one
    signal.signal(signal.SIGINT, before)


def _assert_exact(outputs: list[Output], prompts: list[str]) -> None:
    assert [(output.index, output.prompt, output.text, output.error) for output in outputs] == [
        (index, prompt, prompt[:8], None) for index, prompt in enumerate(prompts)
    ]


@pytest.mark.parametrize("name", CALLS)
def test_interrupt_at_any_moment_leaves_a_pool_whose_next_call_gets_its_own_results(
    echo_pool: Pool, interrupter: Interrupter, name: str
) -> None:
    draw = random.Random(name)
    num_interrupted = 0
    for number in range(ROUNDS):
        doomed = [f"{number:03d}-{index:02d} to be interrupted" for index in range(NUM_ITEMS)]
        num_interrupted += interrupter.interrupt(partial(CALLS[name], echo_pool, doomed), draw.uniform(0, LATEST_S))
        prompts = [f"{number:03d}+{index:02d} next call" for index in range(5)]
        _assert_exact(echo_pool.generate_many(prompts, SHORT), prompts)
        pairs = sorted(echo_pool.iter_many(prompts, SHORT), key=lambda pair: pair[0])
        _assert_exact([output for _, output in pairs], prompts)
    assert num_interrupted > ROUNDS // 2
    connection = echo_pool._connection
    wait_for(lambda: connection.num_pending == 0, "the end of what was interrupted")
    wait_for(lambda: echo_pool.status().in_flight + echo_pool.status().backlog == 0, "its abort")
    assert connection.is_idle, "a close would wait for a call that is over"
