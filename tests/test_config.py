"""Settings: a flag beats the environment, that beats the TOML file, that beats the default; what makes no sense is refused by name."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from conftest import REPO

from enginepool.config import (
    OTHER_VARIABLES,
    PoolSettings,
    build_settings,
    is_service_link,
    iter_settings,
    read_toml,
    resolve_settings,
    unknown_variables,
)
from enginepool.errors import ExitCode, SettingsError

SETTINGS = list(iter_settings())


def _toml(folder: Path, text: str) -> Path:
    path = folder / "pool.toml"
    path.write_text(text)
    return path


def _resolve(flags: Mapping[str, Any], environ: Mapping[str, str], toml: Path | None = None) -> tuple[PoolSettings, dict[str, str]]:
    return resolve_settings(flags, environ, toml)


@pytest.mark.parametrize(
    ("flag", "env", "file", "value", "origin"),
    [
        pytest.param("2", "3", "4", 2, "flag", id="flag-beats-all"),
        pytest.param(None, "3", "4", 3, "environment", id="environment-beats-file"),
        pytest.param(None, None, "4", 4, "file", id="file-beats-default"),
        pytest.param(None, None, None, "auto", "default", id="default"),
        pytest.param("2", None, "4", 2, "flag", id="flag-beats-file"),
        pytest.param("2", "3", None, 2, "flag", id="flag-beats-environment"),
    ],
)
def test_resolve_takes_the_strongest_layer(
    tmp_path: Path, flag: str | None, env: str | None, file: str | None, value: object, origin: str
) -> None:
    toml = _toml(tmp_path, f"workers = {file}") if file else None
    settings, origins = _resolve({"workers": flag}, {"ENGINEPOOL_WORKERS": env} if env else {}, toml)
    assert settings.workers == value
    assert origins["workers"].startswith(origin)


def test_resolve_names_the_file_as_origin(tmp_path: Path) -> None:
    toml = _toml(tmp_path, "max_restarts = 9")
    assert _resolve({}, {}, toml)[1]["max_restarts"] == f"file {toml}"


def test_resolve_merges_layers_setting_by_setting(tmp_path: Path) -> None:
    toml = _toml(tmp_path, 'model = "m"\nworkers = 4\n[engine_args]\nmax_model_len = 256\n')
    settings, origins = _resolve({"workers": "2"}, {"ENGINEPOOL_MIN_READY": "1", "UNRELATED": "x"}, toml)
    assert (settings.model, settings.workers, settings.min_ready, settings.engine_args) == ("m", 2, 1, {"max_model_len": 256})
    assert origins.keys() == {setting.name for setting in SETTINGS}


def test_resolve_needs_no_source_at_all() -> None:
    settings, origins = _resolve({}, {})
    assert settings == PoolSettings()
    assert set(origins.values()) == {"default"}


@pytest.mark.parametrize(
    ("flags", "environ", "culprit"),
    [
        pytest.param({"workers": "0"}, {}, "flag", id="flag"),
        pytest.param({}, {"ENGINEPOOL_WORKERS": "0"}, "environment", id="environment"),
        pytest.param({"workers": "2"}, {"ENGINEPOOL_WORKERS": "none"}, "environment", id="environment-below-a-good-flag"),
    ],
)
def test_resolve_error_names_the_layer(flags: dict[str, str], environ: dict[str, str], culprit: str) -> None:
    with pytest.raises(SettingsError, match=f"^{culprit}: .*workers"):
        _resolve(flags, environ)


def test_resolve_checks_one_layer_against_another(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="min_ready is 3, but there are only 2 workers"):
        _resolve({"min_ready": "3"}, {}, _toml(tmp_path, "workers = 2"))


def test_resolve_error_between_layers_names_the_layer_of_the_culprit(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"^flag: .*batch_size"):
        _resolve({"batch_size": "none"}, {}, _toml(tmp_path, "batch_timeout_s = 0.05"))


def test_resolve_lets_a_flag_complete_what_a_file_began(tmp_path: Path) -> None:
    settings, _ = _resolve({"batch_size": "32"}, {}, _toml(tmp_path, "batch_timeout_s = 0.05"))
    assert settings.static_timeout_s == 0.05


@pytest.mark.parametrize(
    ("values", "named"),
    [
        pytest.param({"workers": 0}, "workers", id="no-workers"),
        pytest.param({"workers": -1}, "workers", id="negative-workers"),
        pytest.param({"workers": "many"}, "workers", id="workers-in-words"),
        pytest.param({"workers": 1.5}, "workers", id="half-a-worker"),
        pytest.param({"workers": True}, "workers", id="workers-true"),
        pytest.param({"engine": "llama"}, "engine", id="unknown-engine"),
        pytest.param({"engine_core": "threads"}, "engine_core", id="unknown-engine-core"),
        pytest.param({"batch_size": 0}, "batch_size", id="batch-of-none"),
        pytest.param({"batch_size": 4, "batch_timeout_s": 0}, "batch_timeout_s", id="batch-timeout-zero"),
        pytest.param({"batch_size": 4, "batch_timeout_s": -0.5}, "batch_timeout_s", id="batch-timeout-negative"),
        pytest.param({"batch_timeout_s": 0.1}, "batch_timeout_s", id="batch-timeout-without-size"),
        pytest.param({"workers": 2, "min_ready": 3}, "min_ready", id="min-ready-beyond-workers"),
        pytest.param({"min_ready": 0}, "min_ready", id="min-ready-zero"),
        pytest.param({"max_restarts": -1}, "max_restarts", id="negative-restarts"),
        pytest.param({"start_timeout_s": "nan"}, "start_timeout_s", id="timeout-nan"),
        pytest.param({"drain_timeout_s": "inf"}, "drain_timeout_s", id="timeout-infinite"),
        pytest.param({"shutdown_timeout_s": "soon"}, "shutdown_timeout_s", id="timeout-in-words"),
        pytest.param({"heartbeat_s": 0}, "heartbeat_s", id="heartbeat-zero"),
        pytest.param({"max_backlog_items": 0}, "max_backlog_items", id="backlog-of-none"),
        pytest.param({"max_frame_bytes": 0}, "max_frame_bytes", id="frame-of-none"),
        pytest.param({"max_slice": 0}, "max_slice", id="slice-of-none"),
        pytest.param({"submit_window": 0}, "submit_window", id="window-of-none"),
        pytest.param({"engine_args": "x"}, "engine_args", id="engine-args-as-text"),
        pytest.param({"worker": 2}, "worker", id="unknown-setting"),
    ],
)
def test_build_refuses_by_name(values: dict[str, Any], named: str) -> None:
    with pytest.raises(SettingsError, match=f"^settings: .*{named}") as caught:
        build_settings(values)
    assert caught.value.exit_code == ExitCode.USAGE


@pytest.mark.parametrize(
    ("values", "name", "value"),
    [
        pytest.param({"workers": "auto"}, "workers", "auto", id="workers-auto"),
        pytest.param({"workers": "3"}, "workers", 3, id="number-as-text"),
        pytest.param({"max_restarts": "0"}, "max_restarts", 0, id="no-restarts"),
        pytest.param({"batch_size": "8"}, "static_timeout_s", 0.01, id="static-default-timeout"),
        pytest.param({"batch_size": 8, "batch_timeout_s": 2.0}, "static_timeout_s", 2.0, id="static-own-timeout"),
        pytest.param({}, "static_timeout_s", None, id="continuous"),
    ],
)
def test_build_accepts(values: dict[str, Any], name: str, value: object) -> None:
    assert getattr(build_settings(values), name) == value


@pytest.mark.parametrize(
    ("content", "told"),
    [
        pytest.param(b"workers = 2\nmodel = = 3\n", "line 2", id="syntax-error-with-its-line"),
        pytest.param(b"model = '\xff'", "utf-8", id="not-utf-8"),
    ],
)
def test_toml_that_can_not_be_read_names_the_file(tmp_path: Path, content: bytes, told: str) -> None:
    path = tmp_path / "bad.toml"
    path.write_bytes(content)
    with pytest.raises(SettingsError, match=told) as caught:
        read_toml(path)
    assert str(path) in str(caught.value)


def test_toml_that_is_missing_names_the_file(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"none\.toml: No such file"):
        read_toml(tmp_path / "none.toml")


def test_toml_unknown_key_names_file_and_key(tmp_path: Path) -> None:
    toml = _toml(tmp_path, "wrokers = 2")
    with pytest.raises(SettingsError, match="wrokers") as caught:
        _resolve({}, {}, toml)
    assert str(toml) in str(caught.value)


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: str(setting.name))
def test_setting_has_help_a_flag_and_a_default(setting: Any) -> None:
    assert setting.help.endswith(".")
    assert setting.flag == "--" + setting.name.replace("_", "-")
    assert setting.env == "ENGINEPOOL_" + setting.name.upper()
    assert setting.default == getattr(PoolSettings(), setting.name)


def test_settings_without_a_flag_are_the_tables_and_lists() -> None:
    assert {setting.name for setting in SETTINGS if not setting.is_flag} == {"engine_args", "vllm_flags"}


def test_setting_with_closed_words_tells_its_choices() -> None:
    choices = {setting.name: setting.choices for setting in SETTINGS if setting.choices}
    assert choices["engine"] == ("vllm", "echo")


@pytest.mark.parametrize(
    "name",
    [
        "ENGINEPOOL_SERVICE_HOST",
        "ENGINEPOOL_SERVICE_PORT",
        "ENGINEPOOL_SERVICE_PORT_HTTP",
        "ENGINEPOOL_PORT",
        "ENGINEPOOL_PORT_8000_TCP",
        "ENGINEPOOL_PORT_8000_TCP_PROTO",
        "ENGINEPOOL_PORT_8000_UDP_PORT",
        "ENGINEPOOL_MAX_PORT_53_SCTP_ADDR",
    ],
)
def test_service_link_is_known_as_such(name: str) -> None:
    assert is_service_link(name)
    assert unknown_variables({name: "x"}) == []


def test_no_variable_of_ours_can_be_a_service_link() -> None:
    assert [name for name in [*(setting.env for setting in SETTINGS), *OTHER_VARIABLES] if is_service_link(name)] == []


def test_every_variable_that_the_sources_name_is_known() -> None:
    sources = [path.read_text(encoding="utf-8") for path in (REPO / "enginepool").rglob("*.py")]
    named = {name for text in sources for name in re.findall(r"\bENGINEPOOL_[A-Z_]*[A-Z]\b", text) if not is_service_link(name)}
    assert named >= {"ENGINEPOOL_RUN_DIR", "ENGINEPOOL_CACHE", "ENGINEPOOL_ENDPOINT"}
    assert unknown_variables(dict.fromkeys(named, "")) == []


def test_unknown_variables_are_told_with_the_name_meant() -> None:
    environ = {"ENGINEPOOL_WORKER": "2", "ENGINEPOOL_RUNDIR": "x", "ENGINEPOOL_QUUX": "1", "ENGINEPOOL_MODEL": "m", "HOME": "/"}
    assert unknown_variables(environ) == [
        "the environment variable ENGINEPOOL_QUUX means nothing to enginepool",
        "the environment variable ENGINEPOOL_RUNDIR means nothing to enginepool; did you mean ENGINEPOOL_RUN_DIR?",
        "the environment variable ENGINEPOOL_WORKER means nothing to enginepool; did you mean ENGINEPOOL_WORKERS?",
    ]


def test_wrong_word_is_answered_with_the_right_ones() -> None:
    with pytest.raises(SettingsError, match=r"'jsn'.*`log_format`; write text or json"):
        build_settings({"log_format": "jsn"})
    with pytest.raises(SettingsError, match=r"`workers`; write a whole number or auto"):
        build_settings({"workers": "two"})
