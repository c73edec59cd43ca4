"""Detects members this node cannot reach; it probes only while local workers are stalled.

The leader sees its own connections and no others: two members that it reaches may not reach each other. So each node
publishes in its record the members it does not reach, and `membership` chooses.

- A member probes once its workers have not advanced for a lease's time, and counts another one as unreachable that has
  been silent for as long again. A node that was left out of the Round probes before it can join again.
- Silence counts after an earlier answer: each member is probed once while all is well. Before a round's first step it
  counts where other members answer. Otherwise a firewall between agents would separate nodes that train together.
- A refusal is left to the leader. Members that have answered are remembered, in case this node leads next.
"""

from __future__ import annotations

from collections.abc import Mapping

from elasticd_agent.model.job import Policy
from elasticd_agent.model.records import Identity, Round
from elasticd_agent.rendezvous.observations import PeerObservations
from elasticd_agent.rendezvous.probe import ProbeAlive, ProbeNoAnswer, ProbeRefused
from elasticd_agent.system.network.addresses import try_parse_endpoint

RETRY_INTERVAL_S = 1.0
MAX_INTERVAL_S = 30.0
"""Between probes while every member answers: it may be a long evaluation."""
EXCLUDED_INTERVAL_S = 5.0
"""Between probes of a node that was left out."""
INTRODUCTION_SPREAD_S = 5.0
"""Within this the members of a round that trains probe each other for the first time, one after the other."""
INTRODUCTION_TRIES = 3


class ReachabilityMonitor:
    """`turn` belongs to the thread that talks to the store: probes may take a moment."""

    def __init__(self, policy: Policy, me: Identity, observations: PeerObservations) -> None:
        self._policy = policy
        self._me = me
        self._observations = observations
        self._number = 0
        self._is_member = False
        self._missed: set[Identity] = set()  #: counted as unreachable once, so their silence counts again
        self._silent_since: dict[str, float] = {}
        self._interval_s = RETRY_INTERVAL_S
        self._next_at = float("-inf")
        self._introduce_at: float | None = None
        self._introductions = 0
        self.unreachable: tuple[str, ...] = ()  #: members of the current Round that this node does not reach

    def turn(self, round: Round | None, stepped: int, next_step_due: float | None, now: float) -> float | None:
        """Probe if it is due, and update `unreachable`. Returns when to come back.

        `stepped`: the last round that made a step here. `next_step_due`: when the workers here should have made their
        next one, None if there are none.
        """
        if round is None or round.terminal:
            self._reset()
            return None
        if round.number != self._number:
            self._begin(round)
        member = self._is_member
        if not member and self._me[0] not in {e.node for e in round.excluded}:
            self._reset()
            return None
        if member and next_step_due is None:
            return None  # its workers have ended: the result so far is final
        if member and next_step_due is not None and now < next_step_due + self._policy.lease_s:
            self._reset()
            if stepped == round.number:
                self._introduce(round, now)
            return None
        if now >= self._next_at:
            self._probe_members(round, member, stepped == round.number, now)
        return self._next_at

    def _begin(self, round: Round) -> None:
        self._number = round.number
        self._is_member = any(m.identity == self._me for m in round.members)
        self._introduce_at = None
        self._introductions = 0
        self._reset()

    def _reset(self) -> None:
        self._interval_s = RETRY_INTERVAL_S
        self._next_at = float("-inf")
        self._silent_since.clear()
        self.unreachable = ()

    def _introduce(self, round: Round, now: float) -> None:
        """Probe members that have never been probed, while all is well. It is not worth a turn of its own."""
        if self._introductions >= INTRODUCTION_TRIES:
            return
        if self._introduce_at is None:
            self._introduce_at = now + INTRODUCTION_SPREAD_S * round.group_rank(self._me[0]) / len(round.members)
        if now < self._introduce_at:
            return
        unknown = {m.identity for m in round.members} - self._observations.answered - {self._me}
        self._introductions = self._introductions + 1 if unknown else INTRODUCTION_TRIES
        self._introduce_at = now + MAX_INTERVAL_S
        self._probe(round, {node for node, _ in unknown})

    def _probe_members(self, round: Round, member: bool, stepped: bool, now: float) -> None:
        answers = self._probe(round, {m.node for m in round.members if m.identity != self._me})
        silent = sorted(node for node, answer in answers.items() if isinstance(answer, ProbeNoAnswer))
        self._silent_since = {node: self._silent_since.get(node, now) for node in silent}
        any_silence_counts = not stepped and len(silent) < len(answers)
        silence_s = self._policy.lease_s if member else 0.0
        identities = {m.node: m.identity for m in round.members}
        self.unreachable = tuple(
            node
            for node, since in self._silent_since.items()
            if now >= since + silence_s and (any_silence_counts or self._silence_counts(identities[node]))
        )
        self._missed |= {identities[node] for node in self.unreachable}
        if not member:
            self._interval_s = EXCLUDED_INTERVAL_S
        elif self._silent_since:
            self._interval_s = RETRY_INTERVAL_S
        self._next_at = now + self._interval_s
        self._interval_s = min(2 * self._interval_s, MAX_INTERVAL_S)

    def _silence_counts(self, identity: Identity) -> bool:
        return identity in self._observations.answered | self._missed

    def _probe(self, round: Round, nodes: set[str]) -> Mapping[str, ProbeAlive | ProbeRefused | ProbeNoAnswer]:
        known = {m.node: try_parse_endpoint(m.address) for m in round.members if m.node in nodes}
        addresses = {node: address for node, address in known.items() if address is not None}
        answers = self._observations.probe(addresses) if addresses else {}
        for answer in answers.values():
            if isinstance(answer, ProbeAlive):
                self._observations.record_answer((answer.node, answer.incarnation))
        return answers
