"""A soak: a pool under a random mix of all faults, with books that must balance.

    python bench/soak.py --minutes 10 --seed N [--engine vllm] [--every-s S]

Four kinds of clients call the pool without a pause, each item with a known end; a seeded draw kills, crashes, stops and pauses
workers, pauses the dispatcher, kills, pauses and interrupts clients, and sends rubbish; some items exit, raise, crash or hang,
once or always. Reported: items sent, ended, lost, doubled and ended in a way they should not (an innocent that was convicted,
a text of another item); restarts by cause; the time from a worker's end to READY again; processes, descriptors and memory left
over. Anything but zero of the bad ones fails the run with exit code 1.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import psutil
from conditions import print_conditions
from figures import print_table
from soak_faults import CLIENT_LIMIT_S, Faults
from soak_ledger import Ledger
from soak_load import ACTS, Client, Items

from enginepool import EnginePoolWarning, Pool, PoolState, WorkerState

MB = 1e6
LIMITS = ["--heartbeat-s", "0.25", "--mute-timeout-s", "2", "--admit-timeout-s", "2", "--stall-timeout-s", "2"]
VLLM_LIMITS = ["--heartbeat-s", "0.5", "--mute-timeout-s", "8", "--admit-timeout-s", "20", "--stall-timeout-s", "20"]
BUDGET = ["--max-restarts", "100000", "--restart-window-s", "5", "--backoff-s", "0.05"]
ECHO = ["--engine", "echo"]
VLLM = ["--kv-cache-budget-bytes", str(512 << 20)]
VLLM_FLAGS = [
    "--",
    "--max-model-len",
    "256",
    "--max-num-seqs",
    "16",
    "--enforce-eager",
    "--logits-processors",
    "fault_processor:FaultProcessor",
]
ECHO_TOML = "[engine_args]\nstep_s = 0.001\nmax_num_seqs = 16\n"
EXIT = re.compile(r"worker \d+ \(pid \d+\) (.*?)(?:; |$)")


class Leftovers(msgspec.Struct):
    """What a process and its surroundings hold on to."""

    descriptors: int
    rss_mb: float

    @classmethod
    def of(cls, pid: int) -> Leftovers:
        """As the kernel tells."""
        process = psutil.Process(pid)
        return cls(process.num_fds(), process.memory_info().rss / MB)


class Recoveries(threading.Thread):
    """Looks at the workers 20 times a second: how long after its end each was READY again."""

    def __init__(self, pool: Pool) -> None:
        super().__init__(name="soak recoveries", daemon=True)
        self.seconds: list[float] = []
        self.is_ending = threading.Event()
        self.peak_mb = 0.0
        self._pool = pool

    def run(self) -> None:
        """Until it is told to end."""
        ready: dict[int, int | None] = {}
        while not self.is_ending.wait(0.05):
            status = self._pool.status()
            self.peak_mb = max(self.peak_mb, status.rss_bytes / MB)
            for worker in status.workers:
                is_fresh = worker.state is WorkerState.READY and ready.get(worker.index) != worker.pid
                if is_fresh and worker.since_last_exit_s is not None:
                    self.seconds.append(worker.since_last_exit_s)
                if worker.state is WorkerState.READY:
                    ready[worker.index] = worker.pid


def main() -> int:
    """Run once; returns 1 when the books do not balance."""
    args = _parse()
    warnings.simplefilter("ignore", EnginePoolWarning)
    if not args.brief:
        print_conditions("soak: a pool under all faults at once", args, has_vllm=args.engine == "vllm")
    with tempfile.TemporaryDirectory(prefix="enginepool-soak-") as name:
        return _soak(args, Path(name))


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Soak a pool in faults.")
    parser.add_argument("--minutes", type=float, default=10.0, help="how long the faults go on")
    parser.add_argument("--seed", type=int, default=1, help="of all draws")
    parser.add_argument("--engine", choices=["echo", "vllm"], default="echo")
    parser.add_argument(
        "--every-s",
        type=float,
        help="mean seconds between faults (1 with echo, 30 with vllm: its workers take half a minute to start again)",
    )
    parser.add_argument("--brief", action="store_true", help="leave the conditions out")
    args = parser.parse_args()
    args.every_s = args.every_s or (1.0 if args.engine == "echo" else 30.0)
    return args


def _soak(args: argparse.Namespace, folder: Path) -> int:
    is_vllm = args.engine == "vllm"
    ledger = Ledger()
    end_watch = ledger.watch_for_doubles()
    with _serve(folder, is_vllm=is_vllm) as (process, log), Pool.connect(f"ipc://{folder}/run/default.sock") as pool:
        list(pool.iter_many(["warm up"] * 20))
        before, own_before = Leftovers.of(process.pid), Leftovers.of(os.getpid())
        faults, recoveries = _play(args, pool, process.pid, ledger, folder)
        _wait_for_ready(pool)
        after, own_after = Leftovers.of(process.pid), Leftovers.of(os.getpid())
        peak_mb = recoveries.peak_mb
        tree = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
        process.terminate()
        exit_code = process.wait(60)
    end_watch()
    _, alive = psutil.wait_procs(tree, timeout=5)
    causes = Counter(match[1] for line in log.read_text().splitlines() if (match := EXIT.search(line)))
    rows = [
        ["items sent", f"{ledger.num_sent:,}", ""],
        *([f"ended: {code}", f"{count:,}", ""] for code, count in sorted(ledger.ended.items())),
        ["lost", str(ledger.num_lost), _none(ledger.num_lost)],
        ["doubled", str(ledger.num_doubled), _none(ledger.num_doubled)],
        ["ended wrongly", str(len(ledger.objections)), _none(len(ledger.objections))],
        ["faults from outside", f"{faults.done.total():,}", ""],
        ["worker deaths", f"{causes.total():,}", ""],
        ["end to READY again: worst", f"{max(recoveries.seconds, default=0):.1f} s", ""],
        [
            "end to READY again: median",
            f"{sorted(recoveries.seconds)[len(recoveries.seconds) // 2] if recoveries.seconds else 0:.2f} s",
            "",
        ],
        ["processes left", str(len(alive)), _none(len(alive))],
        [
            "dispatcher's descriptors",
            f"{before.descriptors} → {after.descriptors}",
            _none(max(0, after.descriptors - before.descriptors - 4)),
        ],
        ["dispatcher's memory", f"{before.rss_mb:.0f} → {after.rss_mb:.0f} MB, peak {peak_mb:.0f}", ""],
        ["clients' descriptors", f"{own_before.descriptors} → {own_after.descriptors}", ""],
        ["clients' memory", f"{own_before.rss_mb:.0f} → {own_after.rss_mb:.0f} MB", ""],
        ["dispatcher's exit code", str(exit_code), _none(exit_code)],
    ]
    print_table(["", "count", "target"], rows)
    print_table(["fault from outside", "times", ""], [[name, str(count), ""] for name, count in faults.done.most_common()])
    print_table(["worker's end", "times", ""], [[cause, str(count), ""] for cause, count in _grouped(causes).most_common()])
    for objection in ledger.objections[:20]:
        print(f"WRONG: {objection}")
    return 1 if any(row[2].endswith("missed") for row in rows) else 0


def _play(args: argparse.Namespace, pool: Pool, pid: int, ledger: Ledger, folder: Path) -> tuple[Faults, Recoveries]:
    """Let clients and faults run for so long, then let everything come to its end."""
    is_vllm = args.engine == "vllm"
    clients = []
    for act in ACTS:
        items = Items(act.__name__, args.seed, folder, is_vllm=is_vllm)
        clients.append(Client(pool.endpoint, items, ledger, act))
    faults = Faults(pool, pid, ledger, args.seed, every_s=args.every_s, is_vllm=is_vllm)
    recoveries = Recoveries(pool)
    threads = [recoveries, faults, *clients]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + 60 * args.minutes
    while (left := deadline - time.monotonic()) > 0:
        time.sleep(min(left, 30.0))
        print(f"{left / 60:.1f} minutes left: {ledger.num_sent:,} items, {faults.done.total()} faults", file=sys.stderr)
    faults.end()
    for client in clients:
        client.is_ending.set()
    for thread in [faults, *clients]:
        thread.join(CLIENT_LIMIT_S)
        print(f"{thread.name} ends", file=sys.stderr)
        if thread.is_alive():
            ledger.object(f"{thread.name} has not come to its end")
    faults.settle()
    recoveries.is_ending.set()
    recoveries.join(10)
    return faults, recoveries


@contextmanager
def _serve(folder: Path, *, is_vllm: bool) -> Iterator[tuple[subprocess.Popen[bytes], Path]]:
    """A dispatcher of its own, in a run directory of its own; its log is a file."""
    log, config = folder / "log", folder / "pool.toml"
    config.write_text("" if is_vllm else ECHO_TOML)
    os.environ["ENGINEPOOL_RUN_DIR"] = str(folder / "run")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[1] / "tests"), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, "-m", "enginepool", "serve", "--workers", "2", "--config", str(config), *BUDGET]
    command += [*VLLM_LIMITS, *VLLM, *VLLM_FLAGS] if is_vllm else [*LIMITS, *ECHO]
    read_fd, write_fd = os.pipe()
    command[4:4] = ["--ready-fd", str(write_fd)]
    with log.open("wb") as file:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=file, env=environment, pass_fds=(write_fd,))
    os.close(write_fd)
    try:
        with os.fdopen(read_fd) as ready:
            print(f"pool: {ready.read().strip()[:200]}", file=sys.stderr)
        yield process, log
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


def _wait_for_ready(pool: Pool) -> None:
    deadline = time.monotonic() + 120
    while pool.status().state is not PoolState.READY and time.monotonic() < deadline:
        time.sleep(0.1)


def _grouped(causes: Counter[str]) -> Counter[str]:
    """Without pids, lease numbers and paths, so that equal causes are one line."""
    grouped: Counter[str] = Counter()
    for cause, count in causes.items():
        text = re.sub(r"oom_kill is still \d+", "oom_kill has not risen", cause)
        grouped[re.sub(r"with \d+ items", "with n items", text)[:110]] += count
    return grouped


def _none(value: int) -> str:
    return f"0: {'met' if value == 0 else 'missed'}"


if __name__ == "__main__":
    sys.exit(main())
