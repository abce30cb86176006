"""Odd inputs on two real workers: each bad item ends alone with its own words, its neighbours are answered, no worker changes."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from conftest import worker_pids
from vllm_work import GREEDY, tool_turns

from enginepool import Code, EnginePoolWarning, Output, Pool, SamplingParams

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]

GOOD = {"max_tokens": 3, "temperature": 0.0}
INVALID, TOO_LONG = Code.INVALID_REQUEST, Code.CONTEXT_LENGTH_EXCEEDED
Bad = tuple[Any, dict[str, Any], Code, list[str]]
"""A prompt, its params, and the code and the words that its error has."""


@pytest.fixture(scope="module")
def pool(vllm_pool: Pool) -> Pool:
    """The shared pool under a shorter name."""
    return vllm_pool


@pytest.fixture(autouse=True)
def same_workers(pool: Pool) -> Iterator[None]:
    """Nothing here may cost a worker, and the next request is answered."""
    before = worker_pids(pool)
    yield
    assert worker_pids(pool) == before
    assert pool.generate("afterwards", GOOD).ok


def _schema(schema: Any) -> dict[str, Any]:
    return {"structured_outputs": {"json": schema}}


def _regex(regex: str) -> dict[str, Any]:
    return {"structured_outputs": {"regex": regex}}


def _nested(depth: int) -> dict[str, Any]:
    """A legal schema whose size triples with each level."""
    if depth == 0:
        return {"type": "string"}
    branch = {"type": "object", "additionalProperties": False}
    return {"oneOf": [branch | {"properties": {f"p{number}": _nested(depth - 1)}, "required": [f"p{number}"]} for number in range(3)]}


PROMPTS: dict[str, Bad] = {
    "far too long": ("word " * 600, {}, TOO_LONG, ["256", "at least 257 input tokens"]),
    "a megabyte": ("word " * 200_000, {}, TOO_LONG, ["256", "1000000 characters"]),
    "exactly the window": ([1] * 256, {}, TOO_LONG, ["length 256", "maximum model length of 256"]),
    "one beyond the window": ([1] * 257, {}, TOO_LONG, ["257", "256 tokens"]),
    "no text": ("", {}, INVALID, ["prompt cannot be empty"]),
    "no ids": ([], {}, INVALID, ["prompt cannot be empty"]),
    "no ids in a dict": ({"prompt_token_ids": []}, {}, INVALID, ["prompt cannot be empty"]),
    "a list of no ids": ([[]], {}, INVALID, ["token id 0 of the prompt is []"]),
    "a dict without a prompt": ({}, {}, INVALID, ["`prompt` (text) or `prompt_token_ids`"]),
    "a foreign id": ([10**7], {}, INVALID, ["10000000 is out of vocabulary"]),
    "a negative id": ([-1], {}, INVALID, ["-1 is out of vocabulary"]),
    "an id beyond 64 bits": ([1 << 70], {}, INVALID, ["64 bits"]),
    "half a pair": ("half \ud83d", {}, INVALID, ["character 5 of the text", "U+D83D"]),
}

SAMPLING: dict[str, Bad] = {
    "temperature NaN": ("x", {"temperature": math.nan}, INVALID, ["`temperature` must be a finite number"]),
    "temperature inf": ("x", {"temperature": 1e999}, INVALID, ["`temperature` must be a finite number"]),
    "temperature below 0": ("x", {"temperature": -1}, INVALID, ["temperature", "-1"]),
    "temperature as text": ("x", {"temperature": "0.5"}, INVALID, ["`temperature`", "str"]),
    "top_p 0": ("x", {"top_p": 0}, INVALID, ["top_p must be in (0, 1]"]),
    "top_p NaN": ("x", {"top_p": math.nan}, INVALID, ["`top_p` must be a finite number"]),
    "top_k below 0": ("x", {"top_k": -5}, INVALID, ["top_k"]),
    "min_p above 1": ("x", {"min_p": 2}, INVALID, ["min_p"]),
    "penalty NaN": ("x", {"repetition_penalty": math.nan}, INVALID, ["`repetition_penalty` must be a finite number"]),
    "bias NaN": ("x", {"logit_bias": {5: math.nan}}, INVALID, ["`logit_bias.5` must be a finite number"]),
    "NaN in a schema": ("x", _schema({"minimum": math.nan}), INVALID, ["`structured_outputs.json.minimum` must be a finite number"]),
    "n 0": ("x", {"n": 0}, INVALID, ["n must be at least 1"]),
    "a million samples": ("x", {"n": 10**6}, INVALID, ["n must be at most 16384"]),
    "samples of greedy": ("x", {"n": 3, "temperature": 0}, INVALID, ["n must be 1 when using greedy sampling"]),
    "max_tokens 0": ("x", {"max_tokens": 0}, INVALID, ["max_tokens must be at least 1"]),
    "max_tokens below 0": ("x", {"max_tokens": -1}, INVALID, ["max_tokens must be at least 1"]),
    "more min than max": ("x", {"min_tokens": 9, "max_tokens": 4}, INVALID, ["min_tokens", "max_tokens=4"]),
    "empty stop": ("x", {"stop": ""}, INVALID, ["`stop` must not hold an empty string"]),
    "empty stop in a list": ("x", {"stop": ["a", ""]}, INVALID, ["`stop` must not hold an empty string"]),
    "half a pair in stop": ("x", {"stop": ["a", "\udc00"]}, INVALID, ["character 0 of `stop[1]`", "U+DC00"]),
    "seed as text": ("x", {"seed": "x"}, INVALID, ["`seed`"]),
    "empty bad word": ("x", {"bad_words": [""]}, INVALID, ["bad_words"]),
    "malformed detection": ("x", {"repetition_detection": {"a": 1}}, INVALID, ["`a`", "repetition_detection"]),
    "detection of less than two": ("x", {"repetition_detection": {"max_pattern_size": 3, "min_count": 1}}, INVALID, ["min_count"]),
    "odd extra argument": ("x", {"extra_args": {"kv_transfer_params": 5}}, INVALID, ["int"]),
    "foreign bias": ("x", {"logit_bias": {10**7: 1.0}}, INVALID, ["logit_bias"]),
    "no token allowed": ("x", {"allowed_token_ids": []}, INVALID, ["allowed_token_ids"]),
    "foreign stop id": ("x", {"stop_token_ids": [10**7]}, INVALID, ["stop_token_ids"]),
    "all logprobs": ("x", {"logprobs": -1}, INVALID, ["logprobs of 49152", "max allowed: 20"]),
    "too many logprobs": ("x", {"logprobs": 1000}, INVALID, ["logprobs of 1000", "max allowed: 20"]),
    "all prompt logprobs": ([1] * 200, {"prompt_logprobs": -1}, INVALID, ["prompt logprobs of 49152", "max allowed: 20"]),
    "too many logprob ids": ("x", {"logprob_token_ids": list(range(3000))}, INVALID, ["logprob_token_ids of length 3000"]),
}

GRAMMARS: dict[str, Bad] = {
    "open group": ("x", _regex("("), INVALID, ["unclosed group"]),
    "open class": ("x", _regex("[a-"), INVALID, ["unclosed character class"]),
    "look-ahead": ("x", _regex("(?=x)y"), INVALID, ["look-ahead"]),
    "NUL in a regex": ("x", _regex("a\0"), INVALID, ["NUL"]),
    "unknown type": ("x", _schema({"type": "objec"}), INVALID, ["objec"]),
    "reference to nothing": ("x", _schema({"$ref": "#/nope"}), INVALID, ["/nope"]),
    "properties of a number": ("x", _schema({"type": "object", "properties": 5}), INVALID, ["properties"]),
    "schema of broken text": ("x", _schema('{"type":'), INVALID, ["JSON"]),
    "no schema": ("x", _schema(""), INVALID, ["json", "empty"]),
    "nothing to match": ("x", {"structured_outputs": {}}, INVALID, ["none are specified"]),
    "two formats": ("x", {"structured_outputs": {"regex": "a", "choice": ["a"]}}, INVALID, ["one kind"]),
    "no choice": ("x", {"structured_outputs": {"choice": []}}, INVALID, ["Choice", "empty"]),
    "unknown rule": ("x", {"structured_outputs": {"grammar": "root ::= undefined_rule"}}, INVALID, ["undefined_rule"]),
    "impossible bounds": ("x", _schema({"type": "integer", "minimum": 5, "maximum": 1}), INVALID, ["minimum (5)"]),
}

OTHER_BACKEND: dict[str, Bad] = {
    "a feature that xgrammar has not": (
        "x",
        _schema({"type": "integer", "multipleOf": 3}),
        INVALID,
        ["not supported by xgrammar", "guidance"],
    ),
    "a flag that xgrammar has not": ("x", _regex("(?i)a"), INVALID, ["Group modifier", "{'backend': 'guidance'}"]),
    "a schema of itself": ("x", _schema({"$ref": "#"}), INVALID, ["could not be compiled or followed"]),
    "a rule of itself": ("x", {"structured_outputs": {"grammar": "root ::= root"}}, INVALID, ["could not be compiled or followed"]),
}


def _sandwich(pool: Pool, bad: dict[str, Bad], good: dict[str, Any]) -> list[Output]:
    """Run bad items between good ones in one batch; check each bad one's error, return the good ones' outputs."""
    prompts: list[Any] = ["good"]
    params: list[Any] = [good]
    for prompt, extra, _, _ in bad.values():
        prompts += [prompt, "good"]
        params += [{"max_tokens": 3} | extra, good]
    with pytest.warns(EnginePoolWarning, match=f"{len(bad)} of {len(prompts)} items failed"):
        outputs = pool.generate_many(prompts, params)
    assert [output.index for output in outputs] == list(range(len(prompts)))
    for (name, (_, _, code, words)), output in zip(bad.items(), outputs[1::2], strict=True):
        assert output.error is not None, name
        assert output.error.code is code, (name, str(output.error))
        assert [word for word in words if word not in output.error.message] == [], (name, output.error.message)
    assert [output.error for output in outputs[::2]] == [None] * (len(bad) + 1)
    return outputs[::2]


def test_bad_prompts_and_params_end_alone_in_their_own_words(pool: Pool) -> None:
    good = _sandwich(pool, PROMPTS | SAMPLING, GOOD)
    assert all(output.text for output in good)


def test_bad_grammars_before_good_ones_and_after(pool: Pool) -> None:
    """The first structured output of an engine settles its backend, so bad ones come first, then good ones, then both."""
    plain = _sandwich(pool, GRAMMARS, GOOD)
    assert all(output.text for output in plain)
    good = pool.generate_many(["x"] * 8, GOOD | _regex("^(|.*)$"))
    assert [output.error for output in good] == [None] * 8
    matching = _sandwich(pool, GRAMMARS | OTHER_BACKEND, GOOD | _regex("[0-9]{2}"))
    assert {str(output.text).isdecimal() for output in matching} == {True}


@pytest.mark.parametrize("at", [0, 10, 19], ids=["first", "in the middle", "last"])
def test_prompt_beyond_the_window_fails_alone_wherever_it_stands(pool: Pool, at: int) -> None:
    prompts = [f"Number {index}:" for index in range(20)]
    prompts[at] = "word " * 600
    with pytest.warns(EnginePoolWarning, match="1 of 20 items failed"):
        outputs = pool.generate_many(prompts, GOOD)
    assert [output.index for output in outputs if not output.ok] == [at]


def test_caps_beyond_the_window_are_clamped(pool: Pool) -> None:
    room = [([1] * 255, 20), ([1] * 250, 100_000), ([1] * 250, 2**62)]
    outputs = pool.generate_many([ids for ids, _ in room], [SamplingParams(max_tokens=cap, ignore_eos=True) for _, cap in room])
    assert [(output.finish_reason, len(output.token_ids)) for output in outputs] == [("length", 1), ("length", 6), ("length", 6)]


def test_odd_but_legal_inputs_run(pool: Pool) -> None:
    """Spaces, NUL, a whole pair; a replacement character, many words or a NUL as stop; limits just reached."""
    odd: list[tuple[Any, dict[str, Any]]] = [
        ("   ", {}),
        ("a\0b", {}),
        ("ok \U0001f600", {}),
        ("x", {"stop": ["\ufffd"]}),
        ("x", {"stop": ["\0"], "bad_words": ["\ufffd"]}),
        ("x", {"stop": [f"word {number}" for number in range(1000)]}),
        ("x", {"top_k": 2**40, "seed": 2**63}),
        ("x", {"min_tokens": 3, "max_tokens": 3, "temperature": 0}),
    ]
    outputs = pool.generate_many([prompt for prompt, _ in odd], [{"max_tokens": 3} | extra for _, extra in odd])
    assert [output.error for output in outputs] == [None] * len(odd)
    assert [output.prompt for output in outputs[:3]] == ["   ", "a\0b", "ok \U0001f600"]


def test_conversations_that_can_not_travel_name_the_place(pool: Pool) -> None:
    hello = [{"role": "user", "content": "Hello"}]
    bad = [tool_turns('{"city": "\ud83d"}'), [*hello, {"role": "assistant", "content": "\udc00"}], []]
    with pytest.warns(EnginePoolWarning, match="3 of 7 items failed"):
        outputs = pool.chat_many([hello, bad[0], hello, bad[1], hello, bad[2], hello], GOOD)
    assert [output.ok for output in outputs] == [True, False] * 3 + [True]
    messages = [str(output.error) for output in outputs[1::2]]
    assert "message 1 can not be encoded: character 10 of `tool_calls[0].function.arguments` is a lone surrogate" in messages[0]
    assert "message 1 can not be encoded: character 0 of `content` is a lone surrogate" in messages[1]
    assert "the conversation has no messages" in messages[2]


def test_results_keep_order_and_count_whatever_their_length(pool: Pool) -> None:
    """Every item has a length of its own, so that an answer in another's place would show."""
    lengths = [1 + (index % 2) * 40 + index for index in range(30)]
    samples = [(1, 3, 8)[index % 3] if index < 12 else 1 for index in range(30)]
    prompts: list[Any] = [f"item {index}:" for index in range(30)]
    prompts[3] = "word " * 600
    params = [
        SamplingParams(max_tokens=length, n=count, temperature=1.0, ignore_eos=True) for length, count in zip(lengths, samples, strict=True)
    ]
    with pytest.warns(EnginePoolWarning, match="1 of 30 items failed"):
        outputs = pool.generate_many(prompts, params)
    assert [output.prompt for output in outputs] == prompts
    assert [output.index for output in outputs if not output.ok] == [3]
    for output, length, count in zip(outputs, lengths, samples, strict=True):
        if output.ok:
            assert [(sample.index, len(sample.token_ids)) for sample in output.outputs] == [(index, length) for index in range(count)]
            assert output.usage.prompt_tokens == len(output.prompt_token_ids or ())
            assert output.usage.completion_tokens == length * count


