"""Pure: the agents' records in the store -> the states that `elasticd jobs`, `status` and `nodes` show.

Times of day are only subtracted from each other for a person to read.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from functools import lru_cache

from elasticd_agent.node.api.schema import AssignmentStatus, JobProgress, JobStatus, JobSummary, NodeSummary, Requested
from elasticd_agent.node.records import Cordon, JobResult, NodeStatus, Placement, RunnerStatus, Submission
from elasticd_agent.node.scheduler import policy
from elasticd_agent.node.scheduler.policy import ClusterView

JobKey = tuple[str, int]

NOT_SCHEDULED_YET = "not scheduled yet; an agent does that within seconds"


def jobs(view: ClusterView, now: float) -> list[JobSummary]:
    """Every job that has a record: the unfinished ones by number, then the ended ones by the time of their end."""
    names = {one.job for one in view.submissions}
    index = _Index.of(view)
    rows = [_summary(one, index, now) for one in view.submissions]
    rows += [_ended(one, now) for one in view.results if one.job not in names]
    return sorted(rows, key=lambda row: (row.ended, row.ended_at or 0.0, row.number))


def job(view: ClusterView, submission: Submission, now: float) -> JobSummary:
    return _summary(submission, _Index.of(view), now)


def job_status(
    summary: JobSummary, assignments: tuple[AssignmentStatus, ...], progress: JobProgress | None, file: str = ""
) -> JobStatus:
    known = {one.name: getattr(summary, one.name) for one in fields(summary)}
    return JobStatus(**known, assignments=assignments, progress=progress, file=file)


def job_file(submission: Submission) -> str:
    """Without the values of `env`, which may be secret."""
    try:
        job = json.loads(submission.spec)
    except (ValueError, RecursionError):
        return ""
    if not isinstance(job, dict) or not job:
        return ""
    if isinstance(job.get("env"), dict):
        job["env"] = dict.fromkeys(job["env"], "…")
    return json.dumps(job, indent=2, ensure_ascii=False)


@dataclass(frozen=True, slots=True)
class _Index:
    """The view by (job, number), since hundreds of jobs are looked up at once."""

    results: dict[JobKey, JobResult]
    placements: dict[JobKey, Placement]
    runners: dict[JobKey, dict[str, RunnerStatus]]
    reasons: dict[str, str]
    """A placement's reason -> for people."""
    places: dict[JobKey, int]
    """In the queue, from 1."""

    @classmethod
    def of(cls, view: ClusterView) -> _Index:
        runners: dict[JobKey, dict[str, RunnerStatus]] = {}
        for node in view.nodes:
            for one in node.runners:
                runners.setdefault((one.job, one.number), {})[node.node] = one
        results = {(one.job, one.number): one for one in view.results}
        placements = {(one.job, one.number): one for one in view.placements}
        head, queue = policy.queue(view)
        places = {(one.job, one.number): place for place, one in enumerate(queue, 1)}
        reasons = {reason: policy.describe(reason, head) for reason in {one.reason for one in view.placements}}
        return cls(results, placements, runners, reasons, places)


def _summary(submission: Submission, index: _Index, now: float) -> JobSummary:
    """Built in one step: a page of ten thousand jobs makes ten thousand of them."""
    key = (submission.job, submission.number)
    result, placement, runners = index.results.get(key), index.placements.get(key), index.runners.get(key, {})
    if result is not None:
        submitted = submission, _elapsed(submission.submitted_at, now)
        return _ended(result, now, submitted, leaving=tuple(sorted(nodes_still_running(runners))))
    assigned = placement.assignments if placement is not None else ()
    return JobSummary(
        job=submission.job,
        number=submission.number,
        requested=_requested(submission),
        submitted_at=submission.submitted_at,
        age_seconds=_elapsed(submission.submitted_at, now),
        submitted_by=submission.submitted_by,
        priority=submission.priority,
        state=_state(placement, runners),
        nodes=tuple([one.node for one in assigned]),
        slots=sum([len(one.slots) for one in assigned]),
        place=index.places.get(key),
        reason=NOT_SCHEDULED_YET if placement is None else index.reasons[placement.reason],
    )


def _requested(submission: Submission) -> Requested:
    return _of_range(submission.min_nodes, submission.max_nodes, submission.min_slots, submission.max_slots)


@lru_cache(64)
def _of_range(min_nodes: int, max_nodes: int, min_slots: int, max_slots: int) -> Requested:
    return Requested(nodes=(min_nodes, max_nodes), slots=(min_slots, max_slots))


def _ended(
    result: JobResult, now: float, submitted: tuple[Submission, float] | None = None, leaving: tuple[str, ...] = ()
) -> JobSummary:
    """`submitted`: its submission and that one's age, unless it is cleaned away."""
    submission, age_s = submitted or (None, None)
    return JobSummary(
        job=result.job,
        number=result.number,
        state=result.outcome,
        nodes=result.nodes,
        requested=None if submission is None else _requested(submission),
        submitted_at=None if submission is None else submission.submitted_at,
        age_seconds=age_s,
        submitted_by="" if submission is None else submission.submitted_by,
        priority="normal" if submission is None else submission.priority,
        ended_at=result.ended_at,
        ended_seconds=_elapsed(result.ended_at, now),
        exit_code=result.exit_code,
        leaving=leaving,
        reason=result.reason,
    )


