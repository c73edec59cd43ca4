"""Makes a worker's stacks readable during a hang; set up before the script runs.

Where Yama restricts ptrace to a process' own descendants, the worker permits the agent and its helpers. As a second
source Python's faulthandler writes the stacks of all threads into a file, on a signal that scripts do not use. Nothing
runs before it is requested, and no error here may fail the script.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import fcntl
import os
import resource

PR_SET_PTRACER = 0x59616D61  # "Yama"
HIGH_FD = 1000
"""Descriptors are assigned from below, and a script that closes inherited ones counts up to the usual limit of 1024."""


def allow_tracing_by(tracer: int) -> None:
    """Permit `tracer` and its descendants to trace this process and its forks, such as a DataLoader's workers. Without
    Yama prctl returns EINVAL, and nothing is needed."""
    libc = ctypes.CDLL(None)

    def permit() -> None:
        libc.prctl(PR_SET_PTRACER, ctypes.c_ulong(tracer), 0, 0, 0)

    permit()
    os.register_at_fork(after_in_child=permit)


def write_stacks_on_signal(signum: int, path: str) -> None:
    """Append the stacks of all threads to `path` on `signum`. The handler is C and needs no GIL."""
    with contextlib.suppress(OSError, RuntimeError):
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            faulthandler.register(signum, duplicate_to_high_fd(fd), all_threads=True)
        finally:
            os.close(fd)


def duplicate_to_high_fd(fd: int) -> int:
    """A copy of the descriptor that stays, with a number that no script gets or counts. Raises OSError."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    lowest = HIGH_FD if limit > HIGH_FD or limit == resource.RLIM_INFINITY else max(0, limit - 1)
    return fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, lowest)
