"""Pure: the next round of a torchrun job, and the membership changes that invalidate a running one.

The rules of rendezvous.plan, as far as torchrun's agents can report: a node is registered (its lease lives) or not, and
it joins the next round or runs the current one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from elasticd.errors import WireError
from elasticd_agent.model.codec import Document, Record

STOP_TIMEOUT_S = 35.0
"""The time that a live member may take to stop: torchrun gives its workers 30 s before it kills them."""
MAX_DEBOUNCES = 10
"""Debounce times after which joining nodes are admitted: a steady trickle of nodes must not exclude all of them."""


@dataclass(frozen=True, slots=True)
class TorchrunMember(Record):
    """A node's part in a round. The round's TCPStore is at the address and port of rank 0's node."""

    node: str
    address: str
    port: int

    def check(self) -> None:
        if not self.node or not self.address or not 0 < self.port < 65536:
            raise WireError(f"node {self.node!r} at {self.address!r}, port {self.port} is no address")


@dataclass(frozen=True, slots=True)
class Candidate(Document):
    """A node's registration: it takes part in rounds above `after_round`, at a fresh port for each join."""

    member: TorchrunMember
    after_round: int


@dataclass(frozen=True, slots=True)
class TorchrunRound(Document):
    """One agreed membership. A member's rank is its position in `members`."""

    MAX_BYTES: ClassVar[int] = 2 << 20
    number: int
    members: tuple[TorchrunMember, ...]

    def check(self) -> None:
        if self.number < 1 or not self.members or len({m.node for m in self.members}) != len(self.members):
            raise WireError(f"round {self.number} of {len(self.members)} members is invalid")

    def rank(self, node: str) -> int | None:
        return next((rank for rank, member in enumerate(self.members) if member.node == node), None)


@dataclass(frozen=True, slots=True)
class TorchrunRequirements:
    min_nodes: int
    max_nodes: int
    last_call_timeout_s: float  #: the time that the minimum of nodes waits for more
    debounce_s: float = 1.0  #: the time for which joining nodes are gathered before a restart


@dataclass(frozen=True, slots=True)
class LiveCandidate:
    """A candidate whose lease lives, and since when this observer knows its registration."""

    candidate: Candidate
    known_since: float

    @property
    def node(self) -> str:
        return self.candidate.member.node


@dataclass(frozen=True, slots=True)
class TorchrunView:
    """The job as one node read it last. `closed_by` None: it is not closed."""

    current: TorchrunRound | None
    candidates: tuple[LiveCandidate, ...]
    closed_by: str | None = None


@dataclass(frozen=True, slots=True)
class NoRoundYet:
    """Decide again when the view changes, and at `retry_at` if it is given."""

    why: str
    retry_at: float | None = None


@dataclass(frozen=True, slots=True)
class MembershipChange:
    """The number of nodes that require a new round, and why. torchrun restarts its workers for any number above 0."""

    node_count: int
    why: str


def join_queue(view: TorchrunView) -> list[LiveCandidate]:
    """The nodes that join the next round, in the order of its ranks: survivors as before, then others by arrival.

    So rank 0 stays on its node if possible.
    """
    number, old = _number_and_ranks(view.current)
    joining = [p for p in view.candidates if p.node not in old or p.candidate.after_round >= number]
    return sorted(joining, key=lambda p: (old.get(p.node, len(old)), p.known_since, p.node))


def next_round(
    view: TorchrunView, requirements: TorchrunRequirements, now: float, *, registrations_settled: bool
) -> TorchrunRound | NoRoundYet:
    """`registrations_settled` False: the store was unavailable lately, so a node without registration may be alive."""
    number, old = _number_and_ranks(view.current)
    joining = join_queue(view)
    returned = [p for p in joining if p.node in old]
    joining_names = {p.node for p in joining}
    registered = {p.node for p in view.candidates}
    running = [node for node in old if node not in joining_names and (node in registered or not registrations_settled)]
    if running:
        if not returned:
            return NoRoundYet(f"round {number} runs; its nodes stop for this node if there is room")
        until = max(p.known_since for p in returned) + STOP_TIMEOUT_S
        if now < until:
            return NoRoundYet(f"waiting for {_name_or_count(running)} of round {number} to stop", until)
    if len(joining) < requirements.min_nodes:
        return NoRoundYet(f"{len(joining)} of at least {requirements.min_nodes} nodes have joined")
    if len(joining) < requirements.max_nodes and not returned:
        until = max(p.known_since for p in joining) + requirements.last_call_timeout_s
        if now < until:
            return NoRoundYet(f"{len(joining)} of {requirements.max_nodes} nodes have joined; last call", until)
    return TorchrunRound(number + 1, tuple(p.candidate.member for p in joining[: requirements.max_nodes]))


def membership_change(
    view: TorchrunView,
    own: TorchrunRound,
    requirements: TorchrunRequirements,
    now: float,
    *,
    registrations_settled: bool,
) -> MembershipChange:
    """The changes that invalidate our round; none: its workers continue."""
    # In a closed job a missing node has finished; if the round is missing or older, the store has lost its data.
    if view.closed_by is not None or view.current is None or view.current.number < own.number:
        return MembershipChange(0, "")
    if view.current != own:
        return MembershipChange(1, f"the job continued with round {view.current.number}, without this node")
    registered = {p.node for p in view.candidates}
    lost = [m.node for m in own.members if m.node not in registered] if registrations_settled else []
    joining = join_queue(view)
    left = [p.node for p in joining if own.rank(p.node) is not None]
    added = [p for p in joining if own.rank(p.node) is None]
    room = max(0, requirements.max_nodes - len(own.members) + len(lost))
    admitted = [p.node for p in added[:room]] if _is_debounce_over(added, requirements.debounce_s, now) else []
    changes = ((lost, "lost"), (left, "left the round"), (admitted, "waiting to join"))
    why = "; ".join(f"{_name_or_count(nodes)} {what}" for nodes, what in changes if nodes)
    return MembershipChange(len(lost) + len(left) + len(admitted), why)


def _is_debounce_over(added: list[LiveCandidate], debounce_s: float, now: float) -> bool:
    times = [p.known_since for p in added]
    return bool(times) and now >= min(max(times) + debounce_s, min(times) + MAX_DEBOUNCES * debounce_s)


def _number_and_ranks(current: TorchrunRound | None) -> tuple[int, dict[str, int]]:
    """The number of the round, and the rank of each of its nodes."""
    if current is None:
        return 0, {}
    return current.number, {member.node: rank for rank, member in enumerate(current.members)}


def _name_or_count(nodes: list[str]) -> str:
    return nodes[0] if len(nodes) == 1 else f"{len(nodes)} nodes"
