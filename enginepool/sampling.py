"""SamplingParams with vLLM's names and defaults, light enough for a process that never imports vLLM."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

import msgspec

from enginepool.errors import InvalidRequest
from enginepool.pinpoint import describe_encoding_error, is_not_finite, pinpoint

_REFUSED = {"prompt_logprob_token_ids", "prompt_logprob_start"}
_INTERNAL = {"output_kind", "output_text_buffer_length", "skip_clone", "stream_interval"}


class _Unset(int):
    """A default that can be told from the same number given by the caller."""


DEFAULT_MAX_TOKENS = _Unset(16)


class StructuredOutputsParams(msgspec.Struct, omit_defaults=True, forbid_unknown_fields=True, kw_only=True):
    """What the text has to match; set exactly one of the first six (names and meaning as in vLLM 0.32)."""

    json: str | dict[str, Any] | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | None = None
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    whitespace_pattern: str | None = None


class RepetitionDetectionParams(msgspec.Struct, omit_defaults=True, forbid_unknown_fields=True, kw_only=True):
    """When to end a text that repeats itself (names and meaning as in vLLM 0.32; counts of tokens and of repetitions)."""

    max_pattern_size: int = 0
    min_pattern_size: int = 0
    min_count: int = 0


class SamplingParams(msgspec.Struct, omit_defaults=True, forbid_unknown_fields=True):
    """How to sample. Field for field vLLM 0.32's `SamplingParams`; vLLM's own checks run in the worker.

    Not here: what only streaming uses (`output_kind`, `stream_interval`), `prompt_logprob_token_ids` and its `…_start`.
    """

    n: int = 1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    max_tokens: int | None = DEFAULT_MAX_TOKENS
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logprob_token_ids: list[int] | None = None
    flat_logprobs: bool = False
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    structured_outputs: StructuredOutputsParams | None = None
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    extra_args: dict[str, Any] | None = None
    bad_words: list[str] | None = None
    watermarking: bool | None = None
    skip_reading_prefix_cache: bool | None = None
    thinking_token_budget: int | None = None
    repetition_detection: RepetitionDetectionParams | None = None
    routed_experts_prompt_start: int = 0
    trace_decode_token_ids: list[int] | None = None


_DEFAULTS = dict(zip(SamplingParams.__struct_fields__, SamplingParams.__struct_defaults__, strict=True))


def coerce_params(value: Any) -> SamplingParams | None:
    """Take None, a SamplingParams, a mapping or a `vllm.SamplingParams` and return checked params of ours.

    Raises InvalidRequest naming the field for an unknown field, a wrong type or a number that is not finite.
    """
    if value is None:
        return None
    if isinstance(value, Mapping):
        fields: Any = dict(value)
    elif isinstance(value, SamplingParams):
        fields = _fields_of(value)
    elif type(value).__module__.partition(".")[0] == "vllm" and hasattr(value, "__struct_fields__"):
        fields = _fields_of_vllm(value)
    else:
        raise InvalidRequest(f"sampling params must be SamplingParams, a dict or None, not {type(value).__name__}")
    _refuse_non_finite(fields)
    try:
        params = msgspec.convert(fields, SamplingParams)
    except msgspec.ValidationError as error:
        raise InvalidRequest(f"sampling params: {_named(str(error))}{_meant(fields)}") from None
    _refuse_nonsense(params)
    return params


def encode_params(params: SamplingParams | None) -> bytes:
    """Encode as the map of fields that differ from the defaults, or nil.

    Raises InvalidRequest where msgpack has no form for a value (a lone surrogate, an integer beyond 64 bits).
    """
    try:
        return msgspec.msgpack.encode(params)
    except (UnicodeEncodeError, OverflowError, TypeError, ValueError, RecursionError) as error:
        raise InvalidRequest(f"sampling params can not be encoded: {describe_encoding_error(error, params)}") from None


def _fields_of(params: SamplingParams) -> dict[str, Any]:
    fields = {name: value for name in SamplingParams.__struct_fields__ if (value := getattr(params, name)) is not _DEFAULTS[name]}
    for nested in ("structured_outputs", "repetition_detection"):
        value = fields.get(nested)
        if isinstance(value, StructuredOutputsParams | RepetitionDetectionParams):
            fields[nested] = {name: getattr(value, name) for name in value.__struct_fields__}
    return fields


def _fields_of_vllm(params: Any) -> dict[str, Any]:
    default = type(params)()
    fields: dict[str, Any] = {}
    for name in params.__struct_fields__:
        value = getattr(params, name)
        if name.startswith("_") or name in _INTERNAL or value is getattr(default, name):
            continue
        if name in _REFUSED or name not in SamplingParams.__struct_fields__:
            if value is not None and value != getattr(default, name):
                raise InvalidRequest(f"sampling params: enginepool can not carry vLLM's field {name!r} yet; leave it unset")
            continue
        fields[name] = value
    for name in ("structured_outputs", "repetition_detection"):
        if fields.get(name) is not None:
            plain = msgspec.to_builtins(fields[name])
            fields[name] = {key: item for key, item in plain.items() if not key.startswith("_")}
    return fields


def _refuse_non_finite(fields: Mapping[str, Any]) -> None:
    """Range checks written as comparisons are all false for NaN, and msgpack carries it, so look before sending."""
    checked = {name: value for name, value in fields.items() if name != "extra_args"}  # what is in there is a plugin's business
    place = pinpoint(checked, is_not_finite)
    if place is not None:
        raise InvalidRequest(f"sampling params: `{place}` must be a finite number")


def _refuse_nonsense(params: SamplingParams) -> None:
    stops = [params.stop] if isinstance(params.stop, str) else params.stop or []
    if "" in stops:
        raise InvalidRequest("sampling params: `stop` must not hold an empty string: it would match at once")


_MOVED = {f"guided_{name}": f"structured_outputs={{{name!r}: …}}" for name in ("json", "regex", "choice", "grammar", "json_object")}


def _meant(fields: Mapping[str, Any]) -> str:
    """What an unknown field was probably meant to be."""
    unknown = next((str(name) for name in fields if name not in SamplingParams.__struct_fields__), None)
    if unknown is None:
        return ""
    near = _MOVED.get(unknown) or next(iter(difflib.get_close_matches(unknown, SamplingParams.__struct_fields__, 1)), None)
    return f"; did you mean {near}?" if near else ""


def _named(message: str) -> str:
    """Turn msgspec's path (`$.temperature`) into the field's name."""
    return message.replace("`$.", "`").replace("Object contains unknown", "there is no")
