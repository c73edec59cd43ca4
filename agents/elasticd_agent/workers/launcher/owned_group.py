"""The owner's state of one group: its processes, the deadlines of their end, and which of them survive SIGKILL.

"The group has ended" has one meaning, and a bound: every member and every process that a member left behind has been
reaped, or was sent SIGKILL `kill_deadline_s` ago and still hangs in the kernel, where it runs no code any more. Only
the standard library is imported: the owner runs without site-packages.
"""

from __future__ import annotations

import contextlib
import math
import os
import socket
import time
from collections.abc import Iterable

from elasticd import channel
from elasticd_agent.system.processes.process import LEFTOVER_GRACE_S, kernel_state, session_of
from elasticd_agent.workers.launcher.messages import STORE_RANK, Signal, UnkillableProcess
from elasticd_agent.workers.launcher.writer_process import MAX_LOOK_GAP_S, SaveAtFault

KILL_DEADLINE_S = 5.0
"""A worker that unpins and unmaps hundreds of GB takes a second or two to die. One that waits for a dead NFS server or
a broken driver (state D) may never end, and the others need not wait for it."""
DEVICE_KILL_DEADLINE_S = 30.0
"""The same where a worker has an accelerator open: tearing down its contexts took up to 15 s elsewhere, and a slot that
is given up costs the job a GPU."""
DEVICE_FILES = ("/dev/nvidia", "/dev/kfd", "/dev/dri")
NO_FAULT_AFTER_S = 5.0
"""Longer than the agent waits for the root cause of a rank's error: ROOT_CAUSE_EXIT_WAIT_S in job/state_machine.py."""


class OwnedGroup:
    """The workers of one group and, where it is hosted here, the round's store: parked, running, ended."""

    def __init__(self, name: int, channels: dict[int, socket.socket]) -> None:
        self.name = name
        self.channels = channels
        """Our ends by local rank. They stay open: end of file ends the store, and a worker that waits at its entry."""
        self.port = 0
        """The store's, once it listens."""
        self.since = time.monotonic()
        self.alive: dict[int, int] = {}
        """pid -> local rank."""
        self.ranks: dict[int, int] = {}
        """The same, with the members that have ended."""
        self.running = False
        self.held_releases: dict[int, channel.Message] = {}
        """The releases that workers of a running group still wait for, by local rank."""
        self.keeps_store = False
        """After a success the store stays until it is killed: other nodes' workers may need it."""
        self.ended = False
        """Except for the store that it keeps."""
        self.failed = False
        self.entered: set[int] = set()
        """Local ranks that can be asked to leave the round and keep their process."""
        self.end: Signal = Signal(name, 0)
        """The newest request for the group's end."""
        self.in_doubt: dict[int, float] = {}
        """When local ranks have said LostPeer, while no fault is known here."""
        self.unwinding: dict[int, int] = {}
        """pid -> local rank of those that were asked, and are not at their entry yet."""
        self.unwound_at = self.looked_at = 0.0
        self.kept: list[int] = []
        """Local ranks whose process waits at its entry: it is no member any more."""
        self.saving: SaveAtFault | None = None
        self.held_step = 0
        """The step of the state that workers hold in their processes in place of saving it, 0 for none."""
        self.is_held = False
        """One of them waits at its entry."""
        self.running_since = 0.0
        self.killed_at: float | None = None
        self.kill_deadline_s = KILL_DEADLINE_S
        self.last_exit_at = 0.0
        self.leftovers_since: float | None = None
        """When its workers had ended and left processes behind."""
        self.asked: set[int] = set()
        """Those that got SIGTERM."""
        self.left_behind: list[str] = []
        """The programs among them that nobody has asked to stop."""
        self.stopped = self.runs_programs = False
        """The workers got a signal to end; some of them are shells, which may end by it before their programs do."""

    def worker_pids(self) -> list[int]:
        return [pid for pid, rank in self.alive.items() if rank != STORE_RANK]

    def staying_pids(self) -> list[int]:
        """The pids of those that are to keep their process."""
        return [pid for pid, rank in self.alive.items() if rank in self.entered.intersection(self.end.keep)]

    def is_being_forked(self) -> bool:
        """Requested from the template, which has not forked it yet."""
        return not self.running and not self.alive

    def workers_ended_or_killed(self) -> bool:
        """Every worker has ended, or was killed."""
        return self.running and not self.ended and (self.killed_at is not None or not self.worker_pids())

    def is_late_at_entry(self, now: float) -> bool:
        """Some worker should be at its entry by now. A time in which this process does not run either is left out."""
        self.unwound_at += max(now - self.looked_at - MAX_LOOK_GAP_S, 0.0)
        self.looked_at = now
        return bool(self.unwinding) and now >= self.unwound_at + self.end.park_s

    def ranks_to_tell_no_fault(self, now: float) -> list[int]:
        """Local ranks that have lost a peer, although all workers here are within their training."""
        overdue = [rank for rank, at in self.in_doubt.items() if now >= at + NO_FAULT_AFTER_S]
        if overdue and not (
            set(self.ranks.values()) - {STORE_RANK} <= self.entered and all(map(is_not_exiting, self.worker_pids()))
        ):
            self.in_doubt.clear()  # the agent will say how the group ends
            return []
        return overdue

    def store_outlives_workers(self) -> bool:
        return bool(self.alive) and self.keeps_store and not self.failed

    def note_kill(self, now: float) -> None:
        """Called before SIGKILL: a process that exits shows no files any more."""
        self.killed_at = now
        if any(map(has_device_open, self.worker_pids())):
            self.kill_deadline_s = DEVICE_KILL_DEADLINE_S

    def awaits_member_deaths(self, now: float) -> bool:
        """False once every member that is left counts as unkillable."""
        return bool(self.unwinding) or self.killed_at is None or now <= self.killed_at + self.kill_deadline_s

    def awaits_leftover_deaths(self, now: float) -> bool:
        """False once all leftovers had their grace period, then SIGKILL, then `kill_deadline_s`."""
        if self.leftovers_since is None:
            return True
        grace_s = LEFTOVER_GRACE_S if self.failed else self.leftover_grace_s()
        return now <= max(self.leftovers_since, self.last_exit_at) + grace_s + self.kill_deadline_s

    def leftover_grace_s(self) -> float:
        """No bound for a shell's program: the agent's SIGKILL follows at the deadline of the stop."""
        return math.inf if self.runs_programs else LEFTOVER_GRACE_S

    def describe_unkillable(self, pids: Iterable[int]) -> list[UnkillableProcess]:
        ranks = {pid: self.ranks.get(pid, self.ranks.get(session_of(pid))) for pid in pids}
        return [UnkillableProcess(pid=pid, local_rank=rank, **kernel_state(pid)) for pid, rank in ranks.items()]


def is_not_exiting(pid: int) -> bool:
    """False for a process that ends: it loses its memory first, and closes devices last, which may take long."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/statm", errors="replace") as file:
        return file.read().split()[0] != "0"
    return False


def has_device_open(pid: int, devices: tuple[str, ...] = DEVICE_FILES) -> bool:
    directory = f"/proc/{pid}/fd"
    with contextlib.suppress(OSError):
        for fd in os.listdir(directory):
            with contextlib.suppress(OSError):
                if os.readlink(f"{directory}/{fd}").startswith(devices):
                    return True
    return False
