"""The timeline of a job as one node has logged it: rounds, steps, checkpoints, goodput, the script's numbers. Pure.

`JobTimeline` reduces typed events one by one: those of the log on the disk, which survives its writer, or those of a
running job as they happen. What `elasticd status` and the pages tell of the past are views of it. The goodput is not
computed again here: every line has the writer's own split of the time (`spent`), which the metrics show, too. A bounded
number of rounds and points is kept.

One reducer, since two would differ. A round's cost, its lost steps and its cause are defined here and nowhere else, so
the page, `status`, `explain` and the result of a job say the same. The order of lines is that of the log; times are
those of the writer's clock, and no line of another node is compared with them.

A log may have been written by several processes one after the other: a runner that was replaced continues the file, and
counts its time from zero. A line whose total began after the newest line belongs to such a process, and the sums
continue from there. That is seen on the monotonic clock: the time of day jumps where a machine was suspended.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field, replace
from typing import ClassVar

from elasticd.heartbeat.worker_events import MAX_SCALARS
from elasticd_agent.model import log_events as events
from elasticd_agent.model.codec import Record
from elasticd_agent.model.log_events import LogLine, TimeSplit
from elasticd_agent.model.phrases import count

PLANNED_CAUSES = frozenset({"start", "resize", "join", "drain", ""})
"""Causes of rounds that follow no fault."""
MAX_ROUNDS = 128
"""The newest rounds are kept, more than any view shows: an agent has 64 timelines, for months. Sums cover all."""
MAX_SCALAR_POINTS = 512
"""The points of a number that the script logs; of more, every second one is dropped."""
MAX_SCALAR_NAME_CHARS = 64
LATE_LINE_S = 60.0
"""A line of an event that a worker reports late has the time of the event; none is later than this."""


@dataclass(frozen=True, slots=True)
class RoundStatus(Record):
    """One round: who was in it, why it began, what it cost, and from which state it resumed."""

    round: int
    at: float = 0.0
    world_size: int = 0
    nodes: tuple[str, ...] = ()
    cause: str = ""
    reason: str = ""
    lost_nodes: tuple[str, ...] = ()  #: members of the round before that were lost
    leader: str = ""  #: the node that published it
    first_step: int | None = None
    first_step_at: float | None = None
    last_step: int | None = None
    ended_at: float | None = None  #: when it made its last step; None while it may make more
    lost_seconds: float | None = None
    """The time from the fault, or without one from the last step of the round before, to the first step of this one."""
    lost_steps: int | None = None  #: steps that had to be trained again; None if unknown
    resumed_step: int | None = None
    donor: int | None = None
    """The rank that saved the state of `resumed_step` after the fault; None if it was saved before."""
    kept: int = 0  #: ranks that have kept their process of an earlier round

    @property
    def origin_phrases(self) -> list[str]:
        """Which rank saved the state that it resumed from, if that was a donor, and how many kept their process."""
        saved = f"resumed from step {self.resumed_step}, saved by rank {self.donor} after the fault"
        kept = f"{self.kept} of {count(self.world_size, 'rank')} kept the process"
        return [saved] * (self.donor is not None) + [kept] * (self.kept > 0)

    @property
    def planned(self) -> bool:
        """True for a round that follows no fault."""
        return self.cause in PLANNED_CAUSES and not self.lost_nodes

    @property
    def cause_words(self) -> str:
        """Why it began, in one or two words."""
        return "node lost" if self.lost_nodes and self.cause in PLANNED_CAUSES else self.cause or "round"


@dataclass(frozen=True, slots=True)
class CheckpointStatus(Record):
    step: int
    round: int = 0
    at: float | None = None
    age_seconds: float | None = None
    bytes: int | None = None
    blocked_seconds: float | None = None

    def with_age(self, now: float) -> CheckpointStatus:
        return self if self.at is None else replace(self, age_seconds=round(max(0.0, now - self.at), 1))

    @property
    def cost_words(self) -> str:
        """Words for its size, and for how long training paused for it."""
        size = f"{self.bytes / 1e6:,.0f} MB" if self.bytes else ""
        paused = "" if self.blocked_seconds is None else f"training blocked {self.blocked_seconds:.2g} s"
        return ", ".join(filter(None, [size, paused]))


@dataclass(frozen=True, slots=True)
class ScalarSeries(Record):
    """A number that the script logs."""

    FLOAT_RANGE: ClassVar[tuple[float, float]] = (-1e300, 1e300)
    name: str
    points: tuple[tuple[int, float], ...] = ()  #: (step, value), by step


@dataclass(slots=True)
class JobTimeline:
    """The sum of the events so far."""

    rounds: OrderedDict[int, RoundStatus] = field(default_factory=OrderedDict)
    began_at: float | None = None
    ended_at: float | None = None
    restarts: int = 0
    step: int | None = None
    checkpoint: CheckpointStatus | None = None
    donor_resumes: int = 0
    donor_steps_saved: int = 0
    scalars: dict[str, list[tuple[int, float]]] = field(default_factory=dict)
    _resumed_steps: dict[int, int] = field(default_factory=dict)
    _training_round: int | None = None  #: the round whose first step came last
    _spent: tuple[TimeSplit, float] | None = None  #: the newest split of the node's time, and when it was written
    _spent_until: float = 0.0  #: the same by the monotonic clock
    _spent_before: TimeSplit = field(default_factory=TimeSplit)  #: the time of processes that wrote this log earlier

    def feed(self, line: LogLine) -> None:
        """Take one line of the log, in its order."""
        event, at = line.event, line.wall
        if self.began_at is None:
            self.began_at = at
        if event.spent is not None:
            self._add_time(event.spent, at, event.mono)
        match event:
            case events.RoundPublishedEvent():
                self._on_round(event, at)
            case events.GroupStartedEvent(kept=kept):
                self.rounds[event.round] = replace(self._get_or_add_round(event, at), kept=kept)
            case events.ResumedEvent():
                self._on_resumed(event, at)
            case events.FirstStepEvent():
                self._on_first_step(event, at)
            case events.CheckpointSavedEvent(step=step, round=number):
                # What a rank resumed from is written beside newer saves, and may end after them.
                if self.checkpoint is None or (number, step) >= (self.checkpoint.round, self.checkpoint.step):
                    self.checkpoint = CheckpointStatus(
                        step, number, at, bytes=event.bytes, blocked_seconds=event.seconds
                    )
                self._on_step(number, step)
            case events.ScalarsEvent():
                self._on_scalars(event)
            case events.WorkerExitedEvent(round=number):
                self._on_step(number, event.step)
                self._end_training(number, at)
            case events.HangDetectedEvent(round=number, seconds=seconds, action=action):
                if action != "report":  # no worker is killed, and it may resume
                    self._end_training(number, at - seconds)
            case events.PausedEvent(round=number) | events.GroupEndedEvent(round=number):
                self._end_training(number, at)
            case events.PauseEndedEvent(round=number) if number in self.rounds:
                self.rounds[number] = replace(self.rounds[number], ended_at=None)
            case events.JobEndedEvent():
                self._on_step(event.round, event.step)
                self._end_training(self._training_round, at)
                self.ended_at = at
                self.restarts = max(self.restarts, event.restarts)

    def goodput(self, now: float) -> float | None:
        """The useful part of this node's time, as `elasticd_time_seconds_total` counts it; None before the first step.

        `now` is unix seconds. Time after the newest line counts as that line's state.
        """
        if self._spent is None:
            return None
        time, at = self.time_split, self._spent[1]
        more_s = max(0.0, (self.ended_at if self.ended_at is not None else now) - at)
        useful = time.useful + (more_s if time.state == "useful" else 0.0)
        return useful / (time.total + more_s) if useful else None

    @property
    def time_split(self) -> TimeSplit:
        """The split of the time of all processes that wrote this log, until the newest line."""
        before, last = self._spent_before, TimeSplit() if self._spent is None else self._spent[0]
        return TimeSplit(before.useful + last.useful, before.lost + last.lost, before.idle + last.idle, last.state)

    def newest_round(self) -> RoundStatus | None:
        """Return the newest round, None before the first."""
        return next(reversed(self.rounds.values()), None)

    def rounds_with_costs(self, now: float) -> list[RoundStatus]:
        """The rounds with what each of them cost. The newest round without a step costs until `now`."""
        priced: list[RoundStatus] = []
        before: RoundStatus | None = None
        newest = self.newest_round()
        for status in self.rounds.values():
            until = status.first_step_at
            if until is None and status is newest:
                until = self.ended_at if self.ended_at is not None else now
            if before is not None and before.ended_at is not None and until is not None:
                lost_s = status.lost_seconds
                if lost_s is None:
                    lost_s = round(max(0.0, until - before.ended_at), 3)
                priced.append(replace(status, lost_seconds=lost_s, lost_steps=self._lost_steps(before, status)))
            else:
                priced.append(status)
            if status.first_step_at is not None:
                before = status
        return priced

    def _lost_steps(self, before: RoundStatus, after: RoundStatus) -> int | None:
        """Return how many steps `after` trained again; None where the script does not say from
        which step it resumed.
        """
        if after.first_step is None or before.last_step is None:
            return None
        # A script that counts its steps from 1 in every process does not report the step it resumed from.
        resumed = self._resumed_steps.get(after.round, after.first_step - 1 or None)
        return None if resumed is None else max(0, before.last_step - resumed)

    def _add_time(self, split: TimeSplit, at: float, mono: float) -> None:
        # Another process continues the log and counts from zero: it began after the newest line, or after a reboot.
        if self._spent is not None and (
            mono - split.total > self._spent_until
            or mono < self._spent_until - LATE_LINE_S
            or split.total < self._spent[0].total - LATE_LINE_S
        ):
            self._spent_before = self.time_split
        self._spent, self._spent_until = (split, at), mono

    def _on_round(self, event: events.RoundPublishedEvent, at: float) -> None:
        # Of a hang that another node judged, only this line has the time of its begin on this node's clock.
        self._end_training(self._training_round, at - (event.idle_seconds if event.cause == "hung" else 0.0))
        self.ended_at = None  # a later runner of the same job continues it
        self.rounds[event.round] = replace(
            self._get_or_add_round(event, at),
            at=at,
            world_size=event.world_size,
            nodes=event.nodes,
            reason=event.reason,
            cause=event.cause,
            lost_nodes=event.lost,
            leader=event.leader,
        )
        self.restarts = max(self.restarts, event.restarts)

    def _on_resumed(self, event: events.ResumedEvent, at: float) -> None:
        number, step = event.round, event.step
        self.rounds[number] = replace(self._get_or_add_round(event, at), resumed_step=step, donor=event.donor)
        self._resumed_steps[number] = step
        if event.donor is not None:  # from memory
            self.donor_resumes += 1
            self.donor_steps_saved += event.steps_saved
        elif not event.in_processes and (self.checkpoint is None or step != self.checkpoint.step):
            # Another node saved it, or an earlier run did; or newer ones cannot be used.
            self.checkpoint = CheckpointStatus(step, number, event.saved_at)

    def _on_first_step(self, event: events.FirstStepEvent, at: float) -> None:
        status = self._get_or_add_round(event, at)
        if status.first_step_at is None:
            # After a fault the measured figure counts, which the console, the metrics and `explain` have.
            seconds = event.recovery_seconds
            self.rounds[event.round] = replace(
                status,
                first_step_at=at,
                first_step=event.step,
                last_step=event.step,
                lost_seconds=None if seconds is None else round(seconds, 3),
            )
            self.step = event.step
            self._training_round = event.round

    def _on_scalars(self, event: events.ScalarsEvent) -> None:
        """A step that is trained again replaces what was logged at it and after it."""
        for name, value in list(event.values.items())[:MAX_SCALARS]:
            if value is None or (name not in self.scalars and len(self.scalars) >= MAX_SCALARS):
                continue
            points = self.scalars.setdefault(name[:MAX_SCALAR_NAME_CHARS], [])
            while points and points[-1][0] >= event.step:
                points.pop()
            points.append((event.step, value))
            if len(points) > MAX_SCALAR_POINTS:
                del points[1:-1:2]  # the first and the newest stay

    def _on_step(self, number: int, step: int | None) -> None:
        status = self.rounds.get(number)
        if status is not None and step is not None:
            if status.last_step is not None:
                self.rounds[number] = replace(status, last_step=max(status.last_step, step))
            self.step = step if self.step is None else max(step, self.step)

    def _end_training(self, number: int | None, at: float) -> None:
        """Whatever this round still does after `at` is no training."""
        status = self.rounds.get(number) if number is not None else None
        if (
            status is not None
            and status.first_step_at is not None
            and (status.ended_at is None or at < status.ended_at)
        ):
            self.rounds[status.round] = replace(status, ended_at=max(at, status.first_step_at))

    def _get_or_add_round(self, event: events.LogEvent, at: float) -> RoundStatus:
        number = event.round
        if number not in self.rounds:
            self.rounds[number] = RoundStatus(number, at=at)
            while len(self.rounds) > MAX_ROUNDS:
                self._resumed_steps.pop(self.rounds.popitem(last=False)[0], None)
        return self.rounds[number]
