"""`serve`: turns settings into a running dispatcher. Pool starts its embedded dispatcher through here too."""

from __future__ import annotations

import os
import signal
import traceback
import uuid
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import setproctitle

from enginepool import lifeline
from enginepool.chat_format import RequestFormat
from enginepool.config import PoolSettings, unknown_variables
from enginepool.dispatcher.announce import Announcer
from enginepool.dispatcher.descriptors import raise_limit
from enginepool.dispatcher.log_lines import level_of
from enginepool.dispatcher.logs import LogWriter
from enginepool.dispatcher.loop import Dispatcher
from enginepool.dispatcher.machine import read_machine
from enginepool.dispatcher.placement import describe
from enginepool.dispatcher.plan import Plan
from enginepool.dispatcher.ready_file import ReadyFile
from enginepool.dispatcher.scratch import sweep_scratch
from enginepool.dispatcher.signals import Signals
from enginepool.errors import EnginePoolError, ExitCode
from enginepool.handover import EngineSpec
from enginepool.preflight.checks import early_checks
from enginepool.preflight.dtype import FLOAT32, REASON, dtype_warning, is_dtype_open
from enginepool.preflight.model import is_on_disk
from enginepool.preflight.packages import VLLM, newer_than_tested, read_packages
from enginepool.preflight.plan import choose_format, make_plan
from enginepool.rundir import claim_endpoint
from enginepool.trace_file import TraceFile

Log = Callable[[str], None]
ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class Parent(msgspec.Struct, frozen=True):
    """How the program that started this process is told and watched."""

    ready_fd: int | None = None
    ready_file: Path | None = None
    stages_fd: int | None = None
    lifeline_fd: int | None = None
    pid: int | None = None
    is_embedded: bool = False


def run_dispatcher(settings: PoolSettings, parent: Parent) -> ExitCode:
    """Run a pool until it is stopped; every failure before it runs is one log line and one ready line."""
    _open_standard_fds()
    setproctitle.setproctitle("enginepool dispatcher")
    announcer = Announcer(parent.ready_fd, parent.stages_fd)
    writer = LogWriter(as_json=settings.log_format == "json")
    pid = os.getpid()
    _make_interruptible(parent)
    raise_limit()

    def log(text: str) -> None:
        level = level_of(text)
        if settings.log_level != "warning" or level != "info":
            writer.tell(level, text, pid=pid)

    warnings.showwarning = lambda text, kind, file, line, *_: log(f"warning: {file}:{line}: {kind.__name__}: {text}")
    try:
        if parent.ready_file is not None:
            announcer.file = ReadyFile(parent.ready_file, log)
        if not parent.is_embedded:
            for text in unknown_variables(os.environ):
                log(f"warning: {text}")
        return _run(settings, parent, announcer, writer, log, pid)
    except KeyboardInterrupt:
        announcer.ready({"state": "failed", "error": "interrupted before any worker was started", "exit_code": 130, "pid": pid})
        log("error: interrupted before any worker was started")
        return ExitCode.INTERRUPTED
    except EnginePoolError as error:
        announcer.ready(
            {"state": "failed", "error": str(error), "error_type": type(error).__name__, "exit_code": int(error.exit_code), "pid": pid}
        )
        log(f"error: {error}")
        return error.exit_code
    except Exception as error:
        announcer.ready({"state": "failed", "error": f"{type(error).__name__}: {error}", "exit_code": int(ExitCode.FAILED), "pid": pid})
        log(f"error: the dispatcher ended by a fault of its own: {traceback.format_exc()}")
        return ExitCode.FAILED


def _open_standard_fds() -> None:
    """A closed standard descriptor would be given to the next file that is opened, and the log be written into it."""
    fd = os.open(os.devnull, os.O_RDWR)
    while fd <= 2:
        fd = os.open(os.devnull, os.O_RDWR)
    os.close(fd)


