"""What lets others see where a worker stands, while it can still be seen: set up before the script runs.

It exists for the evidence that is taken of a hung worker. Where Yama restricts ptrace to a process' own descendants,
the worker lets the agent and what the agent starts look into it. For when nobody can, python's faulthandler writes the
stacks of all threads into a file on a signal that scripts do not use. Nothing here runs unless somebody asks, and
nothing here may fail the script: a limit or a missing file leaves the worker without a second source, and that is all.
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
"""Numbers are given out from below, and a script that closes what it inherited counts up to the usual limit of 1024."""


def allow(tracer: int) -> None:
    """Let `tracer` and its descendants trace this process, and those it forks, a DataLoader's workers for instance.

    Without Yama prctl answers EINVAL, and there is no need for it.
    """
    libc = ctypes.CDLL(None)

    def permit() -> None:
        libc.prctl(PR_SET_PTRACER, ctypes.c_ulong(tracer), 0, 0, 0)

    permit()
    os.register_at_fork(after_in_child=permit)


def write_on(signum: int, path: str) -> None:
    """On `signum` append the stacks of all threads to `path`. The handler is C and needs no GIL."""
    with contextlib.suppress(OSError, RuntimeError):
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
            lowest = HIGH_FD if limit > HIGH_FD or limit == resource.RLIM_INFINITY else max(0, limit - 1)
            faulthandler.register(signum, fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, lowest), all_threads=True)
        finally:
            os.close(fd)
