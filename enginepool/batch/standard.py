"""The standard streams of a run: where one was closed, a file that is opened later must not take its number."""

from __future__ import annotations

import os
import sys


def fill_standard_streams() -> None:
    """Put /dev/null where a standard descriptor is closed: a log would be written into whatever file got that number."""
    while (fd := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(fd, True)
    os.close(fd)
    if sys.stderr is None:  # print(file=None) goes to standard output
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115 (for as long as the program runs)
