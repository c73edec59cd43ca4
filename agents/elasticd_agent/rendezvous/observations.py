"""What this agent has observed of the other agents and of the store, on its own monotonic clock."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from elasticd_agent.model.records import NodeRecord, Round
from elasticd_agent.rendezvous.probe import ProbeAlive, ProbeNoAnswer, ProbeRefused
from elasticd_agent.rendezvous.view import ProbeResult
from elasticd_agent.system.addresses import try_parse_endpoint

Identity = tuple[str, str]
"""(node, incarnation)."""
Address = tuple[str, int]
Probe = Callable[[Mapping[str, Address]], Mapping[str, ProbeAlive | ProbeRefused | ProbeNoAnswer]]
"""Probes the agents at these addresses, all at once."""


class PeerObservations:
    """The only writer of these facts; planner, election and reachability read them, and report events to it.

    It belongs to the thread that talks to the store.
    """

    def __init__(self, node: str, probe: Probe) -> None:
        self.probe = probe
        self._node = node
        self._store_up_since = 0.0
        self._own_record_missing = False
        self._suspects: set[str] = set()
        self._answered: set[Identity] = set()
        self._addresses: dict[Identity, Address] = {}
        self._results: dict[str, ProbeResult] = {}
        self._silent_since: dict[str, float] = {}
        self._unreachable: frozenset[str] = frozenset()

    # --- the store --------------------------------------------------------------------------------------------------

    @property
    def store_up_since(self) -> float:
        """Since when a record missing from the store means something; infinity while the store is unavailable."""
        return self._store_up_since

    def store_unavailable(self) -> None:
        self._store_up_since = float("inf")

    def store_answers(self, now: float) -> None:
        if self._store_up_since == float("inf"):
            self._store_up_since = now

    def distrust_absences(self, now: float) -> None:
        """This agent did not listen, or the store lost a record: records that are missing now mean nothing yet."""
        self._store_up_since = now

    def own_record(self, present: bool, now: float) -> None:
        """Whether a list of all nodes has this node's record; a store that lost it may have lost others."""
        self._own_record_missing = not present
        if not present:
            self._store_up_since = max(self._store_up_since, now)

    def take_own_record_missing(self) -> bool:
        """True once after the own record was found missing."""
        missing, self._own_record_missing = self._own_record_missing, False
        return missing

    # --- suspects ---------------------------------------------------------------------------------------------------

    @property
    def suspects(self) -> frozenset[str]:
        """Nodes whose agent may have died: it broke its connection, or refused a probe."""
        return frozenset(self._suspects)

    def suspect(self, node: str) -> None:
        self._suspects.add(node)

    def clear_suspects(self) -> None:
        """A new Round was published, without the dead ones."""
        self._suspects.clear()

    # --- probes -----------------------------------------------------------------------------------------------------

    @property
    def results(self) -> dict[str, ProbeResult]:
        """Members' answers since the last sign of trouble."""
        return self._results

    @property
    def silent_since(self) -> dict[str, float]:
        """Members that had answered a probe before and answer none now."""
        return self._silent_since

    @property
    def unreachable(self) -> frozenset[str]:
        """Nodes that want to join, had answered before and do not now."""
        return self._unreachable

    def has_answered(self, identity: Identity) -> bool:
        """True if it has answered a probe of this agent: if it refuses the next one, its process is gone."""
        return identity in self._answered

    def record_answer(self, identity: Identity) -> None:
        self._answered.add(identity)

    def probe_node(self, record: NodeRecord) -> ProbeAlive | ProbeRefused | ProbeNoAnswer | None:
        """One agent's answer; None if its record has no address."""
        address = try_parse_endpoint(record.address)
        return None if address is None else self.probe({record.id: address}).get(record.id)

    def probe_members(self, records: Iterable[NodeRecord], incarnations: Mapping[str, str], now: float) -> None:
        """Probe these incarnations; `results` and `silent_since` are of this probe."""
        self._learn_addresses(records)
        found = {node: self._addresses.get((node, incarnation)) for node, incarnation in incarnations.items()}
        addresses = {node: address for node, address in found.items() if address}
        self._results.clear()
        for node, answer in (self.probe(addresses) if addresses else {}).items():
            identity = node, incarnations[node]
            match answer:
                case ProbeAlive():
                    same = (answer.node, answer.incarnation) == identity
                    self._results[node] = "answered" if same else "refused"
                    if same:
                        self.record_answer(identity)
                        self._suspects.discard(node)
                case ProbeRefused():
                    self._results[node] = "refused" if self.has_answered(identity) else "silent"
                case ProbeNoAnswer():
                    self._results[node] = "silent"
        silent = {n for n, i in incarnations.items() if self.has_answered((n, i)) and self._results.get(n) == "silent"}
        self._silent_since = {node: self._silent_since.get(node, now) for node in sorted(silent)}

    def forget_results(self) -> None:
        """All is well, or another node leads: earlier answers and silences mean nothing."""
        self._results.clear()
        self._silent_since.clear()

    def probe_joiners(self, addresses: Mapping[str, Address]) -> None:
        answers = self.probe(addresses) if addresses else {}
        self._unreachable = frozenset(n for n, answer in answers.items() if isinstance(answer, ProbeNoAnswer))

    def addresses(self, round: Round) -> dict[str, Address]:
        """Where the other members' agents answer, as far as it is known."""
        members = (m for m in round.members if m.node != self._node)
        found = {m.node: self._addresses.get((m.node, m.incarnation)) for m in members}
        return {node: address for node, address in found.items() if address}

    def _learn_addresses(self, records: Iterable[NodeRecord]) -> None:
        for record in records:
            identity = record.id, record.incarnation
            if identity not in self._addresses and (address := try_parse_endpoint(record.address)) is not None:
                self._addresses[identity] = address
