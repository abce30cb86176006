"""Numbers as people read them: durations, memory, rates, CPU lists, exits; a dash for what is not known."""

from __future__ import annotations

import re

NONE = "-"


def format_seconds(seconds: float | None) -> str:
    """A latency in three digits: 0.42 ms, 18.3 ms, 4.07 s, 312 s."""
    if seconds is None:
        return NONE
    value, unit = (seconds * 1000, "ms") if seconds < 0.9995 else (seconds, "s")
    digits = 2 if value < 9.995 else 1 if value < 99.95 else 0
    return f"{value:.{digits}f} {unit}"


def format_span(seconds: float) -> str:
    """How long ago or for how long: 12 s, 3 min, 5 h, 2 d."""
    for limit, unit_s, unit in ((120, 1, "s"), (7200, 60, "min"), (172_800, 3600, "h")):
        if seconds < limit:
            return f"{int(seconds / unit_s)} {unit}"
    return f"{int(seconds / 86_400)} d"


def format_bytes(count: int | None) -> str:
    """Memory in MiB or GiB."""
    if count is None:
        return NONE
    return f"{count / (1 << 20):,.0f} MiB" if count < 10 << 30 else f"{count / (1 << 30):.1f} GiB"


def format_rate(value: float) -> str:
    """Things a second: with one digit below ten."""
    return f"{value:,.0f}" if value >= 9.95 or value == 0 else f"{value:.1f}"


def format_cpus(cpus: list[int]) -> str:
    """Consecutive numbers as ranges: 0-3,8."""
    spans: list[list[int]] = []
    for cpu in sorted(cpus):
        if spans and cpu == spans[-1][-1] + 1:
            spans[-1][1:] = [cpu]
        else:
            spans.append([cpu])
    return ",".join("-".join(map(str, span)) for span in spans)


def shorten_exit(text: str) -> str:
    """`was killed by SIGKILL (perhaps …)` as SIGKILL, `exited with code 9` as code 9."""
    found = re.search(r"\bSIG[A-Z0-9]+|\b(signal|code) \d+", text)
    return found[0] if found else text