def _make_interruptible(parent: Parent) -> None:
    """Until the loop takes them over, signals end what may take long before it, preparing the embedded model; so does the parent's end."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)
    signal.signal(signal.SIGINT, signal.SIG_IGN if parent.is_embedded else signal.default_int_handler)
    if parent.lifeline_fd is not None:
        lifeline.signal_at_end(parent.lifeline_fd, signal.SIGTERM, os.getpid())
    if parent.pid is not None and os.getppid() != parent.pid:
        os.kill(os.getpid(), signal.SIGTERM)


def _run(settings: PoolSettings, parent: Parent, announcer: Announcer, writer: LogWriter, log: Log, pid: int) -> ExitCode:
    pool_id = uuid.uuid4().hex[:12]
    packages = read_packages(VLLM)
    for _, check in early_checks(settings, packages):
        check()
    if settings.engine == "vllm" and (newer := newer_than_tested(packages)):
        log(f"warning: {newer}")
    request_format = choose_format(settings)
    sweep_scratch()
    plan = make_plan(settings, packages, read_machine(), os.environ)
    trace = None if settings.trace is None else TraceFile(settings.trace, log)
    held = signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)  # an interrupt now would leave files behind
    claim = claim_endpoint(settings.endpoint, pool_id, keys=settings.keys)
    try:
        signal.pthread_sigmask(signal.SIG_SETMASK, held)
        defaults = _embedded_args(settings, plan)
        model, name = _resolve_model(settings, log, defaults)
        dispatcher = Dispatcher(
            settings,
            plan,
            lambda index: _engine_spec(settings, plan, model, name, request_format, index, defaults),
            claim,
            pool_id,
            name,
            announcer,
            Signals(parent.pid, parent.lifeline_fd, ignore_sigint=parent.is_embedded),
            writer,
            trace=trace,
            one_first=settings.engine == "vllm" and not is_on_disk(model),
            pid=pid,
        )
        noun = "worker" if len(plan.workers) == 1 else "workers"
        log(f"pool {pool_id}: {name}, {len(plan.workers)} {noun}; connect with Pool.connect({dispatcher.endpoint!r})")
        warnings = [*plan.warnings, *filter(None, [dtype_warning(settings, plan)])]
        for line in [f"cpus from {plan.origins['cpus']}", *describe(plan), *(f"warning: {text}" for text in warnings)]:
            log(line)
        return dispatcher.run()
    finally:
        signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)
        claim.release()


def _engine_spec(
    settings: PoolSettings, plan: Plan, model: str, name: str, request_format: RequestFormat, index: int, defaults: dict[str, Any]
) -> EngineSpec:
    worker = plan.workers[index]
    has_own_budget = "kv_cache_memory_bytes" in settings.engine_args
    return EngineSpec(
        kind=settings.engine,
        model=model,
        name=name,
        args=defaults | settings.engine_args,
        flags=settings.vllm_flags,
        engine_core=worker.engine_core,
        kv_cache_bytes=None if has_own_budget else worker.kv_cache_bytes,
        request_format=request_format,
    )


def _embedded_args(settings: PoolSettings, plan: Plan) -> dict[str, Any]:
    """What the embedded model is loaded with unless the settings say otherwise; nothing for others."""
    if settings.model is not None or settings.engine != "vllm":
        return {}
    eager = {} if any("eager" in flag for flag in settings.vllm_flags) else {"enforce_eager": True}
    return eager | ({"dtype": FLOAT32} if is_dtype_open(settings, plan) else {})


def _resolve_model(settings: PoolSettings, log: Log, embedded_args: dict[str, Any]) -> tuple[str, str]:
    """What to load and what to call it; with no model named, the embedded one, and it is said so."""
    if settings.engine == "echo":
        return "echo", "echo"
    if settings.model is not None:
        model = str(Path(settings.model).expanduser()) if settings.model.startswith("~") else settings.model
        return model, model
    from enginepool.demo.model import MODEL_NAME, ensure_model

    dtype = f" and in {FLOAT32} ({REASON})" if "dtype" in embedded_args else ""
    log(f"no model was named: using the embedded {MODEL_NAME}, eagerly (compiling would take a minute or more){dtype}")
    return str(ensure_model(log)), MODEL_NAME
