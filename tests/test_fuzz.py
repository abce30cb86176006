"""A pool that is sent rubbish on every socket answers or cuts off, stays as large as it was, and serves everybody else.

The counts make 100,000 messages and as many tiny ones; `FUZZ_SCALE=10 FUZZ_SEED=7` in the environment sends ten times as many others.
"""

from __future__ import annotations

import os
import random
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import psutil
import pytest
from conftest import is_alive, wait_for, worker_pids
from fuzz_messages import Fuzz
from raw_peer import Context, RawPeer, back_of, raw_context, secret_of

from enginepool import Pool, SamplingParams
from enginepool.protocol import PROTOCOL_VERSION, Enroll, Ping, Rejected, decode_to_worker, encode

SCALE = int(os.environ.get("FUZZ_SCALE", "1"))
SEED = int(os.environ.get("FUZZ_SEED", "1"))
MAX_FRAME_BYTES = 100_000
MAX_GROWTH_BYTES = 12 << 20
MESSAGES_A_PEER = 500
TEN = SamplingParams(max_tokens=10)


class Size:
    """A process's memory and descriptors."""

    def __init__(self, pid: int) -> None:
        process = psutil.Process(pid)
        self.num_bytes = process.memory_info().rss
        self.num_fds = process.num_fds()


@contextmanager
def good_client(pool: Pool) -> Iterator[None]:
    """Another client that works throughout; every one of its items has to end right."""
    is_over, failures, counts = threading.Event(), list[str](), list[int]()

    def work() -> None:
        with Pool.connect(pool.endpoint) as mine:
            while not is_over.is_set() and not failures:
                prompts = [f"{len(counts):04d} item {index}" for index in range(64)]
                outputs = mine.generate_many(prompts, TEN)
                failures.extend(f"{o.prompt}: {o.text} {o.error}" for o, p in zip(outputs, prompts, strict=True) if o.text != p[:10])
                counts.append(len(outputs))

    worker = threading.Thread(target=work)
    worker.start()
    try:
        yield
    finally:
        is_over.set()
        worker.join(30)
    assert not worker.is_alive()
    assert not failures
    assert sum(counts) >= 64


@pytest.fixture(scope="module", params=["ipc", "tcp"])
def pool(request: pytest.FixtureRequest) -> Iterator[Pool]:
    """A pool with small limits on either kind of address."""
    endpoint: dict[str, Any] = {"ipc": {}, "tcp": {"endpoint": "tcp://127.0.0.1:0"}}[request.param]
    with Pool(engine="echo", workers=2, max_frame_bytes=MAX_FRAME_BYTES, max_backlog_items=5000, **endpoint) as pool:
        yield pool


@pytest.fixture
def context() -> Iterator[Context]:
    with raw_context() as context:
        yield context


@contextmanager
def unharmed(pool: Pool) -> Iterator[None]:
    """The pool lives on with the same processes, its good client is served, and it grows no further than a little."""
    before = pool.status()
    workers, size = worker_pids(pool), Size(before.pid)
    with good_client(pool):
        yield
    assert is_alive(before.pid)
    assert worker_pids(pool) == workers
    wait_for(lambda: pool.status().clients == 1, "the end of the other sessions")
    wait_for(lambda: Size(before.pid).num_fds <= size.num_fds + 2, "the descriptors to be closed")
    assert Size(before.pid).num_bytes < size.num_bytes + MAX_GROWTH_BYTES
    wait_for(lambda: pool.status().backlog == pool.status().in_flight == 0, "the end of what was sent")


@pytest.mark.parametrize("is_let_in", [False, True], ids=["stranger", "client"])
def test_rubbish_at_the_front_is_answered_or_cut_off(pool: Pool, context: Context, is_let_in: bool) -> None:
    secret = secret_of(pool)
    fuzz = Fuzz(SEED, secret if is_let_in else b"guessed" * 5)
    with unharmed(pool):
        for _ in range(20_000 * SCALE // MESSAGES_A_PEER):
            peer = RawPeer(context, pool.endpoint, secret)
            for number in range(MESSAGES_A_PEER):
                if is_let_in and number % 5 == 0:
                    peer.hello()
                peer.say(fuzz.message())
            peer.check()
            peer.leave()


@pytest.mark.parametrize("knows_secret", [False, True], ids=["stranger", "knows-the-secret"])
def test_rubbish_at_the_back_is_answered_or_cut_off(pool: Pool, context: Context, knows_secret: bool) -> None:
    secret = secret_of(pool) if knows_secret else b"guessed" * 5
    fuzz = Fuzz(SEED + 1, secret, is_back=True)
    with unharmed(pool):
        for _ in range(10_000 * SCALE // MESSAGES_A_PEER):
            peer = RawPeer(context, back_of(pool), secret)
            for _ in range(MESSAGES_A_PEER):
                peer.say(fuzz.message())
            peer.say([encode(Enroll(PROTOCOL_VERSION, pool.pool_id, secret, 0, os.getpid()))])
            while decode_to_worker(peer.hear()) != Rejected("this dispatcher did not start you"):
                pass
            peer.socket.close(0)


def test_tiny_messages_by_the_hundred_thousand_are_survived(pool: Pool, context: Context) -> None:
    with unharmed(pool):
        peer = RawPeer(context, pool.endpoint, secret_of(pool))
        for number in range(100_000 * SCALE):
            peer.socket.send(b"" if number % 2 else b"x")
        peer.check()
        peer.leave()


def test_oversized_frames_are_cut_off(pool: Pool, context: Context) -> None:
    """The limit is for one frame of a request and some room for the header; what is beyond it never gets into a queue."""
    frame = bytes(MAX_FRAME_BYTES + (1 << 20) + 1)
    with unharmed(pool):
        for address in (pool.endpoint, back_of(pool)):
            for frames in ([frame], [encode(Ping(1)), frame], [b"", b"", frame, b""]):
                peer = RawPeer(context, address, secret_of(pool))
                for _ in range(10):
                    peer.say(frames)
                peer.socket.poll(20)
                peer.socket.close(0)
        peer = RawPeer(context, pool.endpoint, secret_of(pool))
        peer.check()
        peer.leave()


def _raw_socket(address: str) -> socket.socket:
    kind, _, where = address.partition("://")
    raw = socket.socket(socket.AF_UNIX if kind == "ipc" else socket.AF_INET)
    host, _, port = where.rpartition(":")
    raw.connect(where if kind == "ipc" else (host, int(port)))
    return raw


def test_bytes_that_are_not_even_zeromq_are_cut_off(pool: Pool) -> None:
    """A browser, a port scan, a connection that ends in the middle of the greeting or never says anything."""
    draw = random.Random(SEED)
    greeting = b"\xff" + bytes(8) + b"\x7f\x03\x00NULL" + bytes(16) + b"\x00" + bytes(31)
    words = [
        b"",
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        greeting[:10],
        greeting,
        greeting + b"\x04\x05READY" + b"\xff" * 40,
        b"\x16\x03\x01",
    ]
    with unharmed(pool), ExitStack() as opened:
        for number in range(150):
            raw = _raw_socket(draw.choice([pool.endpoint, back_of(pool)]))
            raw.sendall(draw.choice([*words, draw.randbytes(500), greeting + draw.randbytes(500)]))
            if number % 3:
                raw.close()
            else:
                opened.callback(raw.close)
