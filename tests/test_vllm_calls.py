"""Every way of calling on real vLLM: conversations as `LLM.chat` renders them, streams, endless inputs, asyncio, each beside the others."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path
from typing import Any

import pytest
from conftest import wait_for
from vllm_work import CONVERSATIONS, ENGINE_ARGS, GREEDY, KV_BYTES, PROMPTS, SHORT, told_of, tool_turns

from enginepool import AsyncPool, Code, Delta, EnginePoolWarning, Output, Pool, SamplingParams
from enginepool.demo.model import ensure_model

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]

LONG = SamplingParams(max_tokens=240, ignore_eos=True)
HELLO = [{"role": "user", "content": "Hello"}]
STRICT = (
    "{% for m in messages %}{% if loop.index0 % 2 != (m.role != 'user')|int %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}{% endfor %}"
)


@pytest.fixture(scope="module")
def pool(vllm_pool: Pool) -> Pool:
    """The shared pool under a shorter name."""
    return vllm_pool


def _is_idle(pool: Pool) -> bool:
    return pool.status().in_flight == 0


# Conversations.


def test_chat_equals_llm_chat(pool: Pool, vllm_reference: list[dict[str, Any]]) -> None:
    outputs = {name: pool.chat(messages, SHORT, **keywords) for name, (messages, keywords) in CONVERSATIONS.items()}
    expected = dict(zip(CONVERSATIONS, vllm_reference[len(PROMPTS) :], strict=True))
    assert {name: told_of(output) for name, output in outputs.items()} == expected


@pytest.mark.parametrize("arguments", ["{}", "null", "", "{bad"])
def test_chat_null_content_is_no_word_none(pool: Pool, arguments: str) -> None:
    output = pool.chat(tool_turns(arguments), SHORT)
    assert output.ok
    assert output.prompt is not None
    assert "None" not in output.prompt
    assert "sunny" in output.prompt


def test_chat_many_keeps_order_and_bad_ones_fail_alone(pool: Pool) -> None:
    good = [{"role": "user", "content": f"Say {number}"} for number in range(3)]
    bad: list[Any] = [
        [],
        "text",
        [{"role": "user", "content": 5}],
        [{"content": "no role"}],
        [{"role": "user", "content": "half \ud83d"}],
        [{"role": "user", "content": "word " * 600}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}]}],
        [{"role": "user", "content": [{"type": "mystery"}]}],
        [{"role": "assistant", "content": None, "tool_calls": [{"id": "1", "type": "function"}]}],
    ]
    conversations: list[Any] = [[good[0]], *[item for one in bad for item in (one, [good[1]])], [good[2]]]
    with pytest.warns(EnginePoolWarning, match=f"{len(bad)} of {len(conversations)} items failed"):
        outputs = pool.chat_many(conversations, {"max_tokens": 4})
    failed = [output for output in outputs if not output.ok]
    assert [output.index for output in failed] == list(range(1, 2 * len(bad), 2))
    assert all(output.error is not None and output.error.blame == "caller" and output.error.message for output in failed)
    assert failed[5].error is not None
    assert failed[5].error.code is Code.CONTEXT_LENGTH_EXCEEDED


def test_chat_template_that_objects_is_that_items_error(pool: Pool) -> None:
    with pytest.warns(EnginePoolWarning, match="1 of 3 items failed.*roles must alternate"):
        outputs = pool.chat_many([HELLO, [*HELLO, *HELLO], HELLO], {"max_tokens": 4}, chat_template=STRICT + "{{ messages[0].content }}")
    assert [output.ok for output in outputs] == [True, False, True]


def test_chat_format_plain_has_no_roles(pool: Pool) -> None:
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
    ]
    nothing: dict[str, Any] = {"role": "assistant", "content": None}
    output = pool.chat([*messages, nothing], SHORT, request_format="plain")
    assert output.prompt == "Be kind. Hi"
    assert told_of(output) == told_of(pool.generate("Be kind. Hi", SHORT))


def test_chat_format_is_a_template_as_text_or_file(pool: Pool, tmp_path: Path) -> None:
    text = "{% for m in messages %}<{{ m.content }}>{% endfor %}"
    path = tmp_path / "chat.jinja"
    path.write_text(text)
    assert {pool.chat(HELLO, SHORT, request_format=given).prompt for given in (text, path, str(path))} == {"<Hello>"}


def test_chat_unknown_template_name_is_refused(pool: Pool) -> None:
    error = pool.chat(HELLO, SHORT, chat_template="tool_use").error
    assert error is not None
    assert "no chat template named 'tool_use'" in error.message


def test_model_without_a_template(tmp_path: Path) -> None:
    """Prompts run, conversations fail one by one unless a format or a template is given."""
    model = tmp_path / "base-model"
    shutil.copytree(ensure_model(), model)
    (model / "chat_template.jinja").unlink()
    with Pool(model, workers=1, kv_cache_budget_bytes=KV_BYTES, **ENGINE_ARGS) as pool:
        refused = pool.chat(HELLO, SHORT)
        assert refused.error is not None
        assert refused.error.code is Code.INVALID_REQUEST
        assert refused.error.message.startswith("the model has no chat template; give")
        assert pool.generate("Hello", GREEDY).ok
        assert pool.chat(HELLO, SHORT, request_format="default-template").prompt == "Hello"
        assert pool.chat(HELLO, SHORT, chat_template="{{ messages[0].content }}!").prompt == "Hello!"
        tools = pool.chat(HELLO, SHORT, request_format="default-template", tools=[{"type": "function", "function": {"name": "f"}}])
        assert not tools.ok


# Streams.


def _whole(deltas: list[Delta]) -> Output:
    output = deltas[-1].output
    assert output is not None
    assert [delta.output for delta in deltas[:-1]] == [None] * (len(deltas) - 1)
    return output


def test_stream_adds_up_to_the_whole(pool: Pool) -> None:
    params = SamplingParams(temperature=0, max_tokens=16, logprobs=1, prompt_logprobs=1)
    whole = pool.generate(PROMPTS[0], params)
    deltas = list(pool.stream(PROMPTS[0], params))
    assert len(deltas) > 8
    output = _whole(deltas)
    assert told_of(output) == told_of(whole)
    assert "".join(delta.text for delta in deltas) == whole.text
    assert [token for delta in deltas for token in delta.token_ids] == whole.token_ids
    assert [len(delta.logprobs or ()) for delta in deltas] == [len(delta.token_ids) for delta in deltas]
    assert len(output.outputs[0].logprobs or ()) == len(whole.token_ids)
    assert len(output.prompt_logprobs or ()) == len(whole.prompt_token_ids or ())
    assert output.timings.first_token is not None


def test_stream_of_three_samples(pool: Pool) -> None:
    deltas = list(pool.stream("Once", SamplingParams(n=3, max_tokens=6, temperature=1.0, ignore_eos=True)))
    output = _whole(deltas)
    assert [len(sample.token_ids) for sample in output.outputs] == [6] * 3
    for sample in output.outputs:
        assert "".join(delta.text for delta in deltas if delta.index == sample.index) == sample.text


def test_stream_with_a_stop_string_ends_before_it(pool: Pool) -> None:
    deltas = list(pool.stream("Count: one, two, three,", SamplingParams(temperature=0, max_tokens=40, stop=[","])))
    assert (_whole(deltas).finish_reason, "," in "".join(delta.text for delta in deltas)) == ("stop", False)


def test_streams_and_whole_requests_mix(pool: Pool) -> None:
    streams = [pool.stream(prompt, GREEDY) for prompt in PROMPTS]
    outputs = pool.generate_many(PROMPTS, GREEDY)
    streamed = [_whole(list(stream)) for stream in streams]
    assert [len(output.token_ids) for output in streamed] == [len(output.token_ids) for output in outputs]
    assert all(output.ok for output in streamed)


def test_stream_left_early_is_aborted(pool: Pool) -> None:
    for delta in pool.stream("A long story:", LONG):
        assert delta.output is None
        break
    wait_for(lambda: _is_idle(pool), "the abort", 10)


def test_stream_refused_by_the_engine_ends_with_its_error(pool: Pool) -> None:
    (delta,) = pool.stream("word " * 600, GREEDY)
    assert delta.output is not None
    assert delta.output.error is not None
    assert delta.output.error.code is Code.CONTEXT_LENGTH_EXCEEDED


def test_stream_chat_adds_up_to_chat(pool: Pool) -> None:
    messages, keywords = CONVERSATIONS["system"]
    assert told_of(_whole(list(pool.stream_chat(messages, SHORT, **keywords)))) == told_of(pool.chat(messages, SHORT, **keywords))


# Endless inputs, futures.


def test_iter_many_yields_each_index_once(pool: Pool) -> None:
    lengths = {index: 1 + index % 4 * 12 for index in range(40)}

    def params(index: int, prompt: object) -> SamplingParams:
        return SamplingParams(max_tokens=lengths[index], ignore_eos=True)

    found = dict(pool.iter_many((f"Number {index}:" for index in range(40)), params, window=20))
    assert {index: len(output.token_ids) for index, output in found.items()} == lengths
    assert {output.worker for output in found.values()} == {0, 1}


def test_iter_many_in_order_with_a_bad_one(pool: Pool) -> None:
    prompts = ["one", "", "three", "word " * 600, "five"]
    pairs = list(pool.iter_many(iter(prompts), {"max_tokens": 4}, in_order=True))
    assert [(index, output.ok) for index, output in pairs] == [(0, True), (1, False), (2, True), (3, False), (4, True)]


def test_iter_chat_many_renders_each(pool: Pool) -> None:
    conversations = ([{"role": "user", "content": f"Say {number}"}] for number in range(6))
    outputs = dict(pool.iter_chat_many(conversations, {"max_tokens": 4}))
    assert all(f"Say {index}" in str(output.prompt) for index, output in outputs.items())
    assert len(outputs) == 6


def test_submit_chat_is_a_future(pool: Pool) -> None:
    future = pool.submit_chat(HELLO, SHORT, request_id="mine")
    output = future.result(timeout=60)
    assert (output.request_id, output.ok, "Hello" in str(output.prompt)) == ("mine", True, True)


# asyncio.


def test_async_pool_has_every_verb(pool: Pool) -> None:
    greedy = {"max_tokens": 6, "temperature": 0.0}

    async def prompts() -> Any:
        for prompt in PROMPTS[:4]:
            yield prompt

    async def use() -> dict[str, Any]:
        async with AsyncPool.connect(pool.endpoint) as aio:
            return {
                "generate": (await aio.generate(PROMPTS[0], greedy)).text,
                "generate_many": [output.text for output in await aio.generate_many(PROMPTS[:1], greedy)],
                "iter_many": sorted([index async for index, output in aio.iter_many(prompts(), greedy) if output.ok]),
                "stream": "".join([delta.text async for delta in aio.stream(PROMPTS[0], greedy)]),
                "submit": (await aio.submit(PROMPTS[0], greedy)).text,
                "chat": (await aio.chat(HELLO, greedy)).text,
                "chat_many": [output.text for output in await aio.chat_many([HELLO], greedy)],
                "iter_chat_many": [output.text async for _, output in aio.iter_chat_many([HELLO], greedy)],
                "stream_chat": "".join([delta.text async for delta in aio.stream_chat(HELLO, greedy)]),
                "submit_chat": (await aio.submit_chat(HELLO, greedy)).text,
                "status": (await aio.status()).pool_id,
            }

    found = asyncio.run(use())
    text, said = pool.generate(PROMPTS[0], greedy).text, pool.chat(HELLO, greedy).text
    assert found == {
        "generate": text,
        "generate_many": [text],
        "iter_many": [0, 1, 2, 3],
        "stream": text,
        "submit": text,
        "chat": said,
        "chat_many": [said],
        "iter_chat_many": [said],
        "stream_chat": said,
        "submit_chat": said,
        "status": pool.pool_id,
    }


def test_async_cancel_frees_the_engine(pool: Pool) -> None:
    async def cancel() -> bool:
        async with AsyncPool.connect(pool.endpoint) as aio:
            task = asyncio.create_task(aio.generate("A long story:", LONG))
            while (await aio.status()).in_flight == 0:
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.wait([task])
            return task.cancelled()

    assert asyncio.run(cancel())
    wait_for(lambda: _is_idle(pool), "the abort", 10)
