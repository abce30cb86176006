"""The error family: whose fault it was, its wire code, its exit code and its HTTP status."""

from __future__ import annotations

import enum
from typing import ClassVar, Literal

import msgspec

Blame = Literal["caller", "pool"]


class ExitCode(enum.IntEnum):
    """What the commands return to the shell (docs/settings.md lists them)."""

    OK = 0
    FAILED = 1
    USAGE = 2
    START_FAILED = 3
    NO_DISPATCHER = 4
    ALL_WORKERS_FAILED = 5
    ENGINE_MISSING = 6
    DRAIN_LIMIT = 7
    OUTPUT_FAILED = 8
    ALL_LINES_FAILED = 9
    INTERRUPTED = 130


class Code(enum.StrEnum):
    """Why one item has no text. The wire carries the value; the table below says whose fault it is."""

    INVALID_REQUEST = "invalid_request"
    CONTEXT_LENGTH_EXCEEDED = "context_length_exceeded"
    RESULT_TOO_LARGE = "result_too_large"
    ABORTED = "aborted"
    DEADLINE_EXCEEDED = "deadline_exceeded"
    TIMEOUT = "timeout"
    OVERLOADED = "overloaded"
    DRAINING = "draining"
    ENGINE_ERROR = "engine_error"
    WORKER_LOST = "worker_lost"
    POOL_LOST = "pool_lost"
    UNREADABLE_RESULT = "unreadable_result"


_CODES: dict[Code, tuple[Blame, int, bool]] = {
    Code.INVALID_REQUEST: ("caller", 400, False),
    Code.CONTEXT_LENGTH_EXCEEDED: ("caller", 400, False),
    Code.RESULT_TOO_LARGE: ("caller", 413, False),
    Code.ABORTED: ("caller", 499, False),
    Code.DEADLINE_EXCEEDED: ("caller", 504, False),
    Code.TIMEOUT: ("caller", 504, False),
    Code.OVERLOADED: ("pool", 503, True),
    Code.DRAINING: ("pool", 503, True),
    Code.ENGINE_ERROR: ("pool", 500, True),
    Code.WORKER_LOST: ("pool", 500, False),
    Code.POOL_LOST: ("pool", 503, True),
    Code.UNREADABLE_RESULT: ("pool", 500, False),
}


class ItemError(msgspec.Struct, frozen=True, array_like=True):
    """Why one item failed: a code, a sentence for people, and whose fault it was.

    Of an OpenAI request that vLLM has refused, `status`, `kind` and `param` are what vLLM's own server answers.
    """

    code: Code
    message: str
    status: int | None = None
    kind: str | None = None
    param: str | None = None

    @property
    def blame(self) -> Blame:
        """`"caller"` when the request has to change, `"pool"` when it may just be sent again."""
        return _CODES[self.code][0]

    @property
    def http_status(self) -> int:
        """The status an HTTP front end answers with."""
        return _CODES[self.code][1] if self.status is None else self.status

    @property
    def is_retryable(self) -> bool:
        """Whether the same request may succeed a little later."""
        return _CODES[self.code][2]

    def __str__(self) -> str:
        return f"{self.code.value}: {self.message}"


def sayable(text: str) -> str:
    """The text without what can't be sent: lone surrogates, which templates and file names may hold, as their escapes."""
    return text.encode("utf-8", "backslashreplace").decode()


class EnginePoolError(Exception):
    """The root of everything that enginepool raises on purpose."""

    exit_code: ClassVar[ExitCode] = ExitCode.FAILED


class CallerError(EnginePoolError):
    """The caller has to change something."""

    exit_code = ExitCode.USAGE


class SettingsError(CallerError, ValueError):
    """A setting is unknown, out of range, or contradicts the machine or another setting."""


class InvalidRequest(CallerError, ValueError):
    """A call was written in a way that has no meaning (wrong type, unequal lengths, unknown field)."""


class EndpointInUse(CallerError):
    """Another pool holds this endpoint."""


class PoolClosed(CallerError):
    """The pool was used after `close()`."""


class ForkedPool(CallerError):
    """The pool was used in a child made by `os.fork()`."""


class ItemFailed(EnginePoolError):
    """An item failed and the call was made with `on_error="raise"`; `error` and `outputs` hold the rest."""

    def __init__(self, message: str, error: ItemError, outputs: list[object] | None = None) -> None:
        super().__init__(message)
        self.error = error
        self.outputs = outputs or []


class PoolError(EnginePoolError):
    """The pool could not do what it was asked; the request itself was fine."""


class Overloaded(PoolError):
    """The backlog is full; try again a little later."""


class Draining(PoolError):
    """The pool takes no new work because it is stopping."""


class StartError(PoolError):
    """No worker could boot."""

    exit_code = ExitCode.START_FAILED


class EngineMissing(StartError):
    """vLLM is not installed, or its version is not supported."""

    exit_code = ExitCode.ENGINE_MISSING


class StartTimeout(StartError, TimeoutError):
    """The pool was not up within the limit of a wait; it goes on starting."""


class NoDispatcher(PoolError):
    """Nothing answers at this endpoint."""

    exit_code = ExitCode.NO_DISPATCHER


class PoolLost(PoolError):
    """The dispatcher died or its workers all failed while calls were waiting.

    Raised from a `*_many` call, `outputs` holds what had finished.
    """

    exit_code = ExitCode.ALL_WORKERS_FAILED

    def __init__(self, message: str, outputs: list[object] | None = None) -> None:
        super().__init__(message)
        self.outputs = outputs or []
