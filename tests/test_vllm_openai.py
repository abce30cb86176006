"""OpenAI requests on two real workers: the answers of `vllm run-batch`, and each odd one refused alone in vLLM's own words."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import wait_for, worker_pids
from openai_help import EMBEDDINGS, ask, body_of, chat, completion, raw, send, texts_of
from vllm_run_batch import run_batch
from vllm_work import WEATHER, tool_turns

from enginepool import Code, Output, Pool
from enginepool.demo.model import ensure_model
from enginepool.errors import ItemError
from enginepool.payload import OpenAIRequest

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]

SCHEMA = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 5}}, "required": ["name"], "additionalProperties": False}
JSON_SCHEMA = {"type": "json_schema", "json_schema": {"name": "thing", "schema": SCHEMA}}
SAMPLED = {"temperature": 0.8, "seed": 7}
NULLS = dict.fromkeys(["max_tokens", "n", "stop", "seed", "tools", "top_p", "stream", "logprobs", "user", "response_format", "logit_bias"])
EXTRA = {"top_k": 5, "min_p": 0.01, "repetition_penalty": 1.2, "presence_penalty": 0.1, "ignore_eos": True, "stop_token_ids": [3]}

SAME = {
    "plain": chat("What is the capital of France?"),
    "system": chat([{"role": "system", "content": "Answer in one word."}, {"role": "user", "content": "Is snow white?"}]),
    "parts": chat([{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]),
    "tools for the template": chat("Weather in Rome?", tools=[WEATHER], tool_choice="none"),
    "null tool choice": chat("Weather in Rome?", tools=[WEATHER], tool_choice=None),
    "auto tool choice without a parser": chat("Weather in Rome?", tools=[WEATHER]),
    "a tool's turn": chat(tool_turns('{"city": "Rome"}'), return_token_ids=True),
    "broken arguments": chat(tool_turns("{bad")),
    "json object": chat("A name as JSON", response_format={"type": "json_object"}, max_tokens=12),
    "json schema": chat("A name as JSON", response_format=JSON_SCHEMA, max_tokens=24),
    "two samples": chat("Name a fruit", n=2, **SAMPLED),
    "two greedy samples": chat("Name a fruit", n=2),
    "logprobs": chat("Is snow white?", logprobs=True, top_logprobs=3),
    "prompt logprobs": chat("Is snow white?", prompt_logprobs=1, max_tokens=2),
    "stop": chat("Count from one to nine in words", stop=["three", ","], max_tokens=12),
    "template keywords": chat("Hello", chat_template_kwargs={"enable_thinking": False}),
    "cap": chat("Hello", max_completion_tokens=3),
    "nulls": chat("Hello", **NULLS, max_completion_tokens=4),
    "min_tokens": chat("Say yes", min_tokens=5),
    "extra fields": chat("Hello", **EXTRA),
    "unknown key": chat("Hello", foo=1),
    "too long": chat("word " * 600),
    "beyond the window": chat("Hello", max_tokens=100_000, stop=["!", ".", "?"]),
    "other model": chat("Hello", model="other"),
    "named model": chat("Hello", model="SmolLM2-135M-Instruct"),
    "bad temperature": chat("Hello", temperature=-1),
    "stream": chat("Hello", stream=True),
    "embedding": OpenAIRequest(EMBEDDINGS, b'{"input": "a"}'),
    "no messages": chat([]),
    "request's template": chat("Hello", chat_template="{{ 1 }}"),
}
SAMPLES = ("two samples",)


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
    assert ask(pool, [chat("afterwards")])[0].error is None


def _told(response: dict[str, Any], *, with_text: bool) -> dict[str, Any]:
    """What two responses have in common: not ids, times and the fingerprint of a configuration."""
    told = {name: value for name, value in response.items() if name not in ("id", "created", "system_fingerprint")}
    if not with_text:
        told["choices"] = [choice["index"] for choice in told["choices"]]
        told["usage"] = told["usage"]["prompt_tokens"]
    return told


def _assert_close(ours: Any, theirs: Any, place: str) -> None:
    """Equal, but for numbers that two runs round differently."""
    if isinstance(theirs, float) and isinstance(ours, float):
        assert ours == pytest.approx(theirs, abs=0.05), place
    elif isinstance(theirs, dict):
        assert list(ours) == list(theirs), place
        for name, value in theirs.items():
            _assert_close(ours[name], value, f"{place}.{name}")
    elif isinstance(theirs, list):
        assert len(ours) == len(theirs), place
        for index, value in enumerate(theirs):
            _assert_close(ours[index], value, f"{place}[{index}]")
    else:
        assert ours == theirs, place


def _error_told(error: ItemError) -> Any:
    """The error as a line of `vllm run-batch` has it: an object of four, or text alone."""
    if error.kind is None:
        return error.message
    return {"error": {"message": error.message, "type": error.kind, "param": error.param, "code": error.status}}


def test_answers_and_errors_are_those_of_vllm_run_batch(pool: Pool, tmp_path: Path) -> None:
    theirs = run_batch(str(ensure_model()), list(SAME.values()), tmp_path)
    for (name, request), line in zip(SAME.items(), theirs, strict=True):
        (output,) = ask(pool, [request])
        if line["error"] is None:
            with_text = name not in SAMPLES
            _assert_close(_told(body_of(output), with_text=with_text), _told(line["response"]["body"], with_text=with_text), name)
        else:
            assert output.error is not None, name
            assert _error_told(output.error) == line["error"], name
            assert output.error.http_status == line["response"]["status_code"], name


def test_completions_answer_as_vllms_server_does(pool: Pool) -> None:
    asked = {
        "plain": completion("The capital of France is", echo=True, logprobs=1, max_tokens=2),
        "several": completion(["One, two,", "Monday, Tuesday,", "A, B,"], n=2, **SAMPLED),
        "ids": completion([504, 3575], max_tokens=2, return_token_ids=True),
        "prompt only": completion("The capital", echo=True, max_tokens=0),
        "255 ids": completion([1] * 255, ignore_eos=True),
        "wide cap": completion([1] * 240, max_tokens=256, ignore_eos=True),
    }
    outputs = dict(zip(asked, ask(pool, list(asked.values())), strict=True))
    bodies = {name: body_of(output) for name, output in outputs.items()}
    assert {body["object"] for body in bodies.values()} == {"text_completion"}
    assert texts_of(outputs["plain"])[0].startswith("The capital of France is Paris")
    assert bodies["plain"]["choices"][0]["logprobs"]["token_logprobs"][0] is None
    assert [choice["index"] for choice in bodies["several"]["choices"]] == list(range(6))
    assert bodies["several"]["usage"] == bodies["several"]["usage"] | {"completion_tokens": 36}
    answer = outputs["several"].answer
    assert answer is not None
    assert (answer.prompt_tokens, answer.completion_tokens) == (bodies["several"]["usage"]["prompt_tokens"], 36)
    assert bodies["ids"]["choices"][0]["prompt_token_ids"] == [504, 3575]
    assert texts_of(outputs["prompt only"]) == ["The capital"]
    ends = [bodies[name]["choices"][0]["finish_reason"] for name in ("255 ids", "wide cap")]
    assert (ends, bodies["255 ids"]["usage"]["completion_tokens"], bodies["wide cap"]["usage"]["completion_tokens"]) == (
        ["length"] * 2,
        1,
        16,
    )
    stamps = [getattr(outputs["several"].timings, name) or 0 for name in ("arrived", "queued", "scheduled", "first_token", "finished")]
    assert stamps == sorted(stamps)
    assert 0 not in stamps


LONG, BAD, ENGINE = Code.CONTEXT_LENGTH_EXCEEDED, Code.INVALID_REQUEST, Code.ENGINE_ERROR
DEEP = b'{"prompt": ' + b"[" * 20_000 + b"]" * 20_000 + b"}"
PROMPT_LINES: dict[str, tuple[OpenAIRequest, Code, str]] = {
    "too long": (completion("word " * 600), LONG, "257 input tokens"),
    "256 ids": (completion([1] * 256), LONG, "256"),
    "257 ids": (completion([1] * 257), LONG, "257"),
    "no text": (completion(""), BAD, "must be provided and non-empty"),
    "no prompts": (completion([]), BAD, "at least one prompt"),
    "no ids": (completion([[]]), BAD, "prompt cannot be empty"),
    "second empty": (completion(["ok", ""]), BAD, "prompt 1: "),
    "third too long": (completion(["ok", "ok", "word " * 600]), LONG, "prompt 2: "),
    "no prompt": (completion(None), BAD, "must be provided"),
    "foreign id": (completion([10**7]), BAD, "10000000"),
    "id beyond 64 bits": (completion([1 << 70]), BAD, "out of vocabulary"),
    "cap beyond the window": (completion("hi", max_tokens=100_000), LONG, "max_model_len=256"),
    "deep": (OpenAIRequest("/v1/completions", DEEP), BAD, "nested too deeply"),
    "half a pair": (OpenAIRequest("/v1/completions", b'{"prompt": "half \\ud83d"}'), BAD, "`prompt` holds a lone surrogate"),
    "no UTF-8": (OpenAIRequest("/v1/completions", b'{"prompt": "\xff\xfe"}'), BAD, "not JSON"),
    "a text": (OpenAIRequest("/v1/completions", b'"prompt"'), BAD, "not a JSON object"),
    "beam search": (completion("x", use_beam_search=True, n=2), BAD, "beam search"),
    "other endpoint": (OpenAIRequest("/v1/responses", b"{}"), BAD, "Model does not support endpoint: /v1/responses"),
}
SAMPLING_LINES: dict[str, tuple[OpenAIRequest, Code, str]] = {
    "temperature NaN": (raw('"temperature": NaN'), BAD, "`temperature` must be a finite number"),
    "temperature 1e999": (raw('"temperature": 1e999'), BAD, "`temperature` must be a finite number"),
    "bias inf": (raw('"logit_bias": {"5": Infinity}'), BAD, "`logit_bias.5` must be a finite number"),
    "temperature below 0": (completion("x", temperature=-1), BAD, "temperature"),
    "temperature as a word": (completion("x", temperature="warm"), BAD, "body.temperature"),
    "top_p 0": (completion("x", top_p=0), BAD, "top_p"),
    "top_k below 0": (completion("x", top_k=-5), BAD, "top_k"),
    "n 0": (completion("x", n=0), BAD, "n must be at least 1"),
    "a million samples": (completion("x", n=10**6), BAD, "n must be at most"),
    "max_tokens 0": (completion("x", max_tokens=0), BAD, "max_tokens"),
    "max_tokens below 0": (completion("x", max_tokens=-1), BAD, "max_tokens"),
    "more min than max": (completion("x", min_tokens=9, max_tokens=4), BAD, "min_tokens"),
    "empty stop": (completion("x", stop=""), BAD, "empty string"),
    "empty stop in a list": (completion("x", stop=[""]), BAD, "empty string"),
    "half a pair in stop": (raw('"stop": ["\\udc00"]'), BAD, "`stop[0]` holds a lone surrogate"),
    "seed as text": (completion("x", seed="x"), BAD, "body.seed"),
    "empty bad word": (completion("x", bad_words=[""]), BAD, "bad_words"),
    "foreign bias": (completion("x", logit_bias={str(10**7): 1}), BAD, "logit_bias"),
    "all prompt logprobs": (completion([1] * 200, prompt_logprobs=-1), BAD, "max allowed: 20"),
    "all logprobs": (completion("x", logprobs=-1), BAD, "logprobs"),
    "too many logprobs": (completion("x", logprobs=1000), BAD, "max allowed: 20"),
    "strict": (OpenAIRequest("/v1/completions", b'{"prompt": "x", "foo": 1}', is_strict=True), BAD, "unknown key 'foo'"),
}
GRAMMAR_LINES: dict[str, tuple[OpenAIRequest, Code, str]] = {
    "open group": (chat("x", structured_outputs={"regex": "("}), BAD, "unclosed group"),
    "open class": (chat("x", structured_outputs={"regex": "[a-"}), BAD, "unclosed character class"),
    "look-ahead": (completion("x", structured_outputs={"regex": "(?=x)y"}), BAD, "look-ahead"),
    "unknown type": (chat("x", structured_outputs={"json": {"type": "objec"}}), BAD, "objec"),
    "reference to nothing": (chat("x", structured_outputs={"json": {"$ref": "#/nope"}}), BAD, "/nope"),
    "properties of a number": (chat("x", structured_outputs={"json": {"type": "object", "properties": 5}}), BAD, "properties"),
    "broken schema": (chat("x", structured_outputs={"json": '{"type":'}), BAD, "JSON"),
    "no schema": (chat("x", response_format={"type": "json_schema"}), BAD, "json_schema"),
    "unknown rule": (chat("x", structured_outputs={"grammar": "root ::= undefined_rule"}), BAD, "undefined_rule"),
    "of several": (completion(["a", "b"], structured_outputs={"regex": "("}), BAD, "unclosed group"),
    "a rule of itself": (chat("x", structured_outputs={"grammar": "root ::= root"}), BAD, "could not be compiled"),
}
IMAGE = {"type": "image_url", "image_url": {"url": "http://127.0.0.1:9/a.png"}}
CHAT_LINES: dict[str, tuple[OpenAIRequest, Code, str]] = {
    "image": (chat([{"role": "user", "content": [IMAGE]}]), BAD, "image_url"),
    "no content of a user": (chat([{"role": "user", "content": None}]), BAD, "messages"),
    "content as a number": (chat([{"role": "user", "content": 5}]), BAD, "content"),
    "message as text": (chat(["hello"]), BAD, "messages"),
    "reserved tokenize": (chat("x", chat_template_kwargs={"tokenize": True}), BAD, "'tokenize' is reserved"),
    "reserved messages": (chat("x", chat_template_kwargs={"messages": []}), BAD, "'messages' is reserved"),
    "own template": (chat("x", chat_template="{{ 1 }}"), BAD, "--trust-request-chat-template"),
    "half a pair in arguments": (
        OpenAIRequest("/v1/chat/completions", b'{"messages": [{"role": "user", "content": "\\udc00"}]}'),
        BAD,
        "`messages[0].content` holds a lone surrogate",
    ),
}


def _sandwich(pool: Pool, lines: dict[str, tuple[OpenAIRequest, Code, str]], good: OpenAIRequest) -> None:
    """Run bad requests between good ones in one batch; each ends alone, with its code, its words and a status below 500."""
    requests = [good]
    for bad, _, _ in lines.values():
        requests += [bad, good]
    outputs = ask(pool, requests)
    for (name, (_, code, words)), output in zip(lines.items(), outputs[1::2], strict=True):
        assert output.error is not None, name
        assert (output.error.code, output.error.http_status) == (code, 400), (name, str(output.error))
        assert words in output.error.message + f" {output.error.param}", (name, output.error.message)
    assert [output.error for output in outputs[::2]] == [None] * (len(lines) + 1)
    assert all(texts_of(output)[0] for output in outputs[::2])


def test_bad_prompts_and_params_end_alone_in_vllms_words(pool: Pool) -> None:
    _sandwich(pool, PROMPT_LINES | SAMPLING_LINES | CHAT_LINES, completion("good", max_tokens=3))


def test_bad_grammars_end_alone_between_good_ones(pool: Pool) -> None:
    good = chat("x", structured_outputs={"regex": "[0-9]{2}"}, max_tokens=4)
    _sandwich(pool, GRAMMAR_LINES, good)


def test_odd_but_legal_requests_run(pool: Pool) -> None:
    odd = [
        completion("   "),
        completion("a\0b", echo=True),
        OpenAIRequest("/v1/completions", b'{"prompt": "ok \\ud83d\\ude00", "max_tokens": 2, "echo": true}'),
        completion("x", stop=["�"]),
        completion("x", temperature="0.5"),
        completion("x", top_k=2**40, priority=5, request_id="same"),
        completion("x", top_k=2**40, priority=5, request_id="same"),
        chat([{"role": "user", "content": ""}]),
        chat("x", response_format={"type": "text"}),
        chat([{"role": "developer", "content": "Be short."}, {"role": "user", "content": "Hello"}]),
    ]
    outputs = ask(pool, odd)
    assert [output.error for output in outputs] == [None] * len(odd)
    assert [texts_of(output)[0][:4] for output in outputs[1:3]] == ["a\0b" + texts_of(outputs[1])[0][3:4], "ok \U0001f600"]


def test_null_content_and_odd_tool_turns_leave_no_none_in_the_prompt(pool: Pool) -> None:
    turns = [tool_turns(arguments) for arguments in ("{}", "null", "")] + [tool_turns("{}", tool_call_id=None)]
    turns += [[{"role": "user", "content": []}]]
    outputs = ask(pool, [chat(messages, return_prompt_text=True) for messages in turns])
    assert [output.error for output in outputs] == [None] * len(turns)
    assert [text for text in (body_of(output)["prompt_text"] for output in outputs) if "None" in text] == []


def test_unknown_keys_are_named(pool: Pool) -> None:
    (output,) = ask(pool, [chat("Hello", foo=1, guided_json={})])
    assert output.answer is not None
    assert sorted(output.answer.notices) == ["unknown key 'foo' in the body is ignored", "unknown key 'guided_json' in the body is ignored"]


def test_requests_of_several_prompts_leave_nothing_in_the_engine(pool: Pool) -> None:
    futures = [pool.submit("afterwards", {"max_tokens": 3}) for _ in range(4)]
    many = ask(pool, [completion([f"Number {index}:" for index in range(12)], max_tokens=20, ignore_eos=True)] * 3)
    assert [len(texts_of(output)) for output in many] == [12] * 3
    assert all(future.result(timeout=60).ok for future in futures)
    wait_for(lambda: {(worker.running, worker.waiting) for worker in pool.status().workers} == {(0, 0)}, "idle engines")
    assert re.match(r"cmpl-", body_of(many[0])["id"])


def test_aborted_request_of_several_prompts_leaves_nothing_in_the_engine(pool: Pool) -> None:
    flight, _ = send(pool, [completion(["One", "Two", "Three"], max_tokens=250, ignore_eos=True)])
    wait_for(lambda: sum(worker.running for worker in pool.status().workers) == 3, "three running prompts", 60)
    flight.abort()
    wait_for(lambda: {(worker.running, worker.waiting) for worker in pool.status().workers} == {(0, 0)}, "idle engines")


def _outputs_with_errors(outputs: list[Output]) -> list[str]:
    return [str(output.error) for output in outputs if output.error]


def test_tool_calls_are_parsed_and_models_have_their_served_names() -> None:
    arguments: dict[str, Any] = {"tool_call_parser": "hermes", "enable_auto_tool_choice": True, "served_model_name": ["first", "second"]}
    with Pool(workers=1, enforce_eager=True, max_model_len=256, max_num_seqs=8, kv_cache_budget_bytes=256 << 20, **arguments) as pool:
        called = chat("Weather in Rome?", tools=[WEATHER], tool_choice="required", max_tokens=60, model="second")
        outputs = ask(pool, [called, chat("Hello", tools=[WEATHER]), chat("Hello", model="third"), chat("Hello", model=None)])
        assert body_of(outputs[0])["choices"][0]["message"]["tool_calls"][0]["function"]["name"] == "weather"
        assert body_of(outputs[0])["model"] == "first"
        assert outputs[1].error is None
        assert outputs[2].error is not None
        assert (outputs[2].error.http_status, outputs[2].error.kind, outputs[2].error.param) == (404, "NotFoundError", "model")
        assert outputs[3].error is None


def test_embeddings_of_a_pooling_pool() -> None:
    with Pool(workers=1, runner="pooling", convert="embed", enforce_eager=True, max_model_len=256, max_num_seqs=8) as pool:
        texts = ["Snow is white.", "Snow is white.", "Rome"]
        requests = [OpenAIRequest(EMBEDDINGS, body) for body in (b'{"input": "a", "encoding_format": "base64"}', b'{"input": ""}', b"{}")]
        outputs = ask(pool, [OpenAIRequest(EMBEDDINGS, str({"input": texts}).replace("'", '"').encode()), *requests, chat("x")])
        body = body_of(outputs[0])
        first, second, third = (item["embedding"] for item in body["data"])
        assert first == pytest.approx(second, abs=0.01)
        assert first != pytest.approx(third, abs=0.01)
        assert body["usage"]["prompt_tokens"] == outputs[0].answer.prompt_tokens if outputs[0].answer else False
        assert isinstance(body_of(outputs[1])["data"][0]["embedding"], str)
        assert [(output.error.http_status if output.error else None) for output in outputs[2:]] == [400, 400, 400]
        assert "Model does not support endpoint: /v1/chat/completions" in _outputs_with_errors(outputs[4:])[0]
        assert not pool.generate("x", {"max_tokens": 1}).ok
        assert len(worker_pids(pool)) == 1
