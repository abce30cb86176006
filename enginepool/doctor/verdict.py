"""One finding, and how it is made."""

from __future__ import annotations

from typing import Literal

import msgspec

Level = Literal["ok", "warning", "error"]


class Finding(msgspec.Struct, frozen=True):
    """What was found. An `error` carries the code that `serve` would exit with; a warning has a remedy too."""

    level: Level
    topic: str
    text: str
    remedy: str | None = None
    exit_code: int | None = None


def ok(topic: str, text: str) -> Finding:
    """Something that is as it should be."""
    return Finding("ok", topic, text)


def warning(topic: str, text: str, remedy: str) -> Finding:
    """Something that `serve` starts with, but that was hardly meant."""
    return Finding("warning", topic, text, remedy)


def error(topic: str, text: str, remedy: str, exit_code: int) -> Finding:
    """Something that `serve` would fail on."""
    return Finding("error", topic, text, remedy, int(exit_code))


def split_remedy(text: str, fallback: str) -> tuple[str, str]:
    """Our messages end in what to do, after a semicolon."""
    what, semicolon, remedy = text.rpartition("; ")
    return (what, remedy) if semicolon else (text, fallback)
