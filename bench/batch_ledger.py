"""What watching a batch run costs: processor time a line and memory of its ledger, live view and trace, and the report at the end.

    python bench/batch_ledger.py [--lines N] [--workers N] [--quick]

No pool runs: the lines are made up, a chunk at a time, so that only the watching is timed. Memory is resident memory after a
share of the lines; the trace goes to a file in a temporary folder.

Targets: from 10 % of the lines to the last, memory grows by at most 4 MB; all of it together takes at most 5 % of a core at
1,000 lines/s (50 µs a line).
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from pathlib import Path
from time import perf_counter, process_time

import psutil
from conditions import print_conditions
from figures import at_most, print_table

from enginepool.batch.ledger import LineRecord, RunLedger
from enginepool.batch.progress import make_batch_view
from enginepool.batch.report import write_report
from enginepool.batch.trace import TraceWriter
from enginepool.clock import Timings

MB = 1e6
CHUNK = 10_000
STARTED = 1_780_000_000.0
MAX_GROWTH_MB = 4.0
MAX_US = 50.0


def make_line(line: int, workers: int) -> LineRecord:
    """One line; its answer takes longer or shorter, and one in 500 fails."""
    end = STARTED + line / 400
    took = 0.5 + (line * 7919 % 1000) / 500
    stamps = (
        end - took,
        end - took + 0.001,
        end - took * 0.9,
        None,
        None,
        end - took * 0.8,
        end - took * 0.7,
        end - 0.002,
        end - 0.001,
        end,
    )
    tokens = 10 + line * 31 % 120
    code = None if line % 500 else "timeout"
    return LineRecord(
        line, f"request-{line}", code is None, code, code, line % workers, 1, 200, tokens, Timings(*stamps, num_tokens=tokens)
    )


class Watchers:
    """Everything that is told of a line, and the processor seconds that it took."""

    def __init__(self, lines: int, trace: TraceWriter) -> None:
        self.ledger = RunLedger(lines, STARTED)
        self.seconds = {"ledger": 0.0, "live view": 0.0, "trace": 0.0}
        self._view = make_batch_view(lines, quiet=False)
        self._trace = trace

    def tell(self, records: list[LineRecord]) -> None:
        """Tell a chunk of lines to one after the other."""
        self._time("ledger", records, self.ledger.add)
        self._time("live view", records, lambda _: self._view.update(self.ledger))
        self._time("trace", records, self._trace.add)

    def _time(self, name: str, records: list[LineRecord], call: Callable[[LineRecord], object]) -> None:
        before = process_time()
        for record in records:
            call(record)
        self.seconds[name] += process_time() - before


def main() -> None:
    """Run it and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lines", type=int, default=1_000_000)
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--quick", action="store_true", help="50,000 lines, to see that it works")
    options = parser.parse_args()
    lines = options.lines = 50_000 if options.quick else options.lines
    print_conditions("Watching a batch run", options)
    with tempfile.TemporaryDirectory() as folder:
        run(lines, options.workers, Path(folder))


def run(lines: int, workers: int, folder: Path) -> None:
    """Tell all lines, then write the report."""
    process = psutil.Process()
    memory: list[tuple[int, float]] = []
    with TraceWriter(str(folder / "trace.json"), print) as trace:
        watchers = Watchers(lines, trace)
        for first in range(0, lines, CHUNK):
            watchers.tell([make_line(line, workers) for line in range(first + 1, min(lines, first + CHUNK) + 1)])
            memory.append((min(lines, first + CHUNK), process.memory_info().rss / MB))
    before = perf_counter()
    write_report(folder / "report.html", watchers.ledger, {})
    report_s = perf_counter() - before
    tenth = memory[len(memory) // 10][1]
    total_us = sum(watchers.seconds.values()) / lines * 1e6
    rows = [[name, f"{seconds / lines * 1e6:.1f}"] for name, seconds in watchers.seconds.items()]
    print_table(["part", "µs a line"], [*rows, ["together", f"{total_us:.1f}"]])
    sizes = [f"{(folder / name).stat().st_size / MB:,.1f} MB" for name in ("report.html", "trace.json")]
    print(f"Report: {report_s:.2f} s, {sizes[0]}. Trace: {sizes[1]}.")
    print(f"Memory after 10 % of the lines {tenth:.1f} MB, after all {memory[-1][1]:.1f} MB.")
    print(f"Growth {at_most(memory[-1][1] - tenth, MAX_GROWTH_MB, ' MB')}; time {at_most(total_us, MAX_US, ' µs')}.")


if __name__ == "__main__":
    main()
