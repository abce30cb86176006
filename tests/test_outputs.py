"""Outputs as plain values: everything by name, and strict JSON of it."""

from __future__ import annotations

import json
import math

from enginepool import Code, CompletionOutput, ItemError, Logprob, Output, Timings
from enginepool.payload import Logprobs


def _output(error: ItemError | None = None) -> Output:
    logprobs: Logprobs = [{7: Logprob(-0.5, 1, "x"), 9: Logprob(-math.inf, 2, "y")}]
    samples = [CompletionOutput(0, "x", [7], "stop", None, -0.5, logprobs)]
    return Output(index=3, request_id="a", prompt="p", prompt_token_ids=[1], outputs=samples, timings=Timings(submitted=1.0), error=error)


def test_to_dict_is_strict_json_with_every_field() -> None:
    plain = _output().to_dict()
    assert set(plain) == set(Output.__struct_fields__)
    assert json.loads(json.dumps(plain, allow_nan=False)) == plain
    assert plain["outputs"][0]["logprobs"] == [
        {"7": {"logprob": -0.5, "rank": 1, "decoded_token": "x"}, "9": {"logprob": -9999.0, "rank": 2, "decoded_token": "y"}}
    ]
    assert (plain["timings"]["submitted"], plain["timings"]["delivered"], plain["error"]) == (1.0, None, None)


def test_to_dict_of_a_failed_item_has_its_code_as_text() -> None:
    plain = _output(ItemError(Code.WORKER_LOST, "gone")).to_dict()
    assert json.loads(json.dumps(plain))["error"] == {"code": "worker_lost", "message": "gone"}
