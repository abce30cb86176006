"""With `log_format` json every line on stderr is one object, whoever says it and whatever a worker prints."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
from conftest import Serve

from enginepool.dispatcher.log_lines import json_line, level_of, text_line
from enginepool.errors import ExitCode

KEYS = ["time", "level", "role", "worker", "pid", "message"]
TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z")
ODD = b'\xff\xfe odd \x1b[31mred\x1b[0m \x00\x85 \xe2\x80\xa8 50%\r100%\nWARNING 11-29 16:44:21 [core.py:7] old\n{"a": 1}\n'


def _parse(stderr: str) -> list[dict[str, Any]]:
    entries = [json.loads(line) for line in stderr.removesuffix("\n").split("\n")]
    assert all(list(entry) == KEYS for entry in entries)
    assert all(TIME.fullmatch(entry["time"]) for entry in entries)
    assert {entry["level"] for entry in entries} <= {"info", "warning", "error"}
    assert all((entry["role"] == "worker") == (entry["worker"] is not None) for entry in entries)
    return entries


@pytest.mark.parametrize(
    ("text", "level"),
    [
        pytest.param("ready: echo", "info", id="state change"),
        pytest.param("warning: the mask could not be set", "warning", id="our warning"),
        pytest.param("error: no such model", "error", id="our error"),
        pytest.param("WARNING 11-29 16:44:21 [core.py:7] old", "warning", id="vllm warning"),
        pytest.param("(EngineCore_DP0 pid=7) ERROR 11-29 [core.py:7] gone", "error", id="engine core"),
        pytest.param("DEBUG 11-29 16:44:21 [core.py:7] x", "info", id="vllm debug"),
        pytest.param("ERRORS were found", "info", id="a word"),
    ],
)
def test_level_of_a_line(text: str, level: str) -> None:
    assert level_of(text) == level


def test_json_line_keeps_a_message_in_one_line_and_whole() -> None:
    line = json_line(1796057061.0409, "warning", 1, 7, 'warning: two\nlines, "quotes", é, \udc80')
    assert "\n" not in line
    assert json.loads(line) == {
        "time": "2026-11-30T16:44:21.040Z",
        "level": "warning",
        "role": "worker",
        "worker": 1,
        "pid": 7,
        "message": 'two\nlines, "quotes", é, \\udc80',
    }


def test_text_line_tells_role_and_pid() -> None:
    assert text_line(0.0, "info", None, 7, "stopped").endswith(" dispatcher[7] stopped")


def test_every_line_of_a_life_is_an_object(serve: Serve, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        f"import os, sys\nif 'enginepool.worker.main' in sys.orig_argv: os.write(1, {ODD!r}); os.write(2, b'no end')\n"
    )
    served = serve("--engine", "echo", "--workers", "2", "--log-level", "debug", env={"ENGINEPOOL_LOG_FORMAT": "json", **_path(tmp_path)})
    ready = json.loads(served.ready_line())
    served.process.terminate()
    code, stderr = served.finish()
    assert code == ExitCode.OK
    entries = _parse(stderr)
    assert {entry["worker"] for entry in entries} == {None, 0, 1}
    assert {entry["pid"] for entry in entries if entry["role"] == "dispatcher"} == {ready["pid"]}
    assert [entry["level"] for entry in entries if "[core.py:7] old" in entry["message"]] == ["warning", "warning"]
    assert entries[-1]["message"] == "stopped"


def test_death_of_a_worker_and_a_failed_start_are_objects(serve: Serve, tmp_path: Path) -> None:
    config = tmp_path / "pool.toml"
    config.write_text('log_format = "json"\nmax_restarts = 1\n[engine_args]\ncrash_start = [0]\nstdout = "said before"\n')
    served = serve("--engine", "echo", "--config", str(config))
    code, stderr = served.finish()
    assert code == ExitCode.START_FAILED
    entries = _parse(stderr)
    assert [entry["level"] for entry in entries if entry["message"].startswith("failed: ")] == ["error"]
    assert any(entry["level"] == "warning" and "exited with code 9" in entry["message"] for entry in entries)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        pytest.param(["--workers", "0"], "at least 1", id="bad setting"),
        pytest.param(["--worker", "2"], "did you mean --workers?", id="unknown flag"),
        pytest.param(["--config", "/nonexistent.toml"], "/nonexistent.toml", id="no config file"),
        pytest.param(["--endpoint", "tcp://0.0.0.0:5"], "loopback", id="open address"),
        pytest.param(["--ready-file", "/nonexistent/x"], "/nonexistent/x", id="no folder"),
    ],
)
def test_early_error_is_an_object_too(serve: Serve, arguments: list[str], text: str) -> None:
    served = serve("--engine", "echo", "--log-format", "json", *arguments)
    code, stderr = served.finish()
    assert code == ExitCode.USAGE
    (entry,) = _parse(stderr)
    assert entry["level"] == "error"
    assert text in entry["message"]


def test_unknown_variable_is_one_warning(serve: Serve) -> None:
    links = {"ENGINEPOOL_PORT": "tcp://10.0.0.1:80", "ENGINEPOOL_SERVICE_HOST": "10.0.0.1"}
    served = serve("--engine", "echo", "--log-format=json", env={"ENGINEPOOL_WORKER": "2", **links})
    served.ready_line()
    served.process.terminate()
    warnings = [entry["message"] for entry in _parse(served.finish()[1]) if entry["level"] == "warning"]
    assert warnings == ["the environment variable ENGINEPOOL_WORKER means nothing to enginepool; did you mean ENGINEPOOL_WORKERS?"]


def _path(folder: Path) -> dict[str, str]:
    return {"PYTHONPATH": f"{folder}:{os.environ.get('PYTHONPATH', '')}"}
