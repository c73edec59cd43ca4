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
from elasticd_agent.model.records import Round
from elasticd_agent.node.api import rank_logs as ranklogs
from elasticd_agent.node.api import views as showing
from elasticd_agent.node.api.client import Reply, Unreachable
from elasticd_agent.node.api.local import Here
from elasticd_agent.node.api.merge import joined
from elasticd_agent.node.api.peers import Peers
from elasticd_agent.node.api.rank_logs import Piece
from elasticd_agent.node.records import Submission
from elasticd_agent.node.scheduler.policy import View
from elasticd_agent.system.bounded_io import Silent

PEER_S = 5.0
BESIDES_S = 2.0
"""Where this node knows the job itself, the others' ranks are worth so long a wait."""
SEARCH_S = 20.0
MOST_ASKED = 16
"""Nodes that are asked for the history of a job that has no place at the moment."""
MOST_WHOLE = 3
"""Nodes, besides this one and those that the job has left, that are asked for a job's whole history."""


class NoSuch(ElasticdError):
    """What was asked for does not exist; the sentence says what does."""


class Away(ElasticdError):
    """Who would know does not answer; the sentence says who, and why."""


@dataclass(frozen=True, slots=True)
class Asked:
    """A piece of a log that is wanted. `round` None: the newest of the rank; `offset` < 0 counts from the end."""

    rank: int = 0
    round: int | None = None
    stream: str = "stdout"
    offset: int = 0
    limit: int = ranklogs.MOST_BYTES

    def query(self) -> dict[str, object]:
        return {
            "rank": self.rank,
            "round": self.round,
            "stream": self.stream,
            "offset": self.offset,
            "limit": self.limit,
        }

    def __str__(self) -> str:
        if self.stream == ranklogs.TOLD:
            return "of its runner"
        return f"of rank {self.rank}" + ("" if self.round is None else f" in round {self.round}") + f" ({self.stream})"


@dataclass(frozen=True, slots=True)
class Logs:
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
            *((f"Elasticd-{name.capitalize()}", str(getattr(self, name))) for name in _NUMBERS),
            ("Elasticd-Over", str(int(self.over))),
        )

    @classmethod
    def of(cls, reply: Reply, node: str) -> Logs:
        """What such an answer says. Raises Unreachable for one that is none."""
        try:
            numbers = {name: int(reply.headers[f"elasticd-{name}"]) for name in _NUMBERS}
        except (KeyError, ValueError):
            raise Unreachable("what it answers is no log") from None
        return cls(reply.body, node, over=reply.headers.get("elasticd-over") == "1", **numbers)

    @classmethod
    def here(cls, node: str, piece: Piece, round: int) -> Logs:
        return cls(piece.data, node, round, piece.start, piece.next, piece.size, round)


_NUMBERS = ("round", "start", "next", "size", "newest")


