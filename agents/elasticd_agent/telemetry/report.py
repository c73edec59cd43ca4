"""The cost of weeks of jobs, from the event logs of their nodes: goodput, faults by cause, node and rank. Pure.

Each node's log goes through a `JobTimeline`. What its split of the time grows by from one line to the next counts once
for each worker of that node: worker seconds add up over jobs and nodes of any size. Lost time belongs to the first
round that was published after the fault. Several nodes log the same round: their lines make one fault.

Times come from the logs' own splits and are never computed from two nodes' clocks. Clocks are compared for one purpose:
to see whether two lines are of the same run, for which a minute is close enough. A log that begins in the middle, ends
in the middle, or was continued by another process gives what it has; a line without a split of the time counts as
untimed, and the job says so.

A fault is named once by its round, and costs what all workers of the job have lost until the next step beyond the last
one. Whom it is charged to follows from what was logged: nodes that were lost, else the ranks of a verdict, else the
first failure of that round. If several are to blame, each gets an equal share, so sums stay sums.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from elasticd_agent.model import log_events as events
from elasticd_agent.model.log_events import LogLine, TimeSplit
from elasticd_agent.telemetry.timeline import JobTimeline, RoundStatus

MAX_CLOCK_DIFFERENCE_S = 60.0
"""The clocks of two nodes may differ by this much; a larger difference means another run."""
MAX_TIMELINES = 20_000
"""Nodes of jobs. Anybody's job can write a log with any number of names."""
MAX_RUNS_PER_JOB_ID = 1000
"""Runs of one job id whose failures are told apart."""
NO_RESTART_CAUSE = "no restart"
"""The cause of time that was lost at the end of a job: no round followed the fault."""
REPORTED_HANG_CAUSE = "reported hang"
"""The cause of time that was lost in a wait that was only reported as a hang: no round followed."""


@dataclass(slots=True)
class WorkerTime:
    """Seconds of workers: an hour of eight of them is eight hours."""

    useful: float = 0.0
    lost: float = 0.0
    idle: float = 0.0

    @property
    def total(self) -> float:
        return self.useful + self.lost + self.idle

    @property
    def goodput(self) -> float | None:
        """The useful share of the time, None without any."""
        return self.useful / self.total if self.total > 0 else None

    def add(self, other: WorkerTime | TimeSplit, factor: float = 1.0) -> None:
        self.useful += factor * other.useful
        self.lost += factor * other.lost
        self.idle += factor * other.idle

    def to_json(self) -> dict[str, float | None]:
        """The sums in seconds, as JSON has them."""
        goodput = self.goodput
        return {
            "worker_seconds": round(self.total, 1),
            "useful_seconds": round(self.useful, 1),
            "lost_seconds": round(self.lost, 1),
            "idle_seconds": round(self.idle, 1),
            "goodput": None if goodput is None else round(goodput, 4),
        }


@dataclass(slots=True)
class _Fault:
    """The reason for a round that was not planned."""

    round: int
    at: float
    cause: str
    failed_round: int
    failed_since: float  #: when that round began
    nodes: tuple[str, ...] = ()  #: nodes that were lost
    lost_s: float = 0.0  #: worker seconds
    recovery_s: float | None = None
    is_in_report: bool = True  #: it happened in the time of the report


@dataclass(frozen=True, slots=True)
class _Failure:
    at: float
    round: int
    culprits: tuple[tuple[str, int], ...]  #: nodes and ranks; none where a hang has no single cause


@dataclass(slots=True)
class _NodeLog:
    """One node's part in one run of a job."""

    timeline: JobTimeline
    timed_until: float = 0.0  #: of the newest line that was timed
    seen_split: TimeSplit = field(default_factory=TimeSplit)
    workers: int = 0
    time_before_workers: WorkerTime = field(default_factory=WorkerTime)
    time: WorkerTime = field(default_factory=WorkerTime)
    fault: _Fault | None = None  #: the newest one
    failed: bool = False  #: a failure was logged, and no round yet after it
    unassigned_s: float = 0.0  #: lost time of workers before the next round
    reported: _Fault | None = None  #: a hang that was only reported; it may end by itself, or the group for it
    reported_s: float = 0.0  #: lost time of workers in it


@dataclass(slots=True)
class _Job:
    time: WorkerTime = field(default_factory=WorkerTime)
    nodes: set[str] = field(default_factory=set)
    faults: dict[tuple[int, str, int], _Fault] = field(default_factory=dict)  #: by round, cause and time
    failures: dict[int, list[_Failure]] = field(default_factory=dict)
    newest_at: float = 0.0
    outcome: tuple[float, str] | None = None  #: when its newest node ended, and how
    saves: int = 0
    save_s: float = 0.0
    untimed_lines: int = 0  #: those without a split of the time


