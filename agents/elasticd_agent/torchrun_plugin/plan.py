"""Pure: who forms the next round of a torchrun job, and when a running one has to make way for it.

The same rules as `plan`, with what torchrun's agents can tell: a node is there (its lease lives) or not, and it wants
a new round or runs the current one. Nothing here reads a clock or the store.
"""

from __future__ import annotations

from dataclasses import dataclass

from elasticd.errors import WireError
from elasticd_agent.model.codec import Document, Record

STOP_TIMEOUT_S = 35.0
"""How long a member that lives is waited for: torchrun gives its workers 30 s to stop before it kills them."""
MAX_DEBOUNCES = 10
"""Newcomers are debounced at most so many times: nodes that trickle in for ever shall not keep each other out."""


@dataclass(frozen=True, slots=True)
class TorchrunMember(Record):
    """A node's part in a round. Rank 0's address and port are where the round's TCPStore is."""

    node: str
    address: str
    port: int

    def check(self) -> None:
        if not self.node or not self.address or not 0 < self.port < 65536:
            raise WireError(f"node {self.node!r} at {self.address!r}, port {self.port} cannot be reached")


@dataclass(frozen=True, slots=True)
class Candidate(Document):
    """A node's announcement: it takes part in rounds numbered above `past`, each time it joins with a fresh port."""

    member: TorchrunMember
    after_round: int


@dataclass(frozen=True, slots=True)
class TorchrunRound(Document):
    """One agreed membership. A member's rank is its place in `members`."""

    number: int
    members: tuple[TorchrunMember, ...]

    def check(self) -> None:
        if self.number < 1 or not self.members or len({m.node for m in self.members}) != len(self.members):
            raise WireError(f"round {self.number} of {len(self.members)} members makes no sense")

    def rank(self, node: str) -> int | None:
        """None: the node is not a member."""
        return next((rank for rank, seat in enumerate(self.members) if seat.node == node), None)


@dataclass(frozen=True, slots=True)
class TorchrunRequirements:
    """How many nodes, how long to wait for more than the fewest, and to gather newcomers before a restart."""

    min_nodes: int
    max_nodes: int
    last_call_s: float
    debounce_s: float = 1.0


@dataclass(frozen=True, slots=True)
class LiveCandidate:
    """A candidate whose lease lives, and when the observer first saw it want what it wants."""

    candidate: Candidate
    since: float

    @property
    def node(self) -> str:
        return self.candidate.member.node


@dataclass(frozen=True, slots=True)
class TorchrunView:
    """The job as one node saw it last. `closed` says by whom, None: it is not."""

    current: TorchrunRound | None
    candidates: tuple[LiveCandidate, ...]
    closed_by: str | None = None


@dataclass(frozen=True, slots=True)
class NoRoundYet:
    """No round now. Ask again when the view changes, and at `until` unless it is None."""

    why: str
    until: float | None = None


@dataclass(frozen=True, slots=True)
class MembershipChange:
    """How many nodes call for a new round, and why. torchrun restarts its workers for any number above 0."""

    nodes: int
    why: str


def join_queue(view: TorchrunView) -> list[LiveCandidate]:
    """Who waits for the next round, in the order of its ranks: survivors as they were, then newcomers by arrival.

    So rank 0 stays where it was if it can.
    """
    number, old = _of(view.current)
    found = [p for p in view.candidates if p.node not in old or p.candidate.after_round >= number]
    return sorted(found, key=lambda p: (old.get(p.node, len(old)), p.since, p.node))


def next_round(
    view: TorchrunView, asked: TorchrunRequirements, now: float, *, settled: bool
) -> TorchrunRound | NoRoundYet:
    """`settled` False: the store was away lately, so that a node that cannot be seen may live."""
    number, old = _of(view.current)
    cast = join_queue(view)
    back = [p for p in cast if p.node in old]
    names = {p.node for p in cast}
    there = {p.node for p in view.candidates}
    running = [node for node in old if node not in names and (node in there or not settled)]
    if running:
        if not back:
            return NoRoundYet(f"round {number} runs; its nodes make room as soon as they see this one, if there is any")
        until = max(p.since for p in back) + STOP_TIMEOUT_S
        if now < until:
            return NoRoundYet(f"waiting for {_count(running)} of round {number} to stop", until)
    if len(cast) < asked.min_nodes:
        return NoRoundYet(f"{len(cast)} of at least {asked.min_nodes} nodes here")
    if len(cast) < asked.max_nodes and not back:
        until = max(p.since for p in cast) + asked.last_call_s
        if now < until:
            return NoRoundYet(f"{len(cast)} of {asked.max_nodes} nodes here; last call", until)
    return TorchrunRound(number + 1, tuple(p.candidate.member for p in cast[: asked.max_nodes]))


def membership_change(
    view: TorchrunView, mine: TorchrunRound, asked: TorchrunRequirements, now: float, *, settled: bool
) -> MembershipChange:
    """Whose coming or going makes the round `mine` obsolete; nobody's: its group trains on."""
    if view.closed_by is not None or view.current is None or view.current.number < mine.number:
        return MembershipChange(
            0, ""
        )  # ended: a node that is gone has finished; gone or older: the store lost the round, not we
    if view.current != mine:
        return MembershipChange(1, f"the job went on with round {view.current.number}, without this node")
    there = {p.node for p in view.candidates}
    lost = [m.node for m in mine.members if m.node not in there] if settled else []
    waiting = join_queue(view)
    back = [p.node for p in waiting if mine.rank(p.node) is not None]
    newcomers = [p for p in waiting if mine.rank(p.node) is None]
    room = max(0, asked.max_nodes - len(mine.members) + len(lost))
    counted = [p.node for p in newcomers[:room]] if _gathered(newcomers, asked.debounce_s, now) else []
    said = ((lost, "lost"), (back, "left the round"), (counted, "waiting to join"))
    why = "; ".join(f"{_count(nodes)} {what}" for nodes, what in said if nodes)
    return MembershipChange(len(lost) + len(back) + len(counted), why)


def _gathered(newcomers: list[LiveCandidate], debounce_s: float, now: float) -> bool:
    times = [p.since for p in newcomers]
    return bool(times) and now >= min(max(times) + debounce_s, min(times) + MAX_DEBOUNCES * debounce_s)


def _of(current: TorchrunRound | None) -> tuple[int, dict[str, int]]:
    if current is None:
        return 0, {}
    return current.number, {seat.node: rank for rank, seat in enumerate(current.members)}


def _count(nodes: list[str]) -> str:
    return nodes[0] if len(nodes) == 1 else f"{len(nodes)} nodes"
