"""The list of all jobs: put in order, searched and encoded without making a summary of jobs that are not shown. Pure.

With ten thousand jobs nearly all have ended or are pending, and their records are the same objects from one request to
the next. What follows from these objects alone is therefore kept (`JobIndex`) and compared by identity, so that it
needs no invalidation; ages, and what the nodes' runners report, are read in each request.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import lru_cache

import msgspec

from elasticd_agent.node.api.schema import JobSummary, Requested
from elasticd_agent.node.api.views import encoded, nodes_still_running
from elasticd_agent.node.records import JobResult, Placement, RunnerStatus, Submission
from elasticd_agent.node.scheduler import policy
from elasticd_agent.node.scheduler.policy import ClusterView

JobKey = tuple[str, int]
JobRecords = tuple[tuple[Submission, ...], tuple[Placement, ...], tuple[JobResult, ...]]
Runners = Mapping[str, RunnerStatus]
"""Of one job, by node."""

NOT_SCHEDULED_YET = "not scheduled yet; an agent does that within seconds"
_NO_RUNNERS: Runners = {}
_VARYING = ("place", "age_seconds", "ended_seconds")
_LASTING = tuple(one.name for one in fields(JobSummary) if one.name not in ("unknown", *_VARYING))


@dataclass(eq=False, slots=True)
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
    json: bytes = b""
    """Its summary without _VARYING and without the closing brace, while no runner has the job: made once."""

    @property
    def nodes(self) -> tuple[str, ...]:
        if self.result is not None:
            return self.result.nodes
        return () if self.placement is None else tuple([one.node for one in self.placement.assignments])

    def state(self, runners: Runners) -> str:
        if self.result is not None:
            return self.result.outcome
        if self.placement is None or not self.placement.assignments:
            return "leaving" if runners and nodes_still_running(runners) else "pending"
        return "running" if any(one.state == "running" for one in runners.values()) else "starting"

    def is_of(self, submission: Submission, placement: Placement | None, result: JobResult | None, reason: str) -> bool:
        same = self.submission is submission and self.placement is placement and self.result is result
        return same and self.reason == reason

    def summary(self, runners: Runners, place: int | None, now: float) -> JobSummary:
        submission, result = self.submission, self.result
        assigned = () if self.placement is None else self.placement.assignments
        return JobSummary(
            job=self.job,
            number=self.number,
            state=self.state(runners),
            nodes=self.nodes,
            slots=sum([len(one.slots) for one in assigned]),
            requested=None if submission is None else _requested(submission),
            submitted_at=None if submission is None else submission.submitted_at,
            age_seconds=None if submission is None else _elapsed(submission.submitted_at, now),
            submitted_by="" if submission is None else submission.submitted_by,
            priority="normal" if submission is None else submission.priority,
            place=place,
            ended_at=None if result is None else result.ended_at,
            ended_seconds=None if result is None else _elapsed(result.ended_at, now),
            exit_code=None if result is None else result.exit_code,
            leaving=() if result is None else tuple(sorted(nodes_still_running(runners))),
            reason=self.reason,
            step=(result.step or None) if result is not None else None,
        )

    def has_words(self, state: str, words: Iterable[str]) -> bool:
        one = self.submission
        by, priority = ("", "normal") if one is None else (one.submitted_by, one.priority)
        text = " ".join((self.job, state, by, priority, self.reason, *self.nodes)).casefold()
        return all(map(text.__contains__, words))


@dataclass(frozen=True, slots=True, eq=False)
class JobIndex:
    """What follows from jobs' records alone."""

    records: JobRecords = ((), (), ())
    rows: Mapping[str, JobRow] = field(default_factory=dict)
    """By job."""
    places: Mapping[str, int] = field(default_factory=dict)
    """In the queue, from 1, by job."""
    unfinished: tuple[JobRow, ...] = ()
    """Running jobs, the newest first, then the queue."""
    ended: tuple[JobRow, ...] = ()
    """The newest first."""

    @classmethod
    def of(cls, view: ClusterView, before: JobIndex) -> JobIndex:
        """`before`: an earlier one, which is returned if it is of these same records, and whose rows are kept that have
        not changed.
        """
        records = view.submissions, view.placements, view.results
        if all(new is old for new, old in zip(records, before.records, strict=True)):
            return before
        head, queue = policy.queue(ClusterView(submissions=records[0], placements=records[1], results=records[2]))
        rows = _rows(records, head, before.rows)
        places = {one.job: place for place, one in enumerate(queue, 1)}
        running = [row for row in rows.values() if row.result is None and row.job not in places]
        running.sort(key=lambda row: -row.number)
        ended = [(-row.result.ended_at, -row.number, row) for row in rows.values() if row.result is not None]
        ended.sort(key=lambda one: one[:2])
        unfinished = (*running, *[rows[one.job] for one in queue])
        return cls(records, rows, places, unfinished, tuple([row for _, _, row in ended]))


