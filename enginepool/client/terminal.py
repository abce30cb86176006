"""The terminal while something watches on it: another screen, single keys, signals as events; given back whatever happens."""

from __future__ import annotations

import os
import select
import signal
import sys
import termios
import tty
from collections.abc import Sequence
from contextlib import suppress
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.text import Text

WATCHED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGTSTP, signal.SIGWINCH)


class Wakeups:
    """Signals and other threads' calls as bytes of one pipe; nothing happens inside a handler. For the main thread."""

    def __init__(self) -> None:
        self._read_fd, self._write_fd = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._before: list[tuple[signal.Signals, Any]] = []
        self._fd_before = -1

    def __enter__(self) -> Wakeups:
        self._fd_before = signal.set_wakeup_fd(self._write_fd, warn_on_full_buffer=False)
        self._before = [(number, signal.signal(number, _do_nothing)) for number in WATCHED]
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for number, handler in self._before:
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._fd_before)

    def wake(self) -> None:
        """End a `wait` from another thread."""
        with suppress(BlockingIOError):
            os.write(self._write_fd, b"\0")

    def wait(self, timeout_s: float, keys_fd: int | None) -> tuple[set[int], bytes]:
        """Signals that came, and keys (b"\\x04" at their end), after at most `timeout_s`."""
        fds = [self._read_fd] if keys_fd is None else [self._read_fd, keys_fd]
        readable = select.select(fds, [], [], timeout_s)[0]
        numbers = set(os.read(self._read_fd, 4096)) if self._read_fd in readable else set()
        keys = b""
        if keys_fd in readable and keys_fd is not None:
            with suppress(OSError):
                keys = os.read(keys_fd, 4096)
            keys = keys or b"\x04"
        return numbers, keys


class Terminal:
    """The alternate screen of stdout and, where stdin is a terminal too, its keys one by one."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.live import Live

        # Without these two, the console asks the terminal for its size each time.
        environ = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
        self._console = Console(_environ=environ)
        self._live = Live(console=self._console, screen=True, auto_refresh=False)
        self.keys_fd = sys.stdin.fileno() if sys.stdin and sys.stdin.isatty() else None
        self._modes: list[Any] | None = None

    @property
    def size(self) -> tuple[int, int]:
        """Columns and rows now."""
        return self._console.size

    def __enter__(self) -> Terminal:
        if self.keys_fd is not None:
            self._modes = termios.tcgetattr(self.keys_fd)
            tty.setcbreak(self.keys_fd, termios.TCSANOW)
        try:
            self._live.start()
        except BaseException:
            self._give_back_keys()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            with suppress(OSError):  # the terminal may be gone
                self.clear()  # tmux, once resized, carries lines of this screen over to the one below
                self._live.stop()
        finally:
            self._give_back_keys()

    def draw(self, lines: Sequence[Text]) -> None:
        """Show these lines instead of the last ones."""
        from rich.console import Group

        self._live.update(Group(*lines), refresh=True)

    def clear(self) -> None:
        """Leave nothing of what another size or program has drawn."""
        from rich.control import Control

        self._console.control(Control.home(), Control.clear())

    def suspend(self) -> None:
        """Give the terminal back and stop, as Ctrl-Z asks; go on when the shell says so."""
        self.__exit__(None, None, None)
        os.kill(os.getpid(), signal.SIGSTOP)
        self.__enter__()

    def _give_back_keys(self) -> None:
        if self.keys_fd is not None and self._modes is not None:
            with suppress(termios.error):
                termios.tcsetattr(self.keys_fd, termios.TCSANOW, self._modes)


def _do_nothing(number: int, frame: FrameType | None) -> None:
    pass
