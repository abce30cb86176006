"""The mixed-length work of the engine benchmarks: 96 prompts, output lengths exponential, the same for every variant."""

from __future__ import annotations

import random
from collections.abc import Sequence

import msgspec

from enginepool.demo.prompts import PROMPTS, as_chat

SEED = 20
MEAN_TOKENS = 50
MIN_TOKENS, MAX_TOKENS = 4, 200


class Work(msgspec.Struct, frozen=True):
    """Prompts and how many tokens each has to generate, end-of-sequence or not."""

    prompts: list[str]
    num_tokens: list[int]

    @property
    def total_tokens(self) -> int:
        """All tokens to generate."""
        return sum(self.num_tokens)

    def params(self) -> list[dict[str, object]]:
        """The sampling params of each prompt, by vLLM's names."""
        return [{"max_tokens": count, "ignore_eos": True, "temperature": 0.0} for count in self.num_tokens]

    def part(self, indexes: Sequence[int]) -> Work:
        """Only these items, in this order."""
        return Work([self.prompts[index] for index in indexes], [self.num_tokens[index] for index in indexes])


def make_work(count: int, number: int) -> Work:
    """The work of one round. Lengths are those of every round; each prompt starts anew, so no prefix cache has seen it."""
    chance = random.Random(SEED)
    lengths = [min(MAX_TOKENS, max(MIN_TOKENS, round(chance.expovariate(1 / MEAN_TOKENS)))) for _ in range(count)]
    texts = [chance.choice(PROMPTS).text for _ in range(count)]
    return Work([as_chat(f"Question {number}.{index}: {text}") for index, text in enumerate(texts)], lengths)


def split_evenly(num_tokens: Sequence[int], parts: int) -> list[list[int]]:
    """Indexes for each part: longest first to the part with the fewest tokens (LPT), then back in input order."""
    shares: list[list[int]] = [[] for _ in range(parts)]
    loads = [0] * parts
    for index in sorted(range(len(num_tokens)), key=lambda index: -num_tokens[index]):
        least = loads.index(min(loads))
        shares[least].append(index)
        loads[least] += num_tokens[index]
    return [sorted(share) for share in shares]
