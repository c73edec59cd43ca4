"""What lies on nodes, wherever they are: this node's by itself, the others' through their daemons.

It exists because a rank's logs, a job's event log and its evidence are on the nodes it ran on, and whoever asks does
not know which. The job's Round, its placement and its ending say where to look first; a silent node is named.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import quote

from elasticd.errors import ElasticdError
from elasticd_agent.model.job_dir import JobFiles
from elasticd_agent.model.phrases import listing
from elasticd_agent.model.records import Round
from elasticd_agent.node.api import rank_logs as ranklogs
from elasticd_agent.node.api import views as showing
from elasticd_agent.node.api.client import Reply, Unreachable
from elasticd_agent.node.api.local import LocalJobs
from elasticd_agent.node.api.merge import merge_progress
from elasticd_agent.node.api.peers import Peers
from elasticd_agent.node.api.rank_logs import FileSlice
from elasticd_agent.node.records import Submission
from elasticd_agent.node.scheduler.policy import ClusterView
from elasticd_agent.system.bounded_io import DeadlineExceeded

PEER_TIMEOUT_S = 5.0
SUPPLEMENT_TIMEOUT_S = 2.0
"""Where this node knows the job itself, the others' ranks are worth so long a wait."""
LOG_SEARCH_TIMEOUT_S = 20.0
MAX_HISTORY_NODES = 16
"""Nodes that are asked for the history of a job that has no place at the moment."""
MAX_FULL_HISTORY_NODES = 3
"""Nodes, besides this one and those that the job has left, that are asked for a job's whole history."""


class NotFound(ElasticdError):
    """What was asked for does not exist; the sentence says what does."""


class NodesUnavailable(ElasticdError):
    """Who would know does not answer; the sentence says who, and why."""


@dataclass(frozen=True, slots=True)
class LogRequest:
    """A piece of a log that is wanted. `round` None: the newest of the rank; `offset` < 0 counts from the end."""

    rank: int = 0
    round: int | None = None
    stream: str = "stdout"
    offset: int = 0
    limit: int = ranklogs.MAX_BYTES

    def query(self) -> dict[str, object]:
        return {
            "rank": self.rank,
            "round": self.round,
            "stream": self.stream,
            "offset": self.offset,
            "limit": self.limit,
        }

    def __str__(self) -> str:
        if self.stream == ranklogs.RUNNER_LOG:
            return "of its runner"
        return f"of rank {self.rank}" + ("" if self.round is None else f" in round {self.round}") + f" ({self.stream})"


@dataclass(frozen=True, slots=True)
class LogChunk:
    """A piece of a log. `newest` is the job's newest round that is known, `over`: nothing will be added any more."""

    data: bytes
    node: str
    round: int
    start: int
    next: int
    size: int
    newest: int = 0
    over: bool = False

    def headers(self) -> tuple[tuple[str, str], ...]:
        """All but the data, as an answer over HTTP carries it."""
        return (
            ("Elasticd-Node", quote(self.node)),
            *((f"Elasticd-{name.capitalize()}", str(getattr(self, name))) for name in _NUMBER_HEADERS),
            ("Elasticd-Over", str(int(self.over))),
        )

    @classmethod
    def from_reply(cls, reply: Reply, node: str) -> LogChunk:
        """What such an answer says. Raises Unreachable for one that is none."""
        try:
            numbers = {name: int(reply.headers[f"elasticd-{name}"]) for name in _NUMBER_HEADERS}
        except (KeyError, ValueError):
            raise Unreachable("what it answers is no log") from None
        return cls(reply.body, node, over=reply.headers.get("elasticd-over") == "1", **numbers)

    @classmethod
    def from_local(cls, node: str, piece: FileSlice, round: int) -> LogChunk:
        return cls(piece.data, node, round, piece.start, piece.next, piece.size, round)


_NUMBER_HEADERS = ("round", "start", "next", "size", "newest")


