"""Processor time, waiting time and I/O of whole process trees, from /proc.

Only files that the kernel answers at once are read (procfs.py).

The question behind all figures is whether a tree of processes works. Processor time alone does not answer it: threads
of NCCL and CUDA spin while a device hangs, so theirs is taken out; a tree on a crowded machine works without getting a
turn, so the time for which it waited for one is counted; and a loader that reads from a cache or a socket uses no disk,
so bytes are counted where a system call moves them. Sockets are followed one by one, since a request may open one, use
it and close it between two readings.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from elasticd_agent.system.network import sockets
from elasticd_agent.system.processes import cgroups, procfs

MIN_WORKING_SHARE = 0.005
"""A starved thread runs for a larger share of the time, even under a quota of 1 %. The heartbeat thread, which wakes
ten times a second, runs a tenth of it and waits for a core each time."""
DEVICE_THREAD_NAMES = re.compile(rb"NCCL |pt_nccl_|cuda-EvtHandlr|cuda\d+$")
"""The names of threads that spin or poll for as long as their device is busy or hung: NCCL's proxy ("NCCL Progress 0"),
torch's watchdog, CUDA's ("cuda-EvtHandlr", "cuda00001400006"). They do no work of the script, and wait for none. A
thread that the script calls "cuda_prefetch" is its own: Python 3.14 gives its threads' names to the kernel."""


@dataclass(frozen=True, slots=True)
class TreeUsage:
    """Use of a whole process tree so far, except by device threads. Bytes count when a system call moves them, and
    again when a disk does, so that both cached reads and reads through a memory map are counted; those of TCP sockets
    count as well.

    `wait_s` is the time in which working threads could run and got no processor, because of others or of a CPU quota.
    """

    cpu_s: float
    io_bytes: int
    wait_s: float | None = 0.0  #: none: the kernel does not say
    is_runnable: bool = False  #: some main thread can run at this moment
    is_traced: bool = False  #: a debugger is attached to the first process
    throttled_s: float = 0.0  #: seconds for which a CPU quota has kept its control groups from running
    tcp_queued_bytes: int | None = None
    """Bytes in the queues of its TCP sockets, unsent or unread. None: no socket of it is known."""
    tcp_moved_bytes: int = 0
    """Bytes that its TCP sockets have sent and received since the first reading, those closed meanwhile included, but
    not those of the round's store: ranks and torch's watchdogs talk to it all the time."""
    pids: frozenset[int] = frozenset()


def parse_io_bytes(text: bytes) -> int:
    """/proc/PID/io -> bytes read and written, through system calls and by disks."""
    counted = (b"rchar", b"wchar", b"read_bytes", b"write_bytes")
    fields = (line.partition(b":") for line in text.splitlines())
    return sum(int(value) for name, _, value in fields if name in counted)


class UsageReader:
    """Reads the use of the same process trees again and again; processes that belong to none are read once.

    Reading costs 6 µs a process, and a machine with many cores has thousands. A process that is neither below another
    one nor in its session never gets there later. A process id that is reused between two calls may be missed.
    """

    def __init__(self) -> None:
        self._read_at = 0.0
        self._reset(())

    def _reset(self, pids: tuple[int, ...]) -> None:
        self._pids = pids
        self._unrelated: set[int] = set()
        self._threads: dict[int, tuple[float, float]] = {}
        self._waited: dict[int, float] = {}
        self._polled: dict[int, float] = {}
        self._sockets: dict[int, dict[int, int]] = {}
        self._moved: dict[int, int] = {}

    def read(self, pids: Sequence[int], store_port: int = 0) -> dict[int, TreeUsage]:
        """Use by process; ended processes are left out. `store_port` is that of the round's store."""
        if tuple(pids) != self._pids:
            self._reset(tuple(pids))
        everyone = procfs.all_pids()
        known = procfs.scan(everyone - self._unrelated)
        by_root = procfs.trees(pids, known.values())
        ours = {member for members in by_root.values() for member in members}
        self._unrelated = (self._unrelated & everyone) | (known.keys() - ours)
        self._add_thread_times(by_root)
        all_sockets = sockets.tcp_bytes_by_inode()
        usage = {}
        for pid, members in by_root.items():
            tcp = {inode: all_sockets[inode] for inode in procfs.socket_inodes(members) if inode in all_sockets}
            moved = {inode: sock.moved for inode, sock in tcp.items() if sock.peer_port != (store_port or -1)}
            self._add_moved_bytes(pid, moved)
            usage[pid] = TreeUsage(
                sum(known[member].cpu_s for member in members) - self._polled.get(pid, 0.0),
                sum(parse_io_bytes(procfs.read(f"/proc/{member}/io")) for member in members) + self._moved[pid],
                self._waited.get(pid),
                any(known[member].state == "R" for member in members),
                _tracer_pid(pid) != 0,
                cgroups.throttled_s(members),
                sum(sock.queued for sock in tcp.values()) if tcp else None,
                self._moved[pid],
                frozenset(members),
            )
        return usage

    def _add_moved_bytes(self, root: int, by_inode: dict[int, int]) -> None:
        """Add up socket by socket: a request may have a connection of its own, which is closed after it."""
        if root in self._sockets:
            before = self._sockets[root]
            self._moved[root] += sum(max(0, moved - before.get(inode, 0)) for inode, moved in by_inode.items())
        else:
            self._moved[root] = 0
        self._sockets[root] = by_inode

    def _add_thread_times(self, by_root: Mapping[int, tuple[int, ...]]) -> None:
        """Add up how long working threads have waited for a processor, and device threads run, since the last call."""
        now, threads = time.monotonic(), {}
        passed_s, self._read_at = now - self._read_at, now
        for root, members in by_root.items():
            ours = {tid: (member, times) for member in members for tid, times in schedstat(member).items()}
            threads.update({tid: times for tid, (_, times) in ours.items()})
            if not ours:
                continue  # the kernel does not say
            self._waited.setdefault(root, 0.0)
            for tid, (member, (ran, waited)) in ours.items():
                ran_before, waited_before = self._threads.get(tid, (ran, waited))
                if ran - ran_before <= MIN_WORKING_SHARE * passed_s:
                    continue
                if _is_device_thread(member, tid):
                    self._polled[root] = self._polled.get(root, 0.0) + ran - ran_before
                else:
                    self._waited[root] += waited - waited_before
        self._threads = threads


def _is_device_thread(pid: int, tid: int) -> bool:
    """The name tells, unless it is that of the process: a thread without a name of its own inherits it."""
    name = procfs.read(f"/proc/{pid}/task/{tid}/comm")
    return DEVICE_THREAD_NAMES.match(name) is not None and name != procfs.read(f"/proc/{pid}/comm")


def schedstat(pid: int) -> dict[int, tuple[float, float]]:
    """The seconds that each thread ran, and those that it was able to run and did not.

    /proc/PID/task/TID/schedstat is run, wait (ns), slices. {} without that file, and where the kernel does not count:
    then all are 0 of a thread that has run.
    """
    times: dict[int, tuple[float, float]] = {}
    for tid in procfs.tids(pid):
        fields = procfs.read(f"/proc/{pid}/task/{tid}/schedstat").split()
        if len(fields) == 3 and fields[2] != b"0":
            times[tid] = int(fields[0]) / 1e9, int(fields[1]) / 1e9
    return times


def _tracer_pid(pid: int) -> int:
    """The process that traces it (ptrace), 0 for none."""
    _, _, rest = procfs.read(f"/proc/{pid}/status").partition(b"TracerPid:")
    value = rest.split(maxsplit=1)[:1]
    return int(value[0]) if value and value[0].isdigit() else 0
