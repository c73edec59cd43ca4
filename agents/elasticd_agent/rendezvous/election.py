"""The planner's key: who has it, and when this agent takes it.

It exists so that the coordinator can ask two questions, "do we plan?" and "may we?", and need not know what makes the
answers true: a free key goes to a member first, a planner whose agent refuses a knock is usurped at once, one that is
merely silent keeps the key until its lease ends. The key lives under this node's lease. Nothing is planned here.
"""

from __future__ import annotations

from collections.abc import Callable

from elasticd_agent.model.keys import Keys, decode_record
from elasticd_agent.model.records import NodeRecord
from elasticd_agent.rendezvous.planner import Planner
from elasticd_agent.rendezvous.probe import ProbeAlive, ProbeRefused
from elasticd_agent.rendezvous.registration import NodeRegistration
from elasticd_agent.store import Store

PREEMPT_AFTER_S = 0.15
"""A planner that has not answered our report for so long is asked whether it is still there."""
MEMBERS_FIRST_S = 1.0
"""How long the members of a Round have the planner's key to themselves when it is free."""


class LeaderElection:
    """One agent's view of one job's key. Times are monotonic seconds; everything may raise StoreUnavailable.

    `changed` is called when the key becomes ours or ceases to be; `reread` when somebody must read it (and the round)
    again.
    """

    def __init__(
        self,
        store: Store,
        keys: Keys,
        presence: NodeRegistration,
        planner: Planner,
        renewal_s: float,
        knock: Callable[[NodeRecord], object],
        changed: Callable[[], None],
        reread: Callable[[], None],
    ) -> None:
        self._store, self._key, self._presence, self._planner = store, keys.planner, presence, planner
        self._renewal_s, self._knock, self._changed, self._reread = renewal_s, knock, changed, reread
        self.key_version: int | None = None  # the key's version, if it is ours
        self.preempt_at: float | None = None
        self._other: tuple[NodeRecord, int] | None = None
        self._answered: str | None = None
        self._vacant_since: float | None = None
        self._trouble_since: float | None = None
        self._aloof_until = float("-inf")

    @property
    def other_leader(self) -> NodeRecord | None:
        """The other agent that plans, if one does."""
        return self._other[0] if self._other is not None else None

    def expect_answer(self, since: float) -> None:
        """Our group failed at `since`, or the planner hung up: whoever plans should have answered soon after."""
        self._trouble_since = since

    def leader_disconnected(self, now: float) -> None:
        """The planner's agent has broken the standing connection: ask it at once."""
        self._trouble_since, self.preempt_at = now - PREEMPT_AFTER_S, None

    def round_published(self) -> None:
        """A Round was published: somebody plans."""
        self._trouble_since = self.preempt_at = None

    def read_leader(self, now: float) -> None:
        """Read who has the key."""
        found = self._store.read(self._key)
        if found is None:
            self.key_lost(reread=False)
            self._vacant_since = now if self._vacant_since is None else self._vacant_since
            return
        self._vacant_since = None
        record = decode_record(NodeRecord, self._key, found.value)
        if record.incarnation == self._presence.record.incarnation:
            return self._key_taken(found.version)
        self.key_lost(reread=False)
        self._other = (record, found.version)
        if self._answered != record.incarnation and isinstance(self._knock(record), ProbeAlive):
            self._answered = record.incarnation
            self._planner.record_answer(record)

    def claim(self, now: float, *, non_member: bool) -> float | None:
        """Take the key where it is free, or where the planner is gone. `outsider`: a Round runs, and not here."""
        if now < self._aloof_until:
            return self._aloof_until
        if self._vacant_since is not None:
            if non_member and now < self._vacant_since + MEMBERS_FIRST_S:
                return self._vacant_since + MEMBERS_FIRST_S
            return self._take(None, now)
        if self._other is None:
            return None
        record, version = self._other
        if record.id == self._presence.record.id:
            return self._take(version, now)  # we before we were killed: the name is ours, so the key is nobody's
        if self._trouble_since is None:
            return None
        self.preempt_at = max(self.preempt_at or 0.0, self._trouble_since + PREEMPT_AFTER_S)
        if now < self.preempt_at:
            return self.preempt_at
        self.preempt_at = now + self._renewal_s
        if self._answered == record.incarnation and isinstance(self._knock(record), ProbeRefused):
            self._planner.suspects.add(record.id)
            return self._take(version, now)
        return self.preempt_at

    def resign(self, now: float, aloof_s: float) -> float:
        """Let another member plan, which can do it better."""
        self._store.delete(self._key)
        self.key_lost()
        self._aloof_until = now + aloof_s
        return now

    def key_lost(self, *, reread: bool = True) -> None:
        """The key is not ours, or not any more."""
        if self.key_version is not None:
            self.key_version = None
            self._planner.reset()
            self._changed()
        if reread:
            self._reread()

    def _take(self, expected: int | None, now: float) -> float:
        lease = self._presence.lease
        assert lease is not None
        self._reread()
        self.preempt_at = None
        version = lease.put(self._key, self._presence.record.to_json(), expected)
        if version is not None:
            self._key_taken(version)
        return now

    def _key_taken(self, version: int) -> None:
        if self.key_version is None:
            self._planner.reset()
            self.key_version = version
            self._changed()
        self.key_version, self._vacant_since, self._other = version, None, None
