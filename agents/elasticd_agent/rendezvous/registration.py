"""This node's record in the store, kept alive under its lease.

A record that is lost is registered again. A record of the same name that belongs to another agent is never touched
while that agent may be alive.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from elasticd.errors import StoreRefused
from elasticd_agent.model.job import Policy
from elasticd_agent.model.keys import decode_record
from elasticd_agent.model.records import NodeRecord
from elasticd_agent.rendezvous.probe import ProbeAlive, ProbeRefused
from elasticd_agent.store import Lease, Store
from elasticd_agent.store.lease import LeasedKey, RenewalListener


class NodeRegistration:
    """This node's record in the store. `turn` and `send` belong to one thread, `update` to any."""

    def __init__(
        self,
        store: Store,
        key: str,
        policy: Policy,
        record: NodeRecord,
        probe: Callable[[NodeRecord], object],
        attentive: Callable[[], bool],
        renewed: RenewalListener,
    ) -> None:
        self.key = LeasedKey(store, key, policy.lease_s, policy.renewal_s, is_own=self._is_own, on_renewal=renewed)
        self._probe = probe
        self._attentive = attentive
        self._patience_s = policy.join_timeout_s
        self._taken_since: float | None = None
        self.waits_for = ""
        """Why this node cannot be registered yet."""
        self._record = record
        self._sent: NodeRecord | None = None
        self._lock = threading.Lock()

    @property
    def lease(self) -> Lease | None:
        return self.key.lease

    @property
    def record(self) -> NodeRecord:
        return self._record

    def update(self, **fields: Any) -> None:
        """Set fields of the record; `send` writes them."""
        with self._lock:
            self._record = replace(self._record, **fields)

    def turn(self, now: float) -> bool:
        """Renew the lease, or register the node if it is not registered. False: another agent has the name.

        Raises StoreRefused if that agent is alive, or keeps the name for `join_timeout`; StoreUnavailable.
        """
        if self._attentive():
            self.key.renew(now)
        if self.lease is None:
            record = self._record
            if not self.key.create(record.to_json(), now, self._may_replace):
                self._taken_since = now if self._taken_since is None else self._taken_since
                if now - self._taken_since >= self._patience_s:
                    raise StoreRefused(f"{self.waits_for}; give this one another name with --node-id")
                return False
            self._taken_since, self.waits_for = None, ""
            self._sent = record
        return True

    def _may_replace(self, value: bytes) -> bool:
        """Whether the record under our name may go: of this agent before it was killed, or of an agent that is gone."""
        other = decode_record(NodeRecord, self.key.key, value)
        if other.incarnation == self._record.incarnation:
            return True
        answer = self._probe(other)
        if isinstance(answer, ProbeAlive) and answer.incarnation == other.incarnation:
            raise StoreRefused(
                f"another agent takes part in this job as node {other.id!r}, at {other.address}; "
                "give this one another name with --node-id"
            )
        # The lease of an agent that does not answer decides.
        who = f"another agent is node {other.id!r} of this job, at {other.address}"
        self.waits_for = f"{who}; it does not answer, but has a record"
        return isinstance(answer, ProbeRefused)

    def send(self) -> bool:
        """Write the record if it has changed. False: the record or its lease is lost."""
        record = self._record
        if record is not self._sent and self.key.replace(record.to_json()):  # it is the same in most turns
            self._sent = record
        return self.lease is not None

    def check(self) -> None:
        """Give the lease up if the record was deleted or replaced; the next turn registers the node again."""
        self.key.check()

    def withdraw(self) -> None:
        """Delete the record and every key under its lease. Raises StoreUnavailable."""
        self.key.withdraw()

    def _is_own(self, value: bytes) -> bool:
        return decode_record(NodeRecord, self.key.key, value).incarnation == self._record.incarnation
