"""A logits processor for real vLLM engines that misbehaves on demand, by `extra_args` of an item's SamplingParams.

`{"fault": "exit" | "raise" | "hang" | "sleep", "at": n}`: with `at` 0 while vLLM takes the item in, else before its n-th token is
sampled. `once` names a file that makes it happen only once, `for_s` how long a sleep takes.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import torch
from vllm import SamplingParams
from vllm.v1.sample.logits_processor import AdapterLogitsProcessor, RequestLogitsProcessor


class FaultProcessor(AdapterLogitsProcessor):  # type: ignore[misc]
    """Named to vLLM as `fault_processor:FaultProcessor`."""

    @classmethod
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        """Called in the worker while it admits an item."""
        fault = sampling_params.extra_args or {}
        if fault.get("fault") and fault.get("at", 0) == 0:
            _misbehave(fault)

    def is_argmax_invariant(self) -> bool:
        """It has to be called for greedy items too."""
        return False

    def new_req_logits_processor(self, params: SamplingParams) -> RequestLogitsProcessor | None:
        """A processor for items with a fault only."""
        fault = params.extra_args or {}
        if not fault.get("fault"):
            return None

        def process(output_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
            if len(output_ids) + 1 == fault["at"]:
                _misbehave(fault)
            return logits

        return process


def _misbehave(fault: dict[str, Any]) -> None:
    if fault.get("once") and not _is_first_time(Path(fault["once"])):
        return
    match fault["fault"]:
        case "exit":
            os._exit(9)
        case "raise":
            raise RuntimeError("the processor raises here")
        case "hang":
            while True:
                time.sleep(3600)
        case "sleep":
            time.sleep(fault["for_s"])


def _is_first_time(marker: Path) -> bool:
    try:
        marker.touch(exist_ok=False)
    except FileExistsError:
        return False
    return True
