"""A job's event log on one node, line by line -> how the job does: rounds, steps, checkpoints, goodput.

It exists so that `elasticd status` can tell a job's history whatever has become of its agents: the log is on the disk.
It is fed each line once and keeps a bounded amount of it. Pure: it reads no file and no clock.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from elasticd_agent.telemetry.goodput import GoodputLedger

CLOCK_STEP_S = 2.0
"""More than a clock that is only slowed or sped up (by 500 ppm) differs from a monotonic one within an hour."""
_GROUP_EVENTS = frozenset(
    ("group_started", "first_step", "caught_up", "checkpoint_saved", "hung", "worker_exited", "group_gone")
)
MAX_ROUNDS = 1000
"""Of more only the newest are kept; what they add up to is kept of all."""


@dataclass(slots=True)
class RoundTimeline:
    """One round, as this node's log tells it. Times are unix seconds; `ranks` are those on this node."""

    number: int
    world_size: int = 0
    nodes: tuple[str, ...] = ()
    reason: str = ""
    cause: str = ""
    lost: tuple[str, ...] = ()
    restarts: int = 0
    at: float = 0.0
    ranks: tuple[int, ...] = ()
    first_step_at: float | None = None
    first_step: int = 0
    last_step_at: float | None = None
    last_step: int = 0
    resumed_step: int | None = None


@dataclass(frozen=True, slots=True)
class RoundCost:
    """From the last step of the round before to a round's first one; and how many steps were made again, if known."""

    seconds: float
    steps: int | None


