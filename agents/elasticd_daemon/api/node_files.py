"""Files of a job on the nodes, wherever they are: this node's data read directly, the others' through their agents.

A rank's logs, a job's event log and its evidence are on the nodes the job ran on. The job's Round, its placement and
its result say where to look first; a node that does not answer is named.

Where nodes disagree, one of them is right by construction, and the merge takes its word: the cost of a fault from the
node that measured it, the state that was resumed from of rank 0's node, the ranks of the newest round only, all else
from the node whose knowledge is newest. A node that has left the job still has its older rounds.
"""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from urllib.parse import quote

from elasticd.errors import ElasticdError, WireError
from elasticd_agent.model.phrases import listing
from elasticd_agent.model.records import Round, recovery_reporter
from elasticd_agent.system.bounded_io import DeadlineExceeded
from elasticd_daemon.api import rank_logs, views
from elasticd_daemon.api.client import Unreachable
from elasticd_daemon.api.local import MAX_SHOWN_ROUNDS, LocalJobs
from elasticd_daemon.api.peers import Peers
from elasticd_daemon.api.rank_logs import LogRequest
from elasticd_daemon.api.schema import (
    Answer,
    CheckpointStatus,
    JobProgress,
    LogChunk,
    RankProgress,
    RoundStatus,
    ScalarSeries,
)
from elasticd_daemon.job_dir import JobFiles
from elasticd_daemon.records import ClusterView, Submission

PEER_TIMEOUT_S = 5.0
PEER_RANKS_TIMEOUT_S = 2.0
"""The time for the other nodes' ranks where this node knows the job itself."""
LOG_SEARCH_TIMEOUT_S = 20.0
MAX_HISTORY_NODES = 16
"""Nodes that are asked for the history of a job without a placement."""
MAX_FULL_HISTORY_NODES = 3
"""Other nodes that are asked for a job's whole history, besides those that it has left; the rest report their ranks."""
_NOT_REGISTERED_REASON = "its agent is not registered"


class NotFound(ElasticdError):
    """The requested thing does not exist; the sentence says what does."""


class NodesUnavailable(ElasticdError):
    """The nodes that may have it do not answer; the sentence names them and says why."""


