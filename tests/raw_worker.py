"""What speaks for a worker whose process sleeps, so that it can answer when it likes, and what it likes."""

from __future__ import annotations

from raw_peer import Context, RawPeer, back_of, secret_of

from enginepool import Pool
from enginepool.payload import CompletionOutput, GenerateRequest, GenerateResult, decode_request
from enginepool.payload import encode as encode_payload
from enginepool.protocol import (
    PROTOCOL_VERSION,
    Delta,
    Done,
    DoneItem,
    Enroll,
    Lease,
    Ready,
    Rejected,
    ToWorker,
    Window,
    decode_to_worker,
    encode,
)

ASLEEP = "import time; time.sleep(600)"
"""Code for a worker's process that never says a word of its own."""


class RawWorker:
    """Enrols for worker `index`, in the place of its process `pid`."""

    def __init__(self, context: Context, pool: Pool, index: int, pid: int) -> None:
        self.index = index
        self.pid = pid
        self.peer = RawPeer(context, back_of(pool), secret_of(pool))
        self.peer.say([encode(Enroll(PROTOCOL_VERSION, pool.pool_id, secret_of(pool), index, pid))])
        self.peer.say([encode(Ready("raw", 256, 4096, 8, ["generate"], {}, {}))])
        self.peer.say([encode(Window(8, 0))])

    def hear(self) -> tuple[ToWorker, list[bytes]]:
        """The next message to this worker."""
        header, *payloads = self.peer.hear_all()
        return decode_to_worker(header), payloads

    def has_news(self) -> bool:
        """Whether there is one."""
        return bool(self.peer.socket.poll(0))

    def lease(self) -> int:
        """The lease of the one item that it is given next."""
        message, (payload,) = self.hear()
        assert isinstance(message, Lease)
        assert isinstance(decode_request(payload), GenerateRequest)
        return message.leases[0]

    def answer(self, lease: int, text: str) -> None:
        """Say that the item is done."""
        result = GenerateResult([CompletionOutput(0, text, [1], "stop")])
        self.peer.say([encode(Done([DoneItem(lease)])), encode_payload(result)])

    def tell(self, lease: int, text: str) -> None:
        """Say what is new in a stream."""
        self.peer.say([encode(Delta([lease])), encode_payload([CompletionOutput(0, text, [1])])])

    def is_rejected(self) -> bool:
        """Whether the next that it hears is that nobody knows it."""
        return isinstance(self.hear()[0], Rejected)
