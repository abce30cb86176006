"""Every setting of a pool once: frozen structs from which flags, environment names, TOML keys and docs are made.

A flag beats the environment, the environment beats the TOML file, the file beats the default.
"""

from __future__ import annotations

import difflib
import math
import os
import re
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Meta

from enginepool.errors import SettingsError

ENV_PREFIX = "ENGINEPOOL_"
MAX_WORKERS = 1024
OTHER_VARIABLES = ("ENGINEPOOL_RUN_DIR", "ENGINEPOOL_CACHE")
# Kubernetes sets these for every service: one named `enginepool` yields ENGINEPOOL_PORT, ENGINEPOOL_SERVICE_HOST and so on.
_SERVICE_LINK = re.compile(r"\w+_(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT(_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)?)")

PositiveFloat = Annotated[float, Meta(gt=0)]
PositiveInt = Annotated[int, Meta(ge=1)]


class PoolSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """What a pool is made of. `engine_args` go to the engine as they are, `vllm_flags` to vLLM's own parser."""

    model: Annotated[str | None, Meta(description="Model folder or hub id; the embedded demo model when left out.")] = None
    workers: Annotated[
        int | Literal["auto"], Meta(description="Worker processes; auto is devices ÷ (tensor × pipeline size), 1 on CPU.")
    ] = "auto"
    engine: Annotated[Literal["vllm", "echo"], Meta(description="vllm, or echo: answers without a model, for tests and benchmarks.")] = (
        "vllm"
    )
    batch_size: Annotated[PositiveInt | None, Meta(description="Static batching: run batches of this many items. Unset: continuous.")] = (
        None
    )
    batch_timeout_s: Annotated[
        PositiveFloat | None, Meta(description="Static batching: send a partial batch after this long (default 0.01).")
    ] = None
    cpu_affinity: Annotated[
        str, Meta(description="auto, reset, inherit, or core lists such as 0-3 (shared) or 0-3|4-7 (one a worker).")
    ] = "auto"
    engine_core: Annotated[
        Literal["auto", "inproc", "mp"],
        Meta(description="vLLM's engine core inside the worker or in a process of its own; auto: inside on one CPU device."),
    ] = "auto"
    kv_cache_budget_bytes: Annotated[
        PositiveInt | None, Meta(description="KV cache memory of all CPU workers together; default: a share of the memory limit.")
    ] = None
    request_format: Annotated[
        str | None,
        Meta(
            description="How conversations become prompts: unset (the model's chat template), plain, default-template (the model's, "
            "else plain), or a Jinja template as path or text."
        ),
    ] = None
    min_ready: Annotated[PositiveInt | None, Meta(description="Workers that must be ready for the pool to be up (default: all).")] = None
    start_timeout_s: Annotated[
        PositiveFloat, Meta(description="Longest silence of a starting worker; each stage or log line starts it anew.")
    ] = 600.0
    drain_timeout_s: Annotated[
        PositiveFloat, Meta(description="How long a drain may take before what is left is returned as retryable.")
    ] = 300.0
    shutdown_timeout_s: Annotated[
        PositiveFloat, Meta(description="How long stopping workers have before they are killed, all together.")
    ] = 5.0
    max_restarts: Annotated[int, Meta(ge=0, description="Restarts of one worker within restart_window_s before it is given up.")] = 5
    restart_window_s: Annotated[PositiveFloat, Meta(description="The window in which max_restarts counts.")] = 300.0
    backoff_s: Annotated[PositiveFloat, Meta(description="Wait before the first restart of a worker; doubles with each, up to 30 s.")] = 0.1
    endpoint: Annotated[
        str | None,
        Meta(description="ipc:///path or tcp://127.0.0.1:port (0: any), other addresses with keys; default: this user's default endpoint."),
    ] = None
    keys: Annotated[
        str | None, Meta(description="Keys file of `enginepool keys`: encrypts a tcp endpoint, which beyond loopback needs it.")
    ] = None
    client_silence_s: Annotated[
        float, Meta(ge=1), Meta(description="Clients on other machines are taken for gone after this long without a sign of life.")
    ] = 15.0
    submit_window: Annotated[PositiveInt, Meta(description="Items one client keeps unfinished in the *_many calls before it waits.")] = 4096
    max_backlog_items: Annotated[PositiveInt, Meta(description="Items that may wait; beyond that submit is refused.")] = 100_000
    max_backlog_bytes: Annotated[PositiveInt, Meta(description="Payload bytes that may wait.")] = 1 << 30
    max_client_output_bytes: Annotated[
        PositiveInt, Meta(description="Results of one client that may wait for it to read them; beyond that its other items are held back.")
    ] = 64 << 20
    max_frame_bytes: Annotated[int, Meta(ge=1, le=1 << 31), Meta(description="Largest request or result of one item.")] = 64 << 20
    max_items_per_message: Annotated[PositiveInt, Meta(description="Items in one message.")] = 1024
    max_slice: Annotated[PositiveInt, Meta(description="Items handed to a worker in one message (continuous mode).")] = 32
    heartbeat_s: Annotated[PositiveFloat, Meta(description="Interval of the workers' heartbeats.")] = 1.0
    mute_timeout_s: Annotated[
        PositiveFloat, Meta(description="A ready worker without a heartbeat for this long is killed; at least three heartbeats.")
    ] = 15.0
    admit_timeout_s: Annotated[
        PositiveFloat, Meta(description="Longest time that an engine may take to take one item in (compiling its schema, say).")
    ] = 60.0
    stall_timeout_s: Annotated[
        PositiveFloat, Meta(description="Longest time without a token or a result with work in hand, for a worker and for an item.")
    ] = 300.0
    trace: Annotated[str | None, Meta(description="Write a Chrome trace of all items to this file, a lane for each slot of a worker.")] = (
        None
    )
    log_level: Annotated[
        Literal["debug", "info", "warning"],
        Meta(description="debug: all that workers print; info: state changes, ready workers' warnings; warning: what went wrong (Pool's)."),
    ] = "info"
    log_format: Annotated[Literal["text", "json"], Meta(description="How log lines on stderr look: text, or one JSON object a line.")] = (
        "text"
    )
    engine_args: Annotated[dict[str, Any], Meta(description="Engine arguments by vLLM's own names.")] = {}
    vllm_flags: Annotated[list[str], Meta(description="vLLM's own flags, as given after `--`.")] = []

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if isinstance(value, float) and not math.isfinite(value):
                raise SettingsError(f"{name} must be a finite number; got {value}")
        if self.model == "":
            raise SettingsError("model is empty; leave it out for the embedded model")
        if self.workers != "auto" and self.workers > MAX_WORKERS:
            raise SettingsError(f"workers is at most {MAX_WORKERS}; got {self.workers}")
        if self.workers != "auto" and self.workers < 1:
            raise SettingsError(f"workers must be at least 1, or auto; got {self.workers}")
        if self.batch_timeout_s is not None and self.batch_size is None:
            raise SettingsError("batch_timeout_s means static batching, so it needs batch_size too")
        if self.mute_timeout_s < 3 * self.heartbeat_s:
            least = f"three times heartbeat_s, {3 * self.heartbeat_s:g} s"
            raise SettingsError(f"mute_timeout_s must be at least {least}; got {self.mute_timeout_s:g}")
        if self.workers != "auto" and self.min_ready is not None and self.min_ready > self.workers:
            raise SettingsError(f"min_ready is {self.min_ready}, but there are only {self.workers} workers")

    @property
    def static_timeout_s(self) -> float | None:
        """The partial-batch timeout in static mode, None in continuous mode."""
        return None if self.batch_size is None else self.batch_timeout_s or 0.01


