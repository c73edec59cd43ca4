"""Goodput of a node's time in a job, the parts of a recovery, and the step rate. Pure: times are arguments.

    useful  steps beyond the highest step so far
    lost    from the last step before a fault until a step beyond the highest one: detection, agreement on the next
            round, stopping, starting, and repeating the steps that no checkpoint had
    idle    before the job's first step, waiting for nodes, pauses, and rounds without a fault

Time after the last step counts as useful until a fault shows that it was not. A counter cannot decrease, so
`monotonic_counters` lets it catch up: the three always add up to the time that has passed, and each equals the ledger
as soon as possible.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, replace

from elasticd_agent.hangs.observer import Observation
from elasticd_agent.model.log_events import TimeSplit, TimeState
from elasticd_agent.model.records import Round

NEVER = float("inf")
FaultCostS = float
"""Seconds that a fault has cost, 0 where none preceded."""


@dataclass(frozen=True, slots=True)
class GoodputLedger:
    """All before `since` is decided; since then it is `state`, and idle from `waiting_from` on if that is lost.

    Moments are seconds of one clock. One that lies before `since` counts as `since`.
    """

    since: float
    state: TimeState = "idle"
    high_water: int = 0
    totals: TimeSplit = field(default_factory=TimeSplit)
    waiting_from: float = NEVER

    def totals_at(self, now: float) -> TimeSplit:
        """The split of the time until `now`."""
        return self._advanced_to(now).totals

    def on_step(self, step: int, at: float) -> GoodputLedger:
        """Step `step` of the job was finished."""
        if step > self.high_water:
            return replace(self._advanced_to(at), state="useful", high_water=step, waiting_from=NEVER)
        if self.state == "idle":  # repeated steps, though no fault was reported
            return replace(self._advanced_to(at), state="lost")
        return self

    def on_progress(self, at: float) -> GoodputLedger:
        """The time until `at` belongs to the current step: a checkpoint, an evaluation, an orderly end."""
        return self._advanced_to(at) if self.state == "useful" else self

    def on_late_step(self, step: int, at: float) -> GoodputLedger:
        """Step `step` was finished at `at`, before a fault that was reported earlier."""
        if step <= self.high_water:
            return self
        credited = replace(self, state="useful")._advanced_to(at) if self.state == "lost" else self
        return replace(credited, state=self.state, high_water=step)

    def on_fault(self, at: float) -> GoodputLedger:
        """A fault was reported at `at`: time after the last step is lost. Before the first step it is idle."""
        if self.state == "useful":
            return replace(self, state="lost")
        if self.state == "idle" and self.high_water:
            return replace(self._advanced_to(at), state="lost")
        return self

    def on_pause(self) -> GoodputLedger:
        """No steps for a while, without a fault: time since the last step is idle."""
        return replace(self, state="idle") if self.state == "useful" else self

    def on_wait(self, at: float) -> GoodputLedger:
        """Time from `at` on that is not useful is spent waiting for nodes."""
        return replace(self, waiting_from=min(self.waiting_from, at))

    def on_wait_end(self, at: float) -> GoodputLedger:
        """The wait for nodes has ended."""
        return replace(self._advanced_to(at), waiting_from=NEVER)

    def _advanced_to(self, at: float) -> GoodputLedger:
        seconds = max(0.0, at - self.since)
        waited = min(seconds, max(0.0, at - self.waiting_from)) if self.state == "lost" else 0.0
        times = self.totals
        match self.state:
            case "useful":
                times = replace(times, useful=times.useful + seconds)
            case "lost":
                times = replace(times, lost=times.lost + seconds - waited, idle=times.idle + waited)
            case "idle":
                times = replace(times, idle=times.idle + seconds)
        return replace(self, since=max(self.since, at), totals=times)


def monotonic_counters(exported: TimeSplit, found: TimeSplit) -> TimeSplit:
    """The values nearest to `found` that counters at `exported` can reach, with the same total.

    An excess in one state is made up by the others for a while: first in lost, then idle, then useful.
    """
    left = found.total - exported.total
    more = []
    for before, after in ((exported.lost, found.lost), (exported.idle, found.idle), (exported.useful, found.useful)):
        more.append(min(max(0.0, left), max(0.0, after - before)))
        left -= more[-1]
    return TimeSplit(exported.useful + more[2], exported.lost + more[0], exported.idle + more[1])


# ---- one node's ledger, kept while the job runs

AGREEMENT_S = 10.0
"""The next round is agreed on by then, unless nodes are missing or the store is unavailable."""


def lost_nodes(round: Round) -> tuple[str, ...]:
    """The nodes that were lost right before `round`."""
    return tuple(node.node for node in round.excluded if not node.age_s)


def follows_fault(round: Round) -> bool:
    """True if `round` follows a fault: a failure, or the loss of a node."""
    return round.cause not in ("", "start", "resize") or bool(lost_nodes(round))


@dataclass(slots=True)
class GoodputTracker:
    """Moments are monotonic seconds."""

    node: str
    ledger: GoodputLedger
    backoff_s: tuple[float, ...]  #: the waits before restarts without progress, as in the policy
    _ended_round: int = 0  # rounds up to this one have ended, whatever their workers still do
    _round_number: int = 0
    _left_out: bool = False  # the newest round runs without this node
    _next_backoff_s: float = 0.0  # the backoff to expect if this round fails without progress
    _base_step: int = 0  # the offset of a plain script's steps in this round
    _last_step: int = 0  # the last step of this round; 0 before the first
    _lost_before_s: float = 0.0  # lost time before the current fault

    def totals_at(self, now: float) -> TimeSplit:
        return self.ledger.totals_at(now)

    def totals_for_log(self, at: float) -> TimeSplit:
        """The split until `at` for the event log, whose readers add what follows to `state`."""
        times = self.ledger.totals_at(at)
        return TimeSplit(round(times.useful, 3), round(times.lost, 3), round(times.idle, 3), self.ledger.state)

    def on_round(self, round: Round, now: float) -> None:
        if round.terminal:
            self._end_rounds(round.number)
            return
        if follows_fault(round):
            self.on_fault(round.number - 1, now)
        self._end_rounds(round.number - 1)
        self._round_number = round.number
        self._last_step = 0
        self._left_out = round.member(self.node) is None
        self._next_backoff_s = self.backoff_s[min(round.budget.streak, len(self.backoff_s) - 1)]
        self._base_step = max(self.ledger.high_water, round.budget.high_water)
        spent = replace(self.ledger, high_water=self._base_step)
        self.ledger = spent.on_pause().on_wait(now) if self._left_out else spent.on_wait_end(now)

    def on_fault(self, number: int, now: float, *, ends: bool = True) -> None:
        """A fault of round `number` was reported; it `ends` the round, or is only reported."""
        if ends and number <= self._ended_round:
            return
        if self.ledger.state != "lost":
            self._lost_before_s = self.ledger.totals.lost
        self.ledger = self.ledger if self._left_out else self.ledger.on_fault(now)
        self._ended_round = number if ends else self._ended_round

    def on_observation(self, seen: Observation) -> FaultCostS | None:
        """One look at the workers. At the first new step after a fault: the seconds that it cost, or 0; else None."""
        at = seen.last_progress_at
        if seen.first_step_at is None or at is None:
            return None  # its number may be that of the restored step already
        step = seen.step if seen.has_session else self._base_step + seen.step
        before = self.ledger
        if seen.round <= self._ended_round or seen.round != self._round_number:
            self.ledger = before.on_late_step(step, at) if seen.round == self._round_number else before
            return None
        if step > self._last_step:  # else they make no step, as in a pause
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
        """All workers are paused after a checkpoint."""
        self.ledger = self.ledger.on_progress(at).on_pause()

    def on_exit(self, at: float) -> None:
        """A worker has ended with code 0."""
        self.ledger = self.ledger.on_progress(at)

    def on_group_ending(self, number: int) -> None:
        """The group of round `number` is being ended."""
        self._end_rounds(number)

    def on_group_ended(self, number: int, now: float) -> None:
        """All processes of round `number` are gone."""
        self._end_rounds(number)
        if number >= self._round_number:
            self.ledger = self.ledger.on_wait(now + self._next_backoff_s + AGREEMENT_S)

    def on_waiting(self, now: float) -> None:
        """The leader waits, perhaps for more nodes while a round runs."""
        if self._ended_round >= self._round_number:
            self.ledger = self.ledger.on_wait(now)

    def _end_rounds(self, number: int) -> None:
        if number > self._ended_round:
            self._ended_round = number
            self.ledger = self.ledger.on_pause()


# ---- recoveries and steps


@dataclass(slots=True)
class RecoveryTimer:
    """The time from a fault to the first step of the round after it. Times are monotonic seconds."""

    fault_at: float | None = None
    _last_mark_at: float = 0.0
    _parts: dict[str, float] = field(default_factory=dict)
    _started: bool = False  # a round has started since the fault

    def start(self, at: float) -> None:
        """The earliest sign of the fault; later signs of the same recovery change nothing.

        A round that started and made no step, though, ends here: its time goes to `first_step`.
        """
        if self.fault_at is None:
            self.fault_at = self._last_mark_at = at
            self._parts = {}
        elif self._started:
            self.end_part("first_step", at)
        self._started = False

    def end_part(self, part: str, at: float) -> None:
        """`part` ended at `at`. Ignored without a fault."""
        if self.fault_at is not None:
            self._parts[part] = self._parts.get(part, 0.0) + max(0.0, at - self._last_mark_at)
            self._last_mark_at = max(self._last_mark_at, at)
            self._started = self._started or part == "start"

    def finish(self, at: float) -> tuple[float, dict[str, float]] | None:
        """The first step was made at `at`: seconds in all, and by part. None without a fault."""
        if self.fault_at is None:
            return None
        self.end_part("first_step", at)
        seconds, parts = at - self.fault_at, self._parts
        self.fault_at = None
        self._parts = {}
        self._started = False
        return seconds, parts


RATE_WINDOW_S = 10.0
MIN_RATE_WINDOW_S = 0.5


@dataclass(slots=True)
class StepRate:
    """Steps per second of one group. Only steps that were made count: at a restore the number of the step jumps."""

    _samples: deque[tuple[float, int]] = field(default_factory=deque)

    def reset(self) -> None:
        """A new group starts."""
        self._samples.clear()

    def observe(self, step: int, now: float, *, stepped: bool) -> float | None:
        """None with too few samples. `stepped`: the group has made its first step."""
        if not stepped:
            self._samples.clear()
            return None
        self._samples.append((now, step))
        while self._samples[0][0] < now - RATE_WINDOW_S:
            self._samples.popleft()
        then, first = self._samples[0]
        return (step - first) / (now - then) if now - then > MIN_RATE_WINDOW_S else None
