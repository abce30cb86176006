"""Prompts in all their forms become one frame an item; what can't be sent is that item's own error."""

from __future__ import annotations

from typing import Any

import pytest

from enginepool.client.requests import Encoded, check_iterable, encode_prompt, encode_sampling, list_prompts, split_prompt, spread
from enginepool.errors import Code, InvalidRequest, ItemError
from enginepool.payload import GenerateRequest, decode_params, decode_request
from enginepool.sampling import SamplingParams

DEFAULTS = encode_sampling(None)


class _Array:
    """What numpy arrays and tensors have in common."""

    def __init__(self, values: Any) -> None:
        self._values = values

    def tolist(self) -> Any:
        return self._values


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        pytest.param("hello", ("hello", None), id="text"),
        pytest.param("", ("", None), id="empty-text"),
        pytest.param([1, 2], (None, [1, 2]), id="ids"),
        pytest.param((1, 2), (None, [1, 2]), id="tuple-of-ids"),
        pytest.param(range(3), (None, [0, 1, 2]), id="range-of-ids"),
        pytest.param([], (None, []), id="no-ids"),
        pytest.param(_Array([1, 2]), (None, [1, 2]), id="array-of-ids"),
        pytest.param({"prompt": "hello"}, ("hello", None), id="dict-with-text"),
        pytest.param({"prompt_token_ids": [1, 2]}, (None, [1, 2]), id="dict-with-ids"),
        pytest.param({"prompt": "hello", "prompt_token_ids": [1]}, (None, [1]), id="ids-win-over-text"),
        pytest.param({"prompt": "hello", "prompt_token_ids": None}, ("hello", None), id="no-ids-means-text"),
    ],
)
def test_split_prompt_form(prompt: Any, expected: tuple[str | None, list[int] | None]) -> None:
    assert split_prompt(prompt) == expected


