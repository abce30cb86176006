"""vLLM's flags and names: engine arguments, what the serving objects get, and what stops a start before anything is loaded."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]

KEYWORDS = ["--default-chat-template-kwargs", '{"a": 1}']


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What becomes of all these; one process imports vLLM for them."""
    broken = tmp_path_factory.mktemp("templates") / "broken.jinja"
    broken.write_text("{{ messages }}\n{% if %}\n")
    hermes = ["--enable-auto-tool-choice", "--tool-call-parser", "hermes"]
    asked: dict[str, tuple[list[str], dict[str, Any]]] = {
        "none": ([], {}),
        "flags": (
            [*hermes, "--max-model-len", "64", "--default-chat-template-kwargs", '{"a": 1}', "--served-model-name", "one", "two"],
            {},
        ),
        "names": ([], {"tool_call_parser": "hermes", "response_role": "bot", "served_model_name": "one", "chat_template": "{{ 1 }}"}),
        "unknown parser": (["--tool-call-parser", "herms"], {}),
        "auto without a parser": (["--enable-auto-tool-choice"], {}),
        "unknown reasoning parser": ([], {"reasoning_parser": "deep"}),
        "missing template": (["--chat-template", "/nowhere/t.jinja"], {}),
        "broken template": ([], {"chat_template": str(broken)}),
        "server flag": (["--host", "0.0.0.0"], {}),
        "server name": ([], {"api_key": ["k"]}),
        "odd value": ([], {"response_role": 5}),
    }
    program = Path(__file__).with_name("vllm_arguments.py")
    done = subprocess.run(
        [sys.executable, str(program)], input=json.dumps(list(asked.values())), capture_output=True, text=True, check=True, timeout=280
    )
    return dict(zip(asked, json.loads(done.stdout.strip().splitlines()[-1]), strict=True))


def test_frontend_options_reach_the_serving_objects_and_engine_options_the_engine(told: dict[str, dict[str, Any]]) -> None:
    serving = told["flags"]["serving"]
    assert (serving["enable_auto_tool_choice"], serving["tool_call_parser"]) == (True, "hermes")
    assert (serving["default_chat_template_kwargs"], serving["served_model_name"]) == ({"a": 1}, ["one", "two"])
    assert told["flags"]["engine"]["max_model_len"] == 64
    assert "tool_call_parser" not in told["flags"]["engine"]
    named = told["names"]["serving"]
    assert (named["tool_call_parser"], named["response_role"], named["served_model_name"]) == ("hermes", "bot", ["one"])
    assert named["chat_template"] == told["names"]["engine"]["chat_template"] == "{{ 1 }}"


def test_model_goes_by_its_path_and_its_short_name(told: dict[str, dict[str, Any]]) -> None:
    assert told["none"]["serving"]["served_model_name"] == ["/model", "short"]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("unknown parser", "invalid tool call parser: herms"),
        ("auto without a parser", "needs a tool_call_parser"),
        ("unknown reasoning parser", "invalid reasoning parser: deep"),
        ("missing template", "/nowhere/t.jinja: No such file"),
        ("broken template", "broken.jinja, line 2"),
        ("server flag", "HTTP server"),
        ("server name", "'api_key'"),
        ("odd value", "response_role"),
    ],
)
def test_what_vllm_would_not_take_is_refused_by_name(told: dict[str, dict[str, Any]], name: str, words: str) -> None:
    assert told[name]["refused"].startswith("usage: ")
    assert words in told[name]["refused"]
