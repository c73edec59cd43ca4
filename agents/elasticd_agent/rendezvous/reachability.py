"""Whom of its round's members this node does not reach, asked where nothing else may say why its workers stand still.

It exists because the planner sees its own connections and no others: two members that it reaches may not reach each
other. So each node says in its record whom it misses, and `membership` chooses. A member asks once its workers have not
advanced for a lease's time, and misses another one that has been silent for as long again; one that was left out asks
before it is taken again. Silence means something where there was an answer before (each is asked once while all is
well), or, before a round's first step, where others answer: a firewall between agents must not part those who train
together. Who refuses is the planner's to judge; whom we have met serves us, too, should we plan next. It decides
nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from elasticd.errors import WireError
from elasticd_agent.model.job import Policy
from elasticd_agent.model.keys import Keys
from elasticd_agent.model.records import NodeRecord, Round
from elasticd_agent.rendezvous.probe import ProbeAlive, ProbeNoAnswer, ProbeRefused
from elasticd_agent.store import Store
from elasticd_agent.system.addresses import try_parse_endpoint

RETRY_INTERVAL_S = 1.0
MAX_INTERVAL_S = 30.0
"""How far apart knocks get while everybody answers: it may be a long evaluation."""
EXCLUDED_INTERVAL_S = 5.0
"""How often a node that was left out asks whether it reaches the members now."""
INTRODUCTION_SPREAD_S = 5.0
"""The members of a round that trains get to know each other within this, one after the other."""
INTRODUCTION_TRIES = 3

Probe = Callable[[Mapping[str, tuple[str, int]]], Mapping[str, ProbeAlive | ProbeRefused | ProbeNoAnswer]]


class ReachabilityMonitor:
    """`turn` belongs to the thread that talks to the store: knocks may take a moment."""

    def __init__(
        self, store: Store, keys: Keys, policy: Policy, me: tuple[str, str], knock: Probe, met: set[tuple[str, str]]
    ) -> None:
        """`met`: incarnations that have answered a knock of this agent's; it grows here."""
        self._store, self._keys, self._policy, self._me, self._knock = store, keys, policy, me, knock
        self._number = 0
        self._incarnations: set[tuple[str, str]] = set()
        self._members: dict[str, tuple[str, int]] = {}
        self._met = met
        self._missed: set[tuple[str, str]] = set()  # their silence means something though they never answered
        self._silent: dict[str, float] = {}
        self._pause_s = RETRY_INTERVAL_S
        self._at = float("-inf")
        self._meet_at: float | None = None
        self._tries = 0
        self.unreachable: tuple[str, ...] = ()

    def turn(self, round: Round | None, stepped: int, advances_by: float | None, now: float) -> float | None:
        """Knock if it is time; `unreached` is up to date then. Returns when to come back. Raises StoreUnavailable.

        `stepped`: the last round that made a step here. `advances_by`: when the workers here should have made their
        next one, None if there are none.
        """
        if round is None or round.terminal:
            self._forget()
            return None
        if round.number != self._number:
            self._number, self._members, self._meet_at, self._tries = round.number, {}, None, 0
            self._incarnations = {(m.node, m.incarnation) for m in round.members}
            self._forget()
        inside = self._me in self._incarnations
        if not inside and self._me[0] not in {e.node for e in round.excluded}:
            self._forget()
            return None
        if inside and advances_by is None:
            return None  # its workers have ended: what was seen until then is all that will be
        if inside and advances_by is not None and now < advances_by + self._policy.lease_s:
            self._forget()
            if stepped == round.number:
                self._meet(round, now)
            return None
        if now >= self._at:
            self._ask(round, inside, stepped == round.number, now)
        return self._at

    def _forget(self) -> None:
        self._pause_s, self._at = RETRY_INTERVAL_S, float("-inf")
        self._silent.clear()
        self.unreachable = ()

    def _meet(self, round: Round, now: float) -> None:
        """Ask those who have never been asked, while all is well. Nobody need wake up for it."""
        if self._tries >= INTRODUCTION_TRIES:
            return
        unknown = self._incarnations - self._met - {self._me}
        if not unknown:
            self._tries = INTRODUCTION_TRIES
            return
        if self._meet_at is None:
            self._meet_at = now + INTRODUCTION_SPREAD_S * round.group_rank(self._me[0]) / len(round.members)
        if now >= self._meet_at:
            self._tries += 1
            self._meet_at = now + MAX_INTERVAL_S
            self._asked({node for node, _ in unknown})

    def _ask(self, round: Round, inside: bool, stepped: bool, now: float) -> None:
        answers = self._asked({m.node for m in round.members})
        self._silent = {n: self._silent.get(n, now) for n in sorted(answers) if isinstance(answers[n], ProbeNoAnswer)}
        alone = len(self._silent) == len(answers)
        since_s = self._policy.lease_s if inside else 0.0
        incarnations = {m.node: (m.node, m.incarnation) for m in round.members}
        self.unreachable = tuple(
            node
            for node, since in self._silent.items()
            if now >= since + since_s and (incarnations[node] in self._met | self._missed or not (stepped or alone))
        )
        self._missed |= {incarnations[node] for node in self.unreachable}
        self._pause_s = EXCLUDED_INTERVAL_S if not inside else RETRY_INTERVAL_S if self._silent else self._pause_s
        self._at = now + self._pause_s
        self._pause_s = min(2 * self._pause_s, MAX_INTERVAL_S)

    def _asked(self, whom: set[str]) -> Mapping[str, ProbeAlive | ProbeRefused | ProbeNoAnswer]:
        addresses = {node: address for node, address in self._addresses().items() if node in whom}
        answers = self._knock(addresses) if addresses else {}
        self._met |= {(a.node, a.incarnation) for a in answers.values() if isinstance(a, ProbeAlive)}
        return answers

    def _addresses(self) -> dict[str, tuple[str, int]]:
        """Where the other members answer; read once in a round, since an incarnation keeps its address."""
        wanted = self._incarnations - {self._me}
        if len(self._members) < len(wanted):
            for item in self._store.list(self._keys.nodes).values():
                try:
                    record = NodeRecord.from_json(item.value)
                except WireError:
                    continue  # the planner says so
                where = try_parse_endpoint(record.address)
                if (record.id, record.incarnation) in wanted and where is not None:
                    self._members[record.id] = where
        return self._members
