"""Pure: which ranks the others persistently wait for, and by how much they are slower. Never a reason to end anything.

It exists because a rank that is half as fast as its peers costs as much as one that is missing, and nobody sees it: in
data-parallel training all ranks are as slow as the slowest. Each rank's background thread counts its pulses (`alive`)
and those of them that saw the rank wait for others (`waited`), so what is left is its own work.
Ranks whose work is on a device look alike to it: there the host waits in all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from elasticd_agent.model.job import Policy

MIN_TICKS = 100
"""Ten seconds. Of fewer, chance alone makes some rank look half again as slow."""


@dataclass(frozen=True, slots=True)
class RankWaitCounts:
    """How often a rank's background thread counted in some window, and how often it found the rank waiting."""

    rank: int
    ticks: int
    waiting_ticks: int

    @property
    def working_share(self) -> float:
        """The part of the time it did not wait; a pulse's worth at least."""
        return max(self.ticks - self.waiting_ticks, 1) / self.ticks


def find_stragglers(ranks: Sequence[RankWaitCounts], policy: Policy) -> tuple[tuple[int, float], ...]:
    """(rank, factor), the slowest first: whose own work takes more than `slow_factor` times what its peers' takes.

    Steps take all ranks the same time, so that the parts of it that are their own work can be compared. The peers' is
    their median: of three ranks, a second slow one is found, too.
    """
    counted = [rank for rank in ranks if rank.ticks >= MIN_TICKS]
    found = []
    for rank in counted:
        peers = [peer.working_share for peer in counted if peer.rank != rank.rank]
        if peers and (factor := rank.working_share / median(peers)) > policy.slow_factor:
            found.append((rank.rank, factor))
    return tuple(sorted(found, key=lambda one: (-one[1], one[0])))
