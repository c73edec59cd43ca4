"""Process trees, their memory, and their end: what the benchmark must know without asking the launcher it measures.

It reads /proc only and never touches a process that is not a descendant of this one.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time
from collections import defaultdict
from pathlib import Path

_PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h


def adopt_orphans() -> None:
    """Become the parent of every orphan below: a daemonised or abandoned process cannot leave our tree."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER) was refused")


def descendants(root: int) -> list[int]:
    """Every process below root, parents before children."""
    children: dict[int, list[int]] = defaultdict(list)
    with os.scandir("/proc") as entries:
        for entry in entries:
            if entry.name.isdigit():
                with contextlib.suppress(OSError):
                    stat = Path(entry.path, "stat").read_bytes()
                    children[int(stat.rpartition(b")")[2].split()[1])].append(int(entry.name))
    found: list[int] = []
    waiting = [root]
    while waiting:
        below = children[waiting.pop(0)]
        found += below
        waiting += below
    return found


def pss_megabytes(pid: int) -> float:
    """Proportional set size in MB (10^6 bytes), which splits shared pages among their processes; 0 for an ended one."""
    try:
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024 / 1e6
    except OSError:
        pass
    return 0.0


def command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return ""


def end_all(deadline_s: float = 10.0) -> list[int]:
    """SIGKILL everything below this process and reap it; returns the pids that did not end before the deadline."""
    deadline = time.monotonic() + deadline_s
    while True:
        for pid in descendants(os.getpid()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG) != (0, 0):
                pass
        left = descendants(os.getpid())
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(0.01)


def end_at_once(signum: int, _: object = None) -> None:
    """A handler for SIGTERM: threads that wait for jobs are not waited for."""
    end_all()
    os._exit(128 + signum)
