"""The warden: keeps the vigil over ready workers; one that hangs has its stacks dumped into the log, then its group is killed."""

from __future__ import annotations

from typing import Protocol

from enginepool.config import PoolSettings
from enginepool.dispatcher.desk import Desk
from enginepool.dispatcher.log_lines import counted
from enginepool.dispatcher.roster import Roster, Slot
from enginepool.dispatcher.supervisor import Supervisor
from enginepool.dispatcher.vigil import AwakeClock, Hang, Limits, Watch
from enginepool.recorder import Record
from enginepool.status import WorkerState

DUMP_GRACE_S = 1.0
STALL_GRACE_S = 3.0


class Teller(Protocol):
    """Who tells what happens (the dispatcher)."""

    settings: PoolSettings

    def warn(self, text: str, slot: Slot | None = None) -> None: ...


class Warden:
    """Looks at all workers once a slow turn, after the sockets were read."""

    def __init__(self, teller: Teller, supervisor: Supervisor, roster: Roster, desk: Desk) -> None:
        settings = teller.settings
        self._teller = teller
        self._supervisor = supervisor
        self._roster = roster
        self._desk = desk
        self._stall_s = settings.stall_timeout_s
        # A worker that still steps finds the guilty item by itself, at the limit; it goes first.
        self._limits = Limits(settings.mute_timeout_s, settings.admit_timeout_s, settings.stall_timeout_s + STALL_GRACE_S)
        self._clock = AwakeClock()

    def look(self, now: float) -> None:
        """Condemn who hangs, and kill the condemned once their stacks have had time to come.

        Back from a long absence nobody is judged: what has arrived meanwhile may not have been read yet.
        """
        awake = self._clock.advance(now)
        if self._clock.away_s:
            self._roster.excuse(self._clock.away_s)
            return
        for slot in self._roster.slots:
            if slot.state is WorkerState.READY and not slot.is_killed:
                self._look_at(slot, now, awake)

    def _look_at(self, slot: Slot, now: float, awake: float) -> None:
        record = self._supervisor.read_record(slot.index)
        in_hand = self._desk.leases.in_hand(slot.index)
        watch = slot.watch = slot.watch or Watch(self._limits, awake)
        hang = watch.look(slot.num_beats, record, in_hand, self._supervisor.cpu_s(slot.index), awake)
        if slot.hang is None:
            if hang is not None:
                self._condemn(slot, hang, record, in_hand, now)
        elif hang is None:
            slot.pardoned()
            self._teller.warn("goes on after all, and is let be", slot)
        elif now >= slot.kill_at:
            slot.is_killed = True
            self._supervisor.kill(slot.index)

    def _condemn(self, slot: Slot, hang: Hang, record: Record, in_hand: int, now: float) -> None:
        assert slot.watch is not None
        text = self._story(hang, in_hand, slot.watch.silence_s)
        slot.condemned(hang, text, record.admitting, now + DUMP_GRACE_S)
        num_asked = self._supervisor.dump_stacks(slot.index)
        self._teller.warn(f"{text}; its stacks follow ({num_asked} process{'es' * (num_asked != 1)} asked), then it is killed", slot)

    def _story(self, hang: Hang, in_hand: int, silence_s: float) -> str:
        match hang:
            case Hang.MUTE:
                return f"hangs: no heartbeat for {silence_s:.1f} s (mute_timeout_s), and no processor time used"
            case Hang.ADMIT:
                return f"hangs: it has been taking one item in for {self._limits.admit_s:g} s (admit_timeout_s)"
            case Hang.STALL:
                return f"hangs: no token and no result for {self._stall_s:g} s with {counted(in_hand, 'item')} in hand (stall_timeout_s)"
