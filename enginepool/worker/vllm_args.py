"""Turns a spec into `vllm.LLM`'s arguments: vLLM's own parser for its flags, our defaults beneath, the caller's on top."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import io
from typing import Any

from vllm.engine.arg_utils import EngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser

from enginepool.handover import EngineSpec
from enginepool.worker.engine import StartRefused

SERVER_FLAGS = "options of vLLM's HTTP server (host, port, api-key, …) do not apply here"


def engine_arguments(spec: EngineSpec) -> dict[str, Any]:
    """Arguments for `LLM(**…)`. Raises StartRefused("usage") for an unknown name or a flag vLLM's parser refuses."""
    given = {**parse_flags(spec.flags), **spec.args}
    given["model"] = spec.model
    known = {field.name for field in dataclasses.fields(EngineArgs)} | {"chat_template"}
    unknown = sorted(set(given) - known)
    if unknown:
        names = ", ".join(repr(name) for name in unknown)
        near = difflib.get_close_matches(unknown[0], sorted(known), 1)
        meant = f" (did you mean {near[0]!r}?)" if near else ""
        raise StartRefused("usage", f"vLLM has no engine argument {names}{meant}; its names are the fields of `vllm.EngineArgs`")
    defaults: dict[str, Any] = {"disable_log_stats": False}
    if spec.engine_core == "inproc":
        defaults["distributed_executor_backend"] = "uni"
    if spec.kv_cache_bytes is not None:
        defaults["kv_cache_memory_bytes"] = spec.kv_cache_bytes
    return defaults | given


def parse_flags(flags: list[str]) -> dict[str, Any]:
    """What vLLM's own parser makes of its flags; only what differs from its defaults is kept."""
    if not flags:
        return {}
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser(prog="vllm flags after --", add_help=False))
    complaint = io.StringIO()
    try:
        with contextlib.redirect_stderr(complaint):
            parsed, rest = parser.parse_known_args(flags)
    except SystemExit:
        lines = complaint.getvalue().strip().splitlines()
        raise StartRefused("usage", lines[-1] if lines else "vLLM's parser refused its flags") from None
    if rest:
        raise StartRefused("usage", f"vLLM has no engine flag {' '.join(rest)}; {SERVER_FLAGS}")
    args, default = EngineArgs.from_cli_args(parsed), EngineArgs()
    names = [field.name for field in dataclasses.fields(EngineArgs)]
    return {name: getattr(args, name) for name in names if getattr(args, name) != getattr(default, name)}