@dataclass(slots=True)
class _FaultSum:
    """Faults of one kind."""

    faults: int = 0
    lost_s: float = 0.0
    recoveries: list[float] = field(default_factory=list)
    causes: dict[str, int] = field(default_factory=dict)

    def add(self, fault: _Fault, share: float = 1.0) -> None:
        self.lost_s += share * fault.lost_s
        if fault.is_in_report:
            self.faults += 1
            self.causes[fault.cause] = self.causes.get(fault.cause, 0) + 1
            if fault.recovery_s is not None:
                self.recoveries.append(fault.recovery_s)


@dataclass(slots=True)
class Report:
    """Feed it the lines of each log in order. `since`: unix time; what happened before it does not count."""

    since: float = 0.0
    oldest: float | None = None
    newest: float | None = None
    left_out_lines: int = 0  #: lines of more than MAX_TIMELINES nodes of jobs
    _logs: dict[tuple[str, str], _NodeLog] = field(default_factory=dict)
    _jobs: dict[str, _Job] = field(default_factory=dict)
    _nodes: dict[str, WorkerTime] = field(default_factory=dict)

    def feed(self, line: LogLine) -> None:
        """Take one line. The lines of a log come in their order; logs may come one after the other."""
        if not line.job or isinstance(line.event, events.ScalarsEvent):
            return  # an agent's own log; a script's numbers
        key = line.job, line.node
        log = self._logs.get(key)
        if log is None and len(self._logs) >= MAX_TIMELINES:
            self.left_out_lines += 1
            return
        if log is None or _begins_run(log.timeline, line.event):
            if log is not None:
                self._end_run(log, self._jobs[line.job])
            log = self._logs[key] = _NodeLog(JobTimeline())
        job = self._jobs.setdefault(line.job, _Job())
        if line.wall >= self.since:
            self.oldest = line.wall if self.oldest is None else min(self.oldest, line.wall)
            self.newest = line.wall if self.newest is None else max(self.newest, line.wall)
            job.nodes.add(line.node)
        self._feed(log, job, line)

    def _feed(self, log: _NodeLog, job: _Job, line: LogLine) -> None:
        """Take a line of a known run: its event, and by how much its time has grown."""
        event, at, previous = line.event, line.wall, log.timeline.newest_round()
        was_lost = log.timeline.time_split.state == "lost"
        log.timeline.feed(line)
        grown = self._time_growth(log, job, line)
        job.newest_at = max(job.newest_at, at)
        match event:
            case events.RoundPublishedEvent():
                self._on_round(log, job, at, previous)
            case events.HangDetectedEvent(action="report") if previous is not None and log.reported is None:
                log.reported = _Fault(event.round, at, REPORTED_HANG_CAUSE, event.round, previous.at)
                log.reported.is_in_report = at >= self.since
            case events.WorkerExitedEvent(rank=rank, requested=False) if event.exit_code != 0:
                _fail(log)
                _note_failure(job, _Failure(at, event.round, ((line.node, rank),)))
            case events.HangDetectedEvent(action="restart"):
                _fail(log)
                _note_failure(job, _Failure(at, event.round, tuple(zip(event.nodes, event.ranks, strict=False))))
            case events.FirstStepEvent(recovery_seconds=float(seconds)) if log.fault is not None:
                if log.fault.recovery_s is None and log.fault.round == event.round:
                    log.fault.recovery_s = seconds
            case events.CheckpointSavedEvent(seconds=seconds) if at >= self.since:
                newest = log.timeline.newest_round()
                job.saves += 1
                job.save_s += seconds * (newest.world_size if newest is not None else 0)
            case events.JobEndedEvent(outcome=outcome):
                if job.outcome is None or outcome != "left" or not _same_time(at, job.outcome[0]):
                    job.outcome = at, outcome
        self._count_for_workers(log, line, grown, was_lost=was_lost)

    def _time_growth(self, log: _NodeLog, job: _Job, line: LogLine) -> WorkerTime:
        """The time that the node's split grew by, as far as it is since the begin of the report."""
        grown, at = WorkerTime(), line.wall
        if line.event.spent is None:
            job.untimed_lines += 1
            return grown
        # A process that continues the log counts from its own begin, not from where the one before it had ended.
        began = max(at - line.event.spent.total, log.timed_until)
        part = 1.0 if began >= self.since else max(0.0, at - self.since) / max(at - began, 1e-9)
        grown.add(log.timeline.time_split, part)
        grown.add(log.seen_split, -part)
        log.seen_split, log.timed_until = log.timeline.time_split, at
        return grown

    def _on_round(self, log: _NodeLog, job: _Job, at: float, previous: RoundStatus | None) -> None:
        """Begin to charge lost time to the fault that this round follows, if it follows one."""
        newest = log.timeline.newest_round()
        assert newest is not None
        if newest.planned:
            _settle_reported(log, job)
        else:
            _fail(log)
        log.failed, log.fault = False, None
        if not newest.planned or log.unassigned_s:
            failed, since = (previous.round, previous.at) if previous is not None else (0, at)
            fault = _Fault(newest.round, at, newest.cause_words, failed, since, newest.lost_nodes)
            fault.is_in_report = at >= self.since and not newest.planned
            log.fault = _merge_fault(job, fault)
            log.fault.lost_s += log.unassigned_s
            log.unassigned_s = 0.0

    def _count_for_workers(self, log: _NodeLog, line: LogLine, grown: WorkerTime, *, was_lost: bool) -> None:
        """Count the time for each of the node's workers, and what is lost for the fault that it belongs to."""
        before = log.workers
        if isinstance(line.event, events.GroupStartedEvent):
            log.workers = len(line.event.ranks)
        if not log.workers:
            log.time_before_workers.add(grown)
            return
        weighed = WorkerTime()
        weighed.add(grown, before or log.workers)
        weighed.add(log.time_before_workers, log.workers)
        log.time_before_workers = WorkerTime()
        log.time.add(weighed)
        self._jobs[line.job].time.add(weighed)
        self._nodes.setdefault(line.node, WorkerTime()).add(weighed)
        published = isinstance(line.event, events.RoundPublishedEvent)
        if log.fault is not None and (published or (was_lost and not log.failed and log.reported is None)):
            log.fault.lost_s += weighed.lost
        elif log.reported is not None:
            log.reported_s += weighed.lost
            if log.timeline.time_split.state != "lost":  # it has resumed
                _settle_reported(log, self._jobs[line.job])
        else:
            log.unassigned_s += weighed.lost

    def _end_run(self, log: _NodeLog, job: _Job) -> None:
        """The run has ended, or the log ends here: a fault that no round followed."""
        _settle_reported(log, job)
        newest = log.timeline.newest_round()
        if newest is not None and (log.failed or log.unassigned_s > 0):
            fault = _Fault(
                newest.round + 1,
                log.timed_until,
                NO_RESTART_CAUSE,
                newest.round,
                newest.at,
                is_in_report=log.timed_until >= self.since,
            )
            _merge_fault(job, fault).lost_s += log.unassigned_s
            log.failed, log.unassigned_s = False, 0.0

    def to_json(self, now: float) -> dict[str, Any]:
        """All of it, for --json and for the page. The largest losses are first."""
        for (name, _), log in self._logs.items():
            self._end_run(log, self._jobs[name])
        causes: dict[str, _FaultSum] = {}
        nodes: dict[str, _FaultSum] = {}
        ranks: dict[tuple[str, int, str], _FaultSum] = {}
        jobs: dict[str, _FaultSum] = {}
        for name, job in self._jobs.items():
            for fault in job.faults.values():
                if not (fault.is_in_report or fault.lost_s):
                    continue
                causes.setdefault(fault.cause, _FaultSum()).add(fault)
                jobs.setdefault(name, _FaultSum()).add(fault)
                places = _culprits(fault, job.failures.get(fault.failed_round, ()))
                for node, rank in places:
                    nodes.setdefault(node, _FaultSum()).add(fault, 1 / len(places))
                    if rank is not None:
                        ranks.setdefault((name, rank, node), _FaultSum()).add(fault, 1 / len(places))
        total = WorkerTime()
        for job in self._jobs.values():
            total.add(job.time)
        shown = {name: job for name, job in self._jobs.items() if job.nodes}
        return {
            "since": self.since or None,
            "until": now,
            "oldest": self.oldest,
            "newest": self.newest,
            **total.to_json(),
            "faults": sum(one.faults for one in causes.values()),
            "saves": sum(job.saves for job in self._jobs.values()),
            "save_seconds": round(sum(job.save_s for job in self._jobs.values()), 1),
            "left_out_lines": self.left_out_lines,
            "causes": _by_cost({"cause": cause, **_sums_to_json(one)} for cause, one in causes.items()),
            "nodes": _by_cost(
                {
                    "node": node,
                    **self._nodes.get(node, WorkerTime()).to_json(),
                    **_culprit_to_json(nodes.get(node, _FaultSum())),
                }
                for node in {**self._nodes, **nodes}
            ),
            "ranks": _by_cost(
                {"job": name, "rank": rank, "node": node, **_culprit_to_json(one)}
                for (name, rank, node), one in ranks.items()
            ),
            "jobs": _by_cost(
                {
                    "job": name,
                    "nodes": sorted(job.nodes),
                    **job.time.to_json(),
                    "faults": jobs.get(name, _FaultSum()).faults,
                    "saves": job.saves,
                    "save_seconds": round(job.save_s, 1),
                    "outcome": _outcome(job),
                    "newest": job.newest_at,
                    "is_timed": not job.untimed_lines,
                }
                for name, job in shown.items()
            ),
        }


