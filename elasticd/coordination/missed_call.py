"""Proof that a rank cannot come to the session call in which this rank waits for it: an error in seconds, not a hang.

A late rank is never accused: silence proves nothing, nor does time. These do, each in the rank's own published status:
it has ended its session; it waits in another session call for a message that is not written, which this rank cannot
write before its own call ends; it waits in a collective of all ranks that it has issued, since the same step, and this
rank has not; it makes further steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

from elasticd.coordination.rank_status import MAX_RANKS_LISTED, RankStatus, StatusReader
from elasticd.errors import DecisionTimeout, ElasticdError, MissedCall

MIN_BLOCKED_S = 2.0
"""A status must show the same collective for this long: it is published once a second, and collectives end."""


@dataclass(frozen=True, slots=True)
class SessionWait:
    """A session call in which this rank waits for others."""

    number: int  #: each wait of this rank has a number of its own
    call: str  #: the call as the script writes it: "save()"
    key: str  #: the key that it waits for in the store; "*" stands for the rank that writes it
    ranks: tuple[int, ...] = ()
    """The first ranks that it waits for; empty: for all that have not come, which it does not know."""

    def for_ranks(self, missing: Iterable[int]) -> SessionWait:
        """The same wait, for these ranks."""
        return replace(self, ranks=tuple(missing)[:MAX_RANKS_LISTED])


class MissedCallDetector:
    """Looks for proof among the ranks for which `rank` waits in `call`. `mine` is its own status.

    `any_step`: ranks may make this call at different steps.
    """

    def __init__(
        self, call: str, rank: int, prefix: str, mine: Callable[[], RankStatus], any_step: bool = False
    ) -> None:
        self._any_step = any_step
        self._call = call
        self._rank = rank
        self._prefix = prefix
        self._mine = mine
        self._first: dict[int, RankStatus] = {}
        self._waits: dict[int, tuple[int, int]] = {}

    def find(
        self, store: Any, missing: Iterable[int], statuses: StatusReader, has_come: Callable[[int], bool]
    ) -> ElasticdError | None:
        """The error to raise; None while the missing ranks may still come. `has_come` reads the store again."""
        mine = self._mine()
        for rank in missing:
            number, status = statuses.last_with_number(rank)
            if status is None:
                continue
            why = _proof_of_exit(status) or self._proof_of_wait(store, rank, number, status)
            why = why or self._proof_of_collective(status, mine) or self._proof_of_further_step(rank, status, mine)
            if not why or has_come(rank):
                continue
            if status.failed:
                return DecisionTimeout(f"rank {rank} {why} before {self._call} at step {mine.step}")
            return MissedCall(
                f"rank {rank} has not called {self._call} at step {mine.step}; all ranks must. Rank {rank} {why}. Call "
                f"{self._call} on every rank, outside of conditions that differ between ranks "
                "(`if session.rank == 0:`, a clock)"
            )
        return None

    def _proof_of_wait(self, store: Any, rank: int, number: int, status: RankStatus) -> str:
        """Exact only if the key is missing between two statuses of one wait: a status may be older than the key."""
        for_this = status.wait and (not status.ranks or self._rank in status.ranks)
        if not for_this or store.check([self._prefix + status.key.replace("*", str(self._rank))]):
            self._waits.pop(rank, None)
            return ""
        before = self._waits.setdefault(rank, (status.wait, number))
        if before[0] != status.wait:
            self._waits[rank] = (status.wait, number)
        elif before[1] != number:
            return f"waits in {status.call} at step {status.step} for this rank"
        return ""

    def _proof_of_collective(self, status: RankStatus, mine: RankStatus) -> str:
        if not status.collective or status.duration_s < MIN_BLOCKED_S or status.step != mine.step:
            return ""
        # Counted from the same step, as sends and receives are counted too and differ between ranks.
        if mine.issued_in_step < 0 or status.issued_in_step <= mine.issued_in_step:
            return ""
        where, duration = status.collective, f"{status.duration_s:.0f} s"
        return f"has waited in {where} for {duration}; rank {self._rank} has not reached that"

    def _proof_of_further_step(self, rank: int, status: RankStatus, mine: RankStatus) -> str:
        if self._any_step:
            return ""
        first = self._first.setdefault(rank, status)
        further = status.step > first.step or status.issued > mine.issued >= 0
        return f"is at step {status.step}" if status.step > mine.step and further else ""


def _proof_of_exit(status: RankStatus) -> str:
    if status.phase != "exit":
        return ""
    return "ended by an exception" if status.failed else "has closed its session, or has ended"
