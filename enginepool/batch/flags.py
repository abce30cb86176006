"""The flags of `run-batch` beside those of a pool, and the pool that they choose: one of its own, or a running one."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping
from typing import Any

import msgspec

from enginepool import rundir
from enginepool.batch.closing import BatchArguments
from enginepool.batch.command import PoolChoice
from enginepool.client.pool import Pool
from enginepool.client.requests import check_priority
from enginepool.config import resolve_settings
from enginepool.demo.model import MODEL_NAME
from enginepool.errors import InvalidRequest

NOT_ITS_OWN = ("endpoint", "keys", "trace", "client_silence_s")
"""Settings of a pool that others find; here these words mean the pool to use, and the run's own trace."""
FOR_ANSWERS = ("model", "engine", "request_format", "engine_args", "vllm_flags")
"""Settings that change what comes out; a run that is continued must have the same."""


def add_flags(parser: argparse.ArgumentParser) -> None:
    """What a batch needs; the settings of a pool come beside them."""
    add = parser.add_argument
    add("-i", "--input-file", required=True, metavar="IN.jsonl", help="requests, one a line (.gz is read as it is)")
    add("-o", "--output-file", required=True, metavar="OUT.jsonl", help="results, one a line; - is standard output")
    add("--error-file", metavar="FILE", help="failed lines go here instead of into the output")
    add("--endpoint", metavar="ENDPOINT", help="use the pool that runs there, instead of one for this run")
    add("--keys", metavar="FILE", help="keys file, for a running pool that wants one")
    add("--ordered", action="store_true", help="write results in the order of the input")
    add("--plain", action="store_true", help="leave the `enginepool` object out of the results")
    add("--strict", action="store_true", help="refuse keys in a body that vLLM does not know")
    add("--retry-failed", action="store_true", help="run lines again that failed in an earlier run")
    add("--force", action="store_true", help="go on though input or settings have changed; results that still fit are kept")
    add("--overwrite", action="store_true", help="begin anew, and lose what stands in the output")
    add("--window", type=_whole, metavar="N", help="lines in flight at most (default: twice what the workers take)")
    add("--priority", type=int, default=0, metavar="N", help="of all lines in the pool's queue; lower goes first (default 0)")
    add("--max-line-bytes", type=_whole, default=32 << 20, metavar="N", help="a longer line is an error (default 32 MiB)")
    add("--report", metavar="FILE.html", help="write a page about the run")
    add("--trace", metavar="FILE.json", help="write a Chrome trace of the run")
    add("--quiet", action="store_true", help="show no progress")


def batch_arguments(args: argparse.Namespace) -> BatchArguments:
    """The flags as one struct."""
    return BatchArguments(
        input_file=args.input_file,
        output_file=args.output_file,
        error_file=args.error_file,
        is_ordered=args.ordered,
        is_plain=args.plain,
        is_strict=args.strict,
        retry_failed=args.retry_failed,
        force=args.force,
        overwrite=args.overwrite,
        quiet=args.quiet,
        priority=check_priority(args.priority),
        window=args.window,
        max_line_bytes=args.max_line_bytes,
        report=args.report,
        trace=args.trace,
    )


def choose_pool(args: argparse.Namespace, given: dict[str, Any], environ: Mapping[str, str]) -> PoolChoice:
    """The pool to use. Raises SettingsError, and InvalidRequest for settings of a pool that runs already."""
    if args.endpoint is not None:
        if given or args.config:
            names = ", ".join("vLLM's flags" if name == "vllm_flags" else f"--{name.replace('_', '-')}" for name in given) or "--config"
            raise InvalidRequest(f"{names}: the pool at --endpoint runs already with settings of its own; leave them out")
        endpoint, keys = rundir.choose_target(args.endpoint, args.keys)
        with Pool.connect(endpoint, keys=keys) as pool:  # before a long input is checked in vain
            for_answers: dict[str, Any] = {"model": _name_of_model(pool.model)}
        return PoolChoice(join=lambda: Pool.connect(endpoint, keys=keys), leave=Pool.close, settings=for_answers)
    if args.keys is not None:
        raise InvalidRequest("--keys is for a running pool; give its --endpoint too")
    own = {name: value for name, value in environ.items() if name not in [f"ENGINEPOOL_{item.upper()}" for item in NOT_ITS_OWN]}
    settings, origins = resolve_settings(given, own, args.config)
    if origins["log_level"] == "default":
        settings = msgspec.structs.replace(settings, log_level="warning")
    for_answers = {name: getattr(settings, name) for name in FOR_ANSWERS}
    for_answers["model"] = "echo" if settings.engine == "echo" else _name_of_model(settings.model or MODEL_NAME)
    progress = not args.quiet
    return PoolChoice(join=lambda: Pool._of(settings, progress=progress), leave=Pool._kill, settings=for_answers)


def _name_of_model(model: str) -> str:
    """As a pool tells it; a folder is the same however it is named from wherever."""
    return os.path.realpath(model) if os.path.isdir(model) else model


def _whole(text: str) -> int:
    value = int(text) if text.isdecimal() else 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number, at least 1, not {text!r}")
    return value