@dataclass(frozen=True, slots=True)
class ClusterReader:
    """Every call ends within a deadline. `store` is never asked here: the view is given."""

    local: LocalJobs
    peers: Peers

    def progress(self, view: ClusterView, job: Submission, nodes: list[str], now: float) -> dict[str, Any] | None:
        """What its nodes know together, this one's word first; None if nobody has anything to tell."""
        own: dict[str, Any] | None = None
        if self.local.has_job(job.job, job.number):
            try:
                own = self.local.progress(job.job, job.number, now)
            except DeadlineExceeded:
                own = None
        takes_part = own is not None and (self.local.node in nodes or (not nodes and bool(own["rounds"])))
        # Where it waits again after it has run, only who had it knows of that.
        asked = nodes or ([] if takes_part else list(self._candidates(view, job, None))[:MAX_HISTORY_NODES])
        # Nodes that it has left have its older rounds.
        placement = showing.placement_of(view, job)
        left = () if placement is None else placement.previous_nodes
        others = addresses(view, [node for node in dict.fromkeys([*asked, *left]) if node != self.local.node])
        answers = self._peer_progress(others, job, left, SUPPLEMENT_TIMEOUT_S if takes_part else PEER_TIMEOUT_S)
        # Whoever was asked in vain, of nodes that may never have had it, is nobody's business.
        silent = {node: str(one) for node, one in answers.items() if not isinstance(one, dict) and node in nodes}
        silent |= {node: "no daemon announces it" for node in nodes if node not in (*others, self.local.node)}
        rows = [one for one in answers.values() if isinstance(one, dict)]
        rows.sort(key=lambda one: -(one.get("round") or 0))
        if own is not None:
            behind = rows and (rows[0].get("round") or 0) >= (own.get("round") or 0)
            rows.insert(0 if takes_part or not behind else len(rows), own)
        return merge_progress(rows, silent)

    def _peer_progress(
        self, others: dict[str, str], job: Submission, left: Collection[str], within_s: float
    ) -> dict[str, dict[str, Any] | str]:
        """A few tell all they know, the rest only of their ranks: of a thousand nodes' logs most say the same."""
        few = {
            node: at
            for number, (node, at) in enumerate(others.items())
            if number < MAX_FULL_HISTORY_NODES or node in left
        }
        path = f"/v1/here/jobs/{quote(job.job, safe='')}"
        rest = {node: address for node, address in others.items() if node not in few}
        found: dict[str, dict[str, Any] | str] = {}
        whole = lambda: found.update(  # noqa: E731
            self.peers.request_all(few, "GET", path, {"number": job.number}, within_s)
        )
        query = {"number": job.number, "brief": 1}
        found.update(self.peers.request_all(rest, "GET", path, query, within_s, whole))
        return found

    def logs(
        self, view: ClusterView, job: Submission, agreed: Round | None, wanted: LogRequest, node: str | None
    ) -> LogChunk:
        """`agreed`: the job's current Round, if it is known; `node`: look nowhere else. Raises NoSuch, Away."""
        owner = _node_of_rank(agreed, wanted)
        asked = [node] if node is not None else list(dict.fromkeys([*owner, *self._candidates(view, job, agreed)]))
        best: LogChunk | None = None
        silent: dict[str, str] = {}
        until = time.monotonic() + LOG_SEARCH_TIMEOUT_S
        for one in asked:
            try:
                found = self._logs_of(one, view, job, wanted)
            except (Unreachable, DeadlineExceeded) as error:
                silent[one] = str(error) or "its disk does not answer"
                found = None
            if found is not None and (best is None or found.round > best.round):
                best = found
            # A rank may have moved: without a round, and without a Round that says where it is, all have to be asked.
            sure = wanted.round is not None or wanted.stream == ranklogs.RUNNER_LOG or one in owner
            if (best is not None and sure) or time.monotonic() > until:
                break
        if best is None:
            raise self._log_error(job, wanted, asked, silent)
        newest = max(
            best.newest, 0 if agreed is None else agreed.number, *ranklogs.rounds_with_logs(self._files(job))[-1:], 0
        )
        # A job that was cancelled has ended before its workers have.
        over = view.result(job.job, job.number) is not None and not showing.runners_of(view, job.job, job.number)
        return replace(best, newest=newest, over=over)

    def gather(
        self,
        view: ClusterView,
        nodes: Iterable[str],
        here: Callable[[], dict[str, Any]],
        question: tuple[str, str, Mapping[str, object]],
        within_s: float,
    ) -> list[dict[str, Any]]:
        """What each node answers to (method, path, query), all asked at the same time; `here` is this one's answer."""
        wanted = list(nodes)
        others = addresses(view, [node for node in wanted if node != self.local.node])
        own: list[dict[str, Any]] = []
        method, path, query = question
        meanwhile = (lambda: own.append(here())) if self.local.node in wanted else lambda: None
        answers = self.peers.request_all(others, method, path, query, within_s, meanwhile)
        rows: dict[str, dict[str, Any]] = {
            node: one if isinstance(one, dict) else {"error": one} for node, one in answers.items()
        }
        if own:
            rows[self.local.node] = own[0]
        return [{**rows.get(node, {"error": "no daemon announces it"}), "node": node} for node in wanted]

    def candidate_nodes(self, view: ClusterView, job: Submission) -> list[str]:
        """Every node that may have something of the job."""
        return list(self._candidates(view, job, None))

    def _candidates(self, view: ClusterView, job: Submission, agreed: Round | None) -> Iterator[str]:
        yield self.local.node
        placement = showing.placement_of(view, job)
        ending = view.result(job.job, job.number)
        named = [] if placement is None else [place.node for place in placement.assignments]
        named += [] if agreed is None else [member.node for member in agreed.members]
        named += [] if ending is None else list(ending.nodes)
        # Nodes that the job has left have its older rounds.
        named += [card.node for card in view.nodes]
        yield from (node for node in dict.fromkeys(named) if node != self.local.node)

    def _logs_of(self, node: str, view: ClusterView, job: Submission, wanted: LogRequest) -> LogChunk | None:
        """Raises Unreachable, Silent."""
        if node == self.local.node:
            found = self.local.logs(
                job.job, job.number, wanted.rank, wanted.round, wanted.stream, wanted.offset, wanted.limit
            )
            return None if found is None else LogChunk.from_local(node, *found)
        address = addresses(view, [node])
        if node not in address:
            raise Unreachable("no daemon announces it")
        query = {"number": job.number, **wanted.query()}
        path = f"/v1/here/jobs/{quote(job.job, safe='')}/logs"
        reply = self.peers.request(address[node], "GET", path, query, PEER_TIMEOUT_S)
        if reply.code == 404:
            return None
        if reply.code != 200:
            raise Unreachable(reply.why)
        return LogChunk.from_reply(reply, node)

    def _log_error(
        self, job: Submission, wanted: LogRequest, asked: list[str], silent: Mapping[str, str]
    ) -> ElasticdError:
        if silent:
            said = "; ".join(f"{node}: {why}" for node, why in list(silent.items())[:4])
            return NodesUnavailable(f"no log {wanted} of job {job.job!r} was found, but not every node answers: {said}")
        own = ranklogs.rounds_with_logs(self._files(job))
        there = f"; {self.local.node} has rounds {own[0]} to {own[-1]}" if own else ""
        there += (
            f", of the last one ranks {listing(ranklogs.ranks_with_logs(self._files(job), own[-1]))}" if own else ""
        )
        return NotFound(f"job {job.job!r} has no log {wanted} on {listing(asked) if asked else 'any node'}{there}")

    def _files(self, job: Submission) -> JobFiles:
        return self.local.files(job.job, job.number)


def addresses(view: ClusterView, nodes: Iterable[str]) -> dict[str, str]:
    """Of those nodes that a daemon announces."""
    cards = {card.node: card for card in view.nodes}
    return {node: cards[node].address for node in nodes if node in cards}


def _node_of_rank(agreed: Round | None, wanted: LogRequest) -> list[str]:
    """The node that the rank is on by the current Round, if that is the one that is meant."""
    if agreed is None or wanted.round not in (None, agreed.number) or wanted.stream == ranklogs.RUNNER_LOG:
        return []
    return [node for rank, node, _, _ in agreed.assignments() if rank == wanted.rank]
