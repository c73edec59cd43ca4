"""The keeper: root's process above the runner of another user's job, which that user can neither signal nor inspect.

The lock that runner and owner share shows where the job runs, but its user can unlock it, or kill both at once and keep
a GPU with a worker that outlives them. The keeper has a lock of its own. It is a child subreaper, so every process of
the job becomes its child in the end; it ends, and with it the lock, when none is left.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterable

from elasticd_agent.system.processes import procfs
from elasticd_agent.system.processes.process import (
    IGNORED_SIGNALS,
    PR_SET_CHILD_SUBREAPER,
    PR_SET_NAME,
    children,
    end_children,
    prctl,
    reap_children,
)
from elasticd_daemon.keys import KEEPER_COMM

OWNER_COMM = b"elasticd-owner"
OWNER_GRACE_S = 25.0
"""The time for the owner of a killed runner to end the workers and to remove their shared memory."""
KILL_RETRY_S = 1.0
"""Between attempts to kill processes that survive SIGKILL."""


def fork_runner(keeper_lock: int, runner_fds: Iterable[int]) -> int:
    """Fork: return in the child, which becomes the runner, with the keeper's pid. The keeper itself never returns.

    `keeper_lock` is closed in the child, `runner_fds` in the keeper.
    """
    keeper = os.getpid()
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    runner = os.fork()
    if not runner:
        os.close(keeper_lock)
        os.setsid()
        return keeper
    code = 1
    try:
        prctl(PR_SET_NAME, KEEPER_COMM)
        for signum in IGNORED_SIGNALS:
            signal.signal(signum, signal.SIG_IGN)
        for fd in runner_fds:
            os.close(fd)
        nowhere = os.open(os.devnull, os.O_WRONLY)
        for stream in (1, 2):
            os.dup2(nowhere, stream)
        code = _wait_and_kill_remnants(runner)
    finally:
        os._exit(code)


def _wait_and_kill_remnants(runner: int) -> int:
    """Until no process of the job is left. The runner's exit code."""
    pid, status = 0, 0
    while pid != runner:
        pid, status = os.waitpid(-1, 0)
    until = time.monotonic() + OWNER_GRACE_S
    while time.monotonic() < until and OWNER_COMM in [procfs.read(f"/proc/{pid}/comm").strip() for pid in children()]:
        reap_children()
        time.sleep(0.02)
    while children():
        end_children(KILL_RETRY_S)
        time.sleep(KILL_RETRY_S if children() else 0.0)
    return max(0, os.waitstatus_to_exitcode(status))
