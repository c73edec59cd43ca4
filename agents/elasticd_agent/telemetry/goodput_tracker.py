"""What happens to a group -> what becomes of the node's time: one node's ledger of goodput, kept while the job runs.

It exists so that the story need not know what counts as useful. It belongs to the deciding thread; `until` may be asked
from any, because a ledger never changes, it is replaced. It decides nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from elasticd_agent.hangs.observer import Observation
from elasticd_agent.model.records import Round
from elasticd_agent.telemetry.goodput import GoodputLedger, TimeSplit

AGREEMENT_S = 10.0
"""The next round is agreed on by then, unless nodes are waited for, or the store is away."""


def lost_nodes(round: Round) -> tuple[str, ...]:
    """The nodes without which `round` goes on because they were lost, and not in an earlier one."""
    return tuple(node.node for node in round.excluded if not node.age_s)


def follows_fault(round: Round) -> bool:
    """Whether `round` follows a fault: a failure, or the loss of a node."""
    return round.cause not in ("", "start", "resize") or bool(lost_nodes(round))


@dataclass(slots=True)
class GoodputTracker:
    """Moments are monotonic seconds. `backoff_s`: the waits before restarts without progress, as in the policy. Who has
    no group, and hears of no round, for longer than that one and `AGREE_S` waits for nodes."""

    node: str
    ledger: GoodputLedger
    backoff_s: tuple[float, ...]
    _ended_round: int = 0  # rounds up to this one are, whatever their workers still do
    _round: int = 0
    _left_out: bool = False  # the newest round goes on without this node
    _next_backoff_s: float = (
        0.0  # the backoff before the round that a fault of this one leads to, unless there is progress
    )
    _base_step: int = 0  # what a plain script's steps of this round are counted from
    _last_step: int = 0  # the last step of this round; 0 before the first
    _lost_before_s: float = 0.0  # before the fault that is being made good

    def totals_at(self, now: float) -> TimeSplit:
        return self.ledger.totals_at(now)

    def on_round(self, round: Round, now: float) -> None:
        if round.terminal:
            self._end_rounds(round.number)
            return
        if follows_fault(round):
            self.on_fault(round.number - 1, now)
        self._end_rounds(round.number - 1)
        self._round, self._last_step = round.number, 0
        self._left_out = round.member(self.node) is None
        self._next_backoff_s = self.backoff_s[min(round.budget.streak, len(self.backoff_s) - 1)]
        self._base_step = max(self.ledger.high_water, round.budget.high_water)
        spent = replace(self.ledger, high_water=self._base_step)
        self.ledger = spent.on_pause().on_wait(now) if self._left_out else spent.on_resume(now)

    def on_fault(self, number: int, now: float, *, ends: bool = True) -> None:
        """A fault of round `number` was heard of; it `ends` the round, or is only reported."""
        if ends and number <= self._ended_round:
            return
        if self.ledger.state != "lost":
            self._lost_before_s = self.ledger.totals.lost
        self.ledger = self.ledger if self._left_out else self.ledger.on_fault(now)
        self._ended_round = number if ends else self._ended_round

    def on_observation(self, seen: Observation) -> float | None:
        """One look at the workers. Where they do something new again: seconds that a fault has cost before, or 0."""
        at = seen.progress_at
        if seen.first_step_at is None or at is None:
            return None  # it may have the number of the step that it goes on from already, and has made none
        step = seen.step if seen.has_session else self._base_step + seen.step
        before = self.ledger
        if seen.round <= self._ended_round or seen.round != self._round:
            self.ledger = before.on_late_step(step, at) if seen.round == self._round else before
            return None
        if step > self._last_step:  # or they stand still, as in a hold
            at = at if self._last_step else seen.first_step_at
            self._last_step = step
            self.ledger = before.on_step(step, at)
        self.ledger = self.ledger.on_progress(at)
        if before.state == "idle" and self.ledger.state == "lost":
            self._lost_before_s = self.ledger.totals.lost
        if self.ledger.state != "useful" or before.state == "useful" or not before.high_water:
            return None
        return self.ledger.totals.lost - self._lost_before_s if before.state == "lost" else 0.0

    def on_pause(self, at: float) -> None:
        """All workers wait after a checkpoint."""
        self.ledger = self.ledger.on_progress(at).on_pause()

    def on_exit(self, at: float) -> None:
        """A worker has ended with code 0."""
        self.ledger = self.ledger.on_progress(at)

    def on_group_ending(self, number: int) -> None:
        """The group of round `number` is being ended."""
        self._end_rounds(number)

    def on_group_ended(self, number: int, now: float) -> None:
        """Nothing is left of the group of round `number`."""
        self._end_rounds(number)
        if number >= self._round:
            self.ledger = self.ledger.on_wait(now + self._next_backoff_s + AGREEMENT_S)

    def on_waiting(self, now: float) -> None:
        """The planner waits for something; it may be more nodes for a round that runs."""
        if self._ended_round >= self._round:
            self.ledger = self.ledger.on_wait(now)

    def _end_rounds(self, number: int) -> None:
        if number > self._ended_round:
            self._ended_round = number
            self.ledger = self.ledger.on_pause()
