"""A peer that speaks to a dispatcher's sockets without a client in between, so it can say anything."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import psutil
import zmq
from fuzz_messages import REQUEST, Frames

from enginepool import Pool, rundir
from enginepool.protocol import PROTOCOL_VERSION, Bye, Hello, Ping, Pong, Result, Submit, SubmitItem, Welcome, decode_to_client, encode

Context = zmq.Context[zmq.Socket[bytes]]
ANSWER_S = 20.0


@contextmanager
def raw_context() -> Iterator[Context]:
    """A ZeroMQ context; whatever sockets are left in it are closed."""
    context = Context()
    try:
        yield context
    finally:
        context.destroy(0)


def secret_of(pool: Pool) -> bytes:
    """What lets a client in."""
    return rundir.read_secret(pool.endpoint)


def back_of(pool: Pool) -> str:
    """Where the pool's workers connect: the socket that its dispatcher listens at besides the clients'."""
    paths = {entry.laddr for entry in psutil.Process(pool.status().pid).net_connections("unix") if str(entry.laddr).endswith(".back")}
    return f"ipc://{paths.pop()}"


class RawPeer:
    """A raw peer that says what it likes."""

    def __init__(self, context: Context, endpoint: str, secret: bytes, *, client_id: bytes | None = None, reads: bool = True) -> None:
        """With `reads=False` next to nothing is taken from the wire that `hear` is not called for."""
        self.socket = context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 0)
        if not reads:
            self.socket.setsockopt(zmq.RCVHWM, 1)
            self.socket.setsockopt(zmq.RCVBUF, 1)
        self.socket.connect(endpoint)
        self._hello = Hello(PROTOCOL_VERSION, secret, uuid.uuid4().bytes if client_id is None else client_id, os.getpid())
        self._token = 1 << 60

    def say(self, frames: Frames) -> None:
        """Send, waiting where the dispatcher is behind."""
        self.socket.send_multipart(frames)

    def hello(self) -> None:
        """Introduce itself as it should."""
        self.say([encode(self._hello)])

    def hear(self) -> bytes:
        """The header of the next answer."""
        return self.hear_all()[0]

    def hear_all(self) -> list[bytes]:
        """The next answer, header and payloads."""
        assert self.socket.poll(int(ANSWER_S * 1000)), "no answer"
        return self.socket.recv_multipart()

    def introduce(self) -> None:
        """Be let in."""
        self.hello()
        assert isinstance(self.answer(), Welcome)

    def submit(self, *items: SubmitItem, payloads: Sequence[bytes] | None = None) -> None:
        """Send items, with requests for three tokens unless told otherwise."""
        self.say([encode(Submit(list(items))), *([REQUEST] * len(items) if payloads is None else payloads)])

    def answer(self) -> object:
        """The next answer."""
        return decode_to_client(self.hear())

    def results(self, count: int) -> dict[int, str | None]:
        """The next so many ends: the error code of each number, None for a good one."""
        ends: dict[int, str | None] = {}
        while len(ends) < count:
            answer = self.answer()
            assert isinstance(answer, Result), answer
            ends |= {item.seq: item.error.code.value if item.error else None for item in answer.items}
        return ends

    def check(self) -> None:
        """Everything that was said is dealt with, and a proper word is still answered properly."""
        self._token += 1
        self.hello()
        self.say([encode(Ping(self._token))])
        while not (isinstance(answer := self.answer(), Pong) and answer.token == self._token):
            pass

    def leave(self) -> None:
        """Say goodbye and close."""
        self.say([encode(Bye())])
        self.socket.close(1000)
