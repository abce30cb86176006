"""The flight recorder: a page of memory in which a worker notes what its engine is about to do, for the dispatcher to read at any time.

It outlives the worker, however that dies. One thread writes, the dispatcher reads without a lock: a reading may be a moment
old, and one taken after the worker's end is exact. All fields are unsigned 64-bit words::

    0 progress        grows with tokens computed and items finished, never because a step returned
    1 admitting       the lease whose admission runs now, 0 for none
    2 num_admissions  grows at the begin and at the end of each admission
    3 num_fresh       how many of the words from 4 on are valid: leases that were admitted since the last completed step
"""

from __future__ import annotations

import mmap
import os

import msgspec

CAPACITY = 4092
_PROGRESS, _ADMITTING, _NUM_ADMISSIONS, _NUM_FRESH, _FIRST = range(5)
_SIZE_BYTES = (_FIRST + CAPACITY) * 8


class Record(msgspec.Struct, frozen=True):
    """One reading. `admitting` is the lease whose admission ran, `fresh` those admitted since the last completed step."""

    progress: int = 0
    num_admissions: int = 0
    admitting: int | None = None
    fresh: tuple[int, ...] = ()


class FlightRecorder:
    """One worker process's page. `make` it in the dispatcher, pass `fd`, `join` it in the worker."""

    def __init__(self, fd: int, lag: int = 1) -> None:
        """`lag` completed steps have to pass until an admitted item counts as run through."""
        self.fd = fd
        self._page = mmap.mmap(fd, _SIZE_BYTES)
        self._words = memoryview(self._page).cast("Q")
        self._generations: list[list[int]] = [[] for _ in range(max(1, lag))]

    @classmethod
    def make(cls) -> FlightRecorder:
        """A fresh page, in memory only."""
        fd = os.memfd_create("enginepool-recorder")
        os.ftruncate(fd, _SIZE_BYTES)
        return cls(fd)

    @classmethod
    def join(cls, fd: int, lag: int = 1) -> FlightRecorder:
        """The page behind an inherited descriptor; our own children will not have it."""
        os.set_inheritable(fd, False)
        return cls(fd, lag)

    def close(self) -> None:
        """Let go of the page."""
        self._words.release()
        self._page.close()
        os.close(self.fd)

    def begin_admission(self, lease: int) -> None:
        """Note an item before the engine hears of it: it may be the last thing that this process does."""
        words = self._words
        count = words[_NUM_FRESH]
        if count < CAPACITY:
            words[_FIRST + count] = lease
            words[_NUM_FRESH] = count + 1
        words[_ADMITTING] = lease
        words[_NUM_ADMISSIONS] += 1
        self._generations[-1].append(lease)

    def end_admission(self) -> None:
        """The engine has taken or refused the item."""
        self._words[_ADMITTING] = 0
        self._words[_NUM_ADMISSIONS] += 1

    def completed_step(self) -> None:
        """A step has returned: what was admitted `lag` steps ago has been run through."""
        generations = self._generations
        if not self._words[_NUM_FRESH]:
            return
        generations.append([])
        del generations[0]
        kept = [lease for leases in generations for lease in leases][:CAPACITY]
        for index, lease in enumerate(kept):
            self._words[_FIRST + index] = lease
        self._words[_NUM_FRESH] = len(kept)

    def progressed(self) -> None:
        """Tokens were computed, or an item has ended."""
        self._words[_PROGRESS] += 1

    def read(self) -> Record:
        """What stands there now. More newcomers than the page holds are none: then all items are alike."""
        words = self._words
        count = words[_NUM_FRESH]
        fresh = tuple(words[_FIRST : _FIRST + count]) if count < CAPACITY else ()
        return Record(words[_PROGRESS], words[_NUM_ADMISSIONS], words[_ADMITTING] or None, fresh)