@dataclass(slots=True)
class JobTimeline:
    """What the lines so far add up to."""

    rounds: OrderedDict[int, RoundTimeline] = field(default_factory=OrderedDict)
    began_at: float | None = None
    ended_at: float | None = None
    outcome: str = ""
    reason: str = ""
    restarts: int = 0
    step: int | None = None
    checkpoint_step: int | None = None
    checkpoint_round: int | None = None
    checkpoint_at: float | None = None
    _ledger: GoodputLedger | None = None
    _lost_before_fault_s: float = 0.0  # before the fault that is being made good
    _training_round: int | None = None  # the round that was seen to step last
    _clock_offset_s: float = 0.0  # by how much the node's clock has been set forward, or back, since the first line
    _clock_base: tuple[int, float] | None = None  # in which round, and unix seconds less monotonic ones there

    def feed(self, line: Mapping[str, Any]) -> None:
        """One line of the log; what makes no sense is passed over."""
        at, number = _number(line.get("wall")), _whole(line.get("round"))
        if at is None or number is None:
            return
        if self.began_at is None:
            self.began_at = at
        self._detect_clock_step(at, number, line)
        self._account(at - self._clock_offset_s, line)
        match line.get("kind"):
            case "round_published":
                self._on_round_published(number, at, line)
            case "group_started":
                self._round(number, at).ranks = tuple(r for r in _listed(line.get("ranks")) if isinstance(r, int))
            case "resumed":
                step = self._round(number, at).resumed_step = _whole(line.get("step"))
                if step is not None and (self.checkpoint_step is None or step > self.checkpoint_step):
                    self.checkpoint_step, self.checkpoint_round, self.checkpoint_at = step, number, at  # another node's
            case "first_step":
                # Of a hang that another node judged, only this says here when it began: the clock is the node's own.
                if (ago := _number(line.get("recovery_seconds"))) is not None and self._training_round != number:
                    self._end_training(self._training_round, at - ago)
                self._on_first_step(number, at, _whole(line.get("step")) or 1)
            case "checkpoint_saved":
                self.checkpoint_step, self.checkpoint_round, self.checkpoint_at = _whole(line.get("step")), number, at
                self._on_step(number, at, self.checkpoint_step)
            case "hung":
                self._end_training(number, at - (_number(line.get("seconds")) or 0.0))
            case "worker_exited":
                self._on_step(number, None, _whole(line.get("step")))
                self._end_training(number, at)
            case "hold_over" if number in self.rounds:
                self.rounds[number].last_step_at = None
            case "group_gone" | "holding":
                self._end_training(number, at)
            case "job_ended":
                self._on_job_ended(number, at, line)

    def goodput(self, now: float) -> float | None:
        """The useful part of the time since the start, as `elasticd_time_seconds_total` counts it on this node.

        None before the first step. `now` is unix seconds. Where the log does not tell yet when the last step before a
        fault was made, the time until its first sign counts as useful.
        """
        if self._ledger is None or not self._ledger.high_water:
            return None
        return self._ledger.totals_at(
            (self.ended_at if self.ended_at is not None else now) - self._clock_offset_s
        ).goodput

    def costs(self, now: float) -> dict[int, RoundCost]:
        """What each round that followed another cost. `now` is unix seconds: until then the newest one still does."""
        found: dict[int, RoundCost] = {}
        before: RoundTimeline | None = None
        newest = self.newest()
        for one in self.rounds.values():
            until = one.first_step_at
            if until is None and one is newest:
                until = self.ended_at if self.ended_at is not None else now
            if before is not None and before.last_step_at is not None and until is not None:
                # A script that counts its own steps from 1 in every process does not say what it went on from.
                went_on = one.resumed_step if one.resumed_step is not None else one.first_step - 1 or None
                steps = None if one.first_step_at is None or went_on is None else max(0, before.last_step - went_on)
                found[one.number] = RoundCost(max(0.0, until - before.last_step_at), steps)
            if one.first_step_at is not None:
                before = one
        return found

    def newest(self) -> RoundTimeline | None:
        return next(reversed(self.rounds.values()), None)

    def _detect_clock_step(self, at: float, number: int, line: Mapping[str, Any]) -> None:
        """A clock that is set is no time that has passed. Seen within a round: before another the node may have been
        restarted, which begins another monotonic clock.
        """
        mono = _number(line.get("mono"))
        if mono is None or line.get("kind") not in _GROUP_EVENTS:
            return
        before, self._clock_base = self._clock_base, (number, at - mono)
        if before is not None and before[0] == number and abs(forward_s := at - mono - before[1]) > CLOCK_STEP_S:
            self._clock_offset_s += forward_s

    def _on_round_published(self, number: int, at: float, line: Mapping[str, Any]) -> None:
        self._end_training(self._training_round, at)
        self.ended_at, self.outcome = None, ""  # another runner of the same job went on
        one = self._round(number, at)
        one.at = at
        one.world_size = _whole(line.get("world_size")) or 0
        one.nodes = tuple(str(node) for node in _listed(line.get("nodes")))
        one.reason, one.cause = str(line.get("reason", "")), str(line.get("cause", ""))
        one.lost = tuple(str(node) for node in _listed(line.get("lost")))
        one.restarts = self.restarts = max(self.restarts, _whole(line.get("restarts")) or 0)

    def _on_first_step(self, number: int, at: float, step: int) -> None:
        one = self._round(number, at)
        if one.first_step_at is not None:
            return
        one.first_step_at, one.first_step, one.last_step = at, step, step
        self.step, self._training_round = step, number

    def _on_step(self, number: int, at: float | None, step: int | None) -> None:
        one = self.rounds.get(number)
        if one is not None and step is not None:
            one.last_step = max(one.last_step, step)
            self.step = step if self.step is None else max(step, self.step)

    def _end_training(self, number: int | None, at: float) -> None:
        """Whatever this round still does after `at` is no training."""
        one = self.rounds.get(number) if number is not None else None
        if one is not None and one.first_step_at is not None and (one.last_step_at is None or at < one.last_step_at):
            one.last_step_at = max(at, one.first_step_at)

    def _account(self, at: float, line: Mapping[str, Any]) -> None:
        """What the line says of the time, as the ledger that its writer kept would."""
        spent = GoodputLedger(at) if self._ledger is None else self._ledger
        step = _whole(line.get("step"))
        match line.get("kind"):
            case "round_published":
                if line.get("cause", "start") not in ("", "start", "resize") or _listed(line.get("lost")):
                    spent = self._on_fault(spent, at)
                nodes = _listed(line.get("nodes"))
                member = "node" not in line or line["node"] in nodes
                spent = spent.on_progress(at).on_pause()
                spent = spent.on_resume(at) if member else spent.on_wait(at)
            case "first_step":
                spent = spent.on_step(step or 1, at)
            case "caught_up" if step:
                spent = spent.on_step(max(step, spent.high_water + 1), at)
                spent = _corrected(spent, self._lost_before_fault_s, _number(line.get("seconds")) or 0.0)
            case "checkpoint_saved" if step and spent.high_water and step > spent.high_water:
                one = self.rounds.get(self._training_round) if self._training_round is not None else None
                goes_on = one is not None and one.number == line.get("round") and one.last_step_at is None
                spent = spent.on_step(step, at) if goes_on else spent.on_late_step(step, at)
            case "worker_exited" if not line.get("asked") and line.get("exit_code") == 0:
                spent = spent.on_progress(at)
            case "worker_exited":
                spent = (spent if line.get("asked") else self._on_fault(spent, at)).on_late_step(step or 0, at)
            case "hung":
                spent = self._on_fault(spent, at - (_number(line.get("seconds")) or 0.0))
            case "store_exited":
                spent = self._on_fault(spent, at)
            case "waiting" if line.get("nodes") and spent.state == "lost":
                spent = spent.on_wait(at)
            case "holding" | "stop_requested" | "group_gone" | "job_ended":
                spent = spent.on_progress(at).on_pause()
        self._ledger = spent

    def _on_fault(self, spent: GoodputLedger, at: float) -> GoodputLedger:
        spent = spent.on_progress(at)
        if spent.state != "lost":
            self._lost_before_fault_s = spent.totals.lost
        return spent.on_fault(at)

    def _on_job_ended(self, number: int, at: float, line: Mapping[str, Any]) -> None:
        step = _whole(line.get("step"))
        self._on_step(number, at, step)
        self._end_training(self._training_round, at)
        self.ended_at, self.outcome = at, str(line.get("outcome", ""))
        self.reason = str(line.get("reason", ""))
        self.restarts = max(self.restarts, _whole(line.get("restarts")) or 0)

    def _round(self, number: int, at: float) -> RoundTimeline:
        if number not in self.rounds:
            self.rounds[number] = RoundTimeline(number, at=at)
            while len(self.rounds) > MAX_ROUNDS:
                self.rounds.popitem(last=False)
        return self.rounds[number]


def _corrected(spent: GoodputLedger, before_s: float, cost_s: float) -> GoodputLedger:
    """The writer knew when the last step before the fault had been made, and for how long nodes were waited for."""
    times = spent.totals
    more = max(before_s - times.lost, min(cost_s - (times.lost - before_s), times.useful))
    if more > 0:
        return replace(spent, totals=replace(times, lost=times.lost + more, useful=times.useful - more))
    return replace(spent, totals=replace(times, lost=times.lost + more, idle=times.idle - more))


def _number(value: object) -> float | None:
    good = isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < 1e12
    return float(value) if good and isinstance(value, (int, float)) else None


def _whole(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 62 else None


def _listed(value: object) -> list[Any]:
    return value[:10_000] if isinstance(value, list) else []
