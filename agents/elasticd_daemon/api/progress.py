"""A job's event log on one node, line by line -> its timeline: rounds, steps, checkpoints, goodput. Pure.

The log is on the disk, so `elasticd status` has a job's history after its runner has ended. Each line is fed once, and
a bounded amount of it is kept.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from elasticd_agent.model.codec import MOST_SECONDS
from elasticd_agent.telemetry import events
from elasticd_agent.telemetry.goodput import GoodputLedger
from elasticd_daemon.api.schema import CheckpointStatus, JobProgress, RoundStatus, ScalarSeries

CLOCK_STEP_S = 2.0
"""A clock that is only slewed (by 500 ppm) differs from a monotonic one by less than this within an hour."""
MAX_ROUNDS = 1000
"""The newest rounds are kept; sums cover all."""
MAX_SHOWN_ROUNDS = 100
MAX_POINTS = 512
"""The points of a number that the script logs; of more, every second one is dropped."""
MAX_NAME_CHARS = 64
_GROUP_EVENTS = frozenset(
    event.kind
    for event in (
        events.GroupStartedEvent,
        events.FirstStepEvent,
        events.WorkRecoveredEvent,
        events.CheckpointSavedEvent,
        events.HangDetectedEvent,
        events.WorkerExitedEvent,
        events.GroupEndedEvent,
    )
)
"""The events whose `mono` is one process's monotonic clock."""


@dataclass(frozen=True, slots=True)
class _Line:
    """A line of the log that has a time and a round."""

    fields: Mapping[str, Any]
    round: int
    at: float
    ledger_at: float
    """`at` without the steps of the clock since the first line."""

    @property
    def step(self) -> int | None:
        return _whole(self.fields.get("step"))

    @property
    def seconds(self) -> float:
        return _number(self.fields.get("seconds")) or 0.0


