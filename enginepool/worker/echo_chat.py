"""Renders conversations for the echo engine: its own small template, or whatever the request or the pool names."""

from __future__ import annotations

from typing import Any

from enginepool.chat_format import DEFAULT_TEMPLATE, PLAIN, RequestFormat, apply_template, join_plain
from enginepool.errors import Code
from enginepool.payload import ChatOptions, ChatRequest, decode_options
from enginepool.worker.engine import NO_TEMPLATE, RefusedItem, check_messages, check_template_name, choose_format

ECHO_TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


def render_echo(request: ChatRequest, pool_format: RequestFormat, own_template: str | None) -> str:
    """The prompt's text. Raises RefusedItem."""
    check_messages(request.messages)
    options = decode_options(request.options)
    chosen = choose_format(options, pool_format)
    check_template_name(chosen.template, [])
    try:
        if chosen.kind == PLAIN:
            return join_plain(request.messages)
        return _apply(chosen.template or own_template, request.messages, options)
    except ValueError as error:
        if chosen.kind == DEFAULT_TEMPLATE and not options.tools:
            return join_plain(request.messages)
        raise RefusedItem(Code.INVALID_REQUEST, str(error)) from None


def _apply(template: str | None, messages: list[dict[str, Any]], options: ChatOptions) -> str:
    if template is None:
        raise ValueError(NO_TEMPLATE)
    shown = [message | {"content": message.get("content") or ""} for message in messages]
    values = {"tools": options.tools, "add_generation_prompt": options.add_generation_prompt} | (options.chat_template_kwargs or {})
    text = apply_template(template, shown, values)
    if options.continue_final_message:
        last = str(shown[-1]["content"]).strip()
        text = text[: text.rindex(last) + len(last)] if last in text else text
    return text
