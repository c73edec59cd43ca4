"""The operations behind the HTTP API, in terms of jobs and nodes: from the store, this node and other nodes' agents.

Every method may be called from any thread and ends within a deadline. None waits for the node loop, which reads from
the store what is written here, as on every other node.

What is asked of other nodes is bounded by their number and by time: each answers for itself, those that do not answer
in time are named with the reason, and the rest of the answer stands. A page about a job on a thousand nodes is thus
complete except for the nodes that are down, and never waits for them.

Writes are those of the scheduler's queue, by compare-and-swap. A submission that is sent twice, because its answer was
lost, is recognised by its token and made once.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from urllib.parse import quote

from elasticd.errors import ElasticdError, UsageError, WireError
from elasticd_agent.config.run_model import job_id_prefix
from elasticd_agent.model.keys import Keys, decode_record
from elasticd_agent.model.phrases import count, is_are, listing
from elasticd_agent.model.records import Round
from elasticd_agent.store import Store
from elasticd_agent.store.cache import StoreCache
from elasticd_daemon.api import views
from elasticd_daemon.api.local import DUMP_TIMEOUT_S, NOTHING_HERE, READ_TIMEOUT_S, LocalJobs
from elasticd_daemon.api.node_files import ClusterReader, NotFound
from elasticd_daemon.api.peers import Peers
from elasticd_daemon.api.rank_logs import LogRequest
from elasticd_daemon.api.schema import Answer, JobProgress, JobStatus, LogChunk, NodeSummary, RoundStatus
from elasticd_daemon.api.views import JobList
from elasticd_daemon.config import job_file
from elasticd_daemon.config.documents import FileFormat
from elasticd_daemon.config.job_file import JobFile
from elasticd_daemon.records import ClusterView, JobResult, Submission, submitter
from elasticd_daemon.scheduler import job_queue


class Conflict(ElasticdError):
    """The request conflicts with the present state; the sentence says with what."""


@dataclass(eq=False)
class JobService:
    """Methods that need the store raise StoreUnavailable during an outage."""

    store: Store
    local: LocalJobs
    peers: Peers
    check_job: Callable[[JobFile], None] = lambda job: None
    """Applies this node's limits to a job before it is submitted: it raises UsageError."""
    max_jobs_per_submitter: Callable[[], int | None] = lambda: None
    clock: Callable[[], float] = time.time
    cache: StoreCache | None = None
    cluster: ClusterReader = field(init=False)
    _submitting: threading.Lock = field(init=False, default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self.cluster = ClusterReader(self.local, self.peers)

    def jobs(self) -> tuple[JobList, list[str]]:
        """Every job, and a sentence for each record in the store that cannot be read."""
        problems: list[str] = []
        return JobList.of(self._read_view(problems.append), self.clock()), problems

    def overview(self) -> tuple[JobList, list[NodeSummary], list[str]]:
        """Every job and every node, as this agent knows them, and the same sentences."""
        problems: list[str] = []
        view = job_queue.read_view(self.store, problems.append, self.cache, watched=True)
        now = self.clock()
        return JobList.of(view, now), views.node_summaries(view, now), problems

    def job_status(self, name: str) -> JobStatus:
        """Return a job's status: its place in the queue or in the cluster, its rounds and its
        ranks. Raises NotFound.
        """
        view, submission = self._find_job(name)
        now = self.clock()
        summary = JobList.of(view, now).by_name[name]
        assigned = () if summary.ended else views.assignment_statuses(view, submission)
        progress = self.cluster.progress(view, submission, summary.nodes, now)
        result = view.result(submission.job, submission.number)
        return views.make_job_status(
            summary, assigned, _with_result(progress, result), views.redacted_job_file(submission)
        )

    def submit(self, data: bytes, kind: FileFormat, name: str | None, by: str, token: str = "") -> Answer:
        """Raises UsageError for an invalid job, Conflict for an id whose job has not ended."""
        request, stem = self._make_submission(data, kind, name, by, token)
        try:
            # Of many at once, each is counted before the next one.
            with self._submitting if self.max_jobs_per_submitter() is not None else contextlib.nullcontext():
                self._check_job_limit(by, token)
                made = job_queue.submit(self.store, request, stem=stem, cache=self.cache)
                if made.submitted_at == request.submitted_at:  # else it is known, and this is a repetition
                    self._cancel_if_over_limit(made, by)
        except UsageError as error:
            if any(submission.job == request.job for submission in self._read_view().unfinished()):
                raise Conflict(str(error)) from None
            raise
        return {"job": made.job, "number": made.number}

    def _make_submission(
        self, data: bytes, kind: FileFormat, name: str | None, by: str, token: str = ""
    ) -> tuple[Submission, str]:
        """The submission, without a number and perhaps without an id, and what a generated id begins with. Raises
        UsageError for an invalid job.
        """
        job = job_file.read_job(data, kind, "the job")
        self.check_job(job)
        request = Submission(
            name or job.id or "",
            0,
            job_file.to_json(job),
            *job.node_range,
            *job.slot_range,
            submitted_by=by,
            submitted_at=self.clock(),
            token=token,
            grow=job.grow != "never",
            labels=job.node_labels,
            priority=job.priority,
            spares=job.spares,
        )
        return request, job_id_prefix(job.command[0], job.module)

    def _check_job_limit(self, by: str, token: str) -> None:
        """Raises Conflict for a submitter with too many jobs, except for a submission that is repeated."""
        most = self.max_jobs_per_submitter()
        if most is None:
            return
        name = submitter(by)
        own = [submission for submission in self._read_view().unfinished() if submission.submitter == name]
        if len(own) >= most and not (token and any(submission.token == token for submission in own)):
            raise Conflict(f"{name} has {count(len(own), 'unfinished job')}: [limits] jobs_per_submitter is {most}")

    def _cancel_if_over_limit(self, made: Submission, by: str) -> None:
        """Check the limit of jobs once more after the submission was written.

        Raises Conflict, with `made` cancelled, if other agents have let in others of its submitter meanwhile. Each
        agent looks after it has written, so the last one sees all, and no more than the limit stay.
        """
        most = self.max_jobs_per_submitter()
        if most is None:
            return
        own = [submission for submission in self._read_view().unfinished() if submission.submitter == made.submitter]
        if len(own) > most:
            job_queue.cancel(self.store, made.job, "[limits] jobs_per_submitter", self.clock())
            raise Conflict(
                f"{submitter(by)} has submitted too many jobs at once: [limits] jobs_per_submitter is {most}"
            )

    def cancel(self, name: str, by: str) -> Answer:
        """Raises NotFound, or Conflict for a job that has ended by itself."""
        self._find_job(name)
        result = job_queue.cancel(self.store, name, by, self.clock())
        if result.outcome != "cancelled":
            raise Conflict(f"job {name!r} has {result.outcome} already: {result.reason}")
        runners = views.runners_of(self._read_view(), result.job, result.number)
        return {
            "job": result.job,
            "number": result.number,
            "outcome": result.outcome,
            "reason": result.reason,
            "leaving": sorted(views.nodes_still_running(runners)),
        }

    def nodes(self) -> tuple[list[NodeSummary], list[str]]:
        """Every node, and a sentence for each record in the store that cannot be read."""
        problems: list[str] = []
        return views.node_summaries(self._read_view(problems.append), self.clock()), problems

    def cordon(self, node: str, *, drain: bool, reason: str, by: str) -> NodeSummary:
        """Give a node no new jobs; with `drain`, have its jobs leave it. Raises NotFound."""
        self._find_node(node)
        job_queue.cordon(self.store, node, drain, reason, by, self.clock())
        return self._find_node(node)

    def uncordon(self, node: str) -> Answer:
        """Raises NotFound, Conflict for a node that is not cordoned."""
        self._find_node(node)
        if not job_queue.uncordon(self.store, node):
            raise Conflict(f"node {node!r} is not cordoned")
        return {"node": node}

    def read_log(self, name: str, request: LogRequest) -> LogChunk:
        """A piece of a rank's output, from the node that has it. Raises NotFound, NodesUnavailable."""
        view, submission = self._find_job(name)
        return self.cluster.read_log(view, submission, self._current_round(submission), request)

    def dump(self, name: str) -> Answer:
        """Evidence that is taken now on each node, or why there is none. Raises NotFound, Conflict for a job that
        does not run.
        """
        view, submission = self._find_job(name)
        runners = views.runners_of(view, submission.job, submission.number)
        nodes = [node for node, runner in runners.items() if runner.state in ("starting", "running")]
        if not nodes:
            row = JobList.of(view, self.clock()).by_name[name]
            why = row.reason if row.reason.startswith(row.state) else f"{row.state}: {row.reason}"
            raise Conflict(f"job {name!r} runs on no node, so there is no evidence to take: {why}")
        question = ("POST", f"/v1/local/jobs/{quote(name, safe='')}/dump", {"number": submission.number})
        own = lambda: self.local.dump(name, submission.number)  # noqa: E731
        return {
            "job": name,
            "nodes": self.cluster.ask_nodes(view, nodes, own, question, DUMP_TIMEOUT_S + READ_TIMEOUT_S),
        }

    def explain(self, name: str, round: int | None) -> Answer:
        """The explanation of the evidence of each node that has had the job, or why there is none. Raises NotFound."""
        view, submission = self._find_job(name)
        query = {"number": submission.number, "round": round}
        question = ("GET", f"/v1/local/jobs/{quote(name, safe='')}/explain", query)
        own = lambda: self.local.explain(name, submission.number, round)  # noqa: E731
        nodes = self.cluster.candidate_nodes(view, submission)
        rows = self.cluster.ask_nodes(view, nodes, own, question, READ_TIMEOUT_S)
        return {"job": name, "nodes": [row for row in rows if row.get("error") != NOTHING_HERE]}

    def _read_view(self, log: Callable[[str], None] = job_queue.ignore_sentence) -> ClusterView:
        return job_queue.read_view(self.store, log, self.cache)

    def _find_job(self, name: str) -> tuple[ClusterView, Submission]:
        view = self._read_view()
        for submission in view.submissions:
            if submission.job == name:
                return view, submission
        for result in view.results:  # its submission was cleaned away a moment ago
            if result.job == name:
                return view, Submission(result.job, result.number, "{}", 1, 1, 1, 1, submitted_at=result.ended_at)
        raise NotFound(
            f"there is no job {name!r}; {_existing_names([submission.job for submission in view.submissions], 'job')}"
        )

    def _find_node(self, node: str) -> NodeSummary:
        rows, _ = self.nodes()
        for row in rows:
            if row.node == node:
                return row
        raise NotFound(f"there is no node {node!r}; {_existing_names([row.node for row in rows], 'node')}")

    def _current_round(self, job: Submission) -> Round | None:
        """The job's current Round; None if its runners do not meet in this store."""
        try:
            key = Keys(job.job).round
            entry = self.store.read(key)
            agreed = None if entry is None else decode_record(Round, key, entry.value)
        except WireError:
            return None
        return agreed if agreed is not None and agreed.run in ("", str(job.number)) else None


def _with_result(progress: JobProgress | None, result: JobResult | None) -> JobProgress | None:
    """The progress with the rounds and their reasons that only the result has, and no node in its event log."""
    if result is None or not (result.rounds or result.step):
        return progress
    rounds = {} if progress is None else {row.round: row for row in progress.rounds}
    for row in result.rounds:
        known = rounds.get(row.number, RoundStatus(row.number, row.at))
        if not known.reason:
            rounds[row.number] = replace(known, world_size=row.world_size, reason=row.reason)
    newest_last = tuple(rounds[number] for number in sorted(rounds))
    if progress is None:
        return JobProgress(rounds=newest_last, round=newest_last[-1].round if newest_last else None, step=result.step)
    return replace(progress, rounds=newest_last)


def _existing_names(names: list[str], what: str) -> str:
    return f"there {is_are(names)} {listing(sorted(names))}" if names else f"there is no {what} at all"
