"""What a worker says of items that are no longer its own changes nothing; what it said in time counts, though it has died since."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import Serve, Served, wait_for, worker_pids
from raw_peer import Context, raw_context
from raw_worker import ASLEEP, RawWorker
from surroundings import customized

from enginepool import Code, Pool, PoolState
from enginepool.protocol import Abort


class Stage:
    """A pool of two workers whose processes sleep, spoken for by two that we lead."""

    def __init__(self, served: Served, pool: Pool, context: Context) -> None:
        self.served = served
        self.pool = pool
        self._context = context
        self._gone: list[RawWorker] = []
        wait_for(lambda: len(worker_pids(pool)) == 2, "the processes")
        self.workers = [RawWorker(context, pool, index, pid) for index, pid in enumerate(worker_pids(pool))]
        wait_for(lambda: pool.status().state is PoolState.READY, "the enrolment")

    def cast(self) -> tuple[RawWorker, RawWorker]:
        """Who has been given the one item, and the other."""
        wait_for(lambda: any(worker.has_news() for worker in self.workers), "the lease")
        first, second = self.workers
        return (first, second) if first.has_news() else (second, first)

    def kill(self, worker: RawWorker) -> None:
        """End the process; only who speaks for it is left."""
        os.kill(worker.pid, signal.SIGKILL)

    def successor(self, worker: RawWorker) -> RawWorker:
        """Speak for the process that was started in the place of a dead one."""

        def pid() -> int | None:
            return self.pool.status().workers[worker.index].pid

        wait_for(lambda: pid() not in (None, worker.pid), "the restart")
        new = pid()
        assert new is not None
        self.workers[worker.index] = RawWorker(self._context, self.pool, worker.index, new)
        self._gone.append(worker)
        wait_for(lambda: self.pool.status().state is PoolState.READY, "its enrolment")
        return self.workers[worker.index]


@pytest.fixture
def stage(serve: Serve, tmp_path: Path) -> Iterator[Stage]:
    """One pool of raw workers."""
    served = serve("--engine", "echo", "--workers", "2", "--backoff-s", "0.01", env=customized(tmp_path, worker=ASLEEP))
    wait_for(lambda: (tmp_path / "run" / "default.sock.secret").exists(), "the pool's start")
    with Pool.connect() as pool, raw_context() as context:
        yield Stage(served, pool, context)
        pool.close(drain=False)


def test_answer_after_the_worker_has_died_is_dropped(stage: Stage) -> None:
    future = stage.pool.submit("hello")
    dead, other = stage.cast()
    old = dead.lease()
    stage.kill(dead)
    new = other.lease()
    dead.answer(old, "late")
    assert dead.is_rejected()
    other.answer(new, "right")
    output = future.result(timeout=20)
    assert (output.text, output.worker, output.attempts) == ("right", other.index, 2)
    assert new != old


def test_answer_of_the_next_process_to_the_lease_of_its_forerunner_is_dropped(stage: Stage) -> None:
    future = stage.pool.submit("hello")
    dead, other = stage.cast()
    old = dead.lease()
    stage.kill(dead)
    new = other.lease()
    successor = stage.successor(dead)
    own = stage.pool.submit("next")  # the emptier worker gets it
    number = successor.lease()
    successor.tell(old, "late")
    successor.answer(old, "late")
    successor.answer(number, "next")
    assert own.result(timeout=20).text == "next"
    assert not future.done()
    other.answer(new, "right")
    assert future.result(timeout=20).text == "right"


def test_answer_to_a_lease_of_another_worker_is_dropped(stage: Stage) -> None:
    first = stage.pool.submit("first")
    holder, other = stage.cast()
    held = holder.lease()
    second = stage.pool.submit("second")
    own = other.lease()
    other.answer(held, "wrong")
    other.answer(own, "second")
    assert second.result(timeout=20).text == "second"
    assert not first.done()
    holder.answer(held, "first")
    assert first.result(timeout=20).text == "first"


def test_second_answer_to_a_lease_is_dropped(stage: Stage) -> None:
    future = stage.pool.submit("hello")
    worker, _ = stage.cast()
    number = worker.lease()
    worker.answer(number, "once")
    worker.answer(number, "twice")
    later = stage.pool.submit("later")
    other, _ = stage.cast()
    other.answer(other.lease(), "later")
    assert [future.result(timeout=20).text, later.result(timeout=20).text] == ["once", "later"]
    assert stage.pool.status().finished == 2


def test_delta_of_another_worker_is_dropped(stage: Stage) -> None:
    parts: list[str] = []
    stream = stage.pool.stream("hello")
    reader = threading.Thread(target=lambda: parts.extend(delta.text for delta in stream))
    reader.start()
    holder, other = stage.cast()
    number = holder.lease()
    own = stage.pool.submit("other")
    theirs = other.lease()
    other.tell(number, "wrong")
    other.answer(theirs, "other")
    assert own.result(timeout=20).ok
    holder.tell(number, "ri")
    holder.answer(number, "ght")
    reader.join(20)
    assert "".join(parts) == "right"


def test_answer_that_was_sent_before_the_death_counts(stage: Stage) -> None:
    """The dispatcher sees the death first, for what was sent has still to be read."""
    future = stage.pool.submit("hello")
    worker, other = stage.cast()
    number = worker.lease()
    os.kill(stage.served.pid, signal.SIGSTOP)
    worker.answer(number, "in time")
    worker.peer.socket.close(5000)
    stage.kill(worker)
    os.kill(stage.served.pid, signal.SIGCONT)
    output = future.result(timeout=20)
    assert (output.text, output.attempts) == ("in time", 1)
    assert not other.has_news()


SLOW_SOCKET = """
import os, time
from enginepool.dispatcher import back, staff
deaths = []
receive, on_exit = back.Back.receive, staff.Staff._on_exit
def noted(self, process):
    deaths.append(time.monotonic())
    on_exit(self, process)
