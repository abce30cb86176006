"""Run by a test in a process of its own: what becomes of pairs of flags and named arguments, as JSON on the last line."""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace
from typing import Any

from enginepool.handover import EngineSpec
from enginepool.worker.engine import StartRefused
from enginepool.worker.vllm_args import serving_arguments, split_arguments


def main() -> None:
    """Read the pairs from stdin; tell each refusal, or what the engine and the serving objects would get."""
    told: list[dict[str, Any]] = []
    for flags, args in json.load(sys.stdin):
        spec = EngineSpec(kind="vllm", model="/model", name="short", flags=flags, args=args)
        try:
            engine, frontend = split_arguments(spec)
            serving = vars(serving_arguments(spec, frontend, SimpleNamespace(structured_outputs_config=None)))
            told.append({"engine": engine, "serving": serving})
        except StartRefused as refused:
            told.append({"refused": f"{refused.kind}: {refused}"})
    print("\n" + json.dumps(told, default=str))


if __name__ == "__main__":
    main()
