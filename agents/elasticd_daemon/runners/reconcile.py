"""Pure: `reconcile(view, node, ...) -> NodePlan`, the runners that this node starts and stops to match the store.

Missing data causes no action: a runner is stopped only because a record about its job excludes it, never because the
store has no record. The scheduler decides where jobs run.

It compares three things: what the store wants here (placements, with their numbers), what runs here, and how earlier
runs have ended here. From each difference follows one action, and none from agreement, so the function may be called at
any time and as often as anybody likes. Its output is the whole plan; the executor does not add to it.

A run has a number. A runner whose number is lower than the placement's is of an earlier run of the job, and stops.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from elasticd.errors import WireError
from elasticd_agent.model.phrases import count, ranges
from elasticd_daemon.records import ClusterView, JobResult, Placement, RunnerStatus, Submission
from elasticd_daemon.runners.spec import RunnerExit, RunnerSpec

RunKey = tuple[str, int]
SubmissionMark = tuple[str, float]
"""The token and the time of a submission, which tell it from another one with its number."""

CRASH_BACKOFFS_S = (0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0)
"""Before the n-th start after a crash of a runner. The first start is immediate: a single crash is mostly a kill -9."""
REFUSAL_RETRY_S = 300.0
"""Before a node tries a job again that it has refused."""
STABLE_AFTER_S = 600.0
"""A runner that ran this long started correctly: its crash counts as the first one."""


@dataclass(frozen=True, slots=True)
class LocalRunner:
    """A runner with at least one process, its own or one that it started."""

    spec: RunnerSpec
    state: Literal["starting", "running", "leaving"]
    why: str = ""

    @property
    def key(self) -> RunKey:
        """The job and the number of its run."""
        return self.spec.job, self.spec.number


@dataclass(frozen=True, slots=True)
class RunnerEnd:
    spec: RunnerSpec
    exit: RunnerExit | None  #: none: it was killed or crashed before it could write its exit
    stop_requested: bool  #: this agent had requested its stop

    @property
    def key(self) -> RunKey:
        return self.spec.job, self.spec.number


@dataclass(frozen=True, slots=True)
class CrashBackoff:
    """A runner that ended before its job, or could not be started."""

    crashes: int
    wait_s: float
    retry_at: float
    why: str


@dataclass(frozen=True, slots=True)
class RunnerStart:
    submission: Submission
    slots: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class RunnerStop:
    spec: RunnerSpec
    why: str


@dataclass(frozen=True, slots=True)
class NodePlan:
    start: tuple[RunnerStart, ...] = ()
    stop: tuple[RunnerStop, ...] = ()
    results: tuple[JobResult, ...] = ()
    runner_statuses: tuple[RunnerStatus, ...] = ()
    missing_from_store: tuple[RunnerSpec, ...] = ()  #: running jobs without any record in the store
    next_start_at: float | None = None


@dataclass(slots=True)
class RunOutcomes:
    """The ends of runners of this node, while they matter; kept by the main loop between turns."""

    exits: dict[RunKey, RunnerExit] = field(default_factory=dict)
    _noted: dict[RunKey, tuple[float, SubmissionMark | None]] = field(default_factory=dict)
    """When each exit was noted, and of which submission it is; None: not known."""
    backoffs: dict[RunKey, CrashBackoff] = field(default_factory=dict)

    def add(self, end: RunnerEnd, ran_s: float, now: float) -> str:
        """Note the end of a runner; returns its consequence in one sentence.

        A job that ended is reported; a runner that left is done; a runner that crashed is started again after a
        backoff.
        """
        key, exit, job = end.key, end.exit, end.spec.job
        if exit is not None and exit.outcome in ("succeeded", "failed", "refused"):
            self.backoffs.pop(key, None)
            self.exits[key] = exit
            self._noted[key] = now, _mark_of(end.spec)
            if exit.outcome == "refused":
                return f"job {job} is refused by this node: {exit.reason}"
            return f"job {job} has {exit.outcome}: {exit.reason}"
        if end.stop_requested:
            self.backoffs.pop(key, None)
            return f"job {job} has left this node" + (f": {exit.reason}" if exit is not None else "")
        before = self.backoffs.get(key)
        crashes = 1 if before is None or ran_s >= STABLE_AFTER_S else before.crashes + 1
        wait_s = CRASH_BACKOFFS_S[min(crashes - 1, len(CRASH_BACKOFFS_S) - 1)]
        how = f"ended with code {exit.exit_code} ({exit.reason})" if exit is not None else "crashed or was killed"
        self.backoffs[key] = CrashBackoff(crashes, wait_s, now + wait_s, f"its runner {how}")
        when = f"in {wait_s:g} s" if wait_s else "at once"
        return f"job {job}: its runner {how}; if the job is still scheduled here, another runner starts {when}"

    def add_failed_start(self, key: RunKey, why: str, now: float, wait_s: float) -> None:
        """Note that a runner could not be started, and that it is tried again after `wait_s`."""
        before = self.backoffs.get(key)
        crashes = 1 if before is None else before.crashes + 1
        self.backoffs[key] = CrashBackoff(crashes, wait_s, now + wait_s, f"it cannot start: {why}")

    def forget(self, key: RunKey) -> None:
        self.exits.pop(key, None)
        self.backoffs.pop(key, None)
        self._noted.pop(key, None)

    def forget_recorded(self, view: ClusterView, node: str, retry_refused_before: float) -> None:
        """Drop exits that are in the store, and those of an earlier job of this name and number: a store that has lost
        its data numbers jobs anew.

        Refusals are dropped once this node is cordoned, because a person repairs it, and where they were noted before
        `retry_refused_before`, in monotonic seconds: a file server that was away may be back.
        """
        cordoned = any(cordon.node == node for cordon in view.cordons)
        submitted = {(s.job, s.number): s for s in view.submissions} if self.exits else {}
        for key, exit in list(self.exits.items()):
            noted_at, mark = self._noted[key]
            is_over = exit.outcome == "refused" and (cordoned or noted_at < retry_refused_before)
            now = submitted.get(key)
            is_submitted = now is not None and mark in (None, (now.token, now.submitted_at))
            if is_over or not is_submitted or view.result(*key) is not None:
                self.forget(key)


def _mark_of(spec: RunnerSpec) -> SubmissionMark | None:
    try:
        submission = Submission.from_json(spec.submission)
    except WireError:
        return None
    return submission.token, submission.submitted_at


def reconcile(
    view: ClusterView, node: str, runners: Iterable[LocalRunner], outcomes: RunOutcomes, drain_reason: str, now: float
) -> NodePlan:
    """`drain_reason`: why this node may run nothing, or "". `now` is monotonic seconds."""
    runners = tuple(runners)
    stop = tuple(
        RunnerStop(runner.spec, why)
        for runner in runners
        if (why := _stop_reason(runner.spec, view, node, drain_reason))
    )
    start, waiting, next_start_at = _plan_starts(
        () if drain_reason else view.placements, view, node, runners, outcomes, now
    )
    statuses = [*_runner_statuses(runners, stop), *waiting, *_refused_statuses(outcomes)]
    return NodePlan(
        start=tuple(start),
        stop=stop,
        results=tuple(_new_results(view, outcomes)),
        runner_statuses=tuple(sorted(statuses, key=lambda one: (one.number, one.job))),
        missing_from_store=tuple(
            runner.spec for runner in runners if runner.state != "leaving" and _missing_from_store(runner.spec, view)
        ),
        next_start_at=next_start_at,
    )


def _plan_starts(
    placements: Sequence[Placement],
    view: ClusterView,
    node: str,
    runners: Sequence[LocalRunner],
    outcomes: RunOutcomes,
    now: float,
) -> tuple[list[RunnerStart], list[RunnerStatus], float | None]:
    """The runners to start, those that must wait, and when the next backoff ends."""
    running = {runner.key for runner in runners}
    in_use = {slot: runner.spec.job for runner in runners for slot in runner.spec.slots}
    unknown = {runner.spec.job for runner in runners if not runner.spec.slots}
    start: list[RunnerStart] = []
    waiting: list[RunnerStatus] = []
    next_start_at = None
    for placement in placements:
        # The cheapest checks first: most placements are other nodes', or of jobs that ended long ago.
        assignment = placement.assignment(node)
        key = (placement.job, placement.number)
        if assignment is None or key in running or key in outcomes.exits:
            continue
        if (submission := _submission_to_run(placement, view)) is None:
            continue
        slots = assignment.slots
        backoff = outcomes.backoffs.get(key)
        if users := sorted(unknown.union(in_use[slot] for slot in slots if slot in in_use)):
            why = f"waiting for its slots, which {', '.join(users)} still uses"
            waiting.append(RunnerStatus(*key, slots, "starting", why))
        elif backoff is not None and backoff.retry_at > now:
            next_start_at = backoff.retry_at if next_start_at is None else min(next_start_at, backoff.retry_at)
            # Not what is left: each change of a node's status is a write to the store, which the scheduler reads.
            times = count(backoff.crashes, "time")
            why = f"{backoff.why}; {times} in a row, the next start is within {backoff.wait_s:g} s"
            waiting.append(RunnerStatus(*key, slots, "starting", why))
        else:
            start.append(RunnerStart(submission, slots))
            in_use |= dict.fromkeys(slots, placement.job)
    return start, waiting, next_start_at


def _runner_statuses(runners: Iterable[LocalRunner], stop: Iterable[RunnerStop]) -> Iterable[RunnerStatus]:
    reasons = {runner.spec.job: runner.why for runner in stop}
    for runner in runners:
        job = runner.spec.job
        state = "leaving" if job in reasons else runner.state
        yield RunnerStatus(*runner.key, runner.spec.slots, state, runner.why or reasons.get(job, ""))


def _refused_statuses(outcomes: RunOutcomes) -> Iterable[RunnerStatus]:
    for key, exit in outcomes.exits.items():
        if exit.outcome == "refused":
            yield RunnerStatus(*key, (), "refused", exit.reason)


def _stop_reason(spec: RunnerSpec, view: ClusterView, node: str, drain_reason: str) -> str:
    """Why the runner must stop; "" if it may continue."""
    if drain_reason:
        return drain_reason
    for result in view.results:
        if result.job == spec.job and result.number >= spec.number:
            return f"the job was {result.reason}" if result.outcome == "cancelled" else f"the job has {result.outcome}"
    for placement in view.placements:
        if placement.job != spec.job or placement.number < spec.number:
            continue
        if placement.number > spec.number:
            return f"the job was submitted again, as number {placement.number}"
        assignment = placement.assignment(node)
        if assignment is None:
            # A reason that is only about other nodes does not explain why the job leaves this one.
            moved = (
                placement.reason if node in placement.reason else f"the job continues without it; {placement.reason}"
            )
            return next((cordon.text for cordon in view.cordons if cordon.node == node and cordon.drain), moved)
        if spec.slots and set(assignment.slots) != set(spec.slots):
            return f"its slots on this node change to {', '.join(ranges(assignment.slots))}"
    return ""


def _submission_to_run(placement: Placement, view: ClusterView) -> Submission | None:
    """The placement's submission, unless the job has ended."""
    if view.result(placement.job, placement.number) is not None:
        return None
    key = (placement.job, placement.number)
    return next((s for s in view.submissions if (s.job, s.number) == key), None)


def _new_results(view: ClusterView, outcomes: RunOutcomes) -> Iterable[JobResult]:
    """Jobs that succeeded or failed here and have no result in the store yet."""
    placements: Mapping[RunKey, Placement] = {(p.job, p.number): p for p in view.placements}
    submitted = {(s.job, s.number) for s in view.submissions}
    for key, exit in outcomes.exits.items():
        if exit.outcome == "refused" or key not in submitted or view.result(*key) is not None:
            continue
        nodes = tuple(assignment.node for assignment in placements[key].assignments) if key in placements else ()
        outcome: Literal["succeeded", "failed"] = "succeeded" if exit.outcome == "succeeded" else "failed"
        yield JobResult(*key, outcome, exit.exit_code, exit.reason, exit.ended_at, nodes, exit.rounds, exit.step)


def _missing_from_store(spec: RunnerSpec, view: ClusterView) -> bool:
    """True if the store has no record of the job: it came back empty, or the job was never in it."""
    recorded = [(submission.job, submission.number) for submission in view.submissions]
    recorded += [(placement.job, placement.number) for placement in view.placements]
    recorded += [(result.job, result.number) for result in view.results]
    return not any(job == spec.job and number >= spec.number for job, number in recorded)
