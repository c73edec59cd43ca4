"""Pure: what the daemons' records say -> the plain values that `elasticd jobs`, `status` and `nodes` show.

It exists so that what a job's or a node's state is called is decided in one place. It asks nobody and knows no clock
but the one it is given; a time of day is only ever subtracted from another to be read by a person.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from elasticd_agent.node.records import Cordon, JobResult, NodeStatus, Placement, RunnerStatus, Submission
from elasticd_agent.node.scheduler import policy as placing
from elasticd_agent.node.scheduler.policy import ClusterView

JobKey = tuple[str, int]

NOT_SCHEDULED_YET = "nobody has placed it yet: a daemon does so within seconds of starting"


def jobs(view: ClusterView, now: float) -> list[dict[str, Any]]:
    """Every job there is a record of: those that have not ended in the order of their numbers, then the ended ones."""
    names = {s.job for s in view.submissions}
    known = _Index.of(view)
    rows = [_row(s, known, now) for s in view.submissions]
    rows += [_ended_row(e, now) for e in view.results if e.job not in names]
    return sorted(rows, key=lambda row: (row["ended_at"] is not None, row["ended_at"] or 0.0, row["number"]))


def job(view: ClusterView, submission: Submission, now: float) -> dict[str, Any]:
    return _row(submission, _Index.of(view), now)


@dataclass(frozen=True, slots=True)
class _Index:
    """The view by (job, number): hundreds of jobs are looked up at once. `ahead`: whom the others wait behind."""

    endings: dict[JobKey, JobResult]
    placements: dict[JobKey, Placement]
    running: dict[JobKey, dict[str, RunnerStatus]]
    ahead: Submission | None

    @classmethod
    def of(cls, view: ClusterView) -> _Index:
        running: dict[JobKey, dict[str, RunnerStatus]] = {}
        for card in view.nodes:
            for one in card.runners:
                running.setdefault((one.job, one.number), {})[card.node] = one
        endings = {(e.job, e.number): e for e in view.results}
        return cls(endings, {(p.job, p.number): p for p in view.placements}, running, placing.head_of_queue(view))


def _row(submission: Submission, known: _Index, now: float) -> dict[str, Any]:
    key = (submission.job, submission.number)
    ending, placement, there = known.endings.get(key), known.placements.get(key), known.running.get(key, {})
    running = {} if ending is not None else there
    places = () if placement is None or ending is not None else placement.assignments
    state = _state(ending, placement, running)
    return {
        "job": submission.job,
        "number": submission.number,
        "state": state,
        "nodes": list(ending.nodes) if ending is not None else [place.node for place in places],
        "slots": sum(len(place.slots) for place in places),
        "wants": {
            "nodes": [submission.min_nodes, submission.max_nodes],
            "slots": [submission.min_slots, submission.max_slots],
        },
        "submitted_at": submission.submitted_at,
        "age_seconds": _elapsed(submission.submitted_at, now),
        "by": submission.submitted_by,
        "ended_at": None if ending is None else ending.ended_at,
        "ended_seconds": None if ending is None else _elapsed(ending.ended_at, now),
        "exit_code": None if ending is None else ending.exit_code,
        "leaving": [] if ending is None else sorted(nodes_still_running(there)),
        "reason": _reason(ending, placement, known.ahead),
    }


def assignments(view: ClusterView, submission: Submission) -> list[dict[str, Any]]:
    """Where the job runs, or still does: each node's slots, and what its daemon says of the runner there."""
    placement = placement_of(view, submission)
    running = runners_of(view, submission.job, submission.number)
    given = {} if placement is None else {place.node: place for place in placement.assignments}
    rows = []
    for node in dict.fromkeys([*given, *running]):
        runner, place = running.get(node), given.get(node)
        slots = place.slots if place is not None else runner.slots if runner is not None else ()
        here = any(card.node == node for card in view.nodes)
        state = runner.state if runner is not None else "starting" if here else "away"
        why = runner.why if runner is not None else "" if here else "its daemon says nothing"
        rows.append({"node": node, "slots": list(slots), "state": state, "reason": why})
    for refusal in () if placement is None else placement.refusals:
        if refusal.node not in {row["node"] for row in rows}:
            rows.append({"node": refusal.node, "slots": [], "state": "refused", "reason": refusal.why})
    return rows


