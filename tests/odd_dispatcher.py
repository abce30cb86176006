"""A dispatcher that lets everybody in and then answers items with whatever the test gives it: real sockets, a real secret."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

from enginepool.clock import ClockAnchor
from enginepool.protocol import (
    PROTOCOL_VERSION,
    Abort,
    GetStatus,
    Hello,
    Limits,
    Submit,
    SubmitItem,
    Welcome,
    decode_from_client,
    encode,
)
from enginepool.rundir import Claim
from enginepool.transport import Router

Answer = Callable[[SubmitItem, bytes], list[bytes]]


class OddDispatcher:
    """`answer` makes the frames that an item is answered with; what was aborted is in `aborted`."""

    def __init__(self, folder: Path, answer: Answer) -> None:
        self.endpoint = f"ipc://{folder}/odd.sock"
        self.aborted: list[int] = []
        self._answer = answer
        self._claim = Claim(self.endpoint, folder)
        self._router = Router(1 << 20)
        self._router.bind(self.endpoint)
        Path(self._claim.back.removeprefix("ipc://")).touch()
        self._claim.publish(self.endpoint)
        self._is_over = False
        self._thread = threading.Thread(target=self._serve)

    def __enter__(self) -> OddDispatcher:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._is_over = True
        self._thread.join()
        self._router.close(0)
        self._claim.release()

    def _serve(self) -> None:
        while not self._is_over:
            self._router.socket.poll(10)
            while (received := self._router.receive()) is not None:
                self._handle(*received)

    def _handle(self, peer: bytes, frames: list[bytes]) -> None:
        match decode_from_client(frames[0]):
            case Hello():
                limits, anchor = Limits(1 << 20, 1024), ClockAnchor.take(1)
                welcome = Welcome(PROTOCOL_VERSION, "odd", os.getpid(), "odd", self.endpoint, limits, 4096, anchor)
                self._router.send(peer, [encode(welcome)])
            case Submit(items):
                for item, payload in zip(items, frames[1:], strict=True):
                    self._router.send(peer, self._answer(item, payload))
            case Abort(ids):
                self.aborted += ids
            case GetStatus():
                self._router.send(peer, [b"\xc1 no message at all"])