def _state(placement: Placement | None, runners: dict[str, RunnerStatus]) -> str:
    if placement is None or not placement.assignments:
        return "leaving" if runners and nodes_still_running(runners) else "pending"
    return "running" if any(one.state == "running" for one in runners.values()) else "starting"


def assignments(view: ClusterView, submission: Submission) -> tuple[AssignmentStatus, ...]:
    """Each node the job runs on, or still runs on: its slots, and the state of the runner there."""
    placement = placement_of(view, submission)
    runners = runners_of(view, submission.job, submission.number)
    assigned = {} if placement is None else {one.node: one for one in placement.assignments}
    registered = {one.node for one in view.nodes}
    rows: dict[str, AssignmentStatus] = {}
    for node, runner in runners.items():
        slots = assigned[node].slots if node in assigned else runner.slots
        rows[node] = AssignmentStatus(node, slots, runner.state, runner.why)
    for node, one in assigned.items():
        offline = ("offline", "its agent is not registered")
        rows.setdefault(node, AssignmentStatus(node, one.slots, *(("starting", "") if node in registered else offline)))
    for refusal in () if placement is None else placement.refusals:
        rows.setdefault(refusal.node, AssignmentStatus(refusal.node, (), "refused", refusal.why))
    return tuple(rows[node] for node in dict.fromkeys([*assigned, *rows]))


def nodes(view: ClusterView) -> list[NodeSummary]:
    """Every node whose agent is registered, or that is cordoned."""
    statuses = {one.node: one for one in view.nodes}
    cordons = {one.node: one for one in view.cordons}
    ended = {(one.job, one.number) for one in view.results}
    assigned: dict[str, dict[str, tuple[int, ...]]] = {}
    for placement in view.placements:
        if placement.assignments and (placement.job, placement.number) not in ended:
            for one in placement.assignments:
                assigned.setdefault(one.node, {})[placement.job] = one.slots
    return [
        _node(name, statuses.get(name), cordons.get(name), assigned.get(name, {}))
        for name in sorted(statuses.keys() | cordons.keys())
    ]


def _node(
    name: str, status: NodeStatus | None, cordon: Cordon | None, assigned: dict[str, tuple[int, ...]]
) -> NodeSummary:
    """`assigned`: the slots of each job that is placed there."""
    known = status or NodeStatus(name, "", 0)
    runners = [one for one in known.runners if one.state != "refused"]
    used = {slot for slots in (*(one.slots for one in runners), *assigned.values()) for slot in slots}
    state, reason = _node_state(status, cordon, busy=bool(runners or assigned))
    versions = {"elasticd": known.elasticd, "python": known.python, "torch": known.torch, "driver": known.driver}
    return NodeSummary(
        node=name,
        state=state,
        slots=known.slots,
        used=len(used),
        jobs=tuple(sorted({one.job for one in runners} | assigned.keys())),
        reason=reason,
        address=known.address,
        gpus=known.gpus,
        cpus=known.cpus,
        memory_bytes=known.memory_bytes,
        labels=known.labels,
        versions=versions if status is not None else {},
        cordoned_by=None if cordon is None else cordon.cordoned_by,
    )


def _node_state(status: NodeStatus | None, cordon: Cordon | None, *, busy: bool) -> tuple[str, str]:
    """The state and why. A cordon counts above the state that the agent reports, except quarantine."""
    if cordon is None or (status is not None and status.state == "quarantined"):
        assert status is not None
        return status.state, status.why
    by = f"(by {cordon.cordoned_by})" if cordon.cordoned_by else ""
    why = f"{cordon.reason} {by}".strip()
    if status is None:
        return "offline", f"cordoned: {why}" if why else "cordoned"
    if not cordon.drain:
        return "cordoned", why
    return "draining" if busy else "drained", why


def placement_of(view: ClusterView, submission: Submission) -> Placement | None:
    key = (submission.job, submission.number)
    return next((one for one in view.placements if (one.job, one.number) == key), None)


def runners_of(view: ClusterView, job: str, number: int) -> dict[str, RunnerStatus]:
    """By node: the job's runner there, as the node's agent reports it."""
    return {node.node: one for node in view.nodes for one in node.runners if (one.job, one.number) == (job, number)}


def nodes_still_running(runners: dict[str, RunnerStatus]) -> list[str]:
    """The nodes where processes of the job run; a node that refused the job has none."""
    return [node for node, one in runners.items() if one.state != "refused"]


def _elapsed(at: float, now: float) -> float:
    return round(max(0.0, now - at), 1)
