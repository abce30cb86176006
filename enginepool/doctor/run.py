"""`enginepool doctor`: gather, judge, print, exit as `serve` would."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from enginepool.doctor.environment import HIDDEN, find_secrets
from enginepool.doctor.facts import Facts, gather
from enginepool.doctor.findings import exit_code, judge
from enginepool.doctor.show import render
from enginepool.doctor.verdict import Finding


def run_doctor(given: Mapping[str, Any], config: Path | None, *, as_json: bool) -> int:
    """Print the report for the arguments that `serve` would be given; returns the code `serve` would exit with."""
    facts, settings = gather(given, config)
    # A secret can get into any text, such as a refusal that repeats a flag.
    facts = msgspec.convert(_clean(find_secrets(os.environ, settings), msgspec.to_builtins(facts)), Facts)
    findings = judge(facts)
    code = exit_code(findings)
    print(_as_json(facts, findings, code) if as_json else render(facts, findings, code))
    return code


def _as_json(facts: Facts, findings: list[Finding], code: int) -> str:
    report = msgspec.to_builtins({"exit_code": code, "findings": findings, "plan": facts.plan, "facts": facts})
    del report["facts"]["plan"]
    return msgspec.json.encode(report).decode()


def _clean(secrets: set[str], value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _clean(secrets, one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_clean(secrets, one) for one in value]
    return _without(secrets, value) if isinstance(value, str) else value


def _without(secrets: set[str], text: str) -> str:
    for secret in sorted(secrets, key=len, reverse=True):
        text = text.replace(secret, HIDDEN)
    return text