def _rows(records: JobRecords, head: Submission | None, before: Mapping[str, JobRow]) -> dict[str, JobRow]:
    """`head`: of the queue."""
    submissions, placements, results = records
    placed = {one.job: one for one in placements}
    ended = {one.job: one for one in results}
    reasons = {reason: policy.describe(reason, head) for reason in {one.reason for one in placements}}
    rows: dict[str, JobRow] = {}
    for submission in submissions:
        job, number = submission.job, submission.number
        row, result, placement = before.get(job), ended.get(job), placed.get(job)
        if result is not None and result.number == number:
            placement, reason = None, result.reason
        else:
            result = None
            if placement is not None and placement.number == number:
                reason = reasons[placement.reason]
            else:
                placement, reason = None, NOT_SCHEDULED_YET
        if row is None or not row.is_of(submission, placement, result, reason):
            row = JobRow(job, number, submission, placement, result, reason)
        rows[job] = row
    for result in results:
        if result.job not in rows:
            rows[result.job] = JobRow(result.job, result.number, None, None, result, result.reason)
    return rows


@dataclass(frozen=True, slots=True, eq=False)
class JobList:
    """Every job that has a record, as it is `now`."""

    index: JobIndex
    runners: Mapping[JobKey, Runners]
    now: float

    @classmethod
    def of(cls, view: ClusterView, now: float, before: JobIndex) -> JobList:
        """`before`: the index of an earlier list."""
        runners: dict[JobKey, dict[str, RunnerStatus]] = {}
        for node in view.nodes:
            for one in node.runners:
                runners.setdefault((one.job, one.number), {})[node.node] = one
        return cls(JobIndex.of(view, before), runners, now)

    def runners_of(self, row: JobRow) -> Runners:
        return self.runners.get((row.job, row.number), _NO_RUNNERS)

    def summary(self, row: JobRow) -> JobSummary:
        return row.summary(self.runners_of(row), self.index.places.get(row.job), self.now)

    def find(self, state: str, words: Sequence[str]) -> list[JobRow]:
        """Running jobs first, then the queue, then ended jobs, the newest first. `state`: that of a summary,
        "unfinished", or "" for any. `words`: what must occur in a row, in folded case.
        """
        rows = [*self.index.unfinished, *(() if state == "unfinished" else self.index.ended)]
        any_state = state in ("", "unfinished")
        if any_state and not words:
            return rows
        states = [(row, row.state(self.runners_of(row))) for row in rows]
        return [row for row, its in states if (any_state or its == state) and (not words or row.has_words(its, words))]

    def in_order(self) -> list[JobRow]:
        """The unfinished jobs by number, then the ended ones by the time of their end."""
        return [*sorted(self.index.unfinished, key=lambda row: row.number), *reversed(self.index.ended)]

    def json(self) -> list[msgspec.Raw]:
        """The summaries `in_order`, encoded."""
        return [msgspec.Raw(self._json(row)) for row in self.in_order()]

    def _json(self, row: JobRow) -> bytes:
        text = row.json
        if not text or self.runners_of(row):
            summary = self.summary(row)
            text = encoded({name: getattr(summary, name) for name in _LASTING}).removesuffix(b"}")
            if not self.runners_of(row):
                row.json = text
        place = self.index.places.get(row.job)
        return b'%b,"place":%b,"age_seconds":%b,"ended_seconds":%b}' % (
            text,
            b"null" if place is None else b"%d" % place,
            b"null" if row.submission is None else b"%.1f" % _elapsed(row.submission.submitted_at, self.now),
            b"null" if row.result is None else b"%.1f" % _elapsed(row.result.ended_at, self.now),
        )


def _requested(submission: Submission) -> Requested:
    return _of_range(submission.min_nodes, submission.max_nodes, submission.min_slots, submission.max_slots)


@lru_cache(64)
def _of_range(min_nodes: int, max_nodes: int, min_slots: int, max_slots: int) -> Requested:
    return Requested(nodes=(min_nodes, max_nodes), slots=(min_slots, max_slots))


def _elapsed(at: float, now: float) -> float:
    return round(max(0.0, now - at), 1)
