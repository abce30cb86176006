"""From what a caller writes to what travels: prompts and params are checked and encoded one item at a time.

An item that can't be encoded fails alone, before anything of it is sent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import msgspec

from enginepool.errors import Code, InvalidRequest, ItemError
from enginepool.payload import GenerateRequest, encode
from enginepool.pinpoint import describe_encoding_error
from enginepool.sampling import DEFAULT_MAX_TOKENS, SamplingParams, coerce_params, encode_params

Prompt: TypeAlias = str | Sequence[int] | Mapping[str, Any]
Params: TypeAlias = "SamplingParams | Mapping[str, Any] | None"

_PROMPT_KEYS = {"prompt", "prompt_token_ids"}


class EncodedParams(msgspec.Struct, frozen=True):
    """Params ready to be sent, and how many sequences they ask for."""

    raw: msgspec.Raw
    sequences: int
    is_default_length: bool


Encode: TypeAlias = "Callable[[Any, EncodedParams, int], Encoded | ItemError]"
"""(what the caller wrote, its params, max_frame_bytes) → one item ready to be sent, or what is wrong with it."""


class Encoded(msgspec.Struct, frozen=True):
    """One item ready to be sent."""

    frame: bytes
    prompt: str | None
    prompt_token_ids: list[int] | None
    params: EncodedParams


MAX_KNOWN = 256
MAX_SECONDS = 1e9
_KNOWN: dict[bytes, EncodedParams] = {}


def encode_sampling(params: Any) -> EncodedParams:
    """Check and encode params. Raises InvalidRequest naming the field at fault. What passed once is known by its bytes."""
    if params is None or type(params) is SamplingParams:
        try:
            raw = encode(params)
        except (TypeError, ValueError, OverflowError, RecursionError):
            return _checked(params)
        known = _KNOWN.get(raw)
        if known is None:
            if len(_KNOWN) >= MAX_KNOWN:
                _KNOWN.clear()
            known = _KNOWN[raw] = _checked(params)
        return known
    return _checked(params)


def _checked(params: Any) -> EncodedParams:
    checked = coerce_params(params)
    is_default_length = checked is None or checked.max_tokens is DEFAULT_MAX_TOKENS
    return EncodedParams(msgspec.Raw(encode_params(checked)), 1 if checked is None else max(1, checked.n), is_default_length)


def encode_prompt(prompt: Any, params: EncodedParams, max_frame_bytes: int, *, is_stream: bool = False) -> Encoded | ItemError:
    """Encode one prompt, or say what is wrong with it."""
    try:
        text, ids = split_prompt(prompt)
        frame = encode(GenerateRequest(text, ids, params.raw, is_stream))
    except InvalidRequest as error:
        return ItemError(Code.INVALID_REQUEST, str(error))
    except Exception as error:  # the caller's own object may raise anything when it is read; its neighbours are fine
        return ItemError(Code.INVALID_REQUEST, f"the prompt can not be encoded: {describe_encoding_error(error)}")
    return check_size(frame, max_frame_bytes) or Encoded(frame, text, ids, params)


def check_size(frame: bytes, max_frame_bytes: int) -> ItemError | None:
    """The error of a request that is too large to travel."""
    if len(frame) <= max_frame_bytes:
        return None
    return ItemError(Code.INVALID_REQUEST, f"the request has {len(frame)} bytes, more than the pool's max_frame_bytes ({max_frame_bytes})")


def split_prompt(prompt: Any) -> tuple[str | None, list[int] | None]:
    """Text, or token ids, from any of the forms vLLM takes. Raises InvalidRequest."""
    if isinstance(prompt, str):
        return prompt, None
    if isinstance(prompt, Mapping):
        return _split_mapping(prompt)
    if hasattr(prompt, "tolist"):
        prompt = prompt.tolist()
    if isinstance(prompt, Sequence) and not isinstance(prompt, (bytes, bytearray)):
        return None, _token_ids(prompt)
    raise InvalidRequest(f"a prompt is text, a list of token ids or a dict, not {type(prompt).__name__}")


def text_of(prompt: Any) -> str | None:
    """The text of a prompt in whatever form, for outputs that tell of failures too."""
    text = prompt.get("prompt") if isinstance(prompt, dict) else prompt
    return text if isinstance(text, str) else None


def list_prompts(prompts: Any) -> list[Any]:
    """The prompts of a `*_many` call; a bare string or dict is one prompt. Raises InvalidRequest for a bare list of integers."""
    if isinstance(prompts, (str, Mapping)):
        return [prompts]
    if not isinstance(prompts, Iterable) or isinstance(prompts, (bytes, bytearray)):
        raise InvalidRequest(f"prompts must be a list of prompts, not {type(prompts).__name__}")
    items = list(prompts)
    if items and all(isinstance(item, int) for item in items):
        raise InvalidRequest("a list of integers could be one prompt or many; write [[1, 2, 3]] for one prompt of token ids")
    return items


def check_iterable(items: Any) -> None:
    """Raise InvalidRequest for what can be iterated but is one item, not many."""
    if isinstance(items, str | Mapping | bytes) or not hasattr(items, "__iter__"):
        raise InvalidRequest(f"an iterable of items is needed, not {type(items).__name__}")


def spread(name: str, values: Any, count: int, kinds: tuple[type, ...] = ()) -> list[Any]:
    """One value an item: None and single values are repeated, a list must have one entry an item. Raises InvalidRequest."""
    is_list = isinstance(values, Sequence) and not isinstance(values, (str, bytes, *kinds))
    if not is_list:
        return [values] * count
    if len(values) != count:
        raise InvalidRequest(f"{name} has {len(values)} entries for {count} prompts")
    return list(values)


def check_priority(value: Any) -> int:
    """A priority that can travel. Raises InvalidRequest."""
    if isinstance(value, bool) or not isinstance(value, int) or not -(2**31) <= value < 2**31:
        raise InvalidRequest(f"a priority is an integer of 32 bits (lower goes first), not {value!r:.40}")
    return value


def check_deadline(value: Any) -> float | None:
    """A deadline in seconds from now, or None. Raises InvalidRequest."""
    return check_seconds("deadline_s", value)


def check_seconds(name: str, value: Any) -> float | None:
    """A finite, not negative number of seconds, or None. Raises InvalidRequest."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= MAX_SECONDS:
        raise InvalidRequest(f"{name} is a finite number of seconds from now, not {value!r:.40}")
    return float(value)


def _split_mapping(prompt: Mapping[str, Any]) -> tuple[str | None, list[int] | None]:
    unknown = sorted(set(prompt) - _PROMPT_KEYS, key=str)
    if unknown:
        raise InvalidRequest(f"the prompt's key {unknown[0]!r} is not supported; write `prompt` or `prompt_token_ids`")
    ids, text = prompt.get("prompt_token_ids"), prompt.get("prompt")
    if ids is not None:
        return None, split_prompt(ids)[1] if not isinstance(ids, (str, Mapping)) else _token_ids([ids])
    if isinstance(text, str):
        return text, None
    raise InvalidRequest("the prompt dict needs `prompt` (text) or `prompt_token_ids` (a list of integers)")


def _token_ids(values: Sequence[Any]) -> list[int]:
    for position, value in enumerate(values):
        if isinstance(value, Mapping):
            raise InvalidRequest("a list of dicts is a conversation; use chat, chat_many or stream_chat")
        if isinstance(value, bool) or not isinstance(value, int):
            hint = "; for several prompts use generate_many" if isinstance(value, str) else ""
            raise InvalidRequest(f"token id {position} of the prompt is {value!r:.40}, not an integer{hint}")
    return list(values)
