"""The soak's faults: one after the other from a seeded draw, against workers, the dispatcher, clients and both sockets."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import zmq
from soak_ledger import Ledger

from enginepool import Pool, WorkerState

CLIENT = Path(__file__).with_name("soak_client.py")
CLIENT_ITEMS = 400
CLIENT_LIMIT_S = 240
PAUSE_S = 0.6


class Faults(threading.Thread):
    """Does one fault every so often; counts what it did by name."""

    def __init__(self, pool: Pool, dispatcher_pid: int, ledger: Ledger, seed: int, *, every_s: float, is_vllm: bool) -> None:
        super().__init__(name="soak faults", daemon=True)
        self.done: Counter[str] = Counter()
        self.is_ending = threading.Event()
        self._pool = pool
        self._dispatcher_pid = dispatcher_pid
        self._ledger = ledger
        self._draw = random.Random(seed)
        self._every_s = every_s
        self._clients: list[subprocess.Popen[str]] = []
        self._client_items = 40 if is_vllm else CLIENT_ITEMS
        self._acts: list[tuple[Callable[[], None], int]] = [
            (self.kill_worker, 6),
            (self.crash_worker, 2),
            (self.kill_both_workers, 1),
            (self.kill_while_starting, 2),
            (self.stop_worker, 1),
            (self.pause_worker, 2),
            (self.pause_dispatcher, 1),
            (self.kill_client, 2),
            (self.pause_client, 1),
            (self.interrupt_client, 2),
            (self.send_rubbish, 2),
        ]

    def run(self) -> None:
        """Until it is told to end; a process that is gone already is no failure of the fault."""
        acts, weights = zip(*self._acts, strict=True)
        while not self.is_ending.wait(self._draw.uniform(0.2, 2.0) * self._every_s):
            (act,) = self._draw.choices(acts, weights)
            with suppress(ProcessLookupError):
                act()
                self.done[act.__name__.replace("_", " ")] += 1

    def end(self) -> None:
        """No more faults."""
        self.is_ending.set()

    def settle(self) -> None:
        """Wait for the clients that were left to finish; each checks its own answers."""
        for client in self._clients:
            try:
                code = client.wait(CLIENT_LIMIT_S)
            except subprocess.TimeoutExpired:
                client.kill()
                client.wait()
                code = None
            if code != 0:
                self._ledger.object(f"a client that was paused or interrupted ended with {code}")
            if client.stdout is not None:
                client.stdout.close()

    def kill_worker(self) -> None:
        """SIGKILL."""
        self._signal(signal.SIGKILL)

    def crash_worker(self) -> None:
        """SIGSEGV."""
        self._signal(signal.SIGSEGV)

    def kill_both_workers(self) -> None:
        """SIGKILL to all at once."""
        for pid in self._pids():
            os.kill(pid, signal.SIGKILL)

    def kill_while_starting(self) -> None:
        """SIGKILL, and again as soon as the next process has begun to start."""
        pid = self._signal(signal.SIGKILL)
        for _ in range(200):
            fresh = [worker.pid for worker in self._pool.status().workers if worker.state is WorkerState.STARTING and worker.pid]
            if fresh and pid not in fresh:
                os.kill(self._draw.choice(fresh), signal.SIGKILL)
                return
            self.is_ending.wait(0.01)

    def stop_worker(self) -> None:
        """SIGSTOP for good: the dispatcher has to find it out."""
        self._signal(signal.SIGSTOP)

    def pause_worker(self) -> None:
        """SIGSTOP, and SIGCONT before the limit."""
        pid = self._signal(signal.SIGSTOP)
        self.is_ending.wait(PAUSE_S)
        if pid is not None:
            os.kill(pid, signal.SIGCONT)

    def pause_dispatcher(self) -> None:
        """SIGSTOP for longer than any limit of silence, and SIGCONT."""
        os.kill(self._dispatcher_pid, signal.SIGSTOP)
        self.is_ending.wait(3.0)
        os.kill(self._dispatcher_pid, signal.SIGCONT)

    def kill_client(self) -> None:
        """SIGKILL in the middle of its call: nobody wants those items any more."""
        client = self._client()
        client.kill()
        client.wait()
        if client.stdout is not None:
            client.stdout.close()

    def pause_client(self) -> None:
        """SIGSTOP in the middle of its call, and SIGCONT: it gets everything all the same."""
        client = self._client()
        client.send_signal(signal.SIGSTOP)
        self.is_ending.wait(PAUSE_S)
        client.send_signal(signal.SIGCONT)
        self._clients.append(client)

    def interrupt_client(self) -> None:
        """SIGINT in the middle of its call: its next call has to get its own answers."""
        client = self._client()
        client.send_signal(signal.SIGINT)
        self._clients.append(client)

    def send_rubbish(self) -> None:
        """Random bytes to both sockets, from a stranger."""
        path = self._pool.endpoint
        for endpoint in (path, f"{path}.back"):
            with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
                socket.linger = 100
                socket.connect(endpoint)
                for _ in range(50):
                    socket.send_multipart([self._draw.randbytes(self._draw.randint(0, 200)) for _ in range(self._draw.randint(1, 4))])

    def _pids(self) -> list[int]:
        return [worker.pid for worker in self._pool.status().workers if worker.pid is not None]

    def _signal(self, number: signal.Signals) -> int | None:
        pids = self._pids()
        if not pids:
            return None
        pid = self._draw.choice(pids)
        os.kill(pid, number)
        return pid

    def _client(self) -> subprocess.Popen[str]:
        """A client that has connected and is somewhere in its call."""
        name = f"client {self.done.total()}"
        command = [sys.executable, str(CLIENT), self._pool.endpoint, name, str(self._client_items)]
        client = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        assert client.stdout is not None
        client.stdout.readline()
        self.is_ending.wait(self._draw.uniform(0.0, 0.3))
        return client
