"""Conversations: what `chat` and its kin take, checked and encoded one at a time; the worker renders them."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypedDict

import msgspec
from msgspec import UNSET, UnsetType

from enginepool.chat_format import MODEL, RESERVED, read_format, read_template, why_not_text
from enginepool.client.requests import Encoded, EncodedParams, check_size
from enginepool.errors import Code, InvalidRequest, ItemError
from enginepool.payload import ChatOptions, ChatRequest, decode_options, encode
from enginepool.pinpoint import describe_encoding_error

Message = Mapping[str, Any]
Conversation = Sequence[Message]


class ChatKeywords(TypedDict, total=False):
    """How to render conversations; names and meaning as in `LLM.chat`, and `request_format` (docs/chat.md)."""

    tools: Sequence[Mapping[str, Any]] | None
    chat_template: str | None
    chat_template_kwargs: Mapping[str, Any] | None
    add_generation_prompt: bool
    continue_final_message: bool
    request_format: str | os.PathLike[str] | None


class ChatEncoder:
    """Encodes the conversations of one call, all with the same options."""

    def __init__(self, keywords: Mapping[str, Any]) -> None:
        if unknown := sorted(set(keywords) - set(ChatKeywords.__annotations__)):
            known = ", ".join(ChatKeywords.__annotations__)
            raise TypeError(f"there is no keyword {unknown[0]!r}; those for rendering are {known}")
        self._options = msgspec.Raw(_encode_options(make_options(**keywords)))

    def __call__(self, messages: Any, params: EncodedParams, max_frame_bytes: int, *, is_stream: bool = False) -> Encoded | ItemError:
        """Encode one conversation, or say what is wrong with it."""
        try:
            plain = [_plain_message(number, message) for number, message in enumerate(_listed(messages))]
            frame = encode(ChatRequest(plain, self._options, params.raw, is_stream))
        except InvalidRequest as error:
            return ItemError(Code.INVALID_REQUEST, str(error))
        except Exception as error:  # the caller's own object may raise anything when it is read; its neighbours are fine
            return ItemError(Code.INVALID_REQUEST, _where(messages, error))
        return check_size(frame, max_frame_bytes) or Encoded(frame, None, None, params)


def make_options(
    tools: Sequence[Mapping[str, Any]] | None = None,
    chat_template: str | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    request_format: str | os.PathLike[str] | UnsetType | None = UNSET,
) -> ChatOptions:
    """Check how a call wants its conversations rendered. Raises InvalidRequest."""
    if add_generation_prompt and continue_final_message:
        raise InvalidRequest("continue_final_message=True needs add_generation_prompt=False, as in LLM.chat")
    if chat_template_kwargs is not None and not isinstance(chat_template_kwargs, Mapping):
        raise InvalidRequest(f"chat_template_kwargs is a dict, not {type(chat_template_kwargs).__name__}")
    if reserved := sorted(RESERVED & set(chat_template_kwargs or {})):
        raise InvalidRequest(f"chat_template_kwargs: {reserved[0]!r} is reserved; the template is given it by enginepool")
    kind, template = _format(request_format, chat_template)
    if tools is not None and not (isinstance(tools, list | tuple) and all(isinstance(tool, Mapping) for tool in tools)):
        raise InvalidRequest("tools is a list of dicts")
    return ChatOptions(
        request_format=kind,
        chat_template=template,
        chat_template_kwargs=None if chat_template_kwargs is None else dict(chat_template_kwargs),
        tools=[dict(tool) for tool in tools] if tools else None,
        add_generation_prompt=add_generation_prompt,
        continue_final_message=continue_final_message,
    )


def list_conversations(conversations: Any) -> list[Any]:
    """The conversations of a `chat_many` call; a bare list of messages is one conversation, as in `LLM.chat`."""
    if isinstance(conversations, str | Mapping) or not isinstance(conversations, Iterable):
        raise InvalidRequest(f"conversations must be a list of conversations, not {type(conversations).__name__}")
    items = list(conversations)
    return [items] if items and all(isinstance(item, Mapping) for item in items) else items


def _format(request_format: str | os.PathLike[str] | UnsetType | None, chat_template: str | None) -> tuple[str | None, str | None]:
    """What travels: the kind (None: the pool's own) and the template that replaces the model's."""
    try:
        if chat_template is not None:
            if isinstance(request_format, str | os.PathLike):
                raise InvalidRequest("chat_template and request_format exclude each other: give one of them")
            return MODEL, _template_or_name(chat_template)
        if request_format is UNSET:
            return None, None
        chosen = read_format(request_format)
    except (ValueError, TypeError) as error:
        if isinstance(error, InvalidRequest):
            raise
        raise InvalidRequest(f"{'request_format' if chat_template is None else 'chat_template'}: {error}") from None
    return chosen.kind, chosen.template


def _template_or_name(chat_template: Any) -> str:
    """A word that is no file names one of the tokenizer's templates; the worker knows whether there is such a one."""
    if isinstance(chat_template, str) and chat_template.isidentifier() and not os.path.exists(chat_template):
        return chat_template
    return read_template(chat_template)


def _encode_options(options: ChatOptions) -> bytes:
    try:
        encoded = encode(options)
        decode_options(encoded)  # what a worker could not read, such as a key that is no text
    except msgspec.ValidationError as error:
        raise InvalidRequest(f"the chat's options can not be sent: {error}") from None
    except (UnicodeEncodeError, OverflowError, TypeError, ValueError, RecursionError) as error:
        raise InvalidRequest(f"tools or chat_template_kwargs can not be encoded: {describe_encoding_error(error, options)}") from None
    return encoded


def _listed(messages: Any) -> list[Any]:
    if isinstance(messages, str | Mapping) or not isinstance(messages, Sequence):
        raise InvalidRequest(
            f"a conversation is a list of messages such as {{'role': 'user', 'content': …}}, not {type(messages).__name__}"
        )
    if not messages:
        raise InvalidRequest("the conversation has no messages")
    return list(messages)


def _plain_message(number: int, message: Any) -> dict[str, Any]:
    """A dict that can travel; pydantic objects (as the OpenAI client returns them) are taken too."""
    if hasattr(message, "model_dump"):
        message = message.model_dump(exclude_unset=True)
    if not isinstance(message, Mapping):
        hint = "; for several conversations use chat_many" if isinstance(message, list) else ""
        raise InvalidRequest(f"message {number} must be a dict with role and content, not {type(message).__name__}{hint}")
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str) or not role:
        raise InvalidRequest(f"message {number}: role must be text, not {role!r:.40}")
    if content is not None and not isinstance(content, str | list | tuple):
        raise InvalidRequest(f"message {number}: content must be text, a list of parts or None, not {type(content).__name__}")
    for part in content if isinstance(content, list | tuple) else ():
        if fault := why_not_text(part):
            raise InvalidRequest(f"message {number}: {fault}")
    return dict(message)


def _where(messages: Any, error: Exception) -> str:
    """Which message could not be encoded."""
    for number, message in enumerate(messages):
        try:
            encode(_plain_message(number, message))
        except Exception as cause:
            return f"message {number} can not be encoded: {describe_encoding_error(cause, message)}"
    return f"the conversation can not be encoded: {describe_encoding_error(error, messages)}"
