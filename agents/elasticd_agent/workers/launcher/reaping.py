"""How processes are ended and their remains found: the owner's tools, and the agent's should the owner be killed.

Standard library only, since the owner runs without site-packages. It never waits without a bound, and never signals a
process that is not a child of the caller.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Collection

CLEANER_GRACE_S = 1.0
CLEANERS = (b"multiprocessing.resource_tracker", b"torch_shm_manager")
"""Processes that give back their parents' shared memory once these are dead, in milliseconds, and then end; killed
together with them they would leave it behind."""


def end_children(within_s: float, except_pids: Collection[int] = ()) -> None:
    """Kill and reap our children and theirs, each of whose deaths makes more of them ours. Bounded.

    `but_for`: children that are known not to die of it, and are not waited for.
    """
    started = now = time.monotonic()
    while now < started + within_s:
        for pid in children():
            if now > started + CLEANER_GRACE_S or not is_cleaner(pid):
                signal_child(pid, signal.SIGKILL)
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        if not set(children()).difference(
            except_pids
        ):  # what another thread of ours has started is neither an orphan nor ours to wait for
            return
        time.sleep(0.002)
        now = time.monotonic()


def children() -> list[int]:
    """Pids of our direct children, zombies among them."""
    try:
        with open(f"/proc/self/task/{os.getpid()}/children") as listing:
            return [int(pid) for pid in listing.read().split()]
    except OSError:  # a kernel without CONFIG_PROC_CHILDREN
        return [pid for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if parent_of(pid) == os.getpid()]


def parent_of(pid: int) -> int:
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return int(stat.read().rpartition(")")[2].split()[1])
    except (OSError, IndexError):
        return 0


def kernel_state(pid: int) -> dict[str, str]:
    """`state` and `wchan` of a process that does not die, "" where they cannot be known.

    Only what the kernel tells without the process's own memory: reading its command line could wait for the very lock
    that it holds.
    """
    wchan = _read_proc(pid, "wchan").strip()
    return {"state": _read_proc(pid, "stat").rpartition(")")[2].strip()[:1], "wchan": "" if wchan == "0" else wchan}


def _read_proc(pid: int, name: str) -> str:
    try:
        with open(f"/proc/{pid}/{name}") as file:
            return file.read()
    except OSError:
        return ""


def is_cleaner(pid: int) -> bool:
    if kernel_state(pid)["state"] == "D":
        return False
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as cmdline:
            words = cmdline.read()
        return any(cleaner in words for cleaner in CLEANERS)
    except OSError:
        return False


def signal_child(pid: int, signum: int) -> None:
    """Signal a child that is not reaped yet, so that the pid is still its own, and once only.

    The process group it leads hears of everything but SIGKILL, as it would of a terminal's signals: who is left of a
    killed process is our child then, and gets its turn.
    """
    try:
        if signum == signal.SIGKILL or os.getpgid(pid) != pid:
            os.kill(pid, signum)
        else:
            os.killpg(pid, signum)
    except (ProcessLookupError, PermissionError):
        pass


def describe_status(status: int) -> str:
    if os.WIFSIGNALED(status):
        return f"was killed by {signal_name(os.WTERMSIG(status))}"
    return f"exited with code {os.WEXITSTATUS(status)}"


def signal_name(number: int) -> str:
    """Goes after "by": "SIGKILL"; most real-time signals have no name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