def _begins_run(timeline: JobTimeline, event: events.LogEvent) -> bool:
    """True for the first round of another run with the same id and node, whose numbers begin anew."""
    newest = timeline.newest_round()
    if newest is None or not isinstance(event, events.RoundPublishedEvent):
        return False
    return event.round < newest.round or (event.round == newest.round and timeline.ended_at is not None)


def _outcome(job: _Job) -> str | None:
    """The end of the job; None while other nodes continue what this one has left."""
    return (
        job.outcome[1] if job.outcome is not None and job.newest_at <= job.outcome[0] + MAX_CLOCK_DIFFERENCE_S else None
    )


def _fail(log: _NodeLog) -> None:
    """A failure was logged: a hang that was only reported before is part of it."""
    log.failed, log.reported = True, None
    log.unassigned_s, log.reported_s = log.unassigned_s + log.reported_s, 0.0


def _settle_reported(log: _NodeLog, job: _Job) -> None:
    """A hang that was only reported is over, without a failure."""
    if log.reported is not None:
        _merge_fault(job, log.reported).lost_s += log.reported_s
        log.reported, log.reported_s = None, 0.0


def _note_failure(job: _Job, failure: _Failure) -> None:
    """Note it. Of one round only the first failure counts: the others follow from it."""
    noted = job.failures.setdefault(failure.round, [])
    for index, one in enumerate(noted):
        if _same_time(one.at, failure.at):
            noted[index] = min(one, failure, key=lambda each: each.at)
            return
    if len(noted) < MAX_RUNS_PER_JOB_ID:
        noted.append(failure)


