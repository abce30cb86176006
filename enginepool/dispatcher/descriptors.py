"""Descriptors: each connection takes one, also of whoever was not let in, so the dispatcher allows itself as many as it may.

Its workers get the limit that it was started with: programs may count on that.
"""

from __future__ import annotations

import resource
from contextlib import suppress

ENOUGH = 1 << 16
_inherited: tuple[int, int] | None = None


def raise_limit() -> None:
    """Raise the soft limit as far as the hard one goes."""
    global _inherited
    soft, hard = _inherited = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (raised_limit(soft, hard), hard))


def raised_limit(soft: int, hard: int) -> int:
    """The soft limit that a dispatcher gives itself; what is enough already is let be."""
    most = ENOUGH if hard == resource.RLIM_INFINITY else min(hard, ENOUGH)
    return soft if soft == resource.RLIM_INFINITY else max(soft, most)


def restore_limit() -> None:
    """In a child: the limit as it was."""
    if _inherited is not None:
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, _inherited)
