"""The future that `submit` returns: a `concurrent.futures.Future` whose `cancel()` aborts the request."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from functools import partial

from enginepool.client.outputs import Output
from enginepool.errors import Code, Draining, EnginePoolError, Overloaded, PoolError, PoolLost

_REFUSALS: dict[Code, type[PoolError]] = {Code.OVERLOADED: Overloaded, Code.DRAINING: Draining}


def refusal_of(output: Output) -> PoolError | None:
    """What a single call raises where the pool did not accept its item; None where it is the item's own error."""
    error = output.error
    kind = _REFUSALS.get(error.code) if error else None
    return None if kind is None else kind(str(error))


class SingleSink:
    """What the sinks of single items share: a refusal that is no item's fault is raised like a lost pool."""

    def put(self, output: Output) -> None:
        """The item has ended."""
        raise NotImplementedError

    def lose(self, error: EnginePoolError) -> None:
        """Nothing will come."""
        raise NotImplementedError

    def refuse(self, output: Output) -> None:
        """The pool did not accept the item."""
        if (error := refusal_of(output)) is None:
            self.put(output)
        else:
            self.lose(error)


class OutputFuture(SingleSink, Future[Output]):
    """Resolves to an Output, one with an `error` included; raises only when the pool itself could not be asked."""

    def __init__(self) -> None:
        super().__init__()
        self.on_cancel: Callable[[], None] = lambda: None
        self._teller: int | None = None

    def add_done_callback(self, fn: Callable[[Future[Output]], object]) -> None:
        """Call `fn(future)` at the end; what it raises is logged, on the receiving thread even a `sys.exit()`."""
        super().add_done_callback(partial(self._call, fn))

    def _call(self, fn: Callable[[Future[Output]], object], future: Future[Output]) -> None:
        """`Future` logs an Exception and goes on; anything else would end the thread that receives for all callers."""
        try:
            fn(future)
        except Exception:
            raise
        except BaseException as error:
            if self._teller != threading.get_ident():
                raise
            raise RuntimeError(f"a future's callback raised {error!r}, which can not end the thread that receives results") from error

    def cancel(self) -> bool:
        """Abort the request; False when it has ended already."""
        if self.cancelled():
            return True
        is_cancelled = super().cancel()
        if is_cancelled:
            self.set_running_or_notify_cancel()  # `wait` and `as_completed` are only told by this
            self.on_cancel()
        return is_cancelled

    def put(self, output: Output) -> None:
        """One item has ended."""
        self._tell(lambda: self.set_result(output))

    def lose(self, error: EnginePoolError) -> None:
        """The pool is gone."""
        self._tell(lambda: self.set_exception(error))

    def _tell(self, tell: Callable[[], None]) -> None:
        self._teller = threading.get_ident()
        try:
            with suppress(InvalidStateError):
                tell()
        finally:
            self._teller = None


class Waiter(SingleSink):
    """One caller that waits for one output; lighter than a future."""

    def __init__(self) -> None:
        self._output: Output | None = None
        self._error: EnginePoolError | None = None
        self._lock = threading.Lock()
        self._lock.acquire()

    def wait(self, timeout_s: float | None = None) -> Output | None:
        """Wait for the end; None at the timeout. Raises PoolLost, or Overloaded and Draining where the item was not accepted."""
        if not self._lock.acquire(timeout=-1 if timeout_s is None else timeout_s):
            return None
        if self._output is None:
            raise self._error or PoolLost("the pool is gone")
        return self._output

    def put(self, output: Output) -> None:
        """The item has ended."""
        self._output = output
        self._lock.release()

    def lose(self, error: EnginePoolError) -> None:
        """The pool is gone."""
        self._error = error
        self._lock.release()
