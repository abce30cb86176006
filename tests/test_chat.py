"""The chat verbs on echo workers: what the worker rendered, formats a call and a pool, and bad conversations between good ones."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from enginepool import Code, EnginePoolWarning, InvalidRequest, Output, Pool, SamplingParams, SettingsError

FIVE = SamplingParams(max_tokens=5)
HELLO = [{"role": "user", "content": "hello"}]
OTHER = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "why?"}]
RENDERED = "<user>hello<assistant>"
TEMPLATE = "{% for message in messages %}[{{ message.content }}]{% endfor %}{{ mood }}"
STRICT = (
    "{% for message in messages %}{% if loop.index0 % 2 != (message.role == 'assistant') | int %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}{{ message.content }};{% endfor %}"
)
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {}}}]


def _code(output: Output) -> Code | None:
    return output.error.code if output.error else None


def _sandwich(pool: Pool, bad: Any, **chat: Any) -> Output:
    """Put a conversation between good ones, which have to end well and in place; return what became of it."""
    with pytest.warns(EnginePoolWarning, match="1 of 3 items failed"):
        first, output, last = pool.chat_many([HELLO, bad, OTHER], FIVE, **chat)
    assert (first.ok, last.ok, [first.index, output.index, last.index]) == (True, True, [0, 1, 2])
    assert not output.ok
    return output


def _prompt(pool: Pool, messages: Any, **chat: Any) -> str:
    output = pool.chat(messages, FIVE, **chat)
    assert output.ok, output.error
    assert output.prompt is not None
    return output.prompt


# The verbs.


def test_chat_returns_the_rendered_prompt_and_its_tokens(echo_pool: Pool) -> None:
    output = echo_pool.chat(HELLO, FIVE, request_id="mine")
    assert (output.ok, output.prompt, output.text, output.request_id) == (True, RENDERED, RENDERED[:5], "mine")
    assert output.prompt_token_ids == list(RENDERED.encode())


def test_chat_many_keeps_input_order(echo_pool: Pool) -> None:
    conversations = [[{"role": "user", "content": f"item {index}"}] for index in range(50)]
    outputs = echo_pool.chat_many(conversations, [SamplingParams(max_tokens=1 if index % 2 else 30) for index in range(50)])
    assert [output.prompt for output in outputs] == [f"<user>item {index}<assistant>" for index in range(50)]


def test_chat_many_of_bare_messages_is_one_conversation(echo_pool: Pool) -> None:
    (output,) = echo_pool.chat_many(OTHER, FIVE)  # type: ignore[arg-type]
    assert output.prompt == "<system>be brief<user>why?<assistant>"


def test_iter_chat_many_yields_indexes_with_outputs(echo_pool: Pool) -> None:
    def conversations() -> Iterator[list[dict[str, str]]]:
        for index in range(30):
            yield [{"role": "user", "content": f"item {index}"}]

    pairs = list(echo_pool.iter_chat_many(conversations(), FIVE, in_order=True, request_format="plain"))
    assert [(index, output.prompt) for index, output in pairs] == [(index, f"item {index}") for index in range(30)]


def test_iter_chat_many_gives_params_the_conversation(echo_pool: Pool) -> None:
    def params(_: int, messages: Any) -> SamplingParams:
        return SamplingParams(max_tokens=len(messages))

    outputs = dict(echo_pool.iter_chat_many([HELLO, OTHER], params))
    assert [len(outputs[index].token_ids) for index in range(2)] == [1, 2]


def test_stream_chat_yields_deltas_and_the_rendered_prompt(echo_pool: Pool) -> None:
    stream = echo_pool.stream_chat(HELLO, SamplingParams(max_tokens=30))
    text = "".join(delta.text for delta in stream)
    assert stream.output is not None
    assert (text, stream.output.text, stream.output.prompt) == ((RENDERED * 2)[:30], text, RENDERED)


def test_submit_chat_resolves_to_an_output_also_for_a_bad_one(echo_pool: Pool) -> None:
    bad: Any = [{"role": "user", "content": 5}]
    good_one, bad_one = echo_pool.submit_chat(HELLO, FIVE), echo_pool.submit_chat(bad, FIVE)
    assert good_one.result(timeout=20).prompt == RENDERED
    assert _code(bad_one.result(timeout=20)) is Code.INVALID_REQUEST


def test_submit_chat_can_be_cancelled(echo_pool: Pool) -> None:
    future = echo_pool.submit_chat(HELLO, SamplingParams(max_tokens=400_000))
    assert future.cancel()


def test_chat_with_an_unknown_keyword_is_a_type_error(echo_pool: Pool) -> None:
    with pytest.raises(TypeError, match="temperature"):
        echo_pool.chat(HELLO, FIVE, temperature=0.5)  # type: ignore[call-arg]


# Formats of a call.


def test_call_in_plain_format_has_no_roles(echo_pool: Pool) -> None:
    assert _prompt(echo_pool, OTHER, request_format="plain") == "be brief why?"


def test_call_with_a_template_of_its_own(echo_pool: Pool, tmp_path: Path) -> None:
    (tmp_path / "chat.jinja").write_text(TEMPLATE)
    for chat in ({"chat_template": TEMPLATE}, {"request_format": TEMPLATE}, {"request_format": tmp_path / "chat.jinja"}):
        assert _prompt(echo_pool, OTHER, **chat) == "[be brief][why?]"


def test_call_with_template_keywords(echo_pool: Pool) -> None:
    assert _prompt(echo_pool, HELLO, chat_template=TEMPLATE, chat_template_kwargs={"mood": "gently"}) == "[hello]gently"


def test_call_without_a_generation_prompt(echo_pool: Pool) -> None:
    assert _prompt(echo_pool, HELLO, add_generation_prompt=False) == "<user>hello"


def test_call_that_continues_the_last_message(echo_pool: Pool) -> None:
    messages = [*HELLO, {"role": "assistant", "content": "Sure, "}]
    assert _prompt(echo_pool, messages, continue_final_message=True, add_generation_prompt=False) == "<user>hello<assistant>Sure,"


def test_call_with_tools_hands_them_to_the_template(echo_pool: Pool) -> None:
    assert _prompt(echo_pool, HELLO, tools=TOOLS, chat_template="{{ tools[0].function.name }}") == "weather"


def test_call_in_plain_format_has_no_place_for_tools(echo_pool: Pool) -> None:
    output = echo_pool.chat(HELLO, FIVE, tools=TOOLS, request_format="plain")
    assert _code(output) is Code.INVALID_REQUEST
    assert "plain format has no place for tools" in str(output.error)


@pytest.mark.parametrize("verb", ["chat", "chat_many", "iter_chat_many", "stream_chat", "submit_chat"])
@pytest.mark.parametrize(
    ("chat", "told"),
    [
        pytest.param({"chat_template_kwargs": {"tokenize": True}}, "'tokenize' is reserved", id="tokenize"),
        pytest.param({"chat_template_kwargs": {"messages": []}}, "'messages' is reserved", id="messages"),
        pytest.param({"chat_template": "no/such.jinja"}, r"no/such\.jinja: No such file", id="missing-file"),
        pytest.param({"request_format": "a\n{% if %}"}, "line 2", id="bad-syntax"),
    ],
)
def test_call_whose_options_are_at_fault_is_refused_as_a_whole(echo_pool: Pool, verb: str, chat: dict[str, Any], told: str) -> None:
    with pytest.raises(InvalidRequest, match=told):
        getattr(echo_pool, verb)([HELLO] if "many" in verb else HELLO, FIVE, **chat)


# Formats of a pool.


def test_pool_in_plain_format_and_calls_that_want_another() -> None:
    with Pool(engine="echo", workers=1, request_format="plain") as pool:
        assert _prompt(pool, OTHER) == "be brief why?"
        assert _prompt(pool, HELLO, request_format=None) == RENDERED
        assert _prompt(pool, HELLO, chat_template=TEMPLATE) == "[hello]"
        assert _prompt(pool, HELLO, request_format="default-template") == RENDERED


def test_pool_with_a_template_file(tmp_path: Path) -> None:
    (tmp_path / "chat.jinja").write_text(TEMPLATE)
    with Pool(engine="echo", workers=1, request_format=str(tmp_path / "chat.jinja")) as pool:
        assert _prompt(pool, OTHER) == "[be brief][why?]"
        assert _prompt(pool, HELLO, request_format="plain") == "hello"


@pytest.mark.parametrize(
    ("request_format", "told"),
    [("no/such.jinja", r"request_format: no/such\.jinja: No such file"), ("a\n{% for %}", "request_format: .*line 2")],
    ids=["missing-file", "bad-syntax"],
)
def test_pool_whose_format_is_at_fault_does_not_start(request_format: str, told: str) -> None:
    with pytest.raises(SettingsError, match=told):
        Pool(engine="echo", workers=1, request_format=request_format)


def test_pool_of_a_model_without_a_template() -> None:
    with Pool(engine="echo", workers=1, chat_template=None) as pool:
        with pytest.warns(EnginePoolWarning, match=r"2 of 2 items failed \(2 invalid_request\)"):
            outputs = pool.chat_many([HELLO, OTHER], FIVE)
        assert all("the model has no chat template" in str(output.error) for output in outputs)
        assert pool.generate("completions go on", FIVE).ok
        assert _prompt(pool, HELLO, chat_template=TEMPLATE) == "[hello]"
        assert _prompt(pool, HELLO, request_format="plain") == "hello"
        assert _prompt(pool, OTHER, request_format="default-template") == "be brief why?"
        output = pool.chat(HELLO, FIVE, request_format="default-template", tools=TOOLS)
        assert "the model has no chat template" in str(output.error)


def test_pool_with_a_default_template_falls_back_where_the_model_has_none() -> None:
    with Pool(engine="echo", workers=1, chat_template=None, request_format="default-template") as pool:
        assert _prompt(pool, OTHER) == "be brief why?"
        assert not pool.chat(HELLO, FIVE, tools=TOOLS).ok
        assert "has no chat template" in str(pool.chat(HELLO, FIVE, request_format=None).error)


# Null content, tool messages, content lists.


@pytest.mark.parametrize("arguments", ["{}", "null", "", "{bad"])
@pytest.mark.parametrize("chat", [{}, {"request_format": "plain"}], ids=["template", "plain"])
def test_null_content_of_a_tool_call_is_empty_text(echo_pool: Pool, arguments: str, chat: dict[str, Any]) -> None:
    messages = [
        *HELLO,
        {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]},
        {"role": "tool", "content": "42"},
    ]
    prompt = _prompt(echo_pool, messages, **chat)
    assert "None" not in prompt
    assert "hello" in prompt
    assert "42" in prompt


@pytest.mark.parametrize(
    "messages",
    [
        pytest.param([{"role": "developer", "content": "x"}], id="unknown-role"),
        pytest.param([*HELLO, {"role": "user", "content": []}], id="no-parts"),
        pytest.param([*HELLO, {"role": "user", "content": ""}], id="empty-text"),
        pytest.param([{"role": "user", "content": ""}], id="nothing-but-empty-text"),
    ],
)
def test_unusual_conversation_runs_where_the_template_adds_tokens(echo_pool: Pool, messages: Any) -> None:
    assert "None" not in _prompt(echo_pool, messages)


def test_content_parts_are_joined_in_plain_format(echo_pool: Pool) -> None:
    parts = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
    assert _prompt(echo_pool, parts, request_format="plain") == "a b"


@pytest.mark.parametrize(
    ("bad", "told"),
    [
        pytest.param([{"role": "user", "content": 5}], "message 0: content must be text", id="number"),
        pytest.param([], "the conversation has no messages", id="no-messages"),
        pytest.param("hello", "a conversation is a list of messages", id="text"),
        pytest.param([{"content": "x"}], "role must be text", id="no-role"),
        pytest.param([{"role": "user", "content": "half \ud83d"}], r"U+D83D", id="surrogate"),
        pytest.param([{"role": "user", "content": "x", "n": 2**70}], "64 bits", id="huge-integer"),
        pytest.param([{"role": "user", "content": "x", 5: "y"}], "could not be read", id="key-that-is-no-text"),
        pytest.param([{"role": "user", "content": "x" * 600}], "takes less than 512", id="too-long"),
    ],
)
def test_bad_conversation_fails_alone_between_good_ones(echo_pool: Pool, bad: Any, told: str) -> None:
    pids = [worker.pid for worker in echo_pool.status().workers]
    assert told in str(_sandwich(echo_pool, bad).error)
    assert [worker.pid for worker in echo_pool.status().workers] == pids


@pytest.mark.parametrize(
    ("content", "told"),
    [
        pytest.param([{"type": "image_url", "image_url": {"url": "x"}}], "a content part of type 'image_url' is not supported", id="image"),
        pytest.param(None, "the conversation has no content", id="nothing"),
    ],
)
def test_conversation_that_plain_format_can_not_hold_fails_alone(echo_pool: Pool, content: Any, told: str) -> None:
    output = _sandwich(echo_pool, [{"role": "user", "content": content}], request_format="plain")
    assert _code(output) is Code.INVALID_REQUEST
    assert told in str(output.error)


def test_template_that_objects_fails_one_conversation_in_its_own_words(echo_pool: Pool) -> None:
    with pytest.warns(EnginePoolWarning, match="1 of 3 items failed"):
        first, output, last = echo_pool.chat_many([HELLO, [*HELLO, *HELLO], HELLO], FIVE, chat_template=STRICT)
    assert (first.prompt, last.prompt) == ("hello;", "hello;")
    assert _code(output) is Code.INVALID_REQUEST
    assert str(output.error).endswith("the chat template refused the conversation: roles must alternate")


@pytest.mark.parametrize(
    "template",
    ["{{ 'a'.encode('none') }}", "{{ 1 / 0 }}", "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "{{ messages.append(1) }}", "{{ '' }}"],
    ids=["lookup", "division", "recursion", "sandbox", "empty-prompt"],
)
def test_template_that_fails_does_not_touch_its_worker(echo_pool: Pool, template: str) -> None:
    pids = [worker.pid for worker in echo_pool.status().workers]
    assert _code(echo_pool.chat(HELLO, FIVE, chat_template=template)) is Code.INVALID_REQUEST
    assert echo_pool.chat(HELLO, FIVE).ok
    assert [worker.pid for worker in echo_pool.status().workers] == pids


def test_stream_of_a_bad_conversation_is_one_delta_with_its_error(echo_pool: Pool) -> None:
    (last,) = echo_pool.stream_chat([*HELLO, *HELLO], FIVE, chat_template=STRICT)
    assert last.output is not None
    assert "roles must alternate" in str(last.output.error)


def test_unknown_template_name_is_refused_not_prompted(echo_pool: Pool) -> None:
    error = echo_pool.chat(HELLO, FIVE, chat_template="tool_use").error
    assert error is not None
    assert "no chat template named 'tool_use'" in error.message


def test_pool_format_may_be_a_path_object(tmp_path: Path) -> None:
    path = tmp_path / "chat.jinja"
    path.write_text("[{{ messages[0].content }}]")
    with Pool(engine="echo", workers=1, request_format=path) as pool:
        assert pool.chat(HELLO, FIVE).prompt == "[hello]"


def test_template_that_raises_with_a_lone_surrogate_is_that_items_error(echo_pool: Pool) -> None:
    pid = echo_pool.status().workers[0].pid
    output = echo_pool.chat(HELLO, FIVE, chat_template="{{ raise_exception('bad \\ud83d') }}")
    assert output.error is not None
    assert "bad \\ud83d" in output.error.message
    assert echo_pool.status().workers[0].pid == pid
