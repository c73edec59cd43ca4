"""Pure: `reconcile(known, node, ...) -> Plan`, what this node starts, stops and says so that it agrees with the store.

It exists so that the daemon's part in a job is decided in one place, from values. What it does not know it does not
act on: a runner is stopped only because the store says something about its job that excludes it, never because the
store says nothing. It reads no clock, starts nothing, and decides nothing about where jobs run.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from elasticd_agent.model.phrases import ranges
from elasticd_agent.node.records import JobResult, Placement, RunnerStatus, Submission
from elasticd_agent.node.runners.spec import RunnerExit, RunnerSpec
from elasticd_agent.node.scheduler.policy import ClusterView

Key = tuple[str, int]

BACKOFF_S = (0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0)
"""Before the n-th start after a crash of a runner: its first one is most often somebody's kill -9."""
STABLE_S = 600.0
"""A runner that lived so long did not crash because of how it starts."""


@dataclass(frozen=True, slots=True)
class LocalRunner:
    """A runner that lives, or whose remains do."""

    spec: RunnerSpec
    state: Literal["starting", "running", "leaving"]
    why: str = ""

    @property
    def key(self) -> Key:
        return self.spec.job, self.spec.number


@dataclass(frozen=True, slots=True)
class RunnerEnd:
    """A runner that has ended. `last` None: it could not say how. `asked`: this daemon had asked it to leave."""

    spec: RunnerSpec
    exit: RunnerExit | None
    requested: bool

    @property
    def key(self) -> Key:
        return self.spec.job, self.spec.number


@dataclass(frozen=True, slots=True)
class CrashBackoff:
    """A runner that ended without an end of its job: how often in a row, and when it may be started again."""

    crashes: int
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
    """`endings` are to be written; `running` is what this node's card says. `until`: when to ask again."""

    start: tuple[RunnerStart, ...] = ()
    stop: tuple[RunnerStop, ...] = ()
    results: tuple[JobResult, ...] = ()
    runners: tuple[RunnerStatus, ...] = ()
    missing: tuple[RunnerSpec, ...] = ()
    next_start_at: float | None = None


@dataclass(slots=True)
class RunOutcomes:
    """How runners of this node ended, as far as it still matters; kept by the deciding thread between turns."""

    exits: dict[Key, RunnerExit] = field(default_factory=dict)
    backoffs: dict[Key, CrashBackoff] = field(default_factory=dict)

    def add(self, end: RunnerEnd, lived_s: float, now: float) -> str:
        """One sentence on what that end means."""
        key, last, job = end.key, end.exit, end.spec.job
        if last is not None and last.outcome in ("succeeded", "failed", "refused"):
            self.backoffs.pop(key, None)
            self.exits[key] = last
            if last.outcome == "refused":
                return f"job {job} is refused by this node: {last.reason}"
            return f"job {job} has {last.outcome}: {last.reason}"
        if end.requested:
            self.backoffs.pop(key, None)
            return f"job {job} has left this node" + (f": {last.reason}" if last is not None else "")
        before = self.backoffs.get(key)
        crashes = 1 if before is None or lived_s >= STABLE_S else before.crashes + 1
        wait_s = BACKOFF_S[min(crashes - 1, len(BACKOFF_S) - 1)]
        how = f"ended with code {last.exit_code} ({last.reason})" if last is not None else "was killed, or crashed"
        self.backoffs[key] = CrashBackoff(crashes, now + wait_s, f"its runner {how}")
        when = f"in {wait_s:g} s" if wait_s else "at once"
        return f"job {job}: its runner {how}; where it is still placed here, another one starts {when}"

    def forget(self, key: Key) -> None:
        self.exits.pop(key, None)
        self.backoffs.pop(key, None)

    def forget_recorded(self, view: ClusterView, node: str) -> None:
        """Forget what the store knows of; and what this node has refused, once somebody cordons it to mend that."""
        cordoned = any(cordon.node == node for cordon in view.cordons)
        there = {(s.job, s.number) for s in view.submissions} if self.exits else set()
        for key, last in list(self.exits.items()):
            mended = last.outcome == "refused" and cordoned
            if mended or key not in there or view.result(*key) is not None:
                self.forget(key)


