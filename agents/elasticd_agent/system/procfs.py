"""What /proc says of processes: the state of one, what whole trees have used, and who belongs to which tree.

It exists so that a rank that works can be told from one that waits, whatever children do its work. It reads only files
that the kernel answers at once, also for a process that is stuck: never cmdline, environ, maps or anything else that
waits for the process's memory lock. It judges nothing, and a process that ends meanwhile is no error.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

TICK_S = 1 / os.sysconf("SC_CLK_TCK")
_READ_LIMIT = 4096
"""A stat line is below 400 bytes, an io file below 200."""
_FLAGS, _PF_EXITING = 6, 0x4
"""Where a stat line has them, behind the name, and what says that the thread is on its way out (linux/sched.h)."""


@dataclass(frozen=True, slots=True)
class Usage:
    """Of a whole process tree so far: processor seconds, and bytes read and written.

    Bytes count when a system call moves them, and when a disk does: one that is read from a disk counts twice, so that
    both what a cache answers and what is read through a map are seen.
    """

    cpu_s: float
    io_bytes: int


@dataclass(frozen=True, slots=True)
class Stat:
    """One process. `cpu_s` has that of children which ended and were waited for; `started` is in ticks since boot."""

    pid: int
    comm: str
    state: str
    parent: int
    session: int
    cpu_s: float
    threads: int
    started: int


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


def parse_io(text: bytes) -> int:
    """/proc/PID/io -> bytes read and written, through system calls and by disks."""
    counted = (b"rchar", b"wchar", b"read_bytes", b"write_bytes")
    fields = (line.partition(b":") for line in text.splitlines())
    return sum(int(value) for name, _, value in fields if name in counted)


def state(pid: int) -> str:
    """The state letter of the process ("R", "S", "D", "T" stopped, "t" traced, "Z", …); "" if it is gone. 6 µs."""
    found = stat(pid)
    return found.state if found is not None else ""


def condition(pid: int) -> str:
    """As `state`, but "X" of one that is ending: of all threads the main one becomes a zombie first, and the last one
    may have a driver's memory to give back, for seconds."""
    found = state(pid)
    return "X" if found == "Z" and not _has_live_thread(pid) else found


def _has_live_thread(pid: int) -> bool:
    """A thread of the process is neither dead nor dying."""
    try:
        tids = os.listdir(f"/proc/{pid}/task")
    except OSError:
        return False
    for tid in tids:
        fields = read(f"/proc/{pid}/task/{tid}/stat").rpartition(b")")[2].split()
        if len(fields) > _FLAGS and fields[0] not in (b"Z", b"X") and not int(fields[_FLAGS]) & _PF_EXITING:
            return True
    return False


def stat(pid: int) -> Stat | None:
    """The process; None if it is gone."""
    line = read(f"/proc/{pid}/stat")
    try:
        return parse_stat(line)
    except ValueError:
        return None


def usage(pids: Sequence[int]) -> dict[int, Usage]:
    """What the trees of these processes have used so far; those that are gone are left out."""
    return UsageReader().read(pids)


class UsageReader:
    """The same again and again, of the same processes: who belongs to nobody of them is looked at once.

    A look costs 6 µs a process, a machine with many cores has thousands, most of them the kernel's, and a group whose
    steps take seconds is looked at all the time. It relies on this: who is not below a process, nor in its session,
    never gets there later. A process id that is given to another process between two calls may be missed.
    """

    def __init__(self) -> None:
        self._pids: tuple[int, ...] = ()
        self._unrelated: set[int] = set()

    def read(self, pids: Sequence[int]) -> dict[int, Usage]:
        """What the trees of these processes have used so far; those that are gone are left out."""
        if tuple(pids) != self._pids:
            self._pids, self._unrelated = tuple(pids), set()
        everyone = all_pids()
        known = scan(everyone - self._unrelated)
        by_root = trees(pids, known.values())
        ours = {member for members in by_root.values() for member in members}
        self._unrelated = (self._unrelated & everyone) | (known.keys() - ours)
        return {
            pid: Usage(
                sum(known[member].cpu_s for member in members),
                sum(parse_io(read(f"/proc/{member}/io")) for member in members),
            )
            for pid, members in by_root.items()
        }


def all_pids() -> set[int]:
    """The ids of all processes; none where there is no file descriptor left to look with."""
    try:
        return {int(name) for name in os.listdir("/proc") if name.isdigit()}
    except OSError:
        return set()


def scan(pids: Iterable[int] | None = None) -> dict[int, Stat]:
    """Every process there is, or those of `pids`. 6 µs each."""
    found = map(stat, all_pids() if pids is None else pids)
    return {one.pid: one for one in found if one is not None}


def trees(roots: Iterable[int], processes: Iterable[Stat]) -> dict[int, tuple[int, ...]]:
    """By root all its descendants and itself, in order of discovery. Pure.

    A process whose parent has ended is somebody else's child, but stays in its session: where a root leads a session,
    as workers do, everyone in it counts as its own. A root within another's tree belongs to both.
    """
    below: dict[int, list[int]] = {}
    led: dict[int, list[int]] = {}
    there: Mapping[int, Stat] = {process.pid: process for process in processes}
    for process in there.values():
        below.setdefault(process.parent, []).append(process.pid)
        led.setdefault(process.session, []).append(process.pid)
    found = {}
    for root in roots:
        if root in there:
            members: dict[int, None] = {}
            following = deque([root, *led.get(root, ())])
            while following:
                member = following.popleft()
                if member not in members:
                    members[member] = None
                    following += below.get(member, ())
            found[root] = tuple(members)
    return found


def read(path: str, most: int = _READ_LIMIT) -> bytes:
    """The file's first `most` bytes; b"" if it is not there, not ours to read, or its process has just ended."""
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
