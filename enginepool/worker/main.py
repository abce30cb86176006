"""A worker process, from its first instruction to its exit.

::

    arm the parent-death signal ─▶ read the spec ─▶ start the link ─▶ build the engine (Stage …) ─▶ generate one token
        ─▶ Ready, Window ─▶ feed until Stop or Drain ─▶ close the engine ─▶ Goodbye ─▶ exit

    can not start: StartFailed, exit 3        engine lost: Goodbye(error), exit 70
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from enginepool import lifeline

if TYPE_CHECKING:
    from collections.abc import Callable

    from enginepool.handover import WorkerSpec
    from enginepool.worker.link import Link

if __name__ == "__mp_main__":  # an engine core or another child of vLLM's
    import faulthandler
    import signal

    lifeline.arm()
    faulthandler.register(signal.SIGUSR1, all_threads=True)

EXIT_START_FAILED = 3
EXIT_ENGINE_LOST = 70


def main(spec_fd: int, parent_pid: int, recorder_fd: int) -> int:
    """Run one worker; returns its exit code."""
    lifeline.arm(parent_pid)
    from enginepool import handover
    from enginepool.handover import WorkerSpec
    from enginepool.worker.link import Link

    spec = handover.take(spec_fd, WorkerSpec)
    _prepare_process(spec.index)
    link = Link(spec)
    return _work(spec, link, recorder_fd)


def _work(spec: WorkerSpec, link: Link, recorder_fd: int) -> int:
    import traceback

    from enginepool.protocol import Window
    from enginepool.recorder import FlightRecorder
    from enginepool.worker.boot import boot, describe
    from enginepool.worker.core_watch import watch_cores
    from enginepool.worker.engine import StartRefused, hint_for
    from enginepool.worker.feeder import Feeder, FeederLimits

    try:
        engine = boot(spec, link.send)
    except StartRefused as refused:
        return _refuse_start(link, refused.kind, str(refused))
    except Exception as error:
        traceback.print_exc()
        return _refuse_start(link, "engine", f"{type(error).__name__}: {error}{hint_for(error)}")
    recorder = FlightRecorder.join(recorder_fd, engine.step_lag)
    limits = FeederLimits(max_frame_bytes=spec.max_frame_bytes, stall_s=spec.stall_timeout_s)
    feeder = Feeder(engine, link, recorder, limits, is_static=spec.is_static)
    link.load = lambda: feeder.load
    link.become_ready()
    capacity = engine.info.max_num_seqs
    link.send(Window(capacity, max(1, capacity // 16)))
    link.send(describe(engine))
    watch_cores(engine.core_pids, lambda what: _leave(link, what))
    try:
        feeder.run()
    except Exception as error:
        traceback.print_exc()
        link.close(f"{type(error).__name__}: {error}")
        return EXIT_ENGINE_LOST
    link.is_leaving = True
    engine.close()
    link.close()
    return 0


def _leave(link: Link, what: str) -> None:
    """An engine core has gone while the engine's thread may wait for it; nothing can be saved here."""
    if not link.is_leaving:
        link.close(what)
        os._exit(EXIT_ENGINE_LOST)


def _prepare_process(index: int) -> None:
    """Signals are the dispatcher's business: a group signal must not cut a drain short. SIGUSR1 prints all stacks."""
    import faulthandler
    import signal
    from multiprocessing import resource_tracker

    import setproctitle

    setproctitle.setproctitle(f"enginepool worker {index}")
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    _in_another_group(resource_tracker.ensure_running)  # it unblocks these signals here, so it comes before they are blocked
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT, signal.SIGHUP})


def _in_another_group(start: Callable[[], None]) -> None:
    """Start a process that outlives the end of our group: it tidies up behind us. A child that waits lends its group meanwhile."""
    read_fd, write_fd = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(write_fd)
        os.read(read_fd, 1)
        os._exit(0)
    os.close(read_fd)
    os.setpgid(child, child)
    os.setpgid(0, child)
    try:
        start()
    finally:
        os.setpgid(0, 0)
        os.close(write_fd)
        os.waitpid(child, 0)


def _refuse_start(link: Link, kind: str, text: str) -> int:
    from enginepool.errors import sayable
    from enginepool.protocol import StartFailed

    link.send(StartFailed(kind, sayable(text)))
    link.close()
    return EXIT_START_FAILED


if __name__ == "__main__":
    import sys

    code = main(*map(int, sys.argv[1:4]))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
