"""SamplingParams: vLLM's names and defaults, checked before anything is sent, and taken from vLLM's own class too."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest

from enginepool.errors import InvalidRequest
from enginepool.payload import decode_params
from enginepool.sampling import SamplingParams, StructuredOutputsParams, coerce_params, encode_params

ONLY_VLLM = {
    "prompt_logprob_start",
    "output_kind",
    "output_text_buffer_length",
    "skip_clone",
    "stream_interval",
    "prompt_logprob_token_ids",
}


class _FakeStructuredOutputs(msgspec.Struct):
    regex: str | None = None
    json: str | None = None
    _backend: str | None = None


_FakeStructuredOutputs.__module__ = "vllm.sampling_params"


class _FakeSamplingParams(msgspec.Struct):
    """Looks like vLLM's: the same kind of class, in a module of vLLM, with fields of its own."""

    n: int = 1
    temperature: float = 1.0
    max_tokens: int | None = 16
    stop: list[str] = []
    structured_outputs: _FakeStructuredOutputs | None = None
    skip_clone: bool = False
    prompt_logprob_token_ids: list[int] | None = None
    from_the_future: int = 0
    _all_stop_token_ids: set[int] = set()


_FakeSamplingParams.__module__ = "vllm.sampling_params"


def _sent(value: Any) -> Any:
    return decode_params(encode_params(coerce_params(value)))


def _defaults(struct: Any) -> dict[str, Any]:
    return dict(zip(struct.__struct_fields__, struct.__struct_defaults__, strict=True))


@pytest.mark.parametrize(
    ("params", "named"),
    [
        pytest.param({"temprature": 0.5}, "temprature", id="unknown-field"),
        pytest.param({"temperature": "hot"}, "temperature", id="text-for-a-number"),
        pytest.param({"n": 1.5}, "`n`", id="fraction-for-a-count"),
        pytest.param({"n": True}, "`n`", id="bool-for-a-count"),
        pytest.param({"max_tokens": "16"}, "max_tokens", id="digits-for-a-count"),
        pytest.param({"stop": [1]}, "stop", id="number-as-stop"),
        pytest.param({"stop": ""}, "stop", id="empty-stop"),
        pytest.param({"stop": ["a", ""]}, "stop", id="empty-stop-in-a-list"),
        pytest.param({"logit_bias": {"5": 1.0}}, "logit_bias", id="text-as-token-id"),
        pytest.param({"bad_words": ["a", 1]}, r"bad_words\[1\]", id="place-in-a-list"),
        pytest.param({"ignore_eos": 1}, "ignore_eos", id="number-for-a-bool"),
        pytest.param({"structured_outputs": {"regexp": "a"}}, "regexp.*structured_outputs", id="unknown-nested-field"),
        pytest.param({1: 2}, "key", id="number-as-field-name"),
        pytest.param(SamplingParams(temperature="hot"), "temperature", id="own-struct-with-a-wrong-type"),  # type: ignore[arg-type]
    ],
)
def test_coerce_refuses_naming_the_field(params: Any, named: str) -> None:
    with pytest.raises(InvalidRequest, match=f"^sampling params: .*{named}"):
        coerce_params(params)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf], ids=["nan", "inf", "-inf"])
@pytest.mark.parametrize("name", ["temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"])
def test_coerce_refuses_a_number_that_is_not_finite(name: str, value: float) -> None:
    with pytest.raises(InvalidRequest, match=f"`{name}` must be a finite number"):
        coerce_params({name: value})


