"""Turns a spec into `vllm.LLM`'s arguments: vLLM's own parser for its flags, our defaults beneath, the caller's on top.

What vLLM's server knows beside the engine (a tool call parser, a chat template …) goes to the serving objects instead.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import io
from argparse import Namespace
from typing import Any

from pydantic import ValidationError
from vllm.engine.arg_utils import EngineArgs
from vllm.entrypoints.launchers.cli_args import BaseFrontendArgs
from vllm.entrypoints.launchers.launcher import validate_api_server_args
from vllm.reasoning import ReasoningParserManager
from vllm.tool_parsers import ToolParserManager
from vllm.utils.argparse_utils import FlexibleArgumentParser

from enginepool.chat_format import read_template
from enginepool.handover import EngineSpec
from enginepool.worker.engine import StartRefused

SERVER_FLAGS = "options of vLLM's HTTP server (host, port, api-key, …) do not apply here"
_ENGINE_NAMES = {field.name for field in dataclasses.fields(EngineArgs)}
_FRONTEND_NAMES = {field.name for field in dataclasses.fields(BaseFrontendArgs)}


def split_arguments(spec: EngineSpec) -> tuple[dict[str, Any], dict[str, Any]]:
    """Arguments for `LLM(**…)`, and those of the serving objects. Raises StartRefused("usage") for what vLLM would not take."""
    given = {**parse_flags(spec.flags), **spec.args}
    given["model"] = spec.model
    _refuse_unknown(set(given) - _ENGINE_NAMES - _FRONTEND_NAMES)
    frontend = {name: value for name, value in given.items() if name in _FRONTEND_NAMES}
    frontend["served_model_name"] = given.get("served_model_name")
    engine = {name: value for name, value in given.items() if name in _ENGINE_NAMES}
    if frontend.get("chat_template") is not None:
        engine["chat_template"] = frontend["chat_template"] = _template(frontend["chat_template"])
    _check_parsers(engine, frontend)
    defaults: dict[str, Any] = {"disable_log_stats": False}
    if spec.engine_core == "inproc":
        defaults["distributed_executor_backend"] = "uni"
    if spec.kv_cache_bytes is not None:
        defaults["kv_cache_memory_bytes"] = spec.kv_cache_bytes
    return defaults | engine, frontend


def serving_arguments(spec: EngineSpec, frontend: dict[str, Any], config: Any) -> Namespace:
    """What `vllm run-batch` would have parsed, for its serving objects. Raises StartRefused("usage")."""
    named = frontend.pop("served_model_name") or list(dict.fromkeys((spec.model, spec.name)))
    try:
        values = vars(BaseFrontendArgs(**frontend))
    except (ValidationError, TypeError) as error:
        raise StartRefused("usage", f"arguments of vLLM's server: {error}") from None
    values = {name: value for name, value in values.items() if name in _FRONTEND_NAMES}
    if values["chat_template"] is None:
        values["chat_template"] = spec.request_format.template
    return Namespace(
        **values,
        model=spec.model,
        served_model_name=[named] if isinstance(named, str) else named,
        enable_log_requests=False,
        disable_log_stats=False,
        structured_outputs_config=config.structured_outputs_config,
    )


def parse_flags(flags: list[str]) -> dict[str, Any]:
    """What vLLM's own parser makes of its flags; only what differs from its defaults is kept."""
    if not flags:
        return {}
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser(prog="vllm flags after --", add_help=False))
    parser = BaseFrontendArgs.add_cli_args(parser)
    complaint = io.StringIO()
    try:
        with contextlib.redirect_stderr(complaint):
            parsed, rest = parser.parse_known_args(flags)
    except SystemExit:
        lines = complaint.getvalue().strip().splitlines()
        raise StartRefused("usage", lines[-1] if lines else "vLLM's parser refused its flags") from None
    if rest:
        raise StartRefused("usage", f"vLLM has no engine flag {' '.join(rest)}; {SERVER_FLAGS}")
    pairs = ((EngineArgs.from_cli_args(parsed), EngineArgs()), (parsed, BaseFrontendArgs()))
    names = (_ENGINE_NAMES, _FRONTEND_NAMES)
    return {
        name: getattr(args, name)
        for (args, default), known in zip(pairs, names, strict=True)
        for name in known
        if getattr(args, name) != getattr(default, name)
    }


def _refuse_unknown(unknown: set[str]) -> None:
    if unknown:
        names = ", ".join(repr(name) for name in sorted(unknown))
        near = difflib.get_close_matches(min(unknown), sorted(_ENGINE_NAMES | _FRONTEND_NAMES), 1)
        meant = f" (did you mean {near[0]!r}?)" if near else ""
        raise StartRefused("usage", f"vLLM has no engine argument {names}{meant}; its names are the fields of `vllm.EngineArgs`")


def _template(value: str) -> str:
    try:
        return read_template(value)
    except ValueError as error:
        raise StartRefused("usage", f"chat_template: {error}") from None


def _check_parsers(engine: dict[str, Any], frontend: dict[str, Any]) -> None:
    """As vLLM's server does at its start; `run-batch` takes an unknown name, and refuses the requests that need it."""
    name, is_auto = frontend.get("tool_call_parser"), bool(frontend.get("enable_auto_tool_choice"))
    if is_auto and not name:
        raise StartRefused("usage", "enable_auto_tool_choice needs a tool_call_parser")
    reasoning = Namespace(reasoning_parser=engine.get("reasoning_parser"))
    try:
        if plugin := frontend.get("tool_parser_plugin"):
            ToolParserManager.import_tool_parser(plugin)
        if plugin := engine.get("reasoning_parser_plugin"):
            ReasoningParserManager.import_reasoning_parser(plugin)
        validate_api_server_args(
            Namespace(enable_auto_tool_choice=name is not None, tool_call_parser=name, structured_outputs_config=reasoning)
        )
    except KeyError as error:
        raise StartRefused("usage", str(error.args[0])) from None