@dataclass(frozen=True, slots=True)
class ClusterReader:
    """Every call ends within a deadline. The caller passes the view of the store."""

    local: LocalJobs
    peers: Peers

    def progress(self, view: ClusterView, job: Submission, nodes: Collection[str], now: float) -> JobProgress | None:
        """Return what the job's nodes know together, this node's first; None if no node has any.

        Nodes that do not answer are in the result, with the reason, if they are the job's own.
        """
        placement = views.placement_of(view, job)
        if not nodes and placement is not None:  # a cancel names no nodes, and its result has no rounds
            nodes = [assignment.node for assignment in placement.assignments]
        own = self._own_progress(job, now)
        is_member = own is not None and (self.local.node in nodes or (not nodes and bool(own.rounds)))
        left = () if placement is None else placement.previous_nodes  # they have its older rounds
        answers = self._peer_progress(view, job, nodes, left, is_member)
        rows = [answer for answer in answers.values() if isinstance(answer, JobProgress)]
        rows.sort(key=lambda one: -(one.round or 0))
        if own is not None:
            is_behind = bool(rows) and (rows[0].round or 0) >= (own.round or 0)
            rows.insert(len(rows) if is_behind and not is_member else 0, own)
        # Only the job's own nodes: a node that may never have had the job is not missed.
        problems = {
            node: answer for node in nodes if isinstance(answer := answers.get(node, _NOT_REGISTERED_REASON), str)
        }
        problems.pop(self.local.node, None)
        return merge_progress(rows, problems)

    def _own_progress(self, job: Submission, now: float) -> JobProgress | None:
        if not self.local.has_job(job.job, job.number):
            return None
        try:
            return self.local.progress(job.job, job.number, now)
        except DeadlineExceeded:
            return None

    def _peer_progress(
        self, view: ClusterView, job: Submission, nodes: Collection[str], left: Collection[str], is_member: bool
    ) -> dict[str, JobProgress | str]:
        # A job that is pending again after it ran has its history on the nodes that had it.
        past = [] if nodes or is_member else self.candidate_nodes(view, job)[:MAX_HISTORY_NODES]
        known = registered_addresses(view, dict.fromkeys([*nodes, *past, *left]))
        known.pop(self.local.node, None)
        # Of a thousand nodes' logs most say the same: a few report everything, the rest only their ranks.
        full = {node for number, node in enumerate(known) if number < MAX_FULL_HISTORY_NODES or node in left}
        within_s = PEER_RANKS_TIMEOUT_S if is_member else PEER_TIMEOUT_S
        path = f"/v1/local/jobs/{quote(job.job, safe='')}"
        answers: dict[str, Answer | str] = {}

        def ask(brief: bool, meanwhile: Callable[[], None] = lambda: None) -> None:
            addressed = {node: address for node, address in known.items() if (node in full) != brief}
            query = {"number": job.number, "brief": 1 if brief else None}
            answers.update(self.peers.request_all(addressed, "GET", path, query, within_s, meanwhile))

        ask(True, meanwhile=lambda: ask(False))
        return {
            node: answer if isinstance(answer, str) else _decode_progress(answer) for node, answer in answers.items()
        }

    def read_log(self, view: ClusterView, job: Submission, current: Round | None, request: LogRequest) -> LogChunk:
        """Return a piece of a rank's log from the node that has it.

        `current` is the job's current Round, if known: it names the node of the rank. Raises NotFound,
        NodesUnavailable.
        """
        owner = _node_of_rank(current, request)
        candidates = [*owner, *self.candidate_nodes(view, job, current)]
        nodes = [request.node] if request.node else list(dict.fromkeys(candidates))
        result = view.result(job.job, job.number)
        last_round = result.rounds[-1].number if result is not None and result.rounds else None
        best: LogChunk | None = None
        problems: dict[str, str] = {}
        until = time.monotonic() + LOG_SEARCH_TIMEOUT_S
        for node in nodes:
            try:
                chunk = self._read_log_of(node, view, job, request)
            except (Unreachable, DeadlineExceeded, WireError) as error:
                problems[node] = str(error) or "its disk does not answer"
                continue
            if chunk is not None and (best is None or chunk.round > best.round):
                best = chunk
            # A rank may have moved: without a round in the request, a current Round or a last one, every node has to be
            # asked.
            is_sure = request.round is not None or request.stream in rank_logs.NODE_STREAMS or node in owner
            is_sure |= best is not None and last_round is not None and best.round >= last_round
            if (best is not None and is_sure) or time.monotonic() > until:
                break
        if best is None:
            raise self._log_not_found_error(job, request, nodes, problems)
        agreed = 0 if current is None else current.number
        newest = max(best.newest, agreed, *rank_logs.rounds_with_logs(self._files(job))[-1:], 0)
        # The workers of a cancelled job end after the job.
        is_final = result is not None and not views.runners_of(view, job.job, job.number)
        return replace(best, newest=newest, is_final=is_final)

    def _read_log_of(self, node: str, view: ClusterView, job: Submission, request: LogRequest) -> LogChunk | None:
        """Raises Unreachable, DeadlineExceeded, WireError."""
        if node == self.local.node:
            return self.local.read_log(job.job, job.number, request)
        address = registered_addresses(view, [node]).get(node)
        if address is None:
            raise Unreachable(_NOT_REGISTERED_REASON)
        query = {"number": job.number, **request.query()}
        path = f"/v1/local/jobs/{quote(job.job, safe='')}/logs"
        reply = self.peers.request(address, "GET", path, query, PEER_TIMEOUT_S)
        if reply.code == 404:
            return None
        if reply.code != 200:
            raise Unreachable(reply.why)
        return LogChunk.from_reply(reply.body, reply.headers)

    def _log_not_found_error(
        self, job: Submission, request: LogRequest, nodes: list[str], problems: Mapping[str, str]
    ) -> ElasticdError:
        if problems:
            whys = "; ".join(f"{node}: {why}" for node, why in list(problems.items())[:4])
            return NodesUnavailable(
                f"no log {request} of job {job.job!r} was found, but some nodes do not answer: {whys}"
            )
        rounds = rank_logs.rounds_with_logs(self._files(job))
        there = ""
        if rounds:
            ranks = listing(rank_logs.ranks_with_logs(self._files(job), rounds[-1]))
            there = f"; {self.local.node} has rounds {rounds[0]} to {rounds[-1]}, of the last one ranks {ranks}"
        return NotFound(f"job {job.job!r} has no log {request} on {listing(nodes) if nodes else 'any node'}{there}")

    def ask_nodes(
        self,
        view: ClusterView,
        nodes: Iterable[str],
        answer_here: Callable[[], Answer],
        question: tuple[str, str, Mapping[str, object]],
        within_s: float,
    ) -> list[Answer]:
        """Each node's answer to (method, path, query), all asked at the same time; this node's from `answer_here`."""
        names = list(nodes)
        others = registered_addresses(view, [node for node in names if node != self.local.node])
        own: list[Answer] = []
        method, path, query = question
        meanwhile = (lambda: own.append(answer_here())) if self.local.node in names else lambda: None
        answers = self.peers.request_all(others, method, path, query, within_s, meanwhile)
        rows: dict[str, Answer] = {
            node: answer if isinstance(answer, dict) else {"error": answer} for node, answer in answers.items()
        }
        if own:
            rows[self.local.node] = own[0]
        return [{**rows.get(node, {"error": _NOT_REGISTERED_REASON}), "node": node} for node in names]

    def candidate_nodes(self, view: ClusterView, job: Submission, current: Round | None = None) -> list[str]:
        """Every node that may have data of the job, this one first. `current`: the job's current Round, if known."""
        placement = views.placement_of(view, job)
        result = view.result(job.job, job.number)
        named = [] if placement is None else [assignment.node for assignment in placement.assignments]
        named += [] if current is None else [member.node for member in current.members]
        named += [] if result is None else list(result.nodes)
        named += [status.node for status in view.nodes]  # nodes that the job has left have its older rounds
        return list(dict.fromkeys([self.local.node, *named]))

    def _files(self, job: Submission) -> JobFiles:
        return self.local.files(job.job, job.number)