@pytest.mark.parametrize("count", [0, 1, 3, 7])
def test_few_items_for_two_workers(pool: Pool, count: int) -> None:
    params = [SamplingParams(max_tokens=1 if index < 5 else 30, ignore_eos=True) for index in range(count)]
    outputs = pool.generate_many([f"item {index}" for index in range(count)], params)
    assert [len(output.token_ids) for output in outputs] == [param.max_tokens for param in params]


def test_large_logprobs_pass_without_weight_on_the_dispatcher(pool: Pool) -> None:
    before = pool.status().rss_bytes
    params = SamplingParams(max_tokens=8, logprobs=20, prompt_logprobs=20, ignore_eos=True)
    outputs = pool.generate_many([[number + 100] * 120 for number in range(48)], params)
    assert [len(output.prompt_logprobs or ()) for output in outputs] == [120] * 48
    assert min(len(position or ()) for output in outputs for position in output.outputs[0].logprobs or ()) >= 20
    assert pool.status().rss_bytes - before < 100 << 20


def test_large_legal_schemas_do_not_hold_the_pool_up(pool: Pool) -> None:
    """Compiling takes seconds; other items run, and status answers meanwhile."""
    large = [_nested(7), {"enum": [f"value number {number}" for number in range(5000)]}, {"type": "array", "maxItems": 100_000}]
    futures = [pool.submit("x", GOOD | _schema(schema)) for schema in large]
    futures.append(pool.submit("x", GOOD | _regex("(a{1,500}){1,500}")))
    plain = [pool.submit("plain", GREEDY) for _ in range(10)]
    slowest = _slowest_status(pool, threading.Thread(target=lambda: [future.result(timeout=60) for future in [*futures, *plain]]))
    assert [future.result().error for future in [*futures, *plain]] == [None] * 14
    assert slowest < 1


def _slowest_status(pool: Pool, work: threading.Thread) -> float:
    """Ask for the status until the work has ended; returns the longest that one answer took, in seconds."""
    from enginepool.clock import monotonic

    work.start()
    slowest = 0.0
    while work.is_alive():
        started = monotonic()
        pool.status()
        slowest = max(slowest, monotonic() - started)
        work.join(0.1)
    return slowest