class Setting(msgspec.Struct, frozen=True):
    """One field of PoolSettings as the command line, the environment and the docs see it."""

    name: str
    type: Any
    default: Any
    help: str

    @property
    def flag(self) -> str:
        """The command-line spelling."""
        return "--" + self.name.replace("_", "-")

    @property
    def env(self) -> str:
        """The environment variable's name."""
        return ENV_PREFIX + self.name.upper()

    @property
    def choices(self) -> tuple[str, ...] | None:
        """The allowed words where the type is a closed set of them."""
        return get_args(self.type) if get_origin(self.type) is Literal else None

    @property
    def is_flag(self) -> bool:
        """Whether it can be given as one flag (tables and lists come by TOML, by Python or after `--`)."""
        return get_origin(self.type) not in (dict, list)


def iter_settings() -> Iterator[Setting]:
    """Every setting, in the order of the struct."""
    hints = get_type_hints(PoolSettings, include_extras=True)
    for field in msgspec.structs.fields(PoolSettings):
        annotated = hints[field.name]
        meta = next(item for item in annotated.__metadata__ if isinstance(item, Meta) and item.description)
        default = field.default_factory() if field.default is msgspec.NODEFAULT else field.default
        yield Setting(field.name, annotated.__origin__, default, str(meta.description))


