"""The bundled prompts are mixed, distinct and short enough for the demo's window."""

from __future__ import annotations

from enginepool.demo.prompts import PROMPTS, as_chat


def test_prompts_are_distinct_and_about_two_dozen() -> None:
    texts = [prompt.text for prompt in PROMPTS]
    assert 20 <= len(texts) == len(set(texts))


def test_prompts_mix_short_and_long() -> None:
    lengths = sorted(len(prompt.text) for prompt in PROMPTS)
    assert lengths[0] < 40
    assert sum(length > 500 for length in lengths) == 3


def test_max_tokens_spread_from_8_to_160() -> None:
    limits = [prompt.max_tokens for prompt in PROMPTS]
    assert (min(limits), max(limits)) == (8, 160)
    assert len(set(limits)) > 10


def test_prompts_fit_the_demo_window() -> None:
    # English takes about four characters a token; two is on the safe side of that, and the window is 1024.
    assert all(len(as_chat(prompt.text)) / 2 + prompt.max_tokens < 1024 for prompt in PROMPTS)


def test_as_chat_opens_the_answer() -> None:
    assert as_chat("Hi\nthere") == "<|im_start|>user\nHi\nthere<|im_end|>\n<|im_start|>assistant\n"
