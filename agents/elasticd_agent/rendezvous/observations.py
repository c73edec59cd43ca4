"""What this agent has observed of the other agents and of the store, on its own monotonic clock."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from elasticd_agent.model.records import Identity, Member, NodeRecord, Round
from elasticd_agent.rendezvous.probe import ProbeAlive, ProbeNoAnswer, ProbeRefused
from elasticd_agent.rendezvous.view import ProbeResult
from elasticd_agent.system.network.addresses import try_parse_endpoint

Address = tuple[str, int]
Probe = Callable[[Mapping[str, Address]], Mapping[str, ProbeAlive | ProbeRefused | ProbeNoAnswer]]


class PeerObservations:
    """The only writer of its fields; planner, election and reachability read them, and report events by its methods.

    It belongs to the thread that talks to the store. `probe` probes agents at these addresses, all at once.
    """

    def __init__(self, node: str, probe: Probe) -> None:
        self.probe = probe
        self._node = node
        self.store_up_since = 0.0  #: since when a missing record means something; infinity: the store is unavailable
        self.own_record_missing = False  #: in the last list of all nodes
        self.suspects: set[str] = set()  #: nodes whose agent may have died: reset connection, refused probe
        self.answered: set[Identity] = set()  #: have answered a probe: if one refuses the next, its process is gone
        self.results: dict[str, ProbeResult] = {}  #: members' answers since the last sign of trouble
        self.silent_since: dict[str, float] = {}  #: members that had answered before and do not now
        self.unreachable: frozenset[str] = frozenset()  #: nodes that want to join, had answered before and do not now
        self._addresses: dict[Identity, Address] = {}

    def store_unavailable(self) -> None:
        self.store_up_since = float("inf")

    def store_answers(self, now: float) -> None:
        if self.store_up_since == float("inf"):
            self.store_up_since = now

    def distrust_absences(self, now: float) -> None:
        """This agent did not listen, or the store lost a record: records that are missing now mean nothing yet."""
        self.store_up_since = now

    def listed(self, nodes: Iterable[str], now: float) -> None:
        """A list of all nodes was read; a store that lost this node's record may have lost others."""
        self.own_record_missing = self._node not in nodes
        if self.own_record_missing:
            self.store_up_since = max(self.store_up_since, now)

    def take_own_record_missing(self) -> bool:
        missing, self.own_record_missing = self.own_record_missing, False
        return missing

    def suspect(self, node: str) -> None:
        self.suspects.add(node)

    def round_published(self) -> None:
        """It has no dead members."""
        self.suspects.clear()

    def record_answer(self, identity: Identity) -> None:
        self.answered.add(identity)

    def probe_node(self, record: NodeRecord) -> ProbeAlive | ProbeRefused | ProbeNoAnswer | None:
        """One agent's answer; None if its record has no address."""
        address = try_parse_endpoint(record.address)
        return None if address is None else self.probe({record.id: address}).get(record.id)

    def probe_members(self, known: Iterable[NodeRecord | Member], incarnations: Mapping[str, str], now: float) -> None:
        """Probe these incarnations; `results` and `silent_since` are of this probe. `known` names their addresses."""
        for one in known:
            identity = one.identity
            if identity not in self._addresses and (address := try_parse_endpoint(one.address)) is not None:
                self._addresses[identity] = address
        addresses = {n: self._addresses[n, i] for n, i in incarnations.items() if (n, i) in self._addresses}
        self.results.clear()
        for node, answer in (self.probe(addresses) if addresses else {}).items():
            identity = node, incarnations[node]
            match answer:
                case ProbeAlive():
                    same = (answer.node, answer.incarnation) == identity
                    self.results[node] = "answered" if same else "refused"
                    if same:
                        self.record_answer(identity)
                        self.suspects.discard(node)
                case ProbeRefused():
                    self.results[node] = "refused" if identity in self.answered else "closed"
                case ProbeNoAnswer():
                    self.results[node] = "silent"
        silent = {n for n, i in incarnations.items() if (n, i) in self.answered and self.results.get(n) == "silent"}
        self.silent_since = {node: self.silent_since.get(node, now) for node in sorted(silent)}

    def forget_results(self) -> None:
        """All is well, or another node leads: earlier answers and silences mean nothing."""
        self.results.clear()
        self.silent_since.clear()

    def probe_joiners(self, addresses: Mapping[str, Address]) -> None:
        answers = self.probe(addresses) if addresses else {}
        self.unreachable = frozenset(n for n, answer in answers.items() if isinstance(answer, ProbeNoAnswer))

    def addresses(self, round: Round) -> dict[str, Address]:
        """Where the other members' agents answer, as far as it is known."""
        others = (m.identity for m in round.members if m.node != self._node)
        return {identity[0]: self._addresses[identity] for identity in others if identity in self._addresses}
