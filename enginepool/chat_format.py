"""How a conversation becomes a prompt: the forms of `request_format`, their checks, and the join without roles."""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

MODEL = "model"
PLAIN = "plain"
DEFAULT_TEMPLATE = "default-template"
LARGEST_TEMPLATE_BYTES = 16 << 20
KINDS = (MODEL, PLAIN, DEFAULT_TEMPLATE)

TEXT_PARTS = ("text", "input_text", "output_text", "refusal", "thinking")

RESERVED = {
    "add_generation_prompt",
    "chat_template",
    "continue_final_message",
    "conversation",
    "messages",
    "padding",
    "return_assistant_tokens_mask",
    "return_dict",
    "return_tensors",
    "tokenize",
    "tokenizer_kwargs",
    "tools",
    "truncation",
}
"""What a template or transformers' `apply_chat_template` is given by others; a keyword of the same name would override it."""

_JINJA_SIGNS = ("{", "}", "\n")


class RequestFormat(msgspec.Struct, frozen=True):
    """`kind` is "model" (a template has to apply), "plain" or "default-template"; `template` replaces the model's own."""

    kind: str = MODEL
    template: str | None = None


def read_format(value: str | os.PathLike[str] | None) -> RequestFormat:
    """Understand a `request_format`: None, "plain", "default-template", or a Jinja template as path or text.

    Raises ValueError for a file that can't be read and for bad syntax, with path and line.
    """
    if value is None:
        return RequestFormat()
    if value in (PLAIN, DEFAULT_TEMPLATE):
        return RequestFormat(str(value))
    return RequestFormat(MODEL, read_template(value))


def read_template(value: str | os.PathLike[str]) -> str:
    """The text of a Jinja template given as a path or as text, its syntax checked. Raises ValueError with path and line."""
    if isinstance(value, str) and any(sign in value for sign in _JINJA_SIGNS):
        text, origin = value, "the template"
    else:
        path = Path(value)
        try:
            path = path.expanduser()
            _check_file(path)
            text, origin = path.read_text(encoding="utf-8"), str(path)
        except (OSError, ValueError, RuntimeError) as error:  # RuntimeError: `~` of an unknown user
            reason = error.strerror if isinstance(error, OSError) else str(error)
            choices = "write plain, default-template, the path of a Jinja file, or a template's text (which holds {{ … }} or {% … %})"
            raise ValueError(f"{path}: {reason}; {choices}") from None
    check_template(text, origin)
    return text


def _check_file(path: Path) -> None:
    """Refuse what would be read without end: a pipe, a device, a file that can not be a template."""
    info = path.stat()
    if not stat.S_ISREG(info.st_mode):
        raise ValueError("not a file")
    if info.st_size > LARGEST_TEMPLATE_BYTES:
        raise ValueError(f"{info.st_size} bytes are no chat template")


def check_template(text: str, origin: str) -> None:
    """Raise ValueError with `origin` and the line where Jinja does not understand `text`."""
    from jinja2 import TemplateSyntaxError

    try:
        _environment().from_string(text)
    except TemplateSyntaxError as error:
        raise ValueError(f"{origin}, line {error.lineno}: {error.message}") from None
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:  # what Python makes of the code that Jinja writes
        raise ValueError(f"{origin}: {error or type(error).__name__}") from None


def apply_template(text: str, messages: Sequence[Mapping[str, Any]], values: Mapping[str, Any]) -> str:
    """Render as chat templates are meant to be (a template refuses a conversation by `raise_exception`). Raises ValueError."""
    from jinja2 import TemplateError

    def refuse(reason: str) -> None:
        raise TemplateError(reason)

    try:
        return str(_environment().from_string(text).render(messages=messages, raise_exception=refuse, **values))
    except Exception as error:  # a template is a program of the caller's, and may raise anything
        raise ValueError(f"the chat template refused the conversation: {error}") from None


def join_plain(messages: Sequence[Mapping[str, Any]]) -> str:
    """The non-empty contents joined by one space, without roles. Raises ValueError for a part that is no text."""
    texts = [text for number, message in enumerate(messages) for text in _texts(number, message.get("content"))]
    if not texts:
        raise ValueError("the conversation has no content, so in plain format there is no prompt")
    return " ".join(texts)


def why_not_text(part: Any) -> str | None:
    """Why a part of a message's content may not reach an engine, or None for text.

    vLLM would fetch an image's address before the model could refuse the image. It knows media by a part's type, and by any
    other key where a part has no type, or a `uuid`.
    """
    if isinstance(part, str):
        return None
    kind = part.get("type", "text" if "text" in part else None) if isinstance(part, Mapping) else None
    what = repr(kind) if isinstance(part, Mapping) else type(part).__name__
    if kind not in TEXT_PARTS:
        return f"a content part of type {what:.40} is not supported; parts are text (no images or other media)"
    others = sorted(str(key) for key in part if key != "text") if "type" not in part else [key for key in ("uuid",) if key in part]
    return (
        f"a content part has {others[0]!r:.40} beside its text; parts are text with their type (no images or other media)"
        if others
        else None
    )


def _texts(number: int, content: Any) -> list[str]:
    parts = content if isinstance(content, list) else [content]
    texts = []
    for part in parts:
        text = part.get("text") if isinstance(part, Mapping) and part.get("type", "text") == "text" else part
        if text is not None and not isinstance(text, str):
            kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
            raise ValueError(f"message {number}: plain format has no place for content of type {kind}")
        texts.append(text)
    return [text for text in texts if text]


def _environment() -> Any:
    """As transformers compiles chat templates: sandboxed, blocks trimmed, `break`, `continue` and `generation` known."""
    from jinja2 import nodes
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """The block that marks what the assistant says in training data; it renders as its content."""

        tags = {"generation"}  # noqa: RUF012 (Jinja's own interface)

        def parse(self, parser: Any) -> nodes.Node:
            line = next(parser.stream).lineno
            return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)

    return ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols])
