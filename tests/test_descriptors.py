"""Whoever can reach a port can use up the dispatcher's descriptors; the pool outlives that and goes on when they are gone."""

from __future__ import annotations

import json
import os
import resource
import signal
import socket
from contextlib import ExitStack, suppress
from pathlib import Path

import psutil
from conftest import Serve, wait_for

from enginepool import Pool, SamplingParams
from enginepool.make_keys import make_keys

FIVE = SamplingParams(max_tokens=5)
LIMIT = 80


def test_strangers_that_use_up_all_descriptors_do_not_end_the_pool(serve: Serve, tmp_path: Path) -> None:
    """Not even when a worker dies meanwhile; it comes back once there is room."""
    pool_file, client_file = make_keys(tmp_path / "keys")
    served = serve("--engine", "echo", "--endpoint", "tcp://127.0.0.1:0", "--keys", str(pool_file))
    endpoint = json.loads(served.ready_line())["endpoint"]
    address = ("127.0.0.1", int(endpoint.rpartition(":")[2]))
    with Pool.connect(endpoint, keys=client_file) as pool, ExitStack() as strangers:
        worker = pool.status().workers[0].pid
        assert worker is not None
        psutil.Process(served.pid).rlimit(resource.RLIMIT_NOFILE, (LIMIT, LIMIT))
        for _ in range(LIMIT + 20):
            stranger = strangers.enter_context(socket.socket())
            stranger.setblocking(False)
            with suppress(BlockingIOError):
                stranger.connect(address)
        wait_for(lambda: len(os.listdir(f"/proc/{served.pid}/fd")) == LIMIT, "the last descriptor's use")
        assert pool.generate("hello", FIVE).text == "hello"
        os.kill(worker, signal.SIGKILL)
        future = pool.submit("hello", FIVE)
        assert served.process.stderr is not None
        told = next(line for line in served.process.stderr if "started again" in line)
        assert "can't be started again now: Too many open files; the next try is in 2 s" in told
        strangers.close()
        assert future.result(timeout=30).ok
        assert pool.status().workers[0].restarts == 1
    served.process.terminate()
    code, stderr = served.finish()
    assert code == 0
    assert "Traceback" not in stderr
