"""Disturbances of ranks from outside: stop, trace, starve, suspend the whole machine.

Every function ends what it began, and leaves no process behind.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence

from tests.faults.job import Job, descendants

_TRACE = """
import ctypes, os, sys, time
libc = ctypes.CDLL(None, use_errno=True)
libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
ATTACH, DETACH, WALL = 16, 17, 0x40000000  # <sys/ptrace.h>, <sys/wait.h>
pid, seconds = int(sys.argv[1]), float(sys.argv[2])
if libc.ptrace(ATTACH, pid, None, None) != 0:
    raise OSError(ctypes.get_errno(), "ptrace")
os.waitpid(pid, WALL)
time.sleep(seconds)
libc.ptrace(DETACH, pid, None, None)
"""
_BUSY = "while True: pass"


def stop(pids: Sequence[int], seconds: float) -> None:
    """SIGSTOP, and SIGCONT after so long."""
    _send(pids, signal.SIGSTOP)
    try:
        time.sleep(seconds)
    finally:
        _send(pids, signal.SIGCONT)


def _send(pids: Sequence[int], signum: int) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):  # a helper of the agent's that has ended meanwhile
            os.kill(pid, signum)


def suspend(run: Job, seconds: float) -> None:
    """The machine sleeps: all processes of the job, its agent first, since it must not see the others stand still."""
    stop([run.pid, *descendants(run.pid)], seconds)


def trace(pid: int, seconds: float) -> None:
    """A debugger attaches to the process, and leaves it after so long."""
    subprocess.run([sys.executable, "-c", _TRACE, str(pid), str(seconds)], check=True, timeout=seconds + 30)


@contextlib.contextmanager
def busy(processes: int = 8) -> Iterator[None]:
    """So many processes want a core all the time."""
    others = [subprocess.Popen([sys.executable, "-c", _BUSY]) for _ in range(processes)]
    try:
        yield
    finally:
        for other in others:
            other.kill()
            other.wait()
