"""Renders conversations with vLLM's own renderer, as `LLM.chat` does, in whichever request format was asked for."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from enginepool.chat_format import DEFAULT_TEMPLATE, PLAIN, RequestFormat, join_plain
from enginepool.errors import Code
from enginepool.payload import ChatOptions, ChatRequest, decode_options
from enginepool.worker.engine import RefusedItem, check_messages, check_template_name, choose_format

if TYPE_CHECKING:
    from vllm import LLM

CodeOf = Callable[[Exception], Code]
RenderText = Callable[[str], Any]


class ChatRenderer:
    """Turns conversations into engine inputs. `render_text` renders a plain prompt, `code_of` tells a too long one from others."""

    def __init__(self, llm: LLM, pool_format: RequestFormat, render_text: RenderText, code_of: CodeOf) -> None:
        self._llm = llm
        self._pool_format = pool_format
        self._render_text = render_text
        self._code_of = code_of

    def render(self, request: ChatRequest) -> Any:
        """Return what `add_request` takes. Raises RefusedItem, or whatever vLLM raises for what the caller did wrong."""
        check_messages(request.messages)
        options = decode_options(request.options)
        chosen = choose_format(options, self._pool_format)
        if chosen.kind == PLAIN:
            return self._render_plain(request)
        own = getattr(self._llm.get_tokenizer(), "chat_template", None)
        check_template_name(chosen.template, sorted(own) if isinstance(own, dict) else [])
        try:
            return self._render_template(request, options, chosen.template)
        except ValueError as error:
            can_fall_back = chosen.kind == DEFAULT_TEMPLATE and not options.tools
            if not can_fall_back or self._code_of(error) is Code.CONTEXT_LENGTH_EXCEEDED:
                raise
            return self._render_plain(request)

    def _render_plain(self, request: ChatRequest) -> Any:
        try:
            text = join_plain(request.messages)
        except ValueError as error:
            raise RefusedItem(Code.INVALID_REQUEST, str(error)) from None
        return self._render_text(text)

    def _render_template(self, request: ChatRequest, options: ChatOptions, template: str | None) -> Any:
        messages: Any = request.messages
        return self._llm._preprocess_chat_one(  # what `LLM.chat` itself calls, so that both give the same prompt
            messages,
            chat_template=template,
            chat_template_kwargs=options.chat_template_kwargs,
            add_generation_prompt=options.add_generation_prompt,
            continue_final_message=options.continue_final_message,
            tools=options.tools,
        )
