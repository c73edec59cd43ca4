"""Stragglers: ranks that the others persistently wait for, and by how much they are slower. None is ended for it.

In data-parallel training all ranks are as slow as the slowest. Each rank's heartbeat thread counts its ticks and those
in which the rank waits for others; the rest is the rank's own work. Each node's record carries the counts of its last
minute, so that all nodes are compared. Ranks whose work is on a device look alike here: their hosts all wait.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from statistics import median

from elasticd_agent.hangs.observer import Observation
from elasticd_agent.model.job import Policy

MIN_TICKS = 100
"""Ten seconds. In less, chance alone makes some rank look half again as slow."""
WINDOW_S = 60.0
"""Long enough for chance to level out, and rare enough for a node's record to be written."""

MIN_SHARE, MIN_EXCESS_S = 0.1, 3.0
"""A straggler works at least this share of a window, and this much longer than its peers: where all ranks work little,
small differences are large factors."""
TICK_S = 0.1
"""The period of the heartbeat thread."""
CONSECUTIVE_WINDOWS = 2
"""One slow minute may be an evaluation, or another program on that machine."""

WaitCounts = tuple[tuple[int, int, int], ...]
"""(rank, ticks, ticks in which it waited) of each rank."""


@dataclass(slots=True)
class WaitCounter:
    """Counts of one group, window by window."""

    _window_began_s: float | None = None
    _counts_at_begin: dict[int, tuple[int, int]] = field(default_factory=dict)

    def group_started(self) -> None:
        """A new group starts."""
        self._window_began_s = None

    def update(self, seen: Observation) -> WaitCounts | None:
        """The counts of a window that has just ended, else None. A window begins after the group's first step."""
        if seen.first_step_at is None:
            return None
        began_s, before = self._window_began_s, self._counts_at_begin
        if began_s is not None and seen.observed_s < began_s + WINDOW_S:
            return None
        beats = zip(seen.ranks, seen.heartbeats, strict=True)
        now = {rank.rank: (beat.alive_ticks, beat.wait_ticks) for rank, beat in beats}
        self._window_began_s = seen.observed_s
        self._counts_at_begin = now
        if began_s is None:
            return None
        return tuple((rank, now[rank][0] - before[rank][0], now[rank][1] - before[rank][1]) for rank in sorted(now))


def find_stragglers(counts: Iterable[tuple[int, int, int]], policy: Policy) -> tuple[tuple[int, float], ...]:
    """(rank, factor), the slowest first: ranks whose own work takes more than `slow_factor` times that of their peers.

    A step takes all ranks the same time, so the parts of it that are their own work can be compared. The peers' is
    their median, so that of three ranks two stragglers are found.
    """
    counts = tuple(counts)
    ticks = {rank: number for rank, number, _ in counts}
    work = {
        rank: max(all_ticks - waiting, 1) / all_ticks for rank, all_ticks, waiting in counts if all_ticks >= MIN_TICKS
    }
    stragglers = []
    for rank, share in work.items():
        peers = [other for peer, other in work.items() if peer != rank]
        if not peers or share < MIN_SHARE or (share - median(peers)) * TICK_S * ticks[rank] < MIN_EXCESS_S:
            continue
        if (factor := share / median(peers)) > policy.slow_factor:
            stragglers.append((rank, factor))
    return tuple(sorted(stragglers, key=lambda one: (-one[1], one[0])))


@dataclass(slots=True)
class PersistentStragglers:
    """The stragglers of several windows in a row. Nodes report their windows at different times."""

    policy: Policy
    _last_windows: dict[int, tuple[int, int, int]] = field(default_factory=dict)
    _slow_windows: dict[int, int] = field(default_factory=dict)

    def update(self, counts: WaitCounts) -> tuple[tuple[int, float], ...]:
        """(rank, factor) by the newest window of every rank."""
        slow = find_stragglers(counts, self.policy)
        windows = {window[0]: window for window in counts}
        for rank in dict(slow):
            self._slow_windows[rank] = self._slow_windows.get(rank, 0) + (windows[rank] != self._last_windows.get(rank))
        self._slow_windows = {rank: number for rank, number in self._slow_windows.items() if rank in dict(slow)}
        self._last_windows = windows
        return tuple((rank, factor) for rank, factor in slow if self._slow_windows[rank] >= CONSECUTIVE_WINDOWS)