def reconcile(
    view: ClusterView, node: str, runners: Iterable[LocalRunner], outcomes: RunOutcomes, drain_reason: str, now: float
) -> NodePlan:
    """`leaving`: why nothing may run here any more; "" while something may. `now` is monotonic seconds."""
    runners = tuple(runners)
    stop = tuple(
        RunnerStop(one.spec, why) for one in runners if (why := _stop_reason(one.spec, view, node, drain_reason))
    )
    stopped = {one.spec.job for one in stop}
    busy = {slot: one.spec.job for one in runners for slot in one.spec.slots}
    start, until, waiting = [], None, []
    for placement in () if drain_reason else view.placements:
        # First what is quickly said: most placements are other nodes', or of jobs that ended long ago.
        place = placement.assignment(node)
        key = (placement.job, placement.number)
        if place is None or key in {one.key for one in runners} or key in outcomes.exits:
            continue
        if (wants := _submission_to_run(placement, view)) is None:
            continue
        again = outcomes.backoffs.get(key)
        if holders := sorted({busy[slot] for slot in place.slots if slot in busy}):
            waiting.append(
                RunnerStatus(*key, place.slots, "starting", f"waits for its slots: {', '.join(holders)} leaves")
            )
        elif again is not None and again.retry_at > now:
            until = again.retry_at if until is None else min(until, again.retry_at)
            why = f"{again.why}; {again.crashes} times in a row, the next start is in {again.retry_at - now:.0f} s"
            waiting.append(RunnerStatus(*key, place.slots, "starting", why))
        else:
            start.append(RunnerStart(wants, place.slots))
            busy |= dict.fromkeys(place.slots, placement.job)
    card = [RunnerStatus(*one.key, one.spec.slots, _state(one, stopped), _why(one, stop)) for one in runners]
    refused = [
        RunnerStatus(*key, (), "refused", last.reason)
        for key, last in outcomes.exits.items()
        if last.outcome == "refused"
    ]
    return NodePlan(
        start=tuple(start),
        stop=stop,
        results=tuple(_results(view, outcomes)),
        runners=tuple(sorted([*card, *waiting, *refused], key=lambda one: (one.number, one.job))),
        missing=tuple(one.spec for one in runners if one.state != "leaving" and _missing_from_store(one.spec, view)),
        next_start_at=until,
    )


def _stop_reason(spec: RunnerSpec, view: ClusterView, node: str, drain_reason: str) -> str:
    """Why the runner has to go; "" if it may stay."""
    if drain_reason:
        return drain_reason
    for ending in view.results:
        if ending.job == spec.job and ending.number >= spec.number:
            return f"the job was {ending.reason}" if ending.outcome == "cancelled" else f"the job has {ending.outcome}"
    for placement in view.placements:
        if placement.job != spec.job or placement.number < spec.number:
            continue
        place = placement.assignment(node)
        if placement.number > spec.number:
            return f"the job runs anew, as number {placement.number}"
        if place is None:
            # What moves the other nodes' places, and where they are now, is none of this node's.
            here = placement.reason if node in placement.reason else f"the job went on without it; {placement.reason}"
            return next((c.text for c in view.cordons if c.node == node and c.drain), here)
        if set(place.slots) != set(spec.slots):
            return f"its slots here are {', '.join(ranges(place.slots))} from now on"
    return ""


def _submission_to_run(placement: Placement, view: ClusterView) -> Submission | None:
    """What is placed, if it is not over."""
    if view.result(placement.job, placement.number) is not None:
        return None
    key = (placement.job, placement.number)
    return next((s for s in view.submissions if (s.job, s.number) == key), None)


def _results(view: ClusterView, outcomes: RunOutcomes) -> Iterable[JobResult]:
    """What this node knows first: whether a job has succeeded or failed."""
    placements: Mapping[Key, Placement] = {(p.job, p.number): p for p in view.placements}
    there = {(s.job, s.number) for s in view.submissions}
    for key, last in outcomes.exits.items():
        if last.outcome == "refused" or key not in there or view.result(*key) is not None:
            continue
        nodes = tuple(place.node for place in placements[key].assignments) if key in placements else ()
        outcome: Literal["succeeded", "failed"] = "succeeded" if last.outcome == "succeeded" else "failed"
        yield JobResult(*key, outcome, last.exit_code, last.reason, last.ended_at, nodes, last.rounds, last.step)


def _missing_from_store(spec: RunnerSpec, view: ClusterView) -> bool:
    """True if the store knows nothing of the job: it came back empty, or the job was never in it."""
    told = [(one.job, one.number) for one in view.submissions]
    told += [(one.job, one.number) for one in view.placements]
    told += [(one.job, one.number) for one in view.results]
    return not any(job == spec.job and number >= spec.number for job, number in told)


def _state(one: LocalRunner, stopped: set[str]) -> Literal["starting", "running", "leaving"]:
    return "leaving" if one.spec.job in stopped else one.state


def _why(one: LocalRunner, stop: tuple[RunnerStop, ...]) -> str:
    return one.why or next((s.why for s in stop if s.spec is one.spec), "")
