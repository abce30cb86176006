"""Conversations are checked one at a time, options once a call; what is at fault is named, and nothing else suffers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from enginepool.chat_format import DEFAULT_TEMPLATE, MODEL, PLAIN, RESERVED
from enginepool.client.conversations import ChatEncoder, list_conversations, make_options
from enginepool.client.requests import Encoded, encode_sampling
from enginepool.errors import Code, InvalidRequest, ItemError
from enginepool.payload import ChatOptions, ChatRequest, decode_options, decode_params, decode_request

TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"
PARAMS = encode_sampling({"max_tokens": 5})
IMAGE = {"type": "image_url", "image_url": {"url": "http://127.0.0.1:9/x.png"}}
HELLO = [{"role": "user", "content": "hello"}]
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {}}}]

# Options: once a call.


def test_options_by_default_are_the_pools_own() -> None:
    assert make_options() == ChatOptions()


@pytest.mark.parametrize(
    ("keywords", "kind", "template"),
    [
        pytest.param({"request_format": None}, MODEL, None, id="the-models"),
        pytest.param({"request_format": "plain"}, PLAIN, None, id="plain"),
        pytest.param({"request_format": "default-template"}, DEFAULT_TEMPLATE, None, id="default-template"),
        pytest.param({"request_format": TEMPLATE}, MODEL, TEMPLATE, id="text"),
        pytest.param({"chat_template": TEMPLATE}, MODEL, TEMPLATE, id="chat_template"),
        pytest.param({"chat_template": "tool_use"}, MODEL, "tool_use", id="name-of-the-tokenizers"),
        pytest.param({"chat_template": TEMPLATE, "request_format": None}, MODEL, TEMPLATE, id="chat_template-of-the-models"),
    ],
)
def test_options_carry_the_format(keywords: dict[str, Any], kind: str, template: str | None) -> None:
    options = make_options(**keywords)
    assert (options.request_format, options.chat_template) == (kind, template)


def test_options_carry_the_text_of_a_template_file(tmp_path: Path) -> None:
    (tmp_path / "chat.jinja").write_text(TEMPLATE)
    assert make_options(chat_template=str(tmp_path / "chat.jinja")).chat_template == TEMPLATE
    assert make_options(request_format=tmp_path / "chat.jinja").chat_template == TEMPLATE


def test_options_of_a_word_that_is_a_file_hold_its_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "chat").write_text(TEMPLATE)
    monkeypatch.chdir(tmp_path)
    assert make_options(chat_template="chat").chat_template == TEMPLATE


@pytest.mark.parametrize("name", sorted(RESERVED))
def test_options_with_a_reserved_template_keyword_are_refused(name: str) -> None:
    with pytest.raises(InvalidRequest, match=f"chat_template_kwargs: '{name}' is reserved"):
        make_options(chat_template_kwargs={"enable_thinking": True, name: 1})


@pytest.mark.parametrize(
    ("keywords", "told"),
    [
        pytest.param({"chat_template": TEMPLATE, "request_format": "plain"}, "exclude each other", id="both-formats"),
        pytest.param({"continue_final_message": True}, "needs add_generation_prompt=False", id="continue-and-generate"),
        pytest.param({"request_format": "pain"}, "request_format: pain: No such file", id="misspelt"),
        pytest.param({"chat_template": "no/such.jinja"}, r"chat_template: no/such\.jinja: No such file", id="missing-file"),
        pytest.param({"chat_template": "{% for %}"}, "chat_template: the template, line 1", id="bad-syntax"),
        pytest.param({"request_format": "\n{% for %}"}, "request_format: the template, line 2", id="bad-syntax-of-the-format"),
        pytest.param({"request_format": 5}, "request_format: ", id="number"),
        pytest.param({"chat_template": 5}, "chat_template: ", id="number-for-a-template"),
        pytest.param({"tools": {"name": "f"}}, "tools is a list of dicts", id="one-tool"),
        pytest.param({"tools": "f"}, "tools is a list of dicts", id="text-for-tools"),
        pytest.param({"tools": ["f"]}, "tools is a list of dicts", id="names-for-tools"),
        pytest.param({"tools": 5}, "tools is a list of dicts", id="number-for-tools"),
        pytest.param({"tools": iter(TOOLS)}, "tools is a list of dicts", id="iterator-for-tools"),
        pytest.param({"chat_template_kwargs": 5}, "chat_template_kwargs is a dict", id="number-for-kwargs"),
        pytest.param({"chat_template_kwargs": ["a"]}, "chat_template_kwargs is a dict", id="list-for-kwargs"),
    ],
)
def test_options_without_sense_are_refused(keywords: dict[str, Any], told: str) -> None:
    with pytest.raises(InvalidRequest, match=told):
        make_options(**keywords)


def test_options_that_continue_the_last_message() -> None:
    options = make_options(continue_final_message=True, add_generation_prompt=False)
    assert (options.continue_final_message, options.add_generation_prompt) == (True, False)


@pytest.mark.parametrize(
    ("keywords", "told"),
    [
        pytest.param({"chat_template_kwargs": {"x": object()}}, "can not be encoded", id="object"),
        pytest.param({"chat_template_kwargs": {"x": 1 << 70}}, "does not fit into 64 bits", id="huge-integer"),
        pytest.param({"chat_template_kwargs": {"x": "\ud800"}}, r"U\+D800", id="surrogate"),
        pytest.param({"tools": [{"f": {"x": "\ud800"}}]}, r"`tools\[0\].f.x` .*U\+D800", id="surrogate-in-a-tool"),
        pytest.param({"chat_template": "{{ '\ud800' }}"}, r"U\+D800", id="surrogate-in-the-template"),
        pytest.param({"chat_template_kwargs": {1: "x"}}, "the chat's options can not be sent", id="key-that-is-no-text"),
        pytest.param({"tools": [{1: "x"}]}, "the chat's options can not be sent", id="tool-key-that-is-no-text"),
        pytest.param({"add_generation_prompt": "yes"}, "the chat's options can not be sent", id="text-for-a-switch"),
    ],
)
def test_options_that_can_not_travel_are_refused_once_for_the_call(keywords: dict[str, Any], told: str) -> None:
    with pytest.raises(InvalidRequest, match=told):
        ChatEncoder(keywords)


# Encoding: one conversation at a time.


def _encode(messages: Any, *, is_stream: bool = False, max_frame_bytes: int = 10_000, **keywords: Any) -> Encoded | ItemError:
    return ChatEncoder(keywords)(messages, PARAMS, max_frame_bytes, is_stream=is_stream)


def _request(messages: Any, **how: Any) -> ChatRequest:
    encoded = _encode(messages, **how)
    assert isinstance(encoded, Encoded), encoded
    request = decode_request(encoded.frame)
    assert isinstance(request, ChatRequest)
    return request


def test_conversation_travels_whole() -> None:
    request = _request(HELLO, tools=TOOLS, chat_template_kwargs={"enable_thinking": False})
    assert (request.messages, request.is_stream) == (HELLO, False)
    assert decode_params(request.params) == {"max_tokens": 5}
    assert decode_options(request.options) == ChatOptions(tools=TOOLS, chat_template_kwargs={"enable_thinking": False})


def test_conversation_of_a_stream_says_so() -> None:
    assert _request(HELLO, is_stream=True).is_stream


@pytest.mark.parametrize(
    "messages",
    [
        pytest.param((HELLO[0],), id="tuple"),
        pytest.param([{"role": "user", "content": None}], id="null"),
        pytest.param([{"role": "assistant"}], id="no-content"),
        pytest.param([{"role": "user", "content": [{"type": "text", "text": "a"}]}], id="parts"),
        pytest.param([{"role": "user", "content": []}], id="no-parts"),
        pytest.param([{"role": "developer", "content": "x"}], id="unknown-role"),
        pytest.param([{"role": "user", "content": "nul \0 日本語 🎉"}], id="unusual-text"),
        pytest.param(
            [
                {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": "{bad"}}]},
                {"role": "tool", "content": "42"},
            ],
            id="tool-calls",
        ),
    ],
)
def test_conversation_of_any_kind_arrives_as_it_was(messages: Any) -> None:
    assert _request(messages).messages == list(messages)


class _Message:
    """What the OpenAI client returns: a pydantic object with fields that were not set."""

    def model_dump(self, *, exclude_unset: bool) -> dict[str, Any]:
        return {"role": "assistant", "content": None, "tool_calls": []} if exclude_unset else {"refusal": None}


def test_conversation_of_pydantic_objects_is_taken() -> None:
    assert _request([*HELLO, _Message()]).messages[1] == {"role": "assistant", "content": None, "tool_calls": []}


@pytest.mark.parametrize(
    ("messages", "told"),
    [
        pytest.param("hello", "a conversation is a list of messages .* not str", id="text"),
        pytest.param({"role": "user", "content": "x"}, "a conversation is a list of messages .* not dict", id="one-message"),
        pytest.param(5, "a conversation is a list of messages .* not int", id="number"),
        pytest.param(None, "a conversation is a list of messages .* not NoneType", id="none"),
        pytest.param(iter(HELLO), "a conversation is a list of messages .* not list_iterator", id="iterator"),
        pytest.param([], "the conversation has no messages", id="nothing"),
        pytest.param([*HELLO, "hello"], "message 1 must be a dict with role and content, not str", id="text-among-messages"),
        pytest.param([*HELLO, None], "message 1 must be a dict with role and content, not NoneType", id="none-among-messages"),
        pytest.param([HELLO, HELLO], "message 0 must be a dict .* use chat_many", id="conversations-as-one"),
        pytest.param([{"role": "user", "content": [IMAGE]}], "message 0: a content part of type 'image_url' is not supported", id="image"),
        pytest.param([{"role": "user", "content": [{"image_url": "x"}]}], "message 0: a content part of type None", id="image-unnamed"),
        pytest.param(
            [{"role": "user", "content": [{"text": "x", "image_url": "y"}]}],
            "message 0: .* has 'image_url' beside its text",
            id="image-beside-text",
        ),
        pytest.param(
            [{"role": "user", "content": [{"type": "text", "text": "x", "uuid": "1", "image_url": "y"}]}],
            "message 0: a content part has 'uuid' beside its text",
            id="image-by-uuid",
        ),
        pytest.param([{"role": "user", "content": ["a", 5]}], "message 0: a content part of type int", id="number-as-part"),
        pytest.param([{"content": "x"}], "message 0: role must be text, not None", id="no-role"),
        pytest.param([{"role": "", "content": "x"}], "message 0: role must be text, not ''", id="empty-role"),
        pytest.param([{"role": 5, "content": "x"}], "message 0: role must be text, not 5", id="number-for-a-role"),
        pytest.param([*HELLO, {"role": "user", "content": 5}], "message 1: content must be text, .* not int", id="number-as-content"),
        pytest.param([{"role": "user", "content": 0.5}], "message 0: content must be text, .* not float", id="fraction-as-content"),
        pytest.param([{"role": "user", "content": {"text": "x"}}], "message 0: content must be text, .* not dict", id="dict-as-content"),
        pytest.param([{"role": "user", "content": b"x"}], "message 0: content must be text, .* not bytes", id="bytes-as-content"),
        pytest.param(
            [*HELLO, {"role": "user", "content": "half \ud83d"}],
            r"message 1 can not be encoded: character 5 of `content` .*U\+D83D",
            id="surrogate",
        ),
        pytest.param([{"role": "user", "content": "x", "n": 1 << 70}], "message 0 .*does not fit into 64 bits", id="huge-integer"),
        pytest.param([*HELLO, {"role": "user", "content": "x", "o": object()}], "message 1 can not be encoded", id="object"),
        pytest.param([{"role": "user", "content": "x" * 20_000}], r"more than the pool's max_frame_bytes \(10000\)", id="too-long"),
    ],
)
def test_conversation_at_fault_is_its_own_error_and_names_the_message(messages: Any, told: str) -> None:
    error = _encode(messages)
    assert isinstance(error, ItemError)
    assert error.code is Code.INVALID_REQUEST
    with pytest.raises(InvalidRequest, match=told):
        raise InvalidRequest(error.message)


def test_conversation_nested_without_end_is_its_own_error() -> None:
    deep: Any = "x"
    for _ in range(100_000):
        deep = [deep]
    error = _encode([{"role": "user", "content": "x", "extra": deep}])
    while isinstance(deep, list):  # taken apart, so that its own destruction is not as deep
        deep = deep.pop()
    assert isinstance(error, ItemError)
    assert "message 0 can not be encoded" in error.message


# Many of them.


@pytest.mark.parametrize(
    ("conversations", "count"),
    [
        pytest.param([], 0, id="none"),
        pytest.param([HELLO, HELLO], 2, id="list"),
        pytest.param((HELLO for _ in range(3)), 3, id="generator"),
        pytest.param(HELLO, 1, id="bare-messages-are-one"),
        pytest.param([HELLO[0], HELLO], 2, id="mixed-stays-two"),
        pytest.param([HELLO, "bad", None], 3, id="bad-ones-stay"),
        pytest.param([[]], 1, id="one-without-messages"),
    ],
)
def test_list_conversations_form(conversations: Any, count: int) -> None:
    assert len(list_conversations(conversations)) == count


@pytest.mark.parametrize("conversations", ["hello", HELLO[0], 5, None], ids=["text", "one-message", "number", "none"])
def test_list_conversations_refuses_what_is_no_list(conversations: Any) -> None:
    with pytest.raises(InvalidRequest, match="conversations must be a list of conversations"):
        list_conversations(conversations)
