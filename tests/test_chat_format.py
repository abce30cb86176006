"""The forms of `request_format` are told apart and checked before anything is sent; templates render as transformers' do."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from enginepool.chat_format import DEFAULT_TEMPLATE, MODEL, PLAIN, RequestFormat, apply_template, join_plain, read_format, read_template

TEMPLATE = "{% for message in messages %}[{{ message.role }}] {{ message.content }}{% endfor %}"
HELLO = [{"role": "user", "content": "hello"}]
TALK = [*HELLO, {"role": "assistant", "content": "hi"}, {"role": "user", "content": "bye"}]

# What a request_format can be.


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        pytest.param(None, RequestFormat(MODEL, None), id="unset"),
        pytest.param("plain", RequestFormat(PLAIN), id="plain"),
        pytest.param("default-template", RequestFormat(DEFAULT_TEMPLATE), id="default-template"),
        pytest.param(TEMPLATE, RequestFormat(MODEL, TEMPLATE), id="template-text"),
        pytest.param("one line\nno braces", RequestFormat(MODEL, "one line\nno braces"), id="text-of-two-lines"),
    ],
)
def test_read_format_form(value: str | None, expected: RequestFormat) -> None:
    assert read_format(value) == expected


@pytest.mark.parametrize("kind", [str, Path])
def test_read_format_of_a_file_holds_its_text(tmp_path: Path, kind: type) -> None:
    file = tmp_path / "chat.jinja"
    file.write_text(TEMPLATE + "é", encoding="utf-8")
    assert read_format(kind(file)) == RequestFormat(MODEL, TEMPLATE + "é")


def test_read_format_of_a_file_below_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "chat.jinja").write_text(TEMPLATE)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert read_format("~/chat.jinja").template == TEMPLATE


@pytest.mark.parametrize("value", ["", "Plain", "pain", "nowhere/chat.jinja", "~nobody-of-this-name/chat.jinja", "a\0b"])
def test_read_format_of_nothing_that_is_there_names_the_choices(value: str) -> None:
    with pytest.raises(ValueError, match="write plain, default-template, the path of a Jinja file, or a template's text"):
        read_format(value)


def test_read_template_of_a_missing_file_names_its_path() -> None:
    with pytest.raises(ValueError, match=r"nowhere/chat\.jinja: No such file or directory"):
        read_template("nowhere/chat.jinja")


def test_read_template_of_a_folder_says_so(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="not a file"):
        read_template(tmp_path)


def test_read_template_of_a_file_that_is_no_text_names_its_path(tmp_path: Path) -> None:
    (tmp_path / "chat.jinja").write_bytes(b"\xff\xfe{{")
    with pytest.raises(ValueError, match=r"chat\.jinja: .*utf-8"):
        read_template(tmp_path / "chat.jinja")


@pytest.mark.parametrize(
    ("text", "line", "told"),
    [
        pytest.param("a\n{% for x in messages %}", 2, "", id="unclosed-block"),
        pytest.param("a\nb\n{{ messages[ }}", 3, "", id="broken-expression"),
        pytest.param("{{ messages | no_such_filter }}", 1, "no_such_filter", id="unknown-filter"),
        pytest.param("\n{% surprise %}", 2, "surprise", id="unknown-tag"),
        pytest.param("{% generation %}never closed", 1, "", id="unclosed-generation"),
    ],
)
def test_template_with_bad_syntax_is_refused_with_its_line(tmp_path: Path, text: str, line: int, told: str) -> None:
    file = tmp_path / "bad.jinja"
    file.write_text(text)
    with pytest.raises(ValueError, match=f"the template, line {line}: .*{told}"):
        read_template(text if "{" in text else file)
    with pytest.raises(ValueError, match=rf"bad\.jinja, line {line}: .*{told}"):
        read_template(file)


@pytest.mark.parametrize(
    "text",
    [
        pytest.param("{% generation %}x{% endgeneration %}", id="generation"),
        pytest.param("{% for m in messages %}{% break %}{% endfor %}", id="break"),
        pytest.param("{% for m in messages %}{% continue %}{% endfor %}", id="continue"),
        pytest.param("{% set ns = namespace(n=0) %}{% macro f(x) %}{{ x }}{% endmacro %}{{ f(1) }}", id="namespace-and-macro"),
        pytest.param("{{ messages | tojson }}", id="tojson"),
    ],
)
def test_template_with_what_chat_templates_use_is_taken(text: str) -> None:
    assert read_template(text) == text


# Rendering.


def test_apply_template_renders_messages_and_values() -> None:
    assert apply_template(TEMPLATE + "{{ extra }}", TALK, {"extra": "!"}) == "[user] hello[assistant] hi[user] bye!"


def test_apply_template_trims_blocks_as_transformers_does() -> None:
    assert apply_template("{% if true %}\n  {% if true %}\nx\n{% endif %}\n{% endif %}\n", HELLO, {}) == "x\n"


def test_apply_template_renders_a_generation_block_as_its_content() -> None:
    text = "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"
    assert apply_template(text, TALK, {}) == "hellohibye"


def test_apply_template_knows_break_and_continue() -> None:
    text = "{% for m in messages %}{% if m.role == 'assistant' %}{% continue %}{% endif %}{{ m.content }}{% break %}{% endfor %}"
    assert apply_template(text, [TALK[1], TALK[0], TALK[2]], {}) == "hello"


def test_apply_template_that_objects_is_told_in_its_own_words() -> None:
    strict = "{% if messages[0].role == messages[1].role %}{{ raise_exception('roles must alternate') }}{% endif %}ok"
    assert apply_template(strict, TALK, {}) == "ok"
    with pytest.raises(ValueError, match="the chat template refused the conversation: roles must alternate"):
        apply_template(strict, [*HELLO, *HELLO], {})


@pytest.mark.parametrize(
    "text",
    [
        pytest.param("{{ messages.__class__.__mro__ }}", id="class"),
        pytest.param("{{ ().__class__.__bases__[0].__subclasses__() }}", id="subclasses"),
        pytest.param("{{ messages.append(1) }}", id="changing-a-list"),
        pytest.param("{{ messages[0].update({}) }}", id="changing-a-dict"),
        pytest.param("{{ range(10000000000) | list }}", id="endless-range"),
        pytest.param("{{ 1 / 0 }}", id="division"),
        pytest.param("{{ messages + 1 }}", id="types"),
        pytest.param("{{ 'a'.encode('no such codec') }}", id="lookup"),
        pytest.param("{{ [].index(1) }}", id="value"),
        pytest.param("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", id="recursion"),
        pytest.param("{{ undefined_function() }}", id="undefined"),
    ],
)
def test_apply_template_that_fails_or_leaves_the_sandbox_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="the chat template refused the conversation: "):
        apply_template(text, HELLO, {})


def test_apply_template_leaves_the_conversation_as_it_was() -> None:
    messages = [{"role": "user", "content": ["a", "b"]}]
    apply_template("{% for m in messages %}{% set x = m.content | reverse | list %}{{ x }}{% endfor %}", messages, {})
    assert messages == [{"role": "user", "content": ["a", "b"]}]


# Plain.


@pytest.mark.parametrize(
    ("messages", "expected"),
    [
        pytest.param(TALK, "hello hi bye", id="texts"),
        pytest.param([{"role": "user", "content": None}, *HELLO], "hello", id="null"),
        pytest.param([{"role": "assistant"}, *HELLO], "hello", id="no-content"),
        pytest.param([{"role": "user", "content": ""}, *HELLO], "hello", id="empty-text"),
        pytest.param([{"role": "user", "content": []}, *HELLO], "hello", id="empty-list"),
        pytest.param([{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}], "a b", id="parts"),
        pytest.param([{"role": "user", "content": ["a", {"text": "b"}, None, {"type": "text", "text": None}]}], "a b", id="mixed-parts"),
        pytest.param([{"role": "user", "content": " kept as it is\n"}], " kept as it is\n", id="spaces"),
        pytest.param([{"role": "tool", "content": "42", "tool_call_id": "x"}], "42", id="tool"),
    ],
)
def test_join_plain_joins_what_has_text(messages: list[dict[str, Any]], expected: str) -> None:
    assert join_plain(messages) == expected


@pytest.mark.parametrize(
    ("content", "kind"),
    [
        pytest.param([{"type": "image_url", "image_url": {"url": "x"}}], "image_url", id="image"),
        pytest.param([{"type": "input_audio", "text": "a"}], "input_audio", id="audio-with-text"),
        pytest.param(5, "int", id="number"),
        pytest.param(["a", 5], "int", id="number-among-parts"),
        pytest.param([{"type": "text", "text": 5}], "text", id="number-as-text"),
        pytest.param([["a"]], "list", id="list-in-list"),
        pytest.param(True, "bool", id="bool"),
    ],
)
def test_join_plain_of_what_is_no_text_names_message_and_type(content: Any, kind: str) -> None:
    with pytest.raises(ValueError, match=f"message 1: plain format has no place for content of type {kind}"):
        join_plain([*HELLO, {"role": "user", "content": content}])


@pytest.mark.parametrize("content", [None, "", [], [{"type": "text", "text": ""}]], ids=["null", "empty", "no-parts", "empty-part"])
def test_join_plain_of_nothing_is_refused(content: Any) -> None:
    with pytest.raises(ValueError, match="the conversation has no content"):
        join_plain([{"role": "user", "content": content}])


@pytest.mark.parametrize("kind", ["pipe", "device", "folder"])
def test_template_that_is_no_file_is_refused_at_once(tmp_path: Path, kind: str) -> None:
    os.mkfifo(tmp_path / "pipe")
    path = {"pipe": tmp_path / "pipe", "device": Path("/dev/zero"), "folder": tmp_path}[kind]
    with pytest.raises(ValueError, match="not a file"):
        read_format(path)


@pytest.mark.parametrize(
    "text", ["{% for i in x %}" * 40 + "{% endfor %}" * 40, "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}"], ids=["blocks", "parens"]
)
def test_template_that_python_can_not_compile_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"^the template"):
        read_format(text)


@pytest.mark.parametrize("text", ["{{ 'a' * (10 ** 13) }}", "{{ 1e400 | int }}"], ids=["memory", "infinite"])
def test_template_that_asks_for_too_much_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="the chat template refused"):
        apply_template(text, HELLO, {})