def build_settings(values: Mapping[str, Any], source: str = "settings") -> PoolSettings:
    """Check plain values (text from a flag or the environment included) and build the struct.

    Raises SettingsError naming the setting.
    """
    for name in values:
        if name not in PoolSettings.__struct_fields__:
            raise SettingsError(f"{source}: there is no setting {name!r}{_suggestion(name)}")
    try:
        return msgspec.convert(dict(values), PoolSettings, strict=False)
    except msgspec.ValidationError as error:
        cause = error.__cause__
        text = str(cause) if isinstance(cause, SettingsError) else _with_choices(str(error).replace("`$.", "`"))
        raise SettingsError(f"{source}: {text}") from None


def _with_choices(text: str) -> str:
    """msgspec says which word is wrong, but not which are right."""
    named = next((item for item in iter_settings() if text.startswith("Invalid enum value") and text.endswith(f"`{item.name}`")), None)
    if named is None:
        return text
    words = [word for part in (named.type, *get_args(named.type)) if get_origin(part) is Literal for word in get_args(part)]
    number = "a whole number or " if int in get_args(named.type) else ""
    return f"{text}; write {number}{' or '.join(words)}" if words else text


def nearest_setting(name: str) -> str | None:
    """The setting whose name is nearly `name`, or None."""
    return next(iter(difflib.get_close_matches(name, PoolSettings.__struct_fields__, 1, 0.85)), None)


def _suggestion(name: str) -> str:
    near = nearest_setting(name)
    return f"; did you mean {near!r}?" if near else "; an engine argument stands under [engine_args]"


def is_service_link(name: str) -> bool:
    """Whether Kubernetes makes a variable of this name for a service."""
    return _SERVICE_LINK.fullmatch(name) is not None


def unknown_variables(environ: Mapping[str, str]) -> list[str]:
    """One sentence for each ENGINEPOOL_ variable that nothing reads, with the name it is close to; service links are let be."""
    known = [*(item.env for item in iter_settings() if item.is_flag), *OTHER_VARIABLES]
    unknown = sorted(name for name in environ if name.startswith(ENV_PREFIX) and name not in known and not is_service_link(name))
    tails = [name.removeprefix(ENV_PREFIX) for name in known]
    sentences = []
    for name in unknown:
        near = difflib.get_close_matches(name.removeprefix(ENV_PREFIX).upper(), tails, 1, 0.8)
        hint = f"; did you mean {ENV_PREFIX}{near[0]}?" if near else ""
        sentences.append(f"the environment variable {name} means nothing to enginepool{hint}")
    return sentences


def read_toml(path: Path) -> dict[str, Any]:
    """Read a settings file. Raises SettingsError with the path and the parser's line."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SettingsError(f"--config {path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SettingsError(f"--config {path}: {error}") from None


def resolve_settings(
    flags: Mapping[str, Any], environ: Mapping[str, str] = os.environ, toml: Path | None = None
) -> tuple[PoolSettings, dict[str, str]]:
    """Merge flag > environment > TOML > default. Returns the settings and where each came from."""
    merged: dict[str, Any] = {}
    origins: dict[str, str] = {}
    from_env = {item.name: environ[item.env] for item in iter_settings() if item.is_flag and item.env in environ}
    layers = [
        (f"file {toml}", read_toml(toml) if toml else {}),
        ("environment", from_env),
        ("flag", {name: value for name, value in flags.items() if value is not None}),
    ]
    for origin, layer in layers:
        merged.update(layer)
        origins.update(dict.fromkeys(layer, origin))
    checks = [(name, value, origin) for origin, layer in layers for name, value in layer.items()]
    for name, value, origin in sorted(checks, key=lambda check: check[0] in _PARTNERS):
        build_settings({**_partner(name, merged), name: value}, origin)
    settings = build_settings(merged)
    return settings, {item.name: origins.get(item.name, "default") for item in iter_settings()}


_PARTNERS = {"batch_timeout_s": "batch_size", "min_ready": "workers", "mute_timeout_s": "heartbeat_s", "heartbeat_s": "mute_timeout_s"}


def _partner(name: str, merged: Mapping[str, Any]) -> dict[str, Any]:
    """The setting that a check between fields needs, from whichever layer: one may begin what another completes."""
    partner = _PARTNERS.get(name)
    return {} if partner is None or partner not in merged else {partner: merged[partner]}
