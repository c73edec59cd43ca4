"""How much of their time this node's ranks wait for others, window by window: what `slow` compares.

It exists so that the comparison can be made over all nodes: each node's record carries its last window, once a minute.
It counts what the workers' own threads have counted, reads no clock and judges nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from elasticd_agent.hangs.observer import Observation

WINDOW_S = 60.0
"""Long enough for chance to level out (slow.LEAST_PULSES is 10 s), and for a node's record to be written so often."""

WaitCounts = tuple[tuple[int, int, int], ...]
"""(rank, pulses, pulses in which it waited) of each rank."""


@dataclass(slots=True)
class WaitCounter:
    """One group's. Times are attentive seconds."""

    _window_began_s: float | None = None
    _window_began: dict[int, tuple[int, int]] = field(default_factory=dict)

    def begin(self) -> None:
        """A new group starts."""
        self._window_began_s = None

    def update(self, seen: Observation) -> WaitCounts | None:
        """The counts of a window that has just ended, else None. Nothing counts before the group's first step."""
        if seen.first_step_at is None:
            return None
        now = {
            rank.rank: (beat.alive_ticks, beat.wait_ticks)
            for rank, beat in zip(seen.ranks, seen.heartbeats, strict=True)
        }
        if self._window_began_s is not None and seen.observed_s < self._window_began_s + WINDOW_S:
            return None
        before, begun = self._window_began, self._window_began_s is not None
        self._window_began_s, self._window_began = seen.observed_s, now
        if not begun:
            return None
        return tuple((rank, now[rank][0] - before[rank][0], now[rank][1] - before[rank][1]) for rank in sorted(now))
