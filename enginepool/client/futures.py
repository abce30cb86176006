"""The future that `submit` returns: a `concurrent.futures.Future` whose `cancel()` aborts the request."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress

from enginepool.client.outputs import Output
from enginepool.errors import Code, Draining, EnginePoolError, Overloaded, PoolError, PoolLost

_REFUSALS: dict[Code, type[PoolError]] = {Code.OVERLOADED: Overloaded, Code.DRAINING: Draining}


class OutputFuture(Future[Output]):
    """Resolves to an Output, one with an `error` included; raises only when the pool itself could not be asked."""

    def __init__(self) -> None:
        super().__init__()
        self.on_cancel: Callable[[], None] = lambda: None

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
        with suppress(InvalidStateError):
            self.set_result(output)

    def refuse(self, output: Output) -> None:
        """The pool did not accept the item."""
        error = output.error
        kind = _REFUSALS.get(error.code) if error else None
        if kind is None:
            self.put(output)
        else:
            self.lose(kind(str(error)))

    def lose(self, error: EnginePoolError) -> None:
        """The pool is gone."""
        with suppress(InvalidStateError):
            self.set_exception(error)


class Waiter:
    """One caller that waits for one output; lighter than a future."""

    def __init__(self) -> None:
        self._output: Output | None = None
        self._error: EnginePoolError | None = None
        self._lock = threading.Lock()
        self._lock.acquire()

    def wait(self) -> Output:
        """Wait for the end. Raises PoolLost, or Overloaded and Draining where the pool did not accept the item."""
        self._lock.acquire()
        if self._output is None:
            raise self._error or PoolLost("the pool is gone")
        return self._output

    def put(self, output: Output) -> None:
        """The item has ended."""
        self._output = output
        self._lock.release()

    def refuse(self, output: Output) -> None:
        """The pool did not accept the item."""
        kind = _REFUSALS.get(output.error.code) if output.error else None
        if kind is None:
            self.put(output)
        else:
            self.lose(kind(str(output.error)))

    def lose(self, error: EnginePoolError) -> None:
        """The pool is gone."""
        self._error = error
        self._lock.release()


class Collector:
    """Gathers the outputs of one `*_many` call, in input order.

    The receiving thread and the caller's both put into it (the caller what fails before it is sent), hence the lock: a
    lost count, or a refusal appended to a list that has just been taken, would make the call wait for ever.
    """

    def __init__(self, count: int) -> None:
        self._lock = threading.Lock()
        self.outputs: list[Output | None] = [None] * count
        self.num_left = count
        self.num_failed = 0
        self.num_tokens = 0
        self.refused: list[Output] = []
        self.error: EnginePoolError | None = None
        self.is_done = threading.Event()
        if count == 0:
            self.is_done.set()

    def put(self, output: Output) -> None:
        """One item has ended."""
        with self._lock:
            if self.outputs[output.index] is not None:
                return
            self.outputs[output.index] = output
            self.num_failed += output.error is not None
            self.num_tokens += sum(len(sample.token_ids) for sample in output.outputs)
            self.num_left -= 1
            if self.num_left == 0:
                self.is_done.set()

    def refuse(self, output: Output) -> None:
        """Not accepted: the caller's thread decides whether to try again."""
        if output.error is not None and output.error.code is Code.OVERLOADED:
            with self._lock:
                self.refused.append(output)
        else:
            self.put(output)

    def take_refused(self) -> list[Output]:
        """What was refused since the last call."""
        with self._lock:
            refused, self.refused = self.refused, []
        return refused

    def lose(self, error: EnginePoolError) -> None:
        """The pool is gone."""
        self.error = error
        self.is_done.set()
