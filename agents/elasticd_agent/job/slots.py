"""Which of this node's slots can be used: all of them, but for those whose last worker does not die.

It exists so that a process that hangs in the kernel costs its slot and nothing else. A slot that is out of use comes
back when the process has ended; a node that has fewer left than its job wants announces none at all. It belongs to the
deciding thread, reads no clock, and decides nothing about the job: what the node announces, `plan` minds.
"""

from __future__ import annotations

from collections.abc import Sequence

from elasticd_agent.model.records import Round
from elasticd_agent.workers.group import ProcessReaped, ProcessUnkillable


class Slots:
    """One node's, for one job. `fewest`: with fewer workers than that this node does not take part."""

    def __init__(self, node: str, slots: Sequence[int], min_workers: int) -> None:
        self._node, self._all, self._min_workers = node, tuple(slots), min_workers
        self._unkillable: dict[int, ProcessUnkillable] = {}
        self._waiting: Round | None = None

    def handle(self, news: ProcessUnkillable | ProcessReaped) -> str | None:
        """Mind it. Returns the sentence for a person, None if nothing was known of what has been freed."""
        if isinstance(news, ProcessUnkillable):
            self._unkillable[news.pid] = news
            whose = f"rank {news.rank}'s process {news.pid}" if news.rank is not None else f"process {news.pid}"
            left_out = f"; slot {news.slot} is left out until it has ended" if news.slot is not None else ""
            state = _kernel_state(news)
            return f"round {news.number}: {whose} does not die of SIGKILL{state}; going on without it{left_out}"
        freed = self._unkillable.pop(news.pid, None)
        if freed is None:
            return None
        back = f"; slot {freed.slot} can be used again" if freed.slot is not None and freed.slot in self.usable else ""
        return f"process {freed.pid} of round {freed.number} has ended at last{back}"

    @property
    def usable(self) -> tuple[int, ...]:
        """What the node announces: none if there are fewer than it is to take part with."""
        out = self._unusable()
        left = tuple(slot for slot in self._all if slot not in out)
        return left if len(left) >= self._min_workers else ()

    @property
    def why(self) -> str:
        """Why not all of them can be used; "" if they can."""
        return "; ".join(
            f"slot {slot} of {self._node} is held by process {stuck.pid}, which does not die{_kernel_state(stuck)}"
            for slot, stuck in sorted(self._unusable().items())
        )

    def blocks(self, round: Round) -> bool:
        """True if this node's group of `round` cannot be started yet; it is remembered until it can or is over."""
        member = round.member(self._node)
        blocked = member is not None and not self._unusable().keys().isdisjoint(member.slots)
        self._waiting = round if blocked else None
        return blocked

    def forget(self, number: int) -> None:
        """The group of round `number` is over."""
        if self._waiting is not None and self._waiting.number == number:
            self._waiting = None

    def unblocked(self) -> Round | None:
        """The Round whose group can be started now and could not before, once."""
        round = self._waiting
        return round if round is not None and not self.blocks(round) else None

    def _unusable(self) -> dict[int, ProcessUnkillable]:
        return {stuck.slot: stuck for stuck in self._unkillable.values() if stuck.slot is not None}


def _kernel_state(stuck: ProcessUnkillable) -> str:
    """ " (state D in nfs_wait_bit_killable)", as far as it is known."""
    if not stuck.state:
        return ""
    return f" (state {stuck.state} in {stuck.wchan})" if stuck.wchan else f" (state {stuck.state})"
