"""The list of all jobs: put in order and searched without making a summary of jobs that are not shown. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from elasticd_daemon.api.schema import JobSummary, Requested
from elasticd_daemon.api.views import nodes_still_running
from elasticd_daemon.records import ClusterView, JobResult, Placement, RunnerStatus, Submission
from elasticd_daemon.scheduler import policy

NOT_SCHEDULED_YET = "not scheduled yet; an agent does that within seconds"


@dataclass(frozen=True, eq=False, slots=True)
class JobRow:
    """The records of one job."""

    job: str
    number: int
    submission: Submission | None
    """None: it is cleaned away."""
    placement: Placement | None
    """None of an ended job."""
    result: JobResult | None
    reason: str
    """For people."""
    runners: Mapping[str, RunnerStatus]
    """By node."""
    place: int | None
    """In the queue, from 1."""

    @property
    def nodes(self) -> tuple[str, ...]:
        if self.result is not None:
            return self.result.nodes
        return () if self.placement is None else tuple([one.node for one in self.placement.assignments])

    @property
    def state(self) -> str:
        if self.result is not None:
            return self.result.outcome
        if self.placement is None or not self.placement.assignments:
            return "leaving" if nodes_still_running(self.runners) else "pending"
        return "running" if any(one.state == "running" for one in self.runners.values()) else "starting"

    def summary(self, now: float) -> JobSummary:
        submission, result = self.submission, self.result
        assigned = () if self.placement is None else self.placement.assignments
        return JobSummary(
            job=self.job,
            number=self.number,
            state=self.state,
            nodes=self.nodes,
            slots=sum([len(one.slots) for one in assigned]),
            requested=None if submission is None else _requested(submission),
            submitted_at=None if submission is None else submission.submitted_at,
            age_seconds=None if submission is None else _elapsed(submission.submitted_at, now),
            submitted_by="" if submission is None else submission.submitted_by,
            priority="normal" if submission is None else submission.priority,
            place=self.place,
            ended_at=None if result is None else result.ended_at,
            ended_seconds=None if result is None else _elapsed(result.ended_at, now),
            exit_code=None if result is None else result.exit_code,
            leaving=() if result is None else tuple(sorted(nodes_still_running(self.runners))),
            reason=self.reason,
            step=(result.step or None) if result is not None else None,
        )

    def has_words(self, words: Iterable[str]) -> bool:
        one = self.submission
        by, priority = ("", "normal") if one is None else (one.submitted_by, one.priority)
        text = " ".join((self.job, self.state, by, priority, self.reason, *self.nodes)).casefold()
        return all(map(text.__contains__, words))


@dataclass(frozen=True, eq=False, slots=True)
class JobList:
    """Every job that has a record, as it is `now`."""

    rows: Mapping[str, JobRow]
    """By job."""
    unfinished: tuple[JobRow, ...]
    """Running jobs, the newest first, then the queue."""
    ended: tuple[JobRow, ...]
    """The newest first."""
    now: float

    @classmethod
    def of(cls, view: ClusterView, now: float) -> JobList:
        head, queue = policy.queue(view)
        places = {one.job: place for place, one in enumerate(queue, 1)}
        rows = _rows(view, head, places)
        running = sorted(
            (row for row in rows.values() if row.result is None and not row.place), key=lambda r: -r.number
        )
        ended = [(-row.result.ended_at, -row.number, row) for row in rows.values() if row.result is not None]
        ended.sort(key=lambda one: one[:2])
        unfinished = (*running, *[rows[one.job] for one in queue])
        return cls(rows, unfinished, tuple([row for _, _, row in ended]), now)

    def find(self, state: str, words: Sequence[str]) -> list[JobRow]:
        """Running jobs first, then the queue, then ended jobs, the newest first. `state`: that of a summary,
        "unfinished", or "" for any. `words`: what must occur in a row, in folded case.
        """
        rows = [*self.unfinished, *(() if state == "unfinished" else self.ended)]
        any_state = state in ("", "unfinished")
        return [row for row in rows if (any_state or row.state == state) and (not words or row.has_words(words))]

    def summaries(self) -> list[JobSummary]:
        """The unfinished jobs by number, then the ended ones by the time of their end."""
        rows = [*sorted(self.unfinished, key=lambda row: row.number), *reversed(self.ended)]
        return [row.summary(self.now) for row in rows]


def _rows(view: ClusterView, head: Submission | None, places: Mapping[str, int]) -> dict[str, JobRow]:
    """`head`, `places`: of the queue."""
    runners: dict[tuple[str, int], dict[str, RunnerStatus]] = {}
    for node in view.nodes:
        for one in node.runners:
            runners.setdefault((one.job, one.number), {})[node.node] = one
    placed = {one.job: one for one in view.placements}
    ended = {one.job: one for one in view.results}
    rows: dict[str, JobRow] = {}
    for submission in view.submissions:
        job, number = submission.job, submission.number
        result, placement = ended.get(job), placed.get(job)
        if result is not None and result.number == number:
            placement, reason = None, result.reason
        else:
            result = None
            if placement is not None and placement.number == number:
                reason = policy.describe(placement.reason, head)
            else:
                placement, reason = None, NOT_SCHEDULED_YET
        own = runners.get((job, number), {})
        rows[job] = JobRow(job, number, submission, placement, result, reason, own, places.get(job))
    for result in view.results:
        if result.job not in rows:
            own = runners.get((result.job, result.number), {})
            rows[result.job] = JobRow(result.job, result.number, None, None, result, result.reason, own, None)
    return rows


def _requested(submission: Submission) -> Requested:
    return Requested(
        nodes=(submission.min_nodes, submission.max_nodes), slots=(submission.min_slots, submission.max_slots)
    )


def _elapsed(at: float, now: float) -> float:
    return round(max(0.0, now - at), 1)