def registered_addresses(view: ClusterView, nodes: Iterable[str]) -> dict[str, str]:
    """The addresses of those nodes whose agents are registered."""
    known = {status.node: status.address for status in view.nodes}
    return {node: known[node] for node in nodes if node in known}


def _decode_progress(answer: Answer) -> JobProgress | str:
    try:
        return JobProgress.from_dict(answer)
    except WireError as error:
        return f"its answer makes no sense: {error}"


def _node_of_rank(current: Round | None, request: LogRequest) -> list[str]:
    """The rank's node in the current Round, if the request is about that round."""
    if current is None or request.round not in (None, current.number) or request.stream in rank_logs.NODE_STREAMS:
        return []
    return [node for rank, node, _, _ in current.assignments() if rank == request.rank]


def _newest_checkpoint(saved: Iterable[CheckpointStatus | None]) -> CheckpointStatus | None:
    return max(
        (checkpoint for checkpoint in saved if checkpoint is not None),
        key=lambda one: (one.round, one.step),
        default=None,
    )


def merge_progress(rows: Sequence[JobProgress], unreachable: Mapping[str, str]) -> JobProgress | None:
    """One answer from what each node knows: its own ranks, its own log, and a checkpoint only if rank 0 ran there.

    `rows`: the one that counts first, since times of two hosts are never compared. None without any row.
    """
    if not rows:
        return None
    samples = [row.step_samples for row in rows if row.step_samples]
    return replace(
        rows[0],
        step=max((row.step for row in rows if row.step is not None), default=None),
        checkpoint=_newest_checkpoint(row.checkpoint for row in rows),
        snapshot=_newest_checkpoint(row.snapshot for row in rows),
        donor_resumes=max(row.donor_resumes for row in rows),
        donor_steps=max(row.donor_steps for row in rows),
        rounds=_merged_rounds(rows),
        ranks=_merged_ranks(rows),
        spares=tuple(spare for row in sorted(rows, key=lambda row: row.node) for spare in row.spares),
        step_samples=min(samples, key=lambda one: one[0], default=()),
        scalars=_merged_scalars(rows),
        gpus=tuple(gpu for row in sorted(rows, key=lambda row: row.node) for gpu in row.gpus),
        unreachable=dict(unreachable),
    )


def _merged_ranks(rows: Sequence[JobProgress]) -> tuple[RankProgress, ...]:
    """The newest round's ranks: an older one numbers ranks differently."""
    newest = max(row.round or 0 for row in rows)
    by_rank = {rank.rank: rank for row in reversed(rows) if (row.round or 0) == newest for rank in row.ranks}
    return tuple(by_rank[rank] for rank in sorted(by_rank))


def _merged_rounds(rows: Sequence[JobProgress]) -> tuple[RoundStatus, ...]:
    """The rounds, each with the cost of its fault from the node that measured it, the step it resumed from of rank 0's
    node, kept processes of all nodes, and all else from the row that counts.
    """
    rounds: dict[int, RoundStatus] = {}
    kept = Counter[int]()
    for row in reversed(rows):
        rounds |= {status.round: status for status in row.rounds}
    for node, status in ((row.node, status) for row in rows for status in row.rounds):
        number = status.round
        if node == recovery_reporter(status.leader, status.nodes) and status.lost_seconds is not None:
            rounds[number] = replace(rounds[number], lost_seconds=status.lost_seconds)
        if status.resumed_step is not None:
            rounds[number] = replace(rounds[number], resumed_step=status.resumed_step, donor=status.donor)
        kept[number] += status.kept
    return tuple(replace(rounds[number], kept=kept[number]) for number in sorted(rounds)[-MAX_SHOWN_ROUNDS:])


def _merged_scalars(rows: Sequence[JobProgress]) -> tuple[ScalarSeries, ...]:
    """Rank 0, which logs them, may have moved from node to node."""
    merged: dict[str, dict[int, float]] = {}
    for series in itertools.chain.from_iterable(row.scalars for row in reversed(rows)):
        merged.setdefault(series.name, {}).update(series.points)
    return tuple(ScalarSeries(name, tuple(sorted(points.items()))) for name, points in sorted(merged.items()))