@dataclass(slots=True)
class JobTimeline:
    """The sum of the lines so far."""

    rounds: OrderedDict[int, RoundStatus] = field(default_factory=OrderedDict)
    began_at: float | None = None
    ended_at: float | None = None
    restarts: int = 0
    step: int | None = None
    checkpoint: CheckpointStatus | None = None
    donor_resumes: int = 0
    donor_steps: int = 0
    scalars: dict[str, list[tuple[int, float]]] = field(default_factory=dict)
    _resumed_steps: dict[int, int | None] = field(default_factory=dict)
    _ledger: GoodputLedger = field(default_factory=lambda: GoodputLedger(0.0))
    _lost_before_fault_s: float = 0.0
    """Lost time up to the fault whose work is being recovered."""
    _training_round: int | None = None
    """The round whose first step came last."""
    _clock_offset_s: float = 0.0
    """The sum of the steps of the node's clock since the first line."""
    _clock_base: tuple[int, float] | None = None
    """A round, and unix time minus monotonic time in it."""

    def feed(self, line: Mapping[str, Any]) -> None:
        """One line of the log; a line without a time or a round is ignored."""
        at, number = _number(line.get("wall")), _whole(line.get("round"))
        if at is None or number is None:
            return
        if self.began_at is None:
            self.began_at = at
            self._ledger = GoodputLedger(at)
        self._detect_clock_step(at, number, line)
        handler = _HANDLERS.get(str(line.get("kind")))
        if handler is not None:
            handler(self, _Line(line, number, at, at - self._clock_offset_s))

    def goodput(self, now: float) -> float | None:
        """The useful part of the time since the start, as `elasticd_time_seconds_total` counts it on this node.

        None before the first step. `now` is unix seconds. While the log does not have the last step before a fault
        yet, the time until the fault's first sign counts as useful.
        """
        if not self._ledger.high_water:
            return None
        return self._ledger.totals_at(
            (self.ended_at if self.ended_at is not None else now) - self._clock_offset_s
        ).goodput

    def history(self, now: float) -> list[RoundStatus]:
        """The rounds with what each of them cost. The newest round without a step costs until `now`."""
        found: list[RoundStatus] = []
        before: RoundStatus | None = None
        newest = self.newest()
        for one in self.rounds.values():
            until = one.first_step_at
            if until is None and one is newest:
                until = self.ended_at if self.ended_at is not None else now
            if before is not None and before.ended_at is not None and until is not None:
                steps = None
                if one.first_step is not None and before.last_step is not None:
                    # A script that counts its steps from 1 in every process does not report the step it resumed from.
                    resumed = self._resumed_steps.get(one.round)
                    resumed = resumed if resumed is not None else one.first_step - 1 or None
                    steps = None if resumed is None else max(0, before.last_step - resumed)
                lost_s = round(max(0.0, until - before.ended_at), 3) if one.lost_seconds is None else one.lost_seconds
                found.append(replace(one, lost_seconds=lost_s, lost_steps=steps))
            else:
                found.append(one)
            if one.first_step_at is not None:
                before = one
        return found

    def newest(self) -> RoundStatus | None:
        return next(reversed(self.rounds.values()), None)

    def progress(self, node: str, now: float) -> JobProgress:
        """The job's progress, as the log of `node` tells it."""
        newest, goodput, saved = self.newest(), self.goodput(now), self.checkpoint
        return JobProgress(
            node=node,
            round=None if newest is None else newest.round,
            world_size=None if newest is None else newest.world_size,
            step=self.step,
            restarts=self.restarts,
            checkpoint=saved and saved.aged(now),
            donor_resumes=self.donor_resumes,
            donor_steps=self.donor_steps,
            goodput=None if goodput is None else round(goodput, 4),
            started_at=self.began_at,
            rounds=tuple(self.history(now)[-MAX_SHOWN_ROUNDS:]),
            scalars=tuple(ScalarSeries(name, tuple(points)) for name, points in sorted(self.scalars.items())),
        )

    # One method for each kind of event: the ledger first, since it needs the state before the event.

    def _on_round_published(self, line: _Line) -> None:
        fields = line.fields
        nodes = tuple(str(node) for node in _list(fields.get("nodes")))
        lost = tuple(str(node) for node in _list(fields.get("lost")))
        if fields.get("cause", "start") not in ("", "start", "resize") or lost:
            self._on_fault(line.ledger_at)
        is_member = "node" not in fields or fields["node"] in nodes
        self._on_pause(line)
        ledger = self._ledger
        self._ledger = ledger.on_resume(line.ledger_at) if is_member else ledger.on_wait(line.ledger_at)

        # Of a hang that another node judged, only this line has the time of its begin on this node's clock.
        hung_s = _number(fields.get("idle_seconds")) if fields.get("cause") == "hung" else None
        self._end_training(self._training_round, line.at - (hung_s or 0.0))
        self.ended_at = None  # a later runner of the same job continues it
        self.rounds[line.round] = replace(
            self._round(line),
            at=line.at,
            world_size=_whole(fields.get("world_size")) or 0,
            nodes=nodes,
            reason=str(fields.get("reason", "")),
            cause=str(fields.get("cause", "")),
            lost_nodes=lost,
            leader=str(fields.get("leader") or ""),
        )
        self.restarts = max(self.restarts, _whole(fields.get("restarts")) or 0)

    def _on_resumed(self, line: _Line) -> None:
        step = self._resumed_steps[line.round] = line.step
        donor = _whole(line.fields.get("donor"))
        self.rounds[line.round] = replace(self._round(line), resumed_step=step, donor=donor)
        if donor is not None:  # from memory
            self.donor_resumes += 1
            self.donor_steps += _whole(line.fields.get("steps_saved")) or 0
        elif step is not None and (self.checkpoint is None or step > self.checkpoint.step):
            # Another node saved it, or an earlier run did.
            self.checkpoint = CheckpointStatus(step, line.round, _number(line.fields.get("saved_at")))

    def _on_first_step(self, line: _Line) -> None:
        step = line.step or 1
        self._ledger = self._ledger.on_step(step, line.ledger_at)
        ago = _number(line.fields.get("recovery_seconds"))
        one = self._round(line)
        if one.first_step_at is None:
            # After a fault the measured figure counts, which the console, the metrics and `explain` have.
            lost_s = None if ago is None else round(ago, 3)
            self.rounds[line.round] = replace(
                one, first_step_at=line.at, first_step=step, last_step=step, lost_seconds=lost_s
            )
            self.step = step
            self._training_round = line.round

    def _on_work_recovered(self, line: _Line) -> None:
        if step := line.step:
            self._ledger = self._ledger.on_step(max(step, self._ledger.high_water + 1), line.ledger_at)
            self._ledger = _with_measured_loss(self._ledger, self._lost_before_fault_s, line.seconds)

    def _on_checkpoint_saved(self, line: _Line) -> None:
        step, ledger = line.step, self._ledger
        if step and ledger.high_water and step > ledger.high_water:
            one = self.rounds.get(self._training_round) if self._training_round is not None else None
            is_training = one is not None and one.round == line.round and one.ended_at is None
            at = line.ledger_at
            self._ledger = ledger.on_step(step, at) if is_training else ledger.on_late_step(step, at)
        if step is not None:
            size = _whole(line.fields.get("bytes"))
            blocked_s = _number(line.fields.get("seconds"))
            self.checkpoint = CheckpointStatus(step, line.round, line.at, bytes=size, blocked_seconds=blocked_s)
        self._on_step(line)

    def _on_scalars(self, line: _Line) -> None:
        """A step that is trained again replaces what was logged at it and after it."""
        step, values = line.step, line.fields.get("values")
        if step is None or not isinstance(values, dict):
            return
        for name, value in list(values.items())[: events.MAX_SCALARS]:
            if not _is_finite(value) or (name not in self.scalars and len(self.scalars) >= events.MAX_SCALARS):
                continue
            points = self.scalars.setdefault(str(name)[:MAX_NAME_CHARS], [])
            while points and points[-1][0] >= step:
                points.pop()
            points.append((step, float(value)))
            if len(points) > MAX_POINTS:
                del points[1:-1:2]  # the first and the newest stay

    def _on_worker_exited(self, line: _Line) -> None:
        requested, at = line.fields.get("requested"), line.ledger_at
        if not requested and line.fields.get("exit_code") == 0:
            self._ledger = self._ledger.on_progress(at)
        else:
            if not requested:
                self._on_fault(at)
            self._ledger = self._ledger.on_late_step(line.step or 0, at)
        self._on_step(line)
        self._end_training(line.round, line.at)

    def _on_hang_detected(self, line: _Line) -> None:
        self._on_fault(line.ledger_at - line.seconds)
        if line.fields.get("action") != "report":  # no worker is killed, and it may resume
            self._end_training(line.round, line.at - line.seconds)

    def _on_store_exited(self, line: _Line) -> None:
        self._on_fault(line.ledger_at)

    def _on_waiting(self, line: _Line) -> None:
        if line.fields.get("nodes") and self._ledger.state == "lost":
            self._ledger = self._ledger.on_wait(line.ledger_at)

    def _on_pause(self, line: _Line) -> None:
        self._ledger = self._ledger.on_progress(line.ledger_at).on_pause()

    def _on_training_stopped(self, line: _Line) -> None:
        self._on_pause(line)
        self._end_training(line.round, line.at)

    def _on_pause_ended(self, line: _Line) -> None:
        if (one := self.rounds.get(line.round)) is not None:
            self.rounds[line.round] = replace(one, ended_at=None)

    def _on_job_ended(self, line: _Line) -> None:
        self._on_pause(line)
        self._on_step(line)
        self._end_training(self._training_round, line.at)
        self.ended_at = line.at
        self.restarts = max(self.restarts, _whole(line.fields.get("restarts")) or 0)

    def _detect_clock_step(self, at: float, number: int, line: Mapping[str, Any]) -> None:
        """A clock that is set is no time that has passed. Two lines of one round are compared: between rounds the node
        may have been restarted, which begins another monotonic clock.
        """
        mono = _number(line.get("mono"))
        if mono is None or str(line.get("kind")) not in _GROUP_EVENTS:
            return
        before, self._clock_base = self._clock_base, (number, at - mono)
        if before is not None and before[0] == number and abs(forward_s := at - mono - before[1]) > CLOCK_STEP_S:
            self._clock_offset_s += forward_s

    def _on_fault(self, at: float) -> None:
        self._ledger = self._ledger.on_progress(at)
        if self._ledger.state != "lost":
            self._lost_before_fault_s = self._ledger.totals.lost
        self._ledger = self._ledger.on_fault(at)

    def _on_step(self, line: _Line) -> None:
        one, step = self.rounds.get(line.round), line.step
        if one is not None and step is not None:
            if one.last_step is not None:
                self.rounds[line.round] = replace(one, last_step=max(one.last_step, step))
            self.step = step if self.step is None else max(step, self.step)

    def _end_training(self, number: int | None, at: float) -> None:
        """Whatever this round still does after `at` is no training."""
        one = self.rounds.get(number) if number is not None else None
        if one is not None and one.first_step_at is not None and (one.ended_at is None or at < one.ended_at):
            self.rounds[one.round] = replace(one, ended_at=max(at, one.first_step_at))

    def _round(self, line: _Line) -> RoundStatus:
        if line.round not in self.rounds:
            self.rounds[line.round] = RoundStatus(line.round, at=line.at)
            while len(self.rounds) > MAX_ROUNDS:
                self._resumed_steps.pop(self.rounds.popitem(last=False)[0], None)
        return self.rounds[line.round]


