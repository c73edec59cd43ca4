"""Which of this node's slots are usable: all except those of a process that survives SIGKILL.

Such a process costs its slot and nothing else. The slot is usable again when the process has ended. A node with fewer
usable slots than its job's minimum announces none.
"""

from __future__ import annotations

from collections.abc import Sequence

from elasticd_agent.model.records import Round
from elasticd_agent.workers.events import ProcessReaped, ProcessUnkillable


class Slots:
    """One job's. With fewer than `min_workers` usable slots this node does not take part."""

    def __init__(self, node: str, slots: Sequence[int], min_workers: int) -> None:
        self._node = node
        self._all = tuple(slots)
        self._min_workers = min_workers
        self._unkillable: dict[int, ProcessUnkillable] = {}
        self._waiting: Round | None = None

    def handle(self, news: ProcessUnkillable | ProcessReaped) -> str | None:
        """Returns the sentence to report, or None for the end of an unknown process."""
        if isinstance(news, ProcessUnkillable):
            self._unkillable[news.pid] = news
            whose = f"rank {news.rank}'s process {news.pid}" if news.rank is not None else f"process {news.pid}"
            left_out = f"; slot {news.slot} is left out until it has ended" if news.slot is not None else ""
            state = _kernel_state(news)
            return f"round {news.number}: {whose} survives SIGKILL{state}; continuing without it{left_out}"
        freed = self._unkillable.pop(news.pid, None)
        if freed is None:
            return None
        back = f"; slot {freed.slot} can be used again" if freed.slot is not None and freed.slot in self.usable else ""
        return f"process {freed.pid} of round {freed.number} has ended{back}"

    @property
    def usable(self) -> tuple[int, ...]:
        """The slots to announce: none if there are fewer than the minimum."""
        out = self._unusable()
        left = tuple(slot for slot in self._all if slot not in out)
        return left if len(left) >= self._min_workers else ()

    @property
    def why(self) -> str:
        """Why some are not usable, "" if all are."""
        return "; ".join(
            f"slot {slot} of {self._node} is in use by process {stuck.pid}, which does not die{_kernel_state(stuck)}"
            for slot, stuck in sorted(self._unusable().items())
        )

    def blocks(self, round: Round) -> bool:
        """True if this node's group of `round` cannot start yet; the round is remembered until it can."""
        member = round.member(self._node)
        blocked = member is not None and not self._unusable().keys().isdisjoint(member.slots)
        self._waiting = round if blocked else None
        return blocked

    def forget(self, number: int) -> None:
        """The group of round `number` has ended."""
        if self._waiting is not None and self._waiting.number == number:
            self._waiting = None

    def unblocked(self) -> Round | None:
        """The Round whose group can start now, once."""
        round = self._waiting
        return round if round is not None and not self.blocks(round) else None

    def _unusable(self) -> dict[int, ProcessUnkillable]:
        return {stuck.slot: stuck for stuck in self._unkillable.values() if stuck.slot is not None}


def _kernel_state(stuck: ProcessUnkillable) -> str:
    """ " (state D in nfs_wait_bit_killable)", as far as known."""
    if not stuck.state:
        return ""
    return f" (state {stuck.state} in {stuck.wchan})" if stuck.wchan else f" (state {stuck.state})"
