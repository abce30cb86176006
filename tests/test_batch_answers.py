"""Output lines of a batch run: the shape of `vllm run-batch`, its errors, and our own object beside it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from enginepool.batch.answers import LineWriter
from enginepool.batch.request import LineFault
from enginepool.client.outputs import Output
from enginepool.clock import Timings
from enginepool.errors import Code, ItemError
from enginepool.payload import Answer


def _output(error: ItemError | None = None) -> Output:
    answer = Answer(b'{"object":"chat.completion"}', 3, 4) if error is None else None
    stamps = Timings(submitted=1.0, scheduled=1.25, first_token=1.5, last_token=2.5, delivered=3.0, num_tokens=5)
    return Output(
        index=7,
        request_id="a",
        prompt=None,
        prompt_token_ids=None,
        outputs=[],
        timings=stamps,
        error=error,
        worker=1,
        attempts=2,
        answer=answer,
    )


def _line(output: Output, *, is_plain: bool = False) -> dict[str, Any]:
    data = LineWriter("run", is_plain=is_plain).of_output(7, "a", output)
    assert data.count(b"\n") == 1
    line: dict[str, Any] = json.loads(data)
    return line


def test_answer_stands_in_the_response_with_who_gave_it_and_when() -> None:
    line = _line(_output())
    assert (line["id"], line["custom_id"], line["error"]) == ("enginepool-run-7", "a", None)
    assert (line["response"]["status_code"], line["response"]["body"]) == (200, {"object": "chat.completion"})
    facts = line["enginepool"]
    assert (facts["line"], facts["worker"], facts["attempts"], facts["timings"]["submitted"]) == (7, 1, 2, 1.0)
    assert (facts["queue_s"], facts["ttft_s"], facts["tpot_s"], facts["e2e_s"]) == (0.25, 0.5, 0.25, 2.0)


def test_plain_line_has_nothing_that_vllm_does_not_write() -> None:
    assert set(_line(_output(), is_plain=True)) == {"id", "custom_id", "response", "error"}


@pytest.mark.parametrize(
    ("error", "status", "told"),
    [
        (ItemError(Code.INVALID_REQUEST, "no", 404, "NotFoundError", "model"), 404, ("no", "NotFoundError", "model", 404)),
        (ItemError(Code.WORKER_LOST, "gone"), 500, ("gone", "InternalServerError", None, 500)),
        (ItemError(Code.RESULT_TOO_LARGE, "large"), 413, ("large", "RequestEntityTooLargeError", None, 413)),
    ],
)
def test_error_has_the_object_of_vllms_server(error: ItemError, status: int, told: tuple[str, str, str | None, int]) -> None:
    line = _line(_output(error))
    assert (line["response"]["status_code"], line["response"]["body"], line["enginepool"]["code"]) == (status, None, error.code.value)
    assert tuple(line["error"]["error"][name] for name in ("message", "type", "param", "code")) == told


def test_refusal_without_a_kind_is_text_alone() -> None:
    assert _line(_output(ItemError(Code.INVALID_REQUEST, "not here", 400)))["error"] == "not here"


def test_fault_of_a_line_names_it_and_one_without_an_id_has_null() -> None:
    line = json.loads(LineWriter("run", is_plain=True).of_fault(3, LineFault(None, "broken", "custom_id")))
    assert (line["custom_id"], line["response"]["status_code"]) == (None, 400)
    assert line["error"]["error"] == {"message": "line 3: broken", "type": "BadRequestError", "param": "custom_id", "code": 400}
