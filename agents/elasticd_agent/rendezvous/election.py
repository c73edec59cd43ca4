"""Leader election: which agent holds the job's leader key, and when this agent takes it.

The key lives under this node's lease. A free key goes to a member of the Round first; a leader whose agent refuses a
probe is preempted at once; a leader that is merely silent keeps the key until its lease ends.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from elasticd_agent.model.keys import decode_record
from elasticd_agent.model.records import LeaderRecord, NodeRecord
from elasticd_agent.rendezvous.observations import PeerObservations
from elasticd_agent.rendezvous.probe import ProbeAlive, ProbeRefused
from elasticd_agent.rendezvous.registration import NodeRegistration
from elasticd_agent.store import Store

PREEMPT_AFTER_S = 0.15
"""A leader that has not answered this node's report for so long is probed."""
MEMBERS_FIRST_S = 1.0
"""How long the members of a Round have a free leader key to themselves."""


@dataclass
class LeaderElection:
    """One agent's view of one job's leader key. Times are monotonic seconds; everything may raise StoreUnavailable."""

    _store: Store
    _key: str
    _registration: NodeRegistration
    _observations: PeerObservations
    _renewal_s: float
    _changed: Callable[[], None]  #: this agent becomes leader or ceases to be
    _reread: Callable[[], None]  #: the key and the round must be read again
    key_version: int | None = None  #: while this agent holds the key
    preempt_at: float | None = None  #: when the leader is probed next
    _other: tuple[NodeRecord, int] | None = None
    _answered: str | None = None  #: the incarnation of the leader that has answered a probe
    free_since: float | None = None  #: since when no agent holds the key, as far as this one has read it
    _unanswered_since: float | None = None
    _abstain_until: float = float("-inf")

    @property
    def other_leader(self) -> NodeRecord | None:
        """The other agent that leads, if one does."""
        return self._other[0] if self._other is not None else None

    def expect_answer(self, since: float) -> None:
        """This node reported a failure at `since`; a living leader publishes a Round soon after."""
        self._unanswered_since = since

    def leader_disconnected(self, now: float) -> None:
        """The leader's agent has broken the standing connection: probe it at once."""
        self._unanswered_since = now - PREEMPT_AFTER_S
        self.preempt_at = None

    def round_published(self) -> None:
        """A leader is alive."""
        self._unanswered_since = None
        self.preempt_at = None

    def read_leader(self, now: float) -> None:
        found = self._store.read(self._key)
        if found is None:
            self.key_lost(reread=False)
            self.free_since = now if self.free_since is None else self.free_since
            return
        self.free_since = None
        record = decode_record(LeaderRecord, self._key, found.value)
        if record.incarnation == self._registration.record.incarnation:
            self._key_taken(found.version)
            return
        self.key_lost(reread=False)
        self._other = (record, found.version)
        if self._answered != record.incarnation and isinstance(self._observations.probe_node(record), ProbeAlive):
            self._answered = record.incarnation
            self._observations.record_answer(record.identity)

    def claim(self, now: float, *, non_member: bool) -> float | None:
        """Take the key if it is free or its holder is gone; returns when to try again.

        `non_member`: a Round runs without this node.
        """
        if now < self._abstain_until:
            return self._abstain_until
        if self.free_since is not None:
            if non_member and now < self.free_since + MEMBERS_FIRST_S:
                return self.free_since + MEMBERS_FIRST_S
            return self._take(None, now)
        if self._other is None:
            return None
        record, version = self._other
        if record.id == self._registration.record.id:
            return self._take(version, now)  # this node's earlier incarnation: the name is ours, so it is dead
        if self._unanswered_since is None:
            return None
        self.preempt_at = max(self.preempt_at or 0.0, self._unanswered_since + PREEMPT_AFTER_S)
        if now < self.preempt_at:
            return self.preempt_at
        self.preempt_at = now + self._renewal_s
        # Only where a probe was answered before is a refusal proof: a firewall refuses, too.
        if self._answered == record.incarnation and isinstance(self._observations.probe_node(record), ProbeRefused):
            self._observations.suspect(record.id)
            return self._take(version, now)
        return self.preempt_at

    def resign(self, now: float, abstain_s: float) -> float:
        """Leave the key to a member that can lead better."""
        self._store.delete(self._key)
        self.key_lost()
        self._abstain_until = now + abstain_s
        return now

    def key_lost(self, *, reread: bool = True) -> None:
        """This agent does not hold the key, or not any more."""
        if self.key_version is not None:
            self.key_version = None
            self._changed()
        if reread:
            self._reread()

    def _take(self, expected: int | None, now: float) -> float:
        lease = self._registration.lease
        assert lease is not None
        self._reread()
        self.preempt_at = None
        version = lease.put(self._key, self._registration.record.to_json(), expected)
        if version is not None:
            self._key_taken(version)
        return now

    def _key_taken(self, version: int) -> None:
        elected = self.key_version is None
        self.key_version = version
        self.free_since = None
        self._other = None
        if elected:
            self._changed()
