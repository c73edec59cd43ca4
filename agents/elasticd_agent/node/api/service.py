"""The daemon's desk: what people may ask of it, answered from the store, from this node and from other nodes' daemons.

It exists so that routes, the command line and tests speak of jobs and nodes, not of keys and sockets. Every method may
be called from any thread and ends within a deadline; none waits for the deciding thread, which hears of what was
written through the store as every other daemon does. It decides nothing about where a job runs.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any
from urllib.parse import quote

from elasticd.errors import ElasticdError, UsageError, WireError
from elasticd_agent.config import job_file as jobfile
from elasticd_agent.config.documents import FileFormat
from elasticd_agent.config.job_file import JobFile
from elasticd_agent.model.keys import Keys
from elasticd_agent.model.phrases import is_are, listing
from elasticd_agent.model.records import Round
from elasticd_agent.node.api import views as showing
from elasticd_agent.node.api.cluster import ClusterReader, LogChunk, LogRequest, NotFound
from elasticd_agent.node.api.local import DUMP_TIMEOUT_S, READ_TIMEOUT_S, LocalJobs
from elasticd_agent.node.api.peers import Peers
from elasticd_agent.node.records import Submission
from elasticd_agent.node.scheduler import job_queue as queue
from elasticd_agent.node.scheduler.policy import ClusterView
from elasticd_agent.store import Store
from elasticd_agent.store.cache import StoreCache


class Conflict(ElasticdError):
    """What was asked for goes against what is there already; the sentence says what that is."""


class JobService:
    """Whatever needs the store raises StoreUnavailable without it."""

    def __init__(
        self,
        store: Store,
        here: LocalJobs,
        peers: Peers,
        check: Callable[[JobFile], None] = lambda job: None,
        clock: Callable[[], float] = time.time,
        cache: StoreCache | None = None,
    ) -> None:
        """`check` judges a job before it is handed in, by this node's limits: it raises UsageError."""
        self.local = here
        self._cluster = ClusterReader(here, peers)
        self._store, self._check, self._clock = store, check, clock
        self._cache = cache or StoreCache(store, queue.ignore)

    def now(self) -> float:
        """Unix seconds."""
        return self._clock()

    # ---- jobs

    def jobs(self) -> dict[str, Any]:
        troubles: list[str] = []
        view = self._view(troubles.append)
        return {"jobs": showing.jobs(view, self._clock()), "troubles": troubles}

    def job(self, name: str) -> dict[str, Any]:
        """Raises NoSuch."""
        view, submission = self._find_job(name)
        now = self._clock()
        row = showing.job(view, submission, now)
        places = showing.assignments(view, submission) if row["ended_at"] is None else []
        progress = self._cluster.progress(view, submission, row["nodes"], now)
        ending = view.result(submission.job, submission.number)
        return {**row, "places": places, "progress": progress or _progress_from_result(ending)}

    def submit(self, data: bytes, kind: FileFormat, name: str | None, by: str, token: str = "") -> dict[str, Any]:
        """Raises UsageError for a job that cannot be, Conflict for an id whose job has not ended."""
        job = jobfile.read_job(data, kind, "the job")
        self._check(job)
        wanted, nodes, slots = name or job.id, job.node_range, job.slot_range
        spec, at = jobfile.to_json(job), self._clock()
        try:
            grow = job.grow != "never"
            made = queue.submit(
                self._store,
                spec,
                job=wanted,
                nodes=nodes,
                slots=slots,
                submitted_by=by,
                submitted_at=at,
                token=token,
                grow=grow,
                cache=self._cache,
            )
        except UsageError as error:
            if wanted is not None and any(s.job == wanted for s in self._view().unfinished()):
                raise Conflict(str(error)) from None
            raise
        return {"job": made.job, "number": made.number}

    def cancel(self, name: str, by: str) -> dict[str, Any]:
        """Raises NoSuch, or Conflict where the job has ended by itself."""
        self._find_job(name)
        ending = queue.cancel(self._store, name, by, self._clock())
        if ending.outcome != "cancelled":
            raise Conflict(f"job {name!r} has {ending.outcome} already: {ending.reason}")
        leaving = sorted(showing.nodes_still_running(showing.runners_of(self._view(), ending.job, ending.number)))
        said = {"job": ending.job, "number": ending.number, "outcome": ending.outcome, "reason": ending.reason}
        return {**said, "leaving": leaving}

    # ---- nodes

    def nodes(self) -> dict[str, Any]:
        troubles: list[str] = []
        return {"nodes": showing.nodes(self._view(troubles.append)), "troubles": troubles}

    def cordon(self, node: str, *, drain: bool, reason: str, by: str) -> dict[str, Any]:
        """Raises NoSuch."""
        self._node_row(node)
        queue.cordon(self._store, node, drain, reason, by, self._clock())
        return self._node_row(node)

    def uncordon(self, node: str) -> dict[str, Any]:
        """Raises NoSuch, Conflict where there is no cordon to take back."""
        self._node_row(node)
        if not queue.uncordon(self._store, node):
            raise Conflict(f"node {node!r} is not cordoned")
        return {"node": node}

    # ---- what lies on nodes

    def logs(self, name: str, wanted: LogRequest, node: str | None) -> LogChunk:
        """A piece of a rank's output, wherever it is; `node`: on this one. Raises NoSuch, Away."""
        view, submission = self._find_job(name)
        return self._cluster.logs(view, submission, self._current_round(submission), wanted, node)

    def dump(self, name: str) -> dict[str, Any]:
        """By node: evidence taken now, or why there is none. Raises NoSuch, Conflict for a job that does not run."""
        view, submission = self._find_job(name)
        running = showing.runners_of(view, submission.job, submission.number)
        nodes = [node for node, one in running.items() if one.state in ("starting", "running")]
        if not nodes:
            row = showing.job(view, submission, self._clock())
            raise Conflict(
                f"job {name!r} runs nowhere, so there is nothing to look at: {row['state']}: {row['reason']}"
            )
        question = ("POST", f"/v1/here/jobs/{quote(name, safe='')}/dump", {"number": submission.number})
        own = lambda: self.local.dump(name, submission.number)  # noqa: E731
        return {"job": name, "nodes": self._cluster.gather(view, nodes, own, question, DUMP_TIMEOUT_S + READ_TIMEOUT_S)}

    def explain(self, name: str, round: int | None) -> dict[str, Any]:
        """By node: what its evidence says, or why it says nothing. Raises NoSuch."""
        view, submission = self._find_job(name)
        query = {"number": submission.number, "round": round}
        question = ("GET", f"/v1/here/jobs/{quote(name, safe='')}/explain", query)
        own = lambda: self.local.explain(name, submission.number, round)  # noqa: E731
        nodes = self._cluster.candidate_nodes(view, submission)
        return {"job": name, "nodes": self._cluster.gather(view, nodes, own, question, READ_TIMEOUT_S)}

    # ---- inside

    def _view(self, log: Callable[[str], None] = queue.ignore) -> ClusterView:
        return queue.read_view(self._store, log, self._cache)

    def _find_job(self, name: str) -> tuple[ClusterView, Submission]:
        view = self._view()
        for submission in view.submissions:
            if submission.job == name:
                return view, submission
        for ending in view.results:  # its submission was cleaned away a moment ago
            if ending.job == name:
                return view, Submission(ending.job, ending.number, "{}", 1, 1, 1, 1, submitted_at=ending.ended_at)
        raise NotFound(f"there is no job {name!r}; {_existing_names([s.job for s in view.submissions], 'job')}")

    def _node_row(self, node: str) -> dict[str, Any]:
        rows = showing.nodes(self._view())
        for row in rows:
            if row["node"] == node:
                return row
        raise NotFound(f"there is no node {node!r}; {_existing_names([row['node'] for row in rows], 'node')}")

    def _current_round(self, job: Submission) -> Round | None:
        """The job's current Round, where its runners meet in this store; None if it is not known here."""
        try:
            found = self._store.read(Keys(job.job).round)
            agreed = None if found is None else Round.from_json(found.value)
        except WireError:
            return None
        return agreed if agreed is not None and agreed.run in ("", str(job.number)) else None


def _progress_from_result(ending: Any) -> dict[str, Any] | None:
    """What the ending itself tells of a job whose nodes tell nothing any more."""
    if ending is None or not (ending.rounds or ending.step):
        return None
    rounds = [
        {"round": one.number, "at": one.at, "world_size": one.world_size, "nodes": [], "reason": one.reason}
        for one in ending.rounds
    ]
    return {"node": "", "rounds": rounds, "round": rounds[-1]["round"] if rounds else None, "step": ending.step}


def _existing_names(names: list[str], what: str) -> str:
    if not names:
        return f"there is no {what} at all"
    return f"there {is_are(names)} {listing(sorted(names))}"