@pytest.mark.parametrize(
    ("params", "place"),
    [
        pytest.param({"logit_bias": {7: 1.0, 5: math.nan}}, "logit_bias.5", id="logit-bias"),
        pytest.param(
            {"structured_outputs": {"json": {"allOf": [{"minimum": math.inf}]}}}, "structured_outputs.json.allOf[0].minimum", id="schema"
        ),
        pytest.param(
            {"structured_outputs": StructuredOutputsParams(json={"const": math.nan})},
            "structured_outputs.json.const",
            id="schema-in-a-struct",
        ),
    ],
)
def test_coerce_refuses_a_nested_number_that_is_not_finite(params: dict[str, Any], place: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        coerce_params(params)
    assert str(caught.value) == f"sampling params: `{place}` must be a finite number"


def test_coerce_leaves_extra_args_to_the_plugin_that_reads_them() -> None:
    assert coerce_params({"extra_args": {"bias": -math.inf}}) == SamplingParams(extra_args={"bias": -math.inf})


def test_coerce_refuses_nan_in_an_own_struct() -> None:
    with pytest.raises(InvalidRequest, match="`top_p` must be a finite number"):
        coerce_params(SamplingParams(top_p=math.nan))


@pytest.mark.parametrize("value", [5, "greedy", [1], object()], ids=["int", "str", "list", "object"])
def test_coerce_refuses_another_type_by_its_name(value: object) -> None:
    with pytest.raises(InvalidRequest, match=f"not {type(value).__name__}$"):
        coerce_params(value)


def test_coerce_none_means_the_engines_defaults() -> None:
    assert coerce_params(None) is None
    assert _sent(None) is None


def test_coerce_takes_a_whole_number_where_a_fraction_may_stand() -> None:
    assert coerce_params({"temperature": 0}) == SamplingParams(temperature=0.0)


def test_coerce_takes_nested_structs_and_dicts_alike() -> None:
    as_struct = SamplingParams(structured_outputs=StructuredOutputsParams(regex="a+"))
    assert coerce_params({"structured_outputs": {"regex": "a+"}}) == coerce_params(as_struct) == as_struct


def test_encode_sends_only_the_fields_that_were_set() -> None:
    fields = {"temperature": 0.0, "logit_bias": {5: -1.5}, "structured_outputs": {"choice": ["a", "b"]}}
    assert _sent(fields) == _sent(coerce_params(fields)) == fields


@pytest.mark.parametrize(
    ("params", "told"),
    [
        pytest.param({"stop": "a\ud800"}, r"character 1 of `stop` is a lone surrogate \(U\+D800\)", id="lone-surrogate"),
        pytest.param({"bad_words": ["a", "\udc00"]}, r"character 0 of `bad_words\[1\]` is", id="lone-surrogate-in-a-list"),
        pytest.param({"structured_outputs": {"json": {"\ud800": 1}}}, "of `structured_outputs.json` is", id="lone-surrogate-as-key"),
        pytest.param({"seed": 1 << 64}, "`seed` does not fit into 64 bits", id="integer-too-large"),
        pytest.param({"extra_args": {"x": object()}}, "object", id="no-plain-value"),
    ],
)
def test_encode_refuses_what_msgpack_can_not_carry(params: dict[str, Any], told: str) -> None:
    with pytest.raises(InvalidRequest, match=told):
        encode_params(coerce_params(params))


def test_vllm_struct_is_taken_by_its_fields() -> None:
    params = _FakeSamplingParams(n=2, temperature=0.5, stop=["."], structured_outputs=_FakeStructuredOutputs(regex="a+"))
    expected = SamplingParams(n=2, temperature=0.5, stop=["."], structured_outputs=StructuredOutputsParams(regex="a+"))
    assert coerce_params(params) == expected


def test_vllm_struct_internals_are_left_out() -> None:
    assert _sent(_FakeSamplingParams(max_tokens=5, skip_clone=True, _all_stop_token_ids={2})) == {"max_tokens": 5, "stop": []}


@pytest.mark.parametrize(
    "fields",
    [pytest.param({"prompt_logprob_token_ids": [1]}, id="not-carried"), pytest.param({"from_the_future": 1}, id="newer-vllm")],
)
def test_vllm_struct_field_that_can_not_travel_is_refused_by_name(fields: dict[str, Any]) -> None:
    (name,) = fields
    with pytest.raises(InvalidRequest, match=f"vLLM's field '{name}'"):
        coerce_params(_FakeSamplingParams(**fields))


def test_vllm_struct_is_checked_like_any_other() -> None:
    with pytest.raises(InvalidRequest, match="`temperature` must be a finite number"):
        coerce_params(_FakeSamplingParams(temperature=math.nan))


def test_struct_of_another_library_is_refused() -> None:
    class Foreign(msgspec.Struct):
        n: int = 1

    with pytest.raises(InvalidRequest, match="not Foreign"):
        coerce_params(Foreign())


@pytest.mark.vllm
def test_fields_and_defaults_are_those_of_vllm() -> None:
    theirs = pytest.importorskip("vllm.sampling_params")
    public = {name: value for name, value in _defaults(theirs.SamplingParams).items() if not name.startswith("_") and name not in ONLY_VLLM}
    assert _defaults(SamplingParams) == public
    nested = {name: field.default for name, field in theirs.StructuredOutputsParams.__dataclass_fields__.items()}
    assert _defaults(StructuredOutputsParams) == {name: value for name, value in nested.items() if not name.startswith("_")}
    params = theirs.SamplingParams(n=2, stop="x", seed=7, structured_outputs=theirs.StructuredOutputsParams(regex="a+"))
    assert _sent(params)["structured_outputs"] == {"regex": "a+"}
