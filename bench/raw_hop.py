"""The raw two-hop loop: pyzmq and msgspec with nothing else, the least that a pool of this shape can cost.

::

    RawLoop (DEALER) ═ ipc ═ forwarder (ROUTER, DEALER) ═ ipc ═ worker (DEALER)

A message has one payload frame an item, encoded and decoded one by one, as in the pool; there is no header, no queue, no
lease, no supervision. Run as a script this module is the forwarder or a worker.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from multiprocessing.connection import Connection
from pathlib import Path
from time import perf_counter

import zmq
from child import Child
from echo_work import echo, make_request

from enginepool import lifeline
from enginepool.payload import GenerateResult, decode_request, decode_result, encode

WINDOW_ITEMS = 4096
"""How many items the raw client keeps unfinished at once: the pool's default submit_window."""


class RawLoop:
    """A forwarder with its workers, and the client's side of the loop."""

    def __init__(self, stack: ExitStack, num_workers: int) -> None:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="raw-hop-")))
        front, back = f"ipc://{folder}/front", f"ipc://{folder}/back"
        roles = [("forward", front, back)] + [("work", back)] * num_workers
        for role in roles:
            stack.enter_context(Child("raw_hop.py", role)).answer()
        context = stack.enter_context(zmq.Context())
        self._socket = stack.enter_context(_socket(context, zmq.DEALER))
        self._socket.connect(front)

    def round_trips(self, prompts: Sequence[str]) -> list[float]:
        """Send one item, wait for its result, send the next; seconds for each."""
        seconds = []
        for prompt in prompts:
            started = perf_counter()
            self._socket.send_multipart([encode(make_request(prompt))])
            _decode(self._socket.recv_multipart())
            seconds.append(perf_counter() - started)
        return seconds

    def run_many(self, prompts: Sequence[str], slice_items: int) -> float:
        """Send everything in messages of `slice_items` within the window; items a second."""
        started = perf_counter()
        slices = (prompts[start : start + slice_items] for start in range(0, len(prompts), slice_items))
        sent = done = 0
        results: list[GenerateResult] = []
        while done < len(prompts):
            while sent - done < WINDOW_ITEMS and (part := next(slices, None)):
                self._socket.send_multipart([encode(make_request(prompt)) for prompt in part])
                sent += len(part)
            results += _decode(self._socket.recv_multipart())
            done = len(results)
        return len(prompts) / (perf_counter() - started)


def _decode(frames: list[bytes]) -> list[GenerateResult]:
    return [decode_result(frame) for frame in frames]


def _socket(context: zmq.Context[zmq.Socket[bytes]], kind: int) -> zmq.Socket[bytes]:
    socket = context.socket(kind)
    for option in (zmq.LINGER, zmq.SNDHWM, zmq.RCVHWM):
        socket.setsockopt(option, 0)
    return socket


def forward(front: str, back: str, control: Connection) -> None:
    """Pass messages on, in turns over the workers, until killed."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    router, dealer = _socket(context, zmq.ROUTER), _socket(context, zmq.DEALER)
    router.bind(front)
    dealer.bind(back)
    poller = zmq.Poller()
    poller.register(router, zmq.POLLIN)
    poller.register(dealer, zmq.POLLIN)
    others = {router: dealer, dealer: router}
    control.send("bound")
    while True:
        for source, _ in poller.poll():
            target = others[source]
            try:
                while True:
                    target.send_multipart(source.recv_multipart(zmq.NOBLOCK))
            except zmq.Again:
                pass


def work(back: str, control: Connection) -> None:
    """Decode, echo, encode, until killed."""
    socket = _socket(zmq.Context(), zmq.DEALER)
    socket.connect(back)
    control.send("connected")
    while True:
        peer, *frames = socket.recv_multipart()
        socket.send_multipart([peer, *(encode(echo(decode_request(frame))) for frame in frames)])


def main() -> None:
    """`forward FRONT BACK FD` or `work BACK FD`."""
    lifeline.arm()
    role, *endpoints, fd = sys.argv[1:]
    {"forward": forward, "work": work}[role](*endpoints, Connection(int(fd)))  # type: ignore[operator]


if __name__ == "__main__":
    main()
