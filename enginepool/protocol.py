"""Every message between the processes, as one tagged msgspec struct each.

A message is a header frame (msgpack, an array whose first element is the tag) and, for the tags marked *, one opaque
payload frame an item::

    client ── Hello Submit* Abort GetStatus Drain Stop Ping Bye ──▶ dispatcher ── Lease* Abort Drain Stop ──▶ worker
    client ◀── Welcome Rejected Refused Delta* Result* Status Stopping Pong ── dispatcher ◀── Enroll Stage StartFailed Ready ── worker
                                                        dispatcher ◀── Window Delta* Done* Heartbeat Goodbye ── worker

A client names an item by its own `seq`; towards a worker the dispatcher names the attempt by a `lease` number that it
never uses twice, so an answer of an older attempt finds nothing and is dropped. An accepted item ends in exactly one
entry of a `Result`; silence after `Submit` means accepted, `Refused` names what was not. Times are seconds; stamps are
monotonic. Fields are only ever appended, with a default; anything else raises `PROTOCOL_VERSION`.
"""

from __future__ import annotations

from typing import Any, ClassVar

import msgspec

from enginepool.clock import ClockAnchor
from enginepool.errors import ItemError
from enginepool.status import Load, PoolStatus

PROTOCOL_VERSION = 2
DEFAULT_SILENCE_S = 15.0
NO_STAMPS = msgspec.Raw(b"\xc0")
"""Encoded nil: the item never reached an engine."""