@pytest.mark.parametrize(
    ("prompt", "told"),
    [
        pytest.param(None, "not NoneType", id="none"),
        pytest.param(5, "not int", id="number"),
        pytest.param(b"hello", "not bytes", id="bytes"),
        pytest.param({1, 2}, "not set", id="set"),
        pytest.param([1, "2"], "token id 1 of the prompt is '2'", id="text-among-ids"),
        pytest.param([1, 2.0], "token id 1 of the prompt is 2.0", id="fraction-among-ids"),
        pytest.param([True], "token id 0 of the prompt is True", id="bool-among-ids"),
        pytest.param(["hello"], "token id 0 of the prompt is 'hello'", id="list-of-text"),
        pytest.param({}, "needs `prompt`", id="empty-dict"),
        pytest.param({"prompt": 5}, "needs `prompt`", id="dict-with-a-number"),
        pytest.param({"prompt": "a", "multi_modal_data": {}}, "'multi_modal_data' is not supported", id="unknown-key"),
        pytest.param([{"role": "user", "content": "hi"}], "use chat, chat_many or stream_chat", id="conversation"),
        pytest.param({"prompt_token_ids": "12"}, "token id 0 of the prompt is '12'", id="text-for-ids"),
    ],
)
def test_split_prompt_refuses_saying_what_it_got(prompt: Any, told: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        split_prompt(prompt)
    assert told in str(caught.value)


def test_encode_prompt_travels_whole() -> None:
    encoded = encode_prompt("hello", encode_sampling({"max_tokens": 5, "n": 2}), 1000)
    assert isinstance(encoded, Encoded)
    request = decode_request(encoded.frame)
    assert isinstance(request, GenerateRequest)
    assert not request.is_stream
    assert (request.prompt, request.prompt_token_ids, decode_params(request.params)) == ("hello", None, {"n": 2, "max_tokens": 5})


@pytest.mark.parametrize(
    ("prompt", "told"),
    [
        pytest.param("abc\udc80", "character 3 of the text is a lone surrogate (U+DC80)", id="lone-surrogate"),
        pytest.param([1 << 64], "an integer does not fit into 64 bits", id="integer-too-large"),
        pytest.param("x" * 2000, "more than the pool's max_frame_bytes (1000)", id="too-long"),
        pytest.param(None, "not NoneType", id="no-prompt"),
    ],
)
def test_encode_prompt_at_fault_is_its_own_error(prompt: Any, told: str) -> None:
    error = encode_prompt(prompt, DEFAULTS, 1000)
    assert isinstance(error, ItemError)
    assert error.code is Code.INVALID_REQUEST
    assert told in error.message


@pytest.mark.parametrize("prompt", ["nul \0 inside", "日本語 🎉", "\u2028"], ids=["nul", "unicode", "line-separator"])
def test_encode_prompt_keeps_unusual_text(prompt: str) -> None:
    encoded = encode_prompt(prompt, DEFAULTS, 1000)
    assert isinstance(encoded, Encoded)
    request = decode_request(encoded.frame)
    assert isinstance(request, GenerateRequest)
    assert request.prompt == prompt


def test_encode_prompt_of_a_stream_says_so() -> None:
    encoded = encode_prompt("hello", DEFAULTS, 1000, is_stream=True)
    assert isinstance(encoded, Encoded)
    assert decode_request(encoded.frame).is_stream


@pytest.mark.parametrize("items", ["text", {"prompt": "a"}, b"bytes", 5, None], ids=["text", "dict", "bytes", "number", "none"])
def test_check_iterable_refuses_what_is_one_item(items: Any) -> None:
    with pytest.raises(InvalidRequest, match="an iterable of items is needed"):
        check_iterable(items)


@pytest.mark.parametrize("items", [["a"], (), iter("ab"), {"a", "b"}], ids=["list", "empty", "iterator", "set"])
def test_check_iterable_takes_any_iterable(items: Any) -> None:
    check_iterable(items)


@pytest.mark.parametrize(
    ("params", "sequences"),
    [(None, 1), ({"n": 4}, 4), (SamplingParams(n=2), 2), ({"n": 0}, 1)],
    ids=["none", "dict", "struct", "zero-counts-one"],
)
def test_encode_sampling_counts_samples(params: Any, sequences: int) -> None:
    assert encode_sampling(params).sequences == sequences


@pytest.mark.parametrize(
    ("params", "is_default"),
    [(None, True), ({"temperature": 0.0}, True), ({"max_tokens": 64}, False), ({"max_tokens": None}, False)],
    ids=["none", "not-said", "said", "unlimited"],
)
def test_encode_sampling_knows_whether_a_length_was_set(params: Any, is_default: bool) -> None:
    assert encode_sampling(params).is_default_length is is_default


def test_encode_sampling_notices_that_a_struct_was_changed() -> None:
    params = SamplingParams(max_tokens=5)
    before = encode_sampling(params)
    params.n = 3
    assert (before.sequences, encode_sampling(params).sequences) == (1, 3)


def test_encode_sampling_refuses_a_bad_struct_every_time() -> None:
    for _ in range(2):
        with pytest.raises(InvalidRequest, match="`temperature` must be a finite number"):
            encode_sampling(SamplingParams(temperature=float("nan")))


@pytest.mark.parametrize(
    ("prompts", "expected"),
    [
        pytest.param("hello", ["hello"], id="one-text"),
        pytest.param({"prompt": "a"}, [{"prompt": "a"}], id="one-dict"),
        pytest.param(["a", [1]], ["a", [1]], id="mixed-list"),
        pytest.param((text for text in "ab"), ["a", "b"], id="generator"),
        pytest.param([[1, 2, 3]], [[1, 2, 3]], id="one-list-of-ids"),
        pytest.param([], [], id="none"),
    ],
)
def test_list_prompts_form(prompts: Any, expected: list[Any]) -> None:
    assert list_prompts(prompts) == expected


@pytest.mark.parametrize(
    ("prompts", "told"),
    [
        pytest.param([1, 2, 3], r"write \[\[1, 2, 3\]\]", id="bare-ids"),
        pytest.param(5, "not int", id="number"),
        pytest.param(b"ab", "not bytes", id="bytes"),
        pytest.param(None, "not NoneType", id="none"),
    ],
)
def test_list_prompts_refuses(prompts: Any, told: str) -> None:
    with pytest.raises(InvalidRequest, match=told):
        list_prompts(prompts)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        pytest.param(None, [None, None], id="none-for-all"),
        pytest.param(3, [3, 3], id="one-for-all"),
        pytest.param("ab", ["ab", "ab"], id="text-is-one-value"),
        pytest.param([1, 2], [1, 2], id="one-an-item"),
        pytest.param((1, 2), [1, 2], id="tuple"),
    ],
)
def test_spread_gives_one_value_an_item(values: Any, expected: list[Any]) -> None:
    assert spread("priorities", values, 2) == expected


def test_spread_of_another_length_is_refused_with_both_numbers() -> None:
    with pytest.raises(InvalidRequest, match="priorities has 3 entries for 2 prompts"):
        spread("priorities", [1, 2, 3], 2)


class Hostile:
    """Whose every look raises."""

    def __repr__(self) -> str:
        raise KeyError("no look")

    def __len__(self) -> int:
        raise KeyError("no look")


def _deep() -> Any:
    deep: Any = "x"
    for _ in range(20_000):
        deep = [deep]
    return deep


@pytest.mark.parametrize(
    "prompt", [_deep(), {"prompt_token_ids": _deep()}, [Hostile()], Hostile()], ids=["deep", "deep-ids", "list", "object"]
)
def test_prompt_that_raises_when_it_is_read_is_its_own_error(prompt: Any) -> None:
    assert isinstance(encode_prompt(prompt, encode_sampling(None), 1 << 20), ItemError)
