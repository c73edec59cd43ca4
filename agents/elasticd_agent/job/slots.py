"""Which of this node's slots are usable, and whose process starts.

A process that survives SIGKILL costs its slot and nothing else. The slot is usable again when the process has ended. A
node with fewer usable slots than its job's minimum announces none.

Where workers keep their process from one round to the next, a slot whose worker has died **starts**: a new process runs
the script up to its entry. The next Round does without the slot where it can, and takes it back when that process is
there. A process that does not come so far shows that none will: from then on new processes start with their round.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

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
        self._starting: set[int] = set()
        self._starts_with_round = False

    def handle(self, news: ProcessUnkillable | ProcessReaped) -> str | None:
        """Returns the sentence to report, or None for the end of an unknown process."""
        if isinstance(news, ProcessUnkillable):
            self._unkillable[news.pid] = news
            self._starting.discard(news.slot if news.slot is not None else -1)
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

    @property
    def starting(self) -> tuple[int, ...]:
        return tuple(sorted(self._starting.intersection(self._all)))

    def starts(self, slots: Collection[int]) -> None:
        """The workers on these slots have died, and others keep their process."""
        if not self._starts_with_round:
            self._starting.update(slots)

    def ready(self, slots: Collection[int]) -> None:
        """The process of each is at its entry, or starts with its round."""
        self._starting.difference_update(slots)

    def start_with_round(self, slot: int | None, why: str) -> str:
        """No process of this job will come to its entry ahead of its round."""
        self._starting.clear()
        self._starts_with_round = True
        whose = f"the new process of slot {slot} {why} before session.run" if slot is not None else why
        return f"{whose}: from now on new processes start together with their round, and the other ranks wait for them"

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
