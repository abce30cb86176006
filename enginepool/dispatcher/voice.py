"""The voice: what the dispatcher tells on stderr, of itself and of its workers, as the log level allows."""

from __future__ import annotations

from enginepool.config import PoolSettings
from enginepool.dispatcher.log_lines import Level, level_of
from enginepool.dispatcher.logs import LogWriter
from enginepool.dispatcher.roster import Slot
from enginepool.status import WorkerState


class Voice:
    """Writes lines with their role; it never blocks."""

    def __init__(self, writer: LogWriter, level: str, pid: int) -> None:
        self._writer = writer
        self._level = level
        self._pid = pid

    @classmethod
    def of(cls, settings: PoolSettings, writer: LogWriter, pid: int) -> Voice:
        """The voice of a pool with these settings."""
        return cls(writer, settings.log_level, pid)

    def log(self, text: str, slot: Slot | None = None) -> None:
        """Tell a state change, of the dispatcher or of a worker."""
        if self._level != "warning":
            self._tell("info", text, slot)

    def warn(self, text: str, slot: Slot | None = None) -> None:
        """Tell what went wrong."""
        self._tell("warning", text, slot)

    def error(self, text: str) -> None:
        """Tell why the pool can not go on."""
        self._tell("error", text, None)

    def worker_line(self, slot: Slot, text: str) -> None:
        """What a worker has printed: of a starting one only with `debug`, of one that hangs its stacks at every level."""
        if self._level == "debug" or slot.hang is not None or (self._level == "info" and slot.state is WorkerState.READY):
            self._tell(level_of(text), text, slot)

    def _tell(self, level: Level, text: str, slot: Slot | None) -> None:
        worker, pid = (None, self._pid) if slot is None else (slot.index, slot.pid)
        self._writer.tell(level, text, worker=worker, pid=pid)
