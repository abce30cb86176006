"""A session: one client that was let in, and what is collected for it until the next flush."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Sequence

from enginepool.dispatcher.backlog import ClientId
from enginepool.protocol import Delta, Message, Result, ResultItem

MESSAGE_BYTES = 1 << 20


class Session:
    """`is_paused` while it does not read: then no more of its items are handed out. `num_asked_bytes` counts answers since then.

    `client` names its items. It is never used again, so what ends late is not taken for an item of a later session.
    """

    def __init__(self, peer: bytes, client_id: bytes, pid: int | None, number: int) -> None:
        self.peer = peer
        self.client_id = client_id
        self.client: ClientId = client_id + number.to_bytes(8, "big")
        self.pid = pid
        self.pidfd = _open_pidfd(pid)
        self.is_paused = False
        self.was_paused = False
        self.num_asked_bytes = 0
        self.results: list[ResultItem] = []
        self.payloads: list[bytes] = []
        self.streams: list[int] = []
        self.deltas: list[bytes] = []

    def take(self, max_items: int) -> Iterator[tuple[Message, list[bytes]]]:
        """What was collected, deltas first, in messages of at most so many items and about a megabyte."""
        streams, deltas, results, payloads = self.streams, self.deltas, self.results, self.payloads
        self.streams, self.deltas, self.results, self.payloads = [], [], [], []
        for part in _parts(deltas, max_items):
            yield Delta(streams[part]), deltas[part]
        for part in _parts(payloads, max_items):
            yield Result(results[part]), payloads[part]

    def close(self) -> None:
        """Stop watching its process."""
        if self.pidfd is not None:
            os.close(self.pidfd)


def _parts(payloads: Sequence[bytes], max_items: int) -> list[slice]:
    """ZeroMQ counts the messages that it holds for a slow peer, not their bytes, so none may be large without need."""
    starts, num_bytes = [0], 0
    for index, payload in enumerate(payloads):
        num_bytes += len(payload)
        if index - starts[-1] >= max_items or (num_bytes > MESSAGE_BYTES and index > starts[-1]):
            starts.append(index)
            num_bytes = len(payload)
    ends = [*starts[1:], len(payloads)]
    return [slice(start, end) for start, end in zip(starts, ends, strict=True) if end > start]


def _open_pidfd(pid: int | None) -> int | None:
    """None for a pid that tells nothing here. Raises OSError where no descriptor is left to watch it with."""
    try:
        return None if pid is None else os.pidfd_open(pid)
    except OverflowError:
        return None
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE):
            raise
        return None
