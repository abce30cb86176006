"""The soak's clients: threads that call the pool in every way, with items whose end is known beforehand."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from soak_ledger import Ledger, Plan

from enginepool import Code, EnginePoolError, Pool, SamplingParams

MOST_TOKENS = 40
LATE = frozenset({Code.DEADLINE_EXCEEDED})
CANCELLED = frozenset({Code.ABORTED})
LOST = frozenset({Code.WORKER_LOST})
TIMED_OUT = frozenset({Code.TIMEOUT})
ONCE = ("exit", "raise", "segfault", "kill", "stop", "hang", "miscount", "spin", "mute")
ONCE_VLLM = ("exit", "raise", "hang")
ALWAYS = (
    ("exit", 0, LOST),
    ("exit", 2, LOST),
    ("raise", 3, LOST),
    ("segfault", 1, LOST),
    ("hang", 0, TIMED_OUT | LOST),  # while it hangs, a kill from outside may be faster than the limit
    ("block", 1, TIMED_OUT | LOST),
)


class Items:
    """Makes items of one client: most are plain, some do harm once, few do it always."""

    def __init__(self, name: str, seed: int, folder: Path, *, is_vllm: bool) -> None:
        self.draw = random.Random(f"{seed} {name}")
        self._name = name
        self._folder = folder
        self._is_vllm = is_vllm
        self._num = 0

    def batch(self, count: int) -> list[Plan]:
        """Plain items, and with some chance one among them that does harm."""
        plans = [self.plain() for _ in range(count)]
        if self.draw.random() < (0.1 if self._is_vllm else 0.15):
            plans[self.draw.randrange(count)] = self.harmful()
        return plans

    def count(self, least: int, most: int) -> int:
        """How many items a call has; a real engine on two cores gets an eighth of them, so that calls end between faults."""
        share = 8 if self._is_vllm else 1
        return self.draw.randint(max(1, least // share), most // share)

    def plain(self, least_tokens: int = 1, **params: Any) -> Plan:
        """An item that has to succeed."""
        self._num += 1
        prompt = f"{self._name} {self._num:06d};"
        tokens = self.draw.randint(least_tokens, MOST_TOKENS)
        text = None if self._is_vllm else (prompt * 5)[:tokens]
        return Plan(prompt, SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, **params), text)

    def harmful(self) -> Plan:
        """Once: it has to succeed all the same. Always: it has to be found out."""
        if self._is_vllm or self.draw.random() < 0.7:
            fault: dict[str, Any] = {"fault": self.draw.choice(ONCE_VLLM if self._is_vllm else ONCE), "at": self.draw.randint(1, 3)}
            return self.plain(extra_args=fault | {"once": str(self._folder / f"{self._name}-{self._num}")})
        kind, at, codes = self.draw.choice(ALWAYS)
        plan = self.plain(5, extra_args={"fault": kind, "at": at})
        return Plan(plan.prompt, plan.params, plan.text, codes, must_fail=True)


class Client(threading.Thread):
    """One client with a connection of its own, which does one thing again and again until it is told to end."""

    def __init__(self, endpoint: str, items: Items, ledger: Ledger, act: Callable[[Pool, Items, Ledger], None]) -> None:
        super().__init__(name=f"soak {act.__name__}", daemon=True)
        self._endpoint, self._items, self._ledger, self._act = endpoint, items, ledger, act
        self.is_ending = threading.Event()

    def run(self) -> None:
        """Every exception is an objection: a pool that lives answers each call."""
        try:
            with Pool.connect(self._endpoint) as pool:
                while not self.is_ending.is_set():
                    self._act(pool, self._items, self._ledger)
        except EnginePoolError as error:
            self._ledger.object(f"{self.name}: {type(error).__name__}: {error}")


def many(pool: Pool, items: Items, ledger: Ledger) -> None:
    """generate_many with one to three hundred items."""
    plans = items.batch(items.count(1, 300))
    ledger.send(len(plans))
    ledger.end_all(plans, pool.generate_many([plan.prompt for plan in plans], [plan.params for plan in plans], progress=False))


def endless(pool: Pool, items: Items, ledger: Ledger) -> None:
    """iter_many from a generator, with a window that is smaller than the input."""
    plans = items.batch(items.count(50, 500))
    ledger.send(len(plans))
    seen = dict(pool.iter_many((plan.prompt for plan in plans), lambda index, _: plans[index].params, window=64, progress=False))
    ledger.end_all(plans, [seen[index] for index in sorted(seen)])


def streams(pool: Pool, items: Items, ledger: Ledger) -> None:
    """A stream that is read to its end; one that had begun when its worker died ends with that."""
    plan = items.plain()
    plan = Plan(plan.prompt, plan.params, plan.text, LOST)
    ledger.send(1)
    stream = pool.stream(plan.prompt, plan.params)
    text = "".join(delta.text for delta in stream)
    output = stream.output
    assert output is not None
    ledger.end(plan, output)
    if output.text != text:
        ledger.object(f"{plan.prompt!r}: the deltas make {text!r}, the output {output.text!r}")


def singles(pool: Pool, items: Items, ledger: Ledger) -> None:
    """submit with deadlines, priorities and cancelled ones."""
    plans = items.batch(items.count(1, 60))
    futures = []
    for plan in plans:
        deadline_s = items.draw.choice([None, None, None, 0.05])
        may_fail = plan.may_fail | (LATE if deadline_s else frozenset())
        future = pool.submit(plan.prompt, plan.params, priority=items.draw.randint(-1, 1), deadline_s=deadline_s)
        if items.draw.random() < 0.1:
            future.cancel()
            continue
        ledger.send(1)
        futures.append((Plan(plan.prompt, plan.params, plan.text, may_fail, must_fail=plan.must_fail and not deadline_s), future))
    for plan, future in futures:
        ledger.end(plan, future.result(timeout=240))


ACTS = (many, endless, streams, singles)