class Message(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The root of all messages; `has_payload` says whether payload frames follow, one an item."""

    has_payload: ClassVar[bool] = False


class Hello(Message, frozen=True):
    """A client's first message. `pid` lets a dispatcher of the same host see it die; a remote one gives None, and pings."""

    version: int
    secret: bytes
    client_id: bytes
    pid: int | None


class SubmitItem(msgspec.Struct, frozen=True, array_like=True):
    """One item's place in the queue: lower `priority` first, `deadline_s` from now, `sequences` it will run."""

    seq: int
    priority: int = 0
    deadline_s: float | None = None
    sequences: int = 1


class Submit(Message, frozen=True):
    """Items to run, one payload frame each."""

    has_payload = True
    items: list[SubmitItem]


class Abort(Message, frozen=True):
    """Stop these: `seq` numbers from a client, lease numbers to a worker."""

    ids: list[int]


class GetStatus(Message, frozen=True):
    """Ask for a Status."""

    token: int


class Drain(Message, frozen=True):
    """Take nothing new, finish what there is within `limit_s` (None: the pool's own limit), then stop."""

    limit_s: float | None = None


class Stop(Message, frozen=True):
    """Stop now; what has not finished is returned as retryable."""


class Ping(Message, frozen=True):
    """Ask for a Pong."""

    token: int


class Bye(Message, frozen=True):
    """The client goes; what it still has in flight is aborted."""


class Limits(msgspec.Struct, frozen=True, array_like=True):
    """What one message may hold."""

    max_frame_bytes: int
    max_items_per_message: int


class Welcome(Message, frozen=True):
    """The answer to a good Hello. `submit_window` is how many items a client keeps unfinished at once.

    `silence_s` is after how long a client without a pid, or a pool on another machine, is taken for gone when nothing comes.
    """

    version: int
    pool_id: str
    pid: int
    model: str
    endpoint: str
    limits: Limits
    submit_window: int
    anchor: ClockAnchor
    silence_s: float = DEFAULT_SILENCE_S


class Rejected(Message, frozen=True):
    """The answer to a Hello that is not let in, or to a peer that is cut off."""

    reason: str


class Refused(Message, frozen=True):
    """These items were not accepted."""

    seqs: list[int]
    error: ItemError


class ResultItem(msgspec.Struct, frozen=True, array_like=True):
    """The end of one item. With an `error` its payload frame is empty. `stamps` are the worker's (an encoded EngineStamps, or nil)."""

    seq: int
    worker: int | None
    attempts: int
    received: float
    leased: float | None
    error: ItemError | None = None
    stamps: msgspec.Raw = NO_STAMPS


class Result(Message, frozen=True):
    """Items that have ended, one payload frame each."""

    has_payload = True
    items: list[ResultItem]


class Delta(Message, frozen=True):
    """What is new in streams, one payload frame each: `seq` numbers to a client, lease numbers from a worker."""

    has_payload = True
    ids: list[int]


class Status(Message, frozen=True):
    """The answer to GetStatus."""

    token: int
    status: PoolStatus


class Stopping(Message, frozen=True):
    """The pool's last word: it ends with this exit code, and so many unfinished items of all clients went back as retryable."""

    exit_code: int
    num_returned: int


class Pong(Message, frozen=True):
    """The answer to Ping. `at` is when the dispatcher gave it, by its own clock."""

    token: int
    at: float | None = None


class Enroll(Message, frozen=True):
    """A worker's first message; the secret proves that this dispatcher started it."""

    version: int
    pool_id: str
    secret: bytes
    index: int
    pid: int


class Stage(Message, frozen=True):
    """A start-up milestone; each extends the start deadline."""

    text: str


class StartFailed(Message, frozen=True):
    """The worker can not start; an orderly refusal, so starting it again would not help.

    `kind` is "usage" (a bad argument), "missing" (no vLLM) or "engine" (anything else the engine said).
    """

    kind: str
    text: str


class Ready(Message, frozen=True):
    """The engine has generated a token. `threads` counts threads by the CPU list they may run on."""

    model: str
    vocab_size: int
    max_model_len: int
    max_num_seqs: int
    tasks: list[str]
    engine_config: dict[str, Any]
    threads: dict[str, int]


class Window(Message, frozen=True):
    """How many sequences the worker wants in hand: what its engine runs at once, and a few to follow."""

    capacity: int
    prefetch: int


class DoneItem(msgspec.Struct, frozen=True, array_like=True):
    """The end of one lease. With an `error` its payload frame is empty. The dispatcher forwards `stamps` (an encoded EngineStamps)."""

    lease: int
    error: ItemError | None = None
    stamps: msgspec.Raw = NO_STAMPS


class Done(Message, frozen=True):
    """Leases that have ended, one payload frame each."""

    has_payload = True
    items: list[DoneItem]


class Heartbeat(Message, frozen=True):
    """The worker's I/O thread is alive, and this is what its engine does."""

    load: Load


class Goodbye(Message, frozen=True):
    """The worker exits on its own account; `error` says why when it had to."""

    error: str | None = None


class Lease(Message, frozen=True):
    """Items to run, one payload frame each; in static mode one such message is one batch."""

    has_payload = True
    leases: list[int]


ClientMessage = Hello | Submit | Abort | GetStatus | Drain | Stop | Ping | Bye
ToClient = Welcome | Rejected | Refused | Delta | Result | Status | Stopping | Pong
WorkerMessage = Enroll | Stage | StartFailed | Ready | Window | Delta | Done | Heartbeat | Goodbye
ToWorker = Lease | Abort | Drain | Stop | Rejected

UNREADABLE = (msgspec.DecodeError, RecursionError)
"""What the decoders raise for a header that is none, one that is nested thousands deep included."""

_encode = msgspec.msgpack.Encoder().encode
decode_hello = msgspec.msgpack.Decoder(Hello).decode
decode_enroll = msgspec.msgpack.Decoder(Enroll).decode
decode_from_client = msgspec.msgpack.Decoder(ClientMessage).decode
decode_to_client = msgspec.msgpack.Decoder(ToClient).decode
decode_from_worker = msgspec.msgpack.Decoder(WorkerMessage).decode
decode_to_worker = msgspec.msgpack.Decoder(ToWorker).decode


def encode(message: Message) -> bytes:
    """Encode a header frame."""
    return _encode(message)