def _same_time(one: float, other: float) -> bool:
    return abs(one - other) <= MAX_CLOCK_DIFFERENCE_S


def _merge_fault(job: _Job, fault: _Fault) -> _Fault:
    """The same fault as another node has logged it, or this one."""
    minute = int(fault.at // MAX_CLOCK_DIFFERENCE_S)
    for near in (minute, minute - 1, minute + 1):
        one = job.faults.get((fault.round, fault.cause, near))
        if one is not None and _same_time(one.at, fault.at):
            one.is_in_report = one.is_in_report or fault.is_in_report
            return one
    job.faults[fault.round, fault.cause, minute] = fault
    return fault


def _culprits(fault: _Fault, failures: Sequence[_Failure]) -> Sequence[tuple[str, int | None]]:
    """The nodes and ranks at fault: those that were lost, else those of the verdict, else of the first failure."""
    if fault.nodes:
        return [(node, None) for node in fault.nodes]
    found = [
        one
        for one in failures
        if fault.failed_since - MAX_CLOCK_DIFFERENCE_S <= one.at <= fault.at + MAX_CLOCK_DIFFERENCE_S
    ]
    return min(found, key=lambda one: one.at).culprits if found else ()


def _sums_to_json(one: _FaultSum) -> dict[str, Any]:
    """The sums of a kind of fault, as JSON has them."""
    return {
        "faults": one.faults,
        "lost_seconds": round(one.lost_s, 1),
        "recovery_seconds": round(median(one.recoveries), 2) if one.recoveries else None,
    }


def _culprit_to_json(one: _FaultSum) -> dict[str, Any]:
    """The sums of a node or a rank that was at fault, as JSON has them."""
    return {"faults_of_it": one.faults, "cost_seconds": round(one.lost_s, 1), "causes": one.causes}


def _by_cost(rows: Any) -> list[Mapping[str, Any]]:
    """Rows with the largest cost first, then by name."""

    def key(row: Mapping[str, Any]) -> tuple[float, list[str]]:
        cost = row["cost_seconds"] if "cost_seconds" in row else row["lost_seconds"]
        return -cost, [str(value) for value in row.values()]

    return sorted(rows, key=key)
