"""How a log line looks: text for people, or one JSON object a line for machines."""

from __future__ import annotations

import re
import time
from typing import Literal

import msgspec

Level = Literal["info", "warning", "error"]

# "(EngineCore_DP0 pid=7) WARNING 11-29 16:44:21 [file.py:7] text" is how vLLM prints, the parenthesis in its children only.
_PRINTED = re.compile(r"(?:\([^)]*\) *)?(DEBUG|INFO|WARNING|ERROR|CRITICAL)\b")
_OWN = re.compile(r"(warning|error): ")
_LEVELS: dict[str, Level] = {"WARNING": "warning", "ERROR": "error", "CRITICAL": "error", "warning": "warning", "error": "error"}


def counted(number: int, noun: str) -> str:
    """A number with its noun: 1 item, 2 items."""
    return f"{number} {noun}{'s' * (number != 1)}"


def text_line(now: float, level: Level, worker: int | None, pid: int | None, text: str) -> str:
    """Local time, role, pid, text, anew for each line of a long text; the text says itself where it is a warning."""
    del level
    role = "dispatcher" if worker is None else f"worker {worker}"
    head = f"{time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(now))} {role}[{pid}] "
    return head + text.replace("\n", "\n" + head)


def json_line(now: float, level: Level, worker: int | None, pid: int | None, text: str) -> str:
    """One JSON object: time (RFC 3339, UTC, milliseconds), level, role, worker, pid, message."""
    thousandths = int(now * 1000)
    stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(thousandths // 1000))
    entry = {
        "time": f"{stamp}.{thousandths % 1000:03d}Z",
        "level": level,
        "role": "dispatcher" if worker is None else "worker",
        "worker": worker,
        "pid": pid,
        "message": _OWN.sub("", text, count=1) if _OWN.match(text) else text,
    }
    clean = {name: value.encode("utf-8", "backslashreplace").decode() if isinstance(value, str) else value for name, value in entry.items()}
    return msgspec.json.encode(clean).decode()


def level_of(text: str) -> Level:
    """The level of a line by how it begins: `warning: …` of ours, `WARNING …` of what a worker has printed."""
    match = _OWN.match(text) or _PRINTED.match(text)
    return "info" if match is None else _LEVELS.get(match[1], "info")
