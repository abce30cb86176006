"""What is looked at in an OpenAI request's body before vLLM's own models read it."""

from __future__ import annotations

import pytest

from enginepool.worker.engine import RefusedItem
from enginepool.worker.openai_body import read_body


def test_null_counts_as_absent_but_for_the_tool_choice() -> None:
    assert read_body(b'{"prompt": "x", "n": null, "tool_choice": null}') == {"prompt": "x", "tool_choice": None}


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        pytest.param(b'{"temperature": NaN}', "temperature", "finite", id="NaN"),
        pytest.param(b'{"logit_bias": {"5": 1e999}}', "logit_bias.5", "finite", id="beyond doubles"),
        pytest.param(b'{"stop": ["a", "\\udc00"]}', "stop[1]", "lone surrogate", id="half a pair"),
        pytest.param(b'{"prompt": "\xff"}', None, "not JSON", id="no UTF-8"),
        pytest.param(b'{"prompt": ', None, "not JSON", id="cut off"),
        pytest.param(b"[1, 2]", None, "not a JSON object", id="a list"),
        pytest.param(b"[" * 20_000, None, "nested too deeply", id="deep"),
        pytest.param(b'{"use_beam_search": true}', "use_beam_search", "beam search", id="beam search"),
        pytest.param(b'{"messages": [{"content": [{"image_url": {"url": "u"}}]}]}', "messages", "not supported", id="image"),
        pytest.param(b'{"input": [[{"content": [{"type": "audio_url"}]}]]}', "input", "not supported", id="audio to embed"),
        pytest.param(b'{"chat_template_kwargs": {"tokenize": 1}}', "chat_template_kwargs", "'tokenize' is reserved", id="reserved"),
    ],
)
def test_body_that_no_engine_should_see_is_refused_by_the_fields_name(body: bytes, param: str | None, words: str) -> None:
    with pytest.raises(RefusedItem, match=words) as refused:
        read_body(body)
    error = refused.value.error
    assert (error.status, error.kind, error.param) == (400, "BadRequestError", param)


def test_text_parts_and_whole_pairs_pass() -> None:
    body = read_body(b'{"messages": [{"role": "user", "content": [{"type": "text", "text": "\\ud83d\\ude00"}]}]}')
    assert body["messages"][0]["content"][0]["text"] == "\U0001f600"