def slow(self, now):
    is_held = os.path.exists({hold!r}) and not (deaths and time.monotonic() > deaths[0] + 0.01)
    return is_held or receive(self, now)
back.Back.receive, staff.Staff._on_exit = slow, noted
"""


def test_answer_that_comes_through_a_little_after_the_death_counts(serve: Serve, tmp_path: Path) -> None:
    """The news of an exit may overtake what was sent before it: here by ten milliseconds, in which the socket has nothing."""
    hold = tmp_path / "hold"
    environment = customized(tmp_path, worker=ASLEEP, everywhere=SLOW_SOCKET.format(hold=str(hold)))
    served = serve("--engine", "echo", "--workers", "2", env=environment)
    wait_for((tmp_path / "run" / "default.sock.secret").exists, "the pool's start")
    with Pool.connect() as pool, raw_context() as context:
        stage = Stage(served, pool, context)
        future = pool.submit("hello")
        worker, _ = stage.cast()
        number = worker.lease()
        hold.touch()
        worker.answer(number, "in time")
        stage.kill(worker)
        output = future.result(timeout=20)
        pool.close(drain=False)
    assert (output.text, output.attempts) == ("in time", 1)


def test_answer_after_the_deadline_was_told_is_dropped(stage: Stage) -> None:
    future = stage.pool.submit("hello", deadline_s=0.1)
    worker, _ = stage.cast()
    number = worker.lease()
    assert worker.hear()[0] == Abort([number])  # it does not obey
    error = future.result(timeout=20).error
    assert error is not None
    assert error.code is Code.DEADLINE_EXCEEDED
    assert stage.pool.status().in_flight == 1
    worker.answer(number, "late")
    wait_for(lambda: stage.pool.status().in_flight == 0, "the end of the lease")
    assert stage.pool.status().finished == 1
