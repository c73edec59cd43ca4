"""Processes as /proc shows them: the state of one, and which process belongs to which tree.

Only files that the kernel answers at once are read, also for a stuck process: never cmdline, environ, maps or another
file that waits for the process's memory lock. A process that ends meanwhile is no error.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

TICK_S = 1 / os.sysconf("SC_CLK_TCK")
_MAX_READ_BYTES = 4096
"""A stat line is below 400 bytes, an io file below 200."""
_FLAGS, _PF_EXITING = 6, 0x4
"""The flags' index behind the name in a stat line, and the flag of a thread that exits (linux/sched.h)."""


@dataclass(frozen=True, slots=True)
class Stat:
    """One process. `cpu_s` includes reaped children; `start_ticks` count from boot."""

    pid: int
    comm: str
    state: str
    parent: int
    session: int
    cpu_s: float
    threads: int
    start_ticks: int


def parse_stat(line: bytes) -> Stat:
    """/proc/PID/stat, see proc(5). The name may contain anything, a closing bracket too. Raises ValueError."""
    opened, closed = line.find(b"("), line.rfind(b")")
    fields = line[closed + 1 :].split()
    if opened < 0 or closed < opened or len(fields) < 20:
        raise ValueError(f"not a line of /proc/PID/stat: {line[:80]!r}")
    ticks = int(fields[11]) + int(fields[12]) + int(fields[13]) + int(fields[14])
    comm = line[opened + 1 : closed].decode("utf-8", "replace")
    state = chr(fields[0][0])
    threads, started = int(fields[17]), int(fields[19])
    return Stat(int(line[:opened]), comm, state, int(fields[1]), int(fields[3]), ticks * TICK_S, threads, started)


def state(pid: int) -> str:
    """The state letter ("R", "S", "D", "T" stopped, "t" traced, "Z", …); "" if the process has ended. 6 µs."""
    process = stat(pid)
    return process.state if process is not None else ""


def state_or_exiting(pid: int) -> str:
    """The state letter, but "X" for a process that is ending: its main thread becomes a zombie first, while another one
    may free a driver's memory for seconds. The kernel may write its core for longer, with all threads stopped."""
    letter = state(pid)
    ending = (letter == "Z" and not _has_live_thread(pid)) or (
        letter and b"\nCoreDumping:\t1" in read(f"/proc/{pid}/status")
    )
    return "X" if ending else letter


def _has_live_thread(pid: int) -> bool:
    for tid in tids(pid):
        fields = read(f"/proc/{pid}/task/{tid}/stat").rpartition(b")")[2].split()
        if len(fields) > _FLAGS and fields[0] not in (b"Z", b"X") and not int(fields[_FLAGS]) & _PF_EXITING:
            return True
    return False


def tids(pid: int) -> list[int]:
    """The process's threads, the main one first."""
    try:
        return sorted(int(tid) for tid in os.listdir(f"/proc/{pid}/task"))
    except OSError:
        return []


def fd_targets(pid: int, most: int | None = None) -> dict[str, str]:
    """The targets of its first `most` descriptors, by number. The links are read, never followed."""
    targets = {}
    try:
        numbers = sorted(os.listdir(f"/proc/{pid}/fd"), key=int)
    except OSError:
        return {}
    for number in numbers[:most]:
        if target := fd_target(pid, number):
            targets[number] = target
    return targets


def fd_target(pid: int, number: int | str) -> str:
    """The target of one descriptor; "" if it has been closed."""
    try:
        return os.readlink(f"/proc/{pid}/fd/{number}")
    except OSError:
        return ""


def socket_inodes(pids: Iterable[int]) -> set[int]:
    """The inodes of all sockets that these processes have open."""
    targets = (target for pid in pids for target in fd_targets(pid).values())
    return {int(target[8:-1]) for target in targets if target.startswith("socket:[")}


def stat(pid: int) -> Stat | None:
    """The process; None if it has ended."""
    line = read(f"/proc/{pid}/stat")
    try:
        return parse_stat(line)
    except ValueError:
        return None


def all_pids() -> set[int]:
    """The ids of all processes; none where no file descriptor is left to read /proc with."""
    try:
        return {int(name) for name in os.listdir("/proc") if name.isdigit()}
    except OSError:
        return set()


def scan(pids: Iterable[int] | None = None) -> dict[int, Stat]:
    """Every process, or those of `pids`. 6 µs each."""
    processes = map(stat, all_pids() if pids is None else pids)
    return {process.pid: process for process in processes if process is not None}


def trees(roots: Iterable[int], processes: Iterable[Stat]) -> dict[int, tuple[int, ...]]:
    """The tree of each root: all of its descendants and itself, in order of discovery. Pure.

    A process whose parent has ended has another parent, but stays in its session: a root that leads a session, as
    workers do, owns all of it. A root within another's tree belongs to both.
    """
    below: dict[int, list[int]] = {}
    led: dict[int, list[int]] = {}
    there: Mapping[int, Stat] = {process.pid: process for process in processes}
    for process in there.values():
        below.setdefault(process.parent, []).append(process.pid)
        led.setdefault(process.session, []).append(process.pid)
    by_root = {}
    for root in roots:
        if root in there:
            members: dict[int, None] = {}
            following = deque([root, *led.get(root, ())])
            while following:
                member = following.popleft()
                if member not in members:
                    members[member] = None
                    following += below.get(member, ())
            by_root[root] = tuple(members)
    return by_root


def read(path: str, most: int = _MAX_READ_BYTES) -> bytes:
    """The file's first `most` bytes; b"" if it does not exist, is not readable, or its process has just ended."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return b""
    try:
        return os.read(fd, most)
    except OSError:
        return b""
    finally:
        os.close(fd)
