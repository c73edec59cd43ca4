"""What happens to a group -> what becomes of the node's time: one node's ledger of goodput, kept while the job runs.

It exists so that the story need not know what counts as useful. It belongs to the deciding thread; `until` may be asked
from any, because a ledger never changes, it is replaced. It decides nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from elasticd_agent.hangs.observer import Seen
from elasticd_agent.model.records import Round
from elasticd_agent.telemetry.goodput import Spent, Times

AGREE_S = 10.0
"""The next round is agreed on by then, unless nodes are waited for, or the store is away."""


def lost_in(round: Round) -> tuple[str, ...]:
    """The nodes without which `round` goes on because they were lost, and not in an earlier one."""
    return tuple(node.node for node in round.excluded if not node.age_s)


def fault_in(round: Round) -> bool:
    """Whether `round` follows a fault: a failure, or the loss of a node."""
    return round.cause not in ("", "start", "resize") or bool(lost_in(round))


@dataclass(slots=True)
class Spending:
    """Moments are monotonic seconds. `backoff_s`: the waits before restarts without progress, as in the policy. Who has
    no group, and hears of no round, for longer than that one and `AGREE_S` waits for nodes."""

    node: str
    spent: Spent
    backoff_s: tuple[float, ...]
    _over: int = 0  # rounds up to this one are, whatever their workers still do
    _number: int = 0
    _out: bool = False  # the newest round goes on without this node
    _next_s: float = 0.0  # the backoff before the round that a fault of this one leads to, unless there is progress
    _base: int = 0  # what a plain script's steps of this round are counted from
    _made: int = 0  # the last step of this round; 0 before the first
    _lost_s: float = 0.0  # before the fault that is being made good

    def until(self, now: float) -> Times:
        return self.spent.until(now)

    def published(self, round: Round, now: float) -> None:
        if round.terminal:
            self._ended(round.number)
            return
        if fault_in(round):
            self.broke(round.number - 1, now)
        self._ended(round.number - 1)
        self._number, self._made = round.number, 0
        self._out = round.member(self.node) is None
        self._next_s = self.backoff_s[min(round.budget.streak, len(self.backoff_s) - 1)]
        self._base = max(self.spent.high_water, round.budget.high_water)
        spent = replace(self.spent, high_water=self._base)
        self.spent = spent.paused().waits(now) if self._out else spent.goes_on(now)

    def broke(self, number: int, now: float, *, ends: bool = True) -> None:
        """A fault of round `number` was heard of; it `ends` the round, or is only reported."""
        if ends and number <= self._over:
            return
        if self.spent.state != "lost":
            self._lost_s = self.spent.decided.lost
        self.spent = self.spent if self._out else self.spent.broke(now)
        self._over = number if ends else self._over

    def seen(self, seen: Seen) -> float | None:
        """One look at the workers. Where they do something new again: seconds that a fault has cost before, or 0."""
        at = seen.progress_at
        if seen.first_step_at is None or at is None:
            return None  # it may have the number of the step that it goes on from already, and has made none
        step = seen.step if seen.has_session else self._base + seen.step
        before = self.spent
        if seen.number <= self._over or seen.number != self._number:
            self.spent = before.late(step, at) if seen.number == self._number else before
            return None
        if step > self._made:  # or they stand still, as in a hold
            at = at if self._made else seen.first_step_at
            self._made = step
            self.spent = before.stepped(step, at)
        self.spent = self.spent.proceeded(at)
        if before.state == "idle" and self.spent.state == "lost":
            self._lost_s = self.spent.decided.lost
        if self.spent.state != "useful" or before.state == "useful" or not before.high_water:
            return None
        return self.spent.decided.lost - self._lost_s if before.state == "lost" else 0.0

    def holding(self, at: float) -> None:
        """All workers wait after a checkpoint."""
        self.spent = self.spent.proceeded(at).paused()

    def exited(self, at: float) -> None:
        """A worker has ended with code 0."""
        self.spent = self.spent.proceeded(at)

    def ending(self, number: int) -> None:
        """The group of round `number` is being ended."""
        self._ended(number)

    def gone(self, number: int, now: float) -> None:
        """Nothing is left of the group of round `number`."""
        self._ended(number)
        if number >= self._number:
            self.spent = self.spent.waits(now + self._next_s + AGREE_S)

    def waits(self, now: float) -> None:
        """The planner waits for something; it may be more nodes for a round that runs."""
        if self._over >= self._number:
            self.spent = self.spent.waits(now)

    def _ended(self, number: int) -> None:
        if number > self._over:
            self._over = number
            self.spent = self.spent.paused()