def nodes(view: ClusterView) -> list[dict[str, Any]]:
    """Every node that a daemon has announced, or that is cordoned."""
    cards = {card.node: card for card in view.nodes}
    cordons = {cordon.node: cordon for cordon in view.cordons}
    return [node(name, cards.get(name), cordons.get(name), view) for name in sorted(cards.keys() | cordons.keys())]


def node(name: str, card: NodeStatus | None, cordon: Cordon | None, view: ClusterView) -> dict[str, Any]:
    running = [] if card is None else [one for one in card.runners if one.state != "refused"]
    over = {(e.job, e.number) for e in view.results}
    placed = {
        (p.job, p.number): place.slots
        for p in view.placements
        for place in p.assignments
        if place.node == name and (p.job, p.number) not in over
    }
    used = {slot for one in running for slot in one.slots} | {slot for slots in placed.values() for slot in slots}
    state, why = _node_state(card, cordon, busy=bool(running or placed))
    return {
        "node": name,
        "state": state,
        "slots": 0 if card is None else card.slots,
        "used": len(used),
        "jobs": sorted({one.job for one in running} | {job for job, _ in placed}),
        "reason": why,
        "address": "" if card is None else card.address,
        "gpus": [] if card is None else list(card.gpus),
        "cpus": 0 if card is None else card.cpus,
        "memory_bytes": 0 if card is None else card.memory_bytes,
        "labels": [] if card is None else list(card.labels),
        "versions": {}
        if card is None
        else {"elasticd": card.elasticd, "python": card.python, "torch": card.torch, "driver": card.driver},
        "cordoned_by": None if cordon is None else cordon.cordoned_by,
    }


def placement_of(view: ClusterView, submission: Submission) -> Placement | None:
    return next((p for p in view.placements if (p.job, p.number) == (submission.job, submission.number)), None)


def runners_of(view: ClusterView, job: str, number: int) -> dict[str, RunnerStatus]:
    """The job's runner on each node, as the node's own daemon says."""
    return {card.node: one for card in view.nodes for one in card.runners if (one.job, one.number) == (job, number)}


def nodes_still_running(running: dict[str, RunnerStatus]) -> list[str]:
    """The nodes on which something runs: who has refused a job has nothing of it."""
    return [node for node, one in running.items() if one.state != "refused"]


def _state(ending: JobResult | None, placement: Placement | None, running: dict[str, RunnerStatus]) -> str:
    if ending is not None:
        return ending.outcome
    if placement is None or not placement.assignments:
        return "leaving" if any(one.state != "refused" for one in running.values()) else "pending"
    return "running" if any(one.state == "running" for one in running.values()) else "starting"


def _reason(ending: JobResult | None, placement: Placement | None, ahead: Submission | None) -> str:
    if ending is not None:
        return ending.reason
    return NOT_SCHEDULED_YET if placement is None else placing.describe(placement.reason, ahead)


def _node_state(card: NodeStatus | None, cordon: Cordon | None, *, busy: bool) -> tuple[str, str]:
    if cordon is not None:
        by = f" (by {cordon.cordoned_by})" if cordon.cordoned_by else ""
        why = f"{cordon.reason}{by}".strip()
        if card is None:
            return "away", f"cordoned: {why}" if why else "cordoned"
        if card.state == "quarantined":
            return card.state, card.why
        return ("cordoned" if not cordon.drain else "draining" if busy else "drained"), why
    assert card is not None
    return card.state, card.why


def _ended_row(ending: JobResult, now: float) -> dict[str, Any]:
    return {
        "job": ending.job,
        "number": ending.number,
        "state": ending.outcome,
        "nodes": list(ending.nodes),
        "slots": 0,
        "wants": None,
        "submitted_at": None,
        "age_seconds": None,
        "by": "",
        "ended_at": ending.ended_at,
        "ended_seconds": _elapsed(ending.ended_at, now),
        "exit_code": ending.exit_code,
        "leaving": [],
        "reason": ending.reason,
    }


def _elapsed(at: float, now: float) -> float:
    return round(max(0.0, now - at), 1)
