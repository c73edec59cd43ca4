"""What the owner knows of one group: its processes, since when they should be dead, and what does not die.

It exists so that "the group is gone" has one meaning, with a bound: every member and every process a member left behind
has been reaped, or was sent SIGKILL `STUCK_S` ago and is still in the kernel's hands, where it runs no code any more.
It signals nobody; standard library only, since the owner runs without site-packages.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterable
from typing import Any

from elasticd_agent.workers.launcher.reaping import CLEANER_GRACE_S, kernel_state

STORE_RANK = -1
"""The local rank under which the round's store process is known."""
KILL_DEADLINE_S = 5.0
"""How long after SIGKILL a process is waited for. A worker that unpins and unmaps hundreds of GB takes a second or two;
one that waits for a dead NFS server or a broken driver (state D) may never end, and the others need not wait for it."""
LEFTOVER_GRACE_S = 5.0
"""What a successful script left running may take to end by itself, once it was sent SIGTERM."""


class OwnedGroup:
    """The workers of one group and, where the round's store is hosted, the store: parked, then running, then gone."""

    def __init__(self, name: int, channels: dict[int, socket.socket]) -> None:
        self.name = name
        self.channels = channels  # local rank -> our end; the store's stays open: its end of file ends the store
        self.port = 0  # the store's, once it listens
        self.since = time.monotonic()
        self.alive: dict[int, int] = {}  # pid -> local rank
        self.ranks: dict[int, int] = {}  # the same, of those who have ended, too
        self.running = False
        self.keeps_store = False  # until told otherwise, once all has ended well: other nodes' workers may need it
        self.gone = False  # but for the store that it keeps
        self.failed = False
        self.killed_at: float | None = None
        self.last_exit_at = 0.0  # when a member ended last
        self.leftovers_since: float | None = None

    def workers(self) -> list[int]:
        return [pid for pid, rank in self.alive.items() if rank != STORE_RANK]

    def ending(self) -> bool:
        """Its end is near: every worker has ended, or should have."""
        return self.running and not self.gone and (self.killed_at is not None or not self.workers())

    def overdue(self, now: float) -> bool:
        """Whoever of its members is still there does not die."""
        return self.killed_at is not None and now > self.killed_at + KILL_DEADLINE_S

    def leftovers_dead_by(self) -> float:
        """What the workers left behind, the last of them when it ended, has been sent SIGKILL, and time to obey."""
        assert self.leftovers_since is not None
        grace_s = CLEANER_GRACE_S if self.failed else LEFTOVER_GRACE_S
        return max(self.leftovers_since, self.last_exit_at) + grace_s + KILL_DEADLINE_S

    def describe_unkillable(self, pids: Iterable[int]) -> list[dict[str, Any]]:
        """What is known of members and leftovers that do not die. A leftover is its worker's by its session."""
        return [{"pid": pid, "local_rank": self.rank_of(pid), **kernel_state(pid)} for pid in pids]

    def rank_of(self, pid: int) -> int | None:
        try:
            return self.ranks.get(pid, self.ranks.get(os.getsid(pid)))
        except OSError:
            return None
