"""Why vLLM gave an item up: it ends such an item with `finish_reason` "error" and no text, and tells the cause to its log only.

The causes are caught from the log in process; those of an engine core in a process of its own stay there.
"""

from __future__ import annotations

import logging
import re

from enginepool.errors import Code, ItemError

_LOGGERS = ("vllm.v1.structured_output", "vllm.v1.core.sched.scheduler")
_KEPT_CAUSES = 256
_PLACE_IN_XGRAMMAR = re.compile(r"\[\d\d:\d\d:\d\d\] \S+:\d+: ")


class GivenUp(logging.Handler):
    """Listens to vLLM's log for what it says of requests that it ends with an error."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self._causes: dict[str, str] = {}
        for name in _LOGGERS:
            logging.getLogger(name).addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        """Both messages end their arguments with the request's internal id, which holds the lease number."""
        if not isinstance(record.args, tuple) or not record.args or "request" not in str(record.msg):
            return
        while len(self._causes) >= _KEPT_CAUSES:
            self._causes.pop(next(iter(self._causes)))
        error = record.exc_info[1] if record.exc_info else None
        self._causes[str(record.args[-1])] = record.getMessage() if error is None else without_place(error)

    def error_of(self, lease: int, *, is_structured: bool) -> ItemError:
        """The error of an item that vLLM ended with `finish_reason` "error"."""
        self.acquire()  # vLLM compiles, and logs, on threads of its own
        try:
            ids = [name for name in self._causes if re.match(rf"(\d+_)?{lease}(\.\d+)?-", name)]
            causes = [self._causes.pop(name) for name in ids]
        finally:
            self.release()
        if not is_structured:
            return ItemError(Code.ENGINE_ERROR, "vLLM gave this item up (finish_reason error); the worker's log may say why")
        cause = causes[0] if causes else "the worker's log says why"
        return ItemError(Code.INVALID_REQUEST, f"structured_outputs could not be compiled or followed: {cause}")

    def close(self) -> None:
        """Stop listening."""
        for name in _LOGGERS:
            logging.getLogger(name).removeHandler(self)
        super().close()


def without_place(error: BaseException) -> str:
    """An error's text without the time of day and the source line that xgrammar puts before it."""
    return _PLACE_IN_XGRAMMAR.sub("", str(error)).strip() or type(error).__name__
