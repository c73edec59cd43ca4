"""Pure: the agents' records in the store -> the states that `elasticd status JOB` and `elasticd nodes` show."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import fields

import msgspec

from elasticd_agent.model.phrases import listing
from elasticd_agent.system.durations import in_words
from elasticd_daemon.api.schema import AssignmentStatus, JobProgress, JobStatus, JobSummary, NodeSummary
from elasticd_daemon.records import ClusterView, Cordon, KnownNode, NodeStatus, Placement, RunnerStatus, Submission


def job_status(
    summary: JobSummary, assignments: tuple[AssignmentStatus, ...], progress: JobProgress | None, file: str = ""
) -> JobStatus:
    known = {field.name: getattr(summary, field.name) for field in fields(summary)}
    return JobStatus(**known, assignments=assignments, progress=progress, file=file)


def encoded(value: object) -> bytes:
    """The JSON of this agent's own answers, ten times faster than by `to_dict`: they have no unknown fields. No text in
    JSON contains these bytes, since its quotes are escaped.
    """
    return msgspec.json.encode(value).replace(b'{"unknown":{},', b"{")


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


def assignments(view: ClusterView, submission: Submission) -> tuple[AssignmentStatus, ...]:
    """Each node the job runs on, or still runs on: its slots, and the state of the runner there."""
    placement = placement_of(view, submission)
    runners = runners_of(view, submission.job, submission.number)
    assigned = {} if placement is None else {assignment.node: assignment for assignment in placement.assignments}
    registered = {status.node for status in view.nodes}
    rows: dict[str, AssignmentStatus] = {}
    for node, runner in runners.items():
        slots = assigned[node].slots if node in assigned else runner.slots
        rows[node] = AssignmentStatus(node, slots, runner.state, runner.why)
    for node, assignment in assigned.items():
        offline = ("offline", "its agent is not registered")
        rows.setdefault(
            node, AssignmentStatus(node, assignment.slots, *(("starting", "") if node in registered else offline))
        )
    for refusal in () if placement is None else placement.refusals:
        rows.setdefault(refusal.node, AssignmentStatus(refusal.node, (), "refused", refusal.why))
    return tuple(rows[node] for node in dict.fromkeys([*assigned, *rows]))


def nodes(view: ClusterView, now: float) -> list[NodeSummary]:
    """Every node whose agent is registered, or was lost, or that is cordoned. `now`: the time of day."""
    statuses = {status.node: status for status in view.nodes}
    lost = {node.node: node for node in view.known if node.node not in statuses}
    cordons = {cordon.node: cordon for cordon in view.cordons}
    ended = {(result.job, result.number) for result in view.results}
    assigned: dict[str, dict[str, tuple[int, ...]]] = {}
    for placement in view.placements:
        if placement.assignments and (placement.job, placement.number) not in ended:
            for assignment in placement.assignments:
                assigned.setdefault(assignment.node, {})[placement.job] = assignment.slots
    return [
        _node(name, statuses.get(name) or lost.get(name), cordons.get(name), assigned.get(name, {}), now)
        for name in sorted(statuses.keys() | lost.keys() | cordons.keys())
    ]


def _node(
    name: str,
    found: NodeStatus | KnownNode | None,
    cordon: Cordon | None,
    assigned: dict[str, tuple[int, ...]],
    now: float,
) -> NodeSummary:
    """`found`: of a lost node what is known of it. `assigned`: the slots of each job that is placed there."""
    status = found if isinstance(found, NodeStatus) else None
    lost = found if isinstance(found, KnownNode) else None
    known = status or NodeStatus(name, "", 0, "" if lost is None else lost.address)
    runners = [runner for runner in known.runners if runner.state != "refused"]
    used = {slot for slots in (*(runner.slots for runner in runners), *assigned.values()) for slot in slots}
    state, reason = _node_state(status, lost, cordon, now, busy=bool(runners or assigned))
    versions = {"elasticd": known.elasticd, "python": known.python, "torch": known.torch, "driver": known.driver}
    return NodeSummary(
        node=name,
        state=state,
        slots=known.slots,
        used=len(used),
        jobs=tuple(sorted({runner.job for runner in runners} | assigned.keys())),
        reason=reason,
        address=known.address,
        gpus=known.gpus,
        cpus=known.cpus,
        memory_bytes=known.memory_bytes,
        labels=known.labels,
        versions=versions if status is not None else {},
        cordoned_by=None if cordon is None else cordon.cordoned_by,
        lost_at=None if lost is None or lost.lost_s is None else lost.lost_at,
    )


def _node_state(
    status: NodeStatus | None, lost: KnownNode | None, cordon: Cordon | None, now: float, *, busy: bool
) -> tuple[str, str]:
    """The state and why. A cordon counts above the state that the agent reports, except quarantine."""
    by = f"(by {cordon.cordoned_by})" if cordon is not None and cordon.cordoned_by else ""
    why = f"{cordon.reason} {by}".strip() if cordon is not None else ""
    cordoned = f"cordoned: {why}" if why else "cordoned"
    if lost is not None:
        return "lost", _loss(lost, now) + (f"; {cordoned}" if cordon is not None else "")
    if cordon is None or (status is not None and status.state == "quarantined"):
        assert status is not None
        return status.state, status.why
    if status is None:
        return "offline", cordoned
    if not cordon.drain:
        return "cordoned", why
    return "draining" if busy else "drained", why


def _loss(lost: KnownNode, now: float) -> str:
    down = "its agent, the machine or its network is down"
    if lost.lost_s is None:  # the scheduler has not noted it yet
        return down
    at = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(lost.lost_at))
    ran = f"; it ran {listing(lost.jobs)}" if lost.jobs else ""
    return f"for {in_words(now - lost.lost_at)}, since {at}: {down}{ran}"


def placement_of(view: ClusterView, submission: Submission) -> Placement | None:
    key = (submission.job, submission.number)
    return next((placement for placement in view.placements if (placement.job, placement.number) == key), None)


def runners_of(view: ClusterView, job: str, number: int) -> dict[str, RunnerStatus]:
    """The job's runner on each node, as the node's agent reports it."""
    return {
        node.node: runner
        for node in view.nodes
        for runner in node.runners
        if (runner.job, runner.number) == (job, number)
    }


def nodes_still_running(runners: Mapping[str, RunnerStatus]) -> list[str]:
    """The nodes where processes of the job run; a node that refused the job has none."""
    return [node for node, runner in runners.items() if runner.state != "refused"]
