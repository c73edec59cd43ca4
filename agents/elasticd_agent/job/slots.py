"""Which of this node's slots are usable, and whose process starts.

A process that survives SIGKILL costs its slot and nothing else. The slot is usable again when the process has ended. A
node with fewer usable slots than its job's minimum announces none.

Where workers keep their process from one round to the next, a slot whose worker has died **starts**: a new process runs
the script up to its entry. The next Round does without the slot where it can, and takes it back when that process is
there. Where MAX_FAILED_STARTS processes in a row end before, none will come so far: from then on new processes start
with their round. Where they hang, the job would hang with them: the slot is left out, unless a Round needs it.

Three states of a slot that is not simply usable, and who ends them: *stuck*, by the kernel, when the process is gone at
last; *starting*, by its new process at its entry, or by the Round that needs the slot sooner; *given up*, by a Round
that has no other slot left.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence

from elasticd_agent.model.records import Round
from elasticd_agent.workers.events import NewcomerEnded, ProcessUnkillable, UnkillableProcessEnded

MAX_FAILED_STARTS = 3
"""Processes in a row that may fail before their entry."""


class Slots:
    """One job's. With fewer than `min_workers` usable slots this node does not take part."""

    def __init__(
        self, node: str, slots: Sequence[int], min_workers: int, max_workers: int | None = None, max_nodes: int = 1
    ) -> None:
        self._node = node
        self._max_workers = len(slots) if max_workers is None else max_workers
        self._max_nodes = max_nodes
        self._all = tuple(slots)
        self._min_workers = min_workers
        self._unkillable: dict[int, ProcessUnkillable] = {}
        self._waiting: Round | None = None
        self._starting: set[int] = set()
        self._failed: Counter[int] = Counter()
        """Processes in a row that did not come to their entry, by slot."""
        self._given_up: set[int] = set()
        """Slots for which no more processes are started ahead."""
        self._starts_with_round = False

    def handle(self, news: ProcessUnkillable | UnkillableProcessEnded) -> str | None:
        """Returns the sentence to report, or None for the end of an unknown process."""
        if isinstance(news, ProcessUnkillable):
            self._unkillable[news.pid] = news
            self._starting.discard(news.slot if news.slot is not None else -1)
            whose = f"rank {news.rank}'s process {news.pid}" if news.rank is not None else f"process {news.pid}"
            left_out = f"; slot {news.slot} is left out until it has ended" if news.slot is not None else ""
            state = _kernel_state_phrase(news)
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
    def unusable_reason(self) -> str:
        """Why some are not usable, "" if all are."""
        unkillable = sorted(self._unusable().items())
        users = ((slot, stuck.pid, _kernel_state_phrase(stuck)) for slot, stuck in unkillable)
        return "; ".join(
            f"slot {slot} of {self._node} is in use by process {pid}, which does not die{state}"
            for slot, pid, state in users
        )

    @property
    def starting(self) -> tuple[int, ...]:
        return tuple(sorted(self._starting.intersection(self._all)))

    @property
    def to_start_ahead(self) -> set[int]:
        """Those of the starting slots for which a process is to be started ahead."""
        return set(self.starting) - self._given_up

    def spares(self, round: Round) -> tuple[int, ...]:
        """The usable slots here that `round` leaves out although none may come in: it has all that the job asks for."""
        member = round.member(self._node)
        used = () if member is None else member.slots
        room = self._max_nodes - len(round.members) if member is None else self._max_workers - len(used)
        return () if room > 0 or round.terminal else tuple(slot for slot in self.usable if slot not in used)

    def mark_starting(self, slots: Collection[int]) -> None:
        """The workers on these slots have died, and others keep their process."""
        if not self._starts_with_round:
            self._starting.update(slots)

    def mark_ready(self, slots: Collection[int]) -> None:
        """The process of each is at its entry, or starts with its round."""
        self._starting.difference_update(slots)
        self._given_up.difference_update(slots)
        for slot in slots:
            del self._failed[slot]

    def record_failure(self, ended: NewcomerEnded) -> str:
        """A slot's process has not come to its entry: another one starts, unless it would fail as well."""
        slot, who = ended.slot, f"the new process of slot {ended.slot} {ended.why}"
        self._failed[slot] += 1
        if self._failed[slot] < MAX_FAILED_STARTS and not ended.is_refused:
            return f"{who}: another one starts ({self._failed[slot] + 1} of {MAX_FAILED_STARTS})"
        if not ended.is_late:
            return self.give_up_starting_ahead(who)
        self._given_up.add(slot)
        return f"{who}, as {MAX_FAILED_STARTS - 1} before it: the job continues without the slot"

    def give_up_starting_ahead(self, why: str) -> str:
        """No process of this job will come to its entry ahead of its round."""
        self._starting.clear()
        self._starts_with_round = True
        return f"{why}: from now on new processes start together with their round, and the other ranks wait for them"

    def remember_if_blocked(self, round: Round) -> bool:
        """True if this node's group of `round` cannot start yet; the round is remembered until it can."""
        member = round.member(self._node)
        blocked = member is not None and not self._unusable().keys().isdisjoint(member.slots)
        self._waiting = round if blocked else None
        return blocked

    def forget_blocked(self, number: int) -> None:
        """The group of round `number` has ended."""
        if self._waiting is not None and self._waiting.number == number:
            self._waiting = None

    def take_unblocked(self) -> Round | None:
        """The Round whose group can start now, once."""
        round = self._waiting
        return round if round is not None and not self.remember_if_blocked(round) else None

    def _unusable(self) -> dict[int, ProcessUnkillable]:
        return {stuck.slot: stuck for stuck in self._unkillable.values() if stuck.slot is not None}


def _kernel_state_phrase(stuck: ProcessUnkillable) -> str:
    """ " (state D in nfs_wait_bit_killable)", as far as known."""
    if not stuck.state:
        return ""
    return f" (state {stuck.state} in {stuck.wchan})" if stuck.wchan else f" (state {stuck.state})"
