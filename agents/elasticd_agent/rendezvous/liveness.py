"""When the leader probes the other agents: once while all is well, and at every new sign of trouble."""

from __future__ import annotations

from dataclasses import dataclass

from elasticd_agent.model.job import Policy
from elasticd_agent.model.records import Round
from elasticd_agent.rendezvous.membership import STALLED_S
from elasticd_agent.rendezvous.observations import Address, PeerObservations
from elasticd_agent.rendezvous.plan import ROOT_CAUSE_WAIT_S
from elasticd_agent.rendezvous.view import View
from elasticd_agent.system.network.addresses import try_parse_endpoint

PROBE_INTERVAL_S = 1.0
JOINER_PROBE_INTERVAL_S = 5.0
MAX_PROBE_INTERVAL_S = 30.0
"""Between probes while no worker advances and every agent answers: it may be a long evaluation."""


@dataclass(frozen=True, slots=True)
class Trouble:
    """Signs that a member may be gone, the first four as node names. A change of them makes a probe due at once."""

    round: int
    failed: tuple[str, ...]
    unseen: tuple[str, ...]  #: have not seen the Round in time
    absent: tuple[str, ...]  #: have no record
    suspects: tuple[str, ...]
    stalled: bool  #: the workers beside this agent are overdue with their next step
    settled: bool  #: all nodes had time to report: an agent that answered at the first report may have died since

    @property
    def only_stalled(self) -> bool:
        return not (self.failed or self.unseen or self.absent or self.suspects)


class LivenessProber:
    """One job's, while this agent leads."""

    def __init__(self, node: str, policy: Policy, observations: PeerObservations) -> None:
        self._node = node
        self._policy = policy
        self._observations = observations
        self._probed_for: Trouble | None = None
        self._next_at = 0.0
        self._stalled_probes = 0
        self._joiners: set[str] = set()
        self._joiners_at = float("-inf")
        self._handed_over = 0

    def reset(self) -> None:
        """Any trouble is new."""
        self._probed_for = None

    def trouble(self, view: View, round: Round, now: float) -> Trouble | None:
        others = self._others(round)
        late = now >= view.round_at + self._policy.seen_timeout_s
        unseen = (n for n in others if (r := view.record(n)) is not None and r.seen_round < round.number)
        trouble = Trouble(
            round.number,
            failed=tuple(f.node for f in view.failures),
            unseen=tuple(unseen) if late else (),
            absent=tuple(node for node, _ in view.absent_since),
            suspects=tuple(sorted(self._observations.suspects & others.keys())),
            stalled=view.next_step_due is not None and now >= view.next_step_due + STALLED_S,
            settled=bool(view.failures) and now >= view.failed_at + ROOT_CAUSE_WAIT_S,
        )
        return None if trouble.only_stalled and not trouble.stalled else trouble

    def introduce(self, view: View, round: Round, now: float) -> None:
        """All is well: probe members that have never been probed, so that their later silence means something."""
        self._observations.forget_results()
        self._stalled_probes = 0
        unknown = {n: i for n, i in self._others(round).items() if (n, i) not in self._observations.answered}
        if unknown and now >= self._next_at:
            self._probe(view, unknown, now)
            self._observations.forget_results()

    def probe_if_due(self, view: View, round: Round, trouble: Trouble, now: float) -> bool:
        """Probe all members at a new sign of trouble, and again and again while there is any. True if it did."""
        if trouble == self._probed_for and now < self._next_at:
            return False
        self._probed_for = trouble
        self._probe(view, self._others(round), now)
        if trouble.only_stalled and not self._observations.silent_since:
            self._stalled_probes += 1
            pause_s = PROBE_INTERVAL_S * 2.0 ** min(self._stalled_probes, 16)
            self._next_at = now + min(pause_s, MAX_PROBE_INTERVAL_S)
        return True

    def check_joiners(self, view: View, round: Round, now: float) -> None:
        """A node that was lost because it is unreachable is not taken again before it is reachable."""
        members = {m.node for m in round.members}
        joiners: dict[str, Address] = {}
        for record in (p.record for p in view.nodes):
            known = record.identity in self._observations.answered
            address = try_parse_endpoint(record.address)
            if record.id not in members and known and address is not None:
                joiners[record.id] = address
        if now >= self._joiners_at or joiners.keys() != self._joiners:
            self._joiners = set(joiners)
            self._joiners_at = now + JOINER_PROBE_INTERVAL_S
            self._observations.probe_joiners(joiners)

    def unreachable_majority(self, view: View, round: Round, now: float) -> list[str]:
        """Members that do not answer this agent, if they are the majority: then this agent is cut off. Once a Round."""
        silent_s = self._policy.lease_s
        silent = [node for node, since in view.silent_since if now >= since + silent_s and view.record(node)]
        if len(silent) <= len(round.members) / 2 or self._handed_over >= round.number:
            return []
        self._handed_over = round.number
        return silent

    def _others(self, round: Round) -> dict[str, str]:
        return {m.node: m.incarnation for m in round.members if m.node != self._node}

    def _probe(self, view: View, incarnations: dict[str, str], now: float) -> None:
        members = view.current.members if view.current is not None else ()
        self._observations.probe_members((*(p.record for p in view.nodes), *members), incarnations, now)
        self._next_at = now + PROBE_INTERVAL_S