@dataclass(frozen=True, slots=True)
class Across:
    """Every call ends within a deadline. `store` is never asked here: the view is given."""

    here: Here
    peers: Peers

    def progress(self, view: View, job: Submission, nodes: list[str], now: float) -> dict[str, Any] | None:
        """What its nodes know together, this one's word first; None if nobody has anything to tell."""
        own: dict[str, Any] | None = None
        if self.here.knows(job.job, job.number):
            try:
                own = self.here.about(job.job, job.number, now)
            except Silent:
                own = None
        takes_part = own is not None and (self.here.node in nodes or (not nodes and bool(own["rounds"])))
        # Where it waits again after it has run, only who had it knows of that.
        asked = nodes or ([] if takes_part else list(self._candidates(view, job, None))[:MOST_ASKED])
        # Nodes that it has left have its older rounds.
        placement = showing.placement_of(view, job)
        left = () if placement is None else placement.last
        others = addresses(view, [node for node in dict.fromkeys([*asked, *left]) if node != self.here.node])
        answers = self._about(others, job, left, BESIDES_S if takes_part else PEER_S)
        # Whoever was asked in vain, of nodes that may never have had it, is nobody's business.
        silent = {node: str(one) for node, one in answers.items() if not isinstance(one, dict) and node in nodes}
        silent |= {node: "no daemon announces it" for node in nodes if node not in (*others, self.here.node)}
        rows = [one for one in answers.values() if isinstance(one, dict)]
        rows.sort(key=lambda one: -(one.get("round") or 0))
        if own is not None:
            behind = rows and (rows[0].get("round") or 0) >= (own.get("round") or 0)
            rows.insert(0 if takes_part or not behind else len(rows), own)
        return joined(rows, silent)

    def _about(
        self, others: dict[str, str], job: Submission, left: Collection[str], within_s: float
    ) -> dict[str, dict[str, Any] | str]:
        """A few tell all they know, the rest only of their ranks: of a thousand nodes' logs most say the same."""
        few = {node: at for number, (node, at) in enumerate(others.items()) if number < MOST_WHOLE or node in left}
        path = f"/v1/here/jobs/{quote(job.job, safe='')}"
        rest = {node: address for node, address in others.items() if node not in few}
        found: dict[str, dict[str, Any] | str] = {}
        whole = lambda: found.update(  # noqa: E731
            self.peers.ask_all(few, "GET", path, {"number": job.number}, within_s)
        )
        query = {"number": job.number, "brief": 1}
        found.update(self.peers.ask_all(rest, "GET", path, query, within_s, whole))
        return found

    def logs(self, view: View, job: Submission, agreed: Round | None, wanted: Asked, node: str | None) -> Logs:
        """`agreed`: the job's current Round, if it is known; `node`: look nowhere else. Raises NoSuch, Away."""
        owner = _owner(agreed, wanted)
        asked = [node] if node is not None else list(dict.fromkeys([*owner, *self._candidates(view, job, agreed)]))
        best: Logs | None = None
        silent: dict[str, str] = {}
        until = time.monotonic() + SEARCH_S
        for one in asked:
            try:
                found = self._logs_of(one, view, job, wanted)
            except (Unreachable, Silent) as error:
                silent[one] = str(error) or "its disk does not answer"
                found = None
            if found is not None and (best is None or found.round > best.round):
                best = found
            # A rank may have moved: without a round, and without a Round that says where it is, all have to be asked.
            sure = wanted.round is not None or wanted.stream == ranklogs.TOLD or one in owner
            if (best is not None and sure) or time.monotonic() > until:
                break
        if best is None:
            raise self._none(job, wanted, asked, silent)
        newest = max(best.newest, 0 if agreed is None else agreed.number, *ranklogs.rounds(self._files(job))[-1:], 0)
        # A job that was cancelled has ended before its workers have.
        over = view.ending(job.job, job.number) is not None and not showing.running_on(view, job.job, job.number)
        return replace(best, newest=newest, over=over)

    def of_all(
        self,
        view: View,
        nodes: Iterable[str],
        here: Callable[[], dict[str, Any]],
        question: tuple[str, str, Mapping[str, object]],
        within_s: float,
    ) -> list[dict[str, Any]]:
        """What each node answers to (method, path, query), all asked at the same time; `here` is this one's answer."""
        wanted = list(nodes)
        others = addresses(view, [node for node in wanted if node != self.here.node])
        own: list[dict[str, Any]] = []
        method, path, query = question
        meanwhile = (lambda: own.append(here())) if self.here.node in wanted else lambda: None
        answers = self.peers.ask_all(others, method, path, query, within_s, meanwhile)
        rows: dict[str, dict[str, Any]] = {
            node: one if isinstance(one, dict) else {"error": one} for node, one in answers.items()
        }
        if own:
            rows[self.here.node] = own[0]
        return [{**rows.get(node, {"error": "no daemon announces it"}), "node": node} for node in wanted]

    def nodes(self, view: View, job: Submission) -> list[str]:
        """Every node that may have something of the job."""
        return list(self._candidates(view, job, None))

    def _candidates(self, view: View, job: Submission, agreed: Round | None) -> Iterator[str]:
        yield self.here.node
        placement = showing.placement_of(view, job)
        ending = view.ending(job.job, job.number)
        named = [] if placement is None else [place.node for place in placement.places]
        named += [] if agreed is None else [member.node for member in agreed.members]
        named += [] if ending is None else list(ending.nodes)
        # Nodes that the job has left have its older rounds.
        named += [card.node for card in view.cards]
        yield from (node for node in dict.fromkeys(named) if node != self.here.node)

    def _logs_of(self, node: str, view: View, job: Submission, wanted: Asked) -> Logs | None:
        """Raises Unreachable, Silent."""
        if node == self.here.node:
            found = self.here.logs(
                job.job, job.number, wanted.rank, wanted.round, wanted.stream, wanted.offset, wanted.limit
            )
            return None if found is None else Logs.here(node, *found)
        address = addresses(view, [node])
        if node not in address:
            raise Unreachable("no daemon announces it")
        query = {"number": job.number, **wanted.query()}
        path = f"/v1/here/jobs/{quote(job.job, safe='')}/logs"
        reply = self.peers.ask(address[node], "GET", path, query, PEER_S)
        if reply.code == 404:
            return None
        if reply.code != 200:
            raise Unreachable(reply.why)
        return Logs.of(reply, node)

    def _none(self, job: Submission, wanted: Asked, asked: list[str], silent: Mapping[str, str]) -> ElasticdError:
        if silent:
            said = "; ".join(f"{node}: {why}" for node, why in list(silent.items())[:4])
            return Away(f"no log {wanted} of job {job.job!r} was found, but not every node answers: {said}")
        own = ranklogs.rounds(self._files(job))
        there = f"; {self.here.node} has rounds {own[0]} to {own[-1]}" if own else ""
        there += f", of the last one ranks {_listed(ranklogs.ranks(self._files(job), own[-1]))}" if own else ""
        return NoSuch(f"job {job.job!r} has no log {wanted} on {_listed(asked) or 'any node'}{there}")

    def _files(self, job: Submission) -> JobFiles:
        return self.here.files(job.job, job.number)


def addresses(view: View, nodes: Iterable[str]) -> dict[str, str]:
    """Of those nodes that a daemon announces."""
    cards = {card.node: card for card in view.cards}
    return {node: cards[node].address for node in nodes if node in cards}


def _owner(agreed: Round | None, wanted: Asked) -> list[str]:
    """The node that the rank is on by the current Round, if that is the one that is meant."""
    if agreed is None or wanted.round not in (None, agreed.number) or wanted.stream == ranklogs.TOLD:
        return []
    return [node for rank, node, _, _ in agreed.places() if rank == wanted.rank]


def _listed(names: Iterable[object]) -> str:
    all_of_them = [str(name) for name in names]
    more = f" and {len(all_of_them) - 6} more" if len(all_of_them) > 6 else ""
    return ", ".join(all_of_them[:6]) + more
