"""The list of all jobs, put in order, and searched. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from elasticd_daemon.api.schema import JobSummary, Requested
from elasticd_daemon.api.views import nodes_still_running
from elasticd_daemon.records import ClusterView, JobResult, Placement, RunnerStatus, Submission
from elasticd_daemon.scheduler import policy

NOT_SCHEDULED_YET = "not scheduled yet; an agent does that within seconds"


@dataclass(frozen=True, eq=False, slots=True)
class JobList:
    """Every job that has a record, as it is at one moment."""

    by_name: Mapping[str, JobSummary]
    unfinished: tuple[JobSummary, ...]
    """Running jobs, the newest first, then the queue."""
    ended: tuple[JobSummary, ...]

    @classmethod
    def of(cls, view: ClusterView, now: float) -> JobList:
        """`now`: the time of day."""
        head, queue = policy.queue(view)
        places = {submission.job: place for place, submission in enumerate(queue, 1)}
        jobs = {job.job: job for job in _summaries(view, head, places, now)}
        running = sorted((job for job in jobs.values() if not job.ended and not job.place), key=lambda job: -job.number)
        ended = sorted(
            (job for job in jobs.values() if job.ended), key=lambda job: (-(job.ended_at or 0.0), -job.number)
        )
        return cls(jobs, (*running, *[jobs[submission.job] for submission in queue]), tuple(ended))

    def find(self, state: str, words: Sequence[str]) -> list[JobSummary]:
        """Running jobs first, then the queue, then ended jobs, the newest first. `state`: that of a summary,
        "unfinished", or "" for any. `words`: what must occur in a row, in folded case.
        """
        jobs = [*self.unfinished, *(() if state == "unfinished" else self.ended)]
        any_state = state in ("", "unfinished")
        return [job for job in jobs if (any_state or job.state == state) and (not words or _has_words(job, words))]

    def summaries(self) -> list[JobSummary]:
        """The unfinished jobs by number, then the ended ones by the time of their end."""
        return [*sorted(self.unfinished, key=lambda job: job.number), *reversed(self.ended)]


def _has_words(job: JobSummary, words: Iterable[str]) -> bool:
    text = " ".join((job.job, job.state, job.submitted_by, job.priority, job.reason, *job.nodes)).casefold()
    return all(map(text.__contains__, words))


def _summaries(
    view: ClusterView, head: Submission | None, places: Mapping[str, int], now: float
) -> Iterable[JobSummary]:
    """`head`, `places`: of the queue."""
    runners: dict[tuple[str, int], dict[str, RunnerStatus]] = {}
    for node in view.nodes:
        for runner in node.runners:
            runners.setdefault((runner.job, runner.number), {})[node.node] = runner
    placements = {(placement.job, placement.number): placement for placement in view.placements}
    results = {(result.job, result.number): result for result in view.results}
    submitted = set()
    for submission in view.submissions:
        key = (submission.job, submission.number)
        submitted.add(submission.job)
        yield JobSummary(
            *key,
            requested=Requested(
                (submission.min_nodes, submission.max_nodes), (submission.min_slots, submission.max_slots)
            ),
            submitted_at=submission.submitted_at,
            age_seconds=_elapsed(submission.submitted_at, now),
            submitted_by=submission.submitted_by,
            priority=submission.priority,
            place=places.get(submission.job),
            **_state(placements.get(key), results.get(key), runners.get(key, {}), head, now),
        )
    for key, result in results.items():
        if result.job not in submitted:  # its submission is cleaned away
            yield JobSummary(*key, **_state(None, result, runners.get(key, {}), head, now))


def _state(
    placement: Placement | None,
    result: JobResult | None,
    runners: Mapping[str, RunnerStatus],
    head: Submission | None,
    now: float,
) -> Mapping[str, Any]:
    """The fields of a summary that say how the job is. `runners`: by node."""
    if result is not None:
        return {
            "state": result.outcome,
            "nodes": result.nodes,
            "ended_at": result.ended_at,
            "ended_seconds": _elapsed(result.ended_at, now),
            "exit_code": result.exit_code,
            "leaving": tuple(sorted(nodes_still_running(runners))),
            "reason": result.reason,
            "step": result.step or None,
        }
    assignments = () if placement is None else placement.assignments
    if assignments:
        state = "running" if any(runner.state == "running" for runner in runners.values()) else "starting"
    else:
        state = "leaving" if nodes_still_running(runners) else "pending"
    return {
        "state": state,
        "nodes": tuple([assignment.node for assignment in assignments]),
        "slots": sum([len(assignment.slots) for assignment in assignments]),
        "reason": NOT_SCHEDULED_YET if placement is None else policy.describe(placement.reason, head),
    }


def _elapsed(at: float, now: float) -> float:
    return round(max(0.0, now - at), 1)