_HANDLERS: dict[str, Callable[[JobTimeline, _Line], object]] = {
    events.RoundPublishedEvent.kind: JobTimeline._on_round_published,
    events.GroupStartedEvent.kind: JobTimeline._round,
    events.ResumedEvent.kind: JobTimeline._on_resumed,
    events.FirstStepEvent.kind: JobTimeline._on_first_step,
    events.WorkRecoveredEvent.kind: JobTimeline._on_work_recovered,
    events.CheckpointSavedEvent.kind: JobTimeline._on_checkpoint_saved,
    events.ScalarsEvent.kind: JobTimeline._on_scalars,
    events.WorkerExitedEvent.kind: JobTimeline._on_worker_exited,
    events.HangDetectedEvent.kind: JobTimeline._on_hang_detected,
    events.StoreExitedEvent.kind: JobTimeline._on_store_exited,
    events.WaitingEvent.kind: JobTimeline._on_waiting,
    events.StopRequestedEvent.kind: JobTimeline._on_pause,
    events.PausedEvent.kind: JobTimeline._on_training_stopped,
    events.PauseEndedEvent.kind: JobTimeline._on_pause_ended,
    events.GroupEndedEvent.kind: JobTimeline._on_training_stopped,
    events.JobEndedEvent.kind: JobTimeline._on_job_ended,
}


def _with_measured_loss(ledger: GoodputLedger, lost_before_s: float, cost_s: float) -> GoodputLedger:
    """The writer measured the time since the last step before the fault, without waits for nodes: its value counts."""
    totals = ledger.totals
    more = max(lost_before_s - totals.lost, min(cost_s - (totals.lost - lost_before_s), totals.useful))
    if more > 0:
        return replace(ledger, totals=replace(totals, lost=totals.lost + more, useful=totals.useful - more))
    return replace(ledger, totals=replace(totals, lost=totals.lost + more, idle=totals.idle - more))


def _is_finite(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and -1e300 < value < 1e300


def _number(value: object) -> float | None:
    good = isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value <= MOST_SECONDS
    return float(value) if good and isinstance(value, (int, float)) else None


def _whole(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 62 else None


def _list(value: object) -> list[Any]:
    return value[:10_000] if isinstance(value, list) else []
