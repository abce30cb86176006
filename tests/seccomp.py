"""Forbids one system call to a process and its children, as a container's seccomp profile does."""

from __future__ import annotations

import ctypes
import errno
import platform
from collections.abc import Callable

SCHED_SETAFFINITY = {"x86_64": 203, "aarch64": 122}
_LOAD, _JUMP_IF_EQUAL, _RETURN = 0x20, 0x15, 0x06
_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000
_PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS = 22, 38
_MODE_FILTER = 2


class _Instruction(ctypes.Structure):
    _fields_ = [("code", ctypes.c_ushort), ("jt", ctypes.c_ubyte), ("jf", ctypes.c_ubyte), ("k", ctypes.c_uint)]


class _Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("instructions", ctypes.POINTER(_Instruction))]


def forbid_affinity(number: int = errno.EPERM) -> Callable[[], None]:
    """Something to run before exec: setting CPU masks fails with this error from then on."""
    steps = [
        (_LOAD, 0, 0, 0),
        (_JUMP_IF_EQUAL, 0, 1, SCHED_SETAFFINITY[platform.machine()]),
        (_RETURN, 0, 0, _ERRNO | number),
        (_RETURN, 0, 0, _ALLOW),
    ]
    instructions = (_Instruction * len(steps))(*(_Instruction(*step) for step in steps))
    program = _Program(len(steps), instructions)
    libc = ctypes.CDLL(None, use_errno=True)

    def install() -> None:
        if libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) or libc.prctl(_PR_SET_SECCOMP, _MODE_FILTER, ctypes.byref(program)):
            raise OSError(ctypes.get_errno(), "seccomp filter")

    return install
