"""One `*_many` call: submits within the window, waits, shows progress, and always ends with one Output an input.

`ManyCall.steps` is written without waiting: it yields how long it could sleep, so a thread and an event loop drive the
same code.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Generator, Sequence
from typing import Literal

from enginepool.client.flight import LONGEST_WAIT_S, Flight, Job
from enginepool.client.outputs import Output
from enginepool.client.progress import View
from enginepool.client.requests import EncodedParams
from enginepool.clock import monotonic
from enginepool.errors import Code, InvalidRequest, ItemError, ItemFailed, PoolLost

TICK_S = 0.1
TIMEOUT = ItemError(Code.TIMEOUT, "the call's timeout_s passed before this item finished")

OnError = Literal["return", "raise"]


class EnginePoolWarning(UserWarning):
    """Something about a finished call that is worth knowing."""


class ManyCall:
    """The items of one call; `flight` carries them, `view` shows how far they are."""

    def __init__(self, flight: Flight, jobs: Sequence[Job], timeout_s: float | None, view: View, tick_s: float | None = None) -> None:
        self._flight = flight
        self._jobs = jobs
        self._ends_at = None if timeout_s is None else monotonic() + timeout_s
        self._view = view
        self._tick_s = LONGEST_WAIT_S if tick_s is None else tick_s
        self._outputs: list[Output | None] = [None] * len(jobs)
        self._num_started = 0
        self._num_left = len(jobs)
        self._num_failed = 0
        self._num_tokens = 0

    def steps(self) -> Generator[tuple[int, float], None, list[Output]]:
        """Run to the end; yields (how many outputs are worth waking up for, how long to sleep at most).

        Raises PoolLost, with what has finished in its `outputs`, when the pool is gone.
        """
        try:
            while self._num_left and not self._is_late():
                self._place_all(self._flight.advance())
                self._start_what_fits()
                self._view.update(len(self._jobs) - self._num_left, self._num_failed, self._num_tokens)
                if self._num_left and not self._flight.has_news:
                    self._flight.check()
                    yield self._wanted(), self._sleep_s()
            self._end_rest()
        except PoolLost as error:
            raise self._with_outputs(error) from None
        except BaseException:
            self._flight.abort()
            raise
        self._view.update(len(self._jobs), self._num_failed, self._num_tokens)
        return [output for output in self._outputs if output is not None]

    def _is_late(self) -> bool:
        return self._ends_at is not None and monotonic() >= self._ends_at

    def _start_what_fits(self) -> None:
        while self._num_started < len(self._jobs) and (room := self._flight.room) > 0:
            count = min(self._flight.chunk, room)
            self._flight.start(self._jobs[self._num_started : self._num_started + count])
            self._num_started = min(len(self._jobs), self._num_started + count)

    def _wanted(self) -> int:
        """Waking up for each output would cost more than handling it; enough must stay in flight meanwhile."""
        if self._num_started == len(self._jobs):
            return max(1, self._flight.num_open)
        return max(1, min(self._flight.chunk, self._flight.num_open // 4))

    def _sleep_s(self) -> float:
        left_s = LONGEST_WAIT_S if self._ends_at is None else max(0.0, self._ends_at - monotonic())
        return min(left_s, self._tick_s, self._flight.retry_s)

    def _place_all(self, outputs: list[Output]) -> None:
        for output in outputs:
            self._place(output)

    def _place(self, output: Output) -> None:
        if self._outputs[output.index] is None:
            self._outputs[output.index] = output
            self._num_left -= 1
            self._num_failed += output.error is not None
            self._num_tokens += sum(len(sample.token_ids) for sample in output.outputs)

    def _end_rest(self) -> None:
        """At the timeout: what has ended unseen is taken, what is missing gets its error here."""
        self._place_all(self._flight.take())
        missing = [self._jobs[index] for index, output in enumerate(self._outputs) if output is None]
        self._place_all(self._flight.end(missing, TIMEOUT))

    def _with_outputs(self, error: PoolLost) -> PoolLost:
        self._place_all(self._flight.take())
        done = [output for output in self._outputs if output is not None]
        text = f"{error} ({len(done)} of {len(self._outputs)} items had finished; they are in `outputs`)"
        return PoolLost(text, list(done))


def check_on_error(on_error: str) -> None:
    """Raise InvalidRequest for anything but "return" and "raise"."""
    if on_error not in ("return", "raise"):
        raise InvalidRequest(f"on_error is 'return' or 'raise', not {on_error!r}")


def warn_of(outputs: Sequence[Output], jobs: Sequence[Job], stacklevel: int) -> None:
    """One warning that sums up failures by kind, and cut-offs where nobody had set `max_tokens`."""
    parts = []
    failures = Counter(output.error.code.value for output in outputs if output.error is not None)
    if failures:
        first = next(output for output in outputs if output.error is not None)
        kinds = ", ".join(f"{count} {code}" for code, count in failures.most_common())
        parts.append(f"{failures.total()} of {len(outputs)} items failed ({kinds}); the first is item {first.index}: {first.error}")
    cut = sum(
        output.finish_reason == "length" and isinstance(job.params, EncodedParams) and job.params.is_default_length
        for output, job in zip(outputs, jobs, strict=True)
    )
    if cut:
        parts.append(f"{cut} of {len(outputs)} outputs were cut off at vLLM's default of 16 tokens; set max_tokens")
    if parts:
        warnings.warn("; ".join(parts), EnginePoolWarning, stacklevel=stacklevel)


def raise_first(outputs: list[Output]) -> None:
    """Raise ItemFailed for the first failed item, with all outputs in it."""
    for output in outputs:
        if output.error is not None:
            raise ItemFailed(f"item {output.index} ({output.request_id}): {output.error}", output.error, list(outputs))
