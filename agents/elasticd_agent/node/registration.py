"""Keeps this node's card in the store, under a lease: taken, renewed, replaced, and taken again after an outage.

It exists so that the deciding loop need not know how a name is kept. A card of this very daemon's, left by a process
of it that was killed or replaced, is taken over at once; another daemon's is never touched while its lease lives. Other
keys of this daemon's may live under the same lease, so that an idle daemon asks for one renewal.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from elasticd.errors import ElasticdError, StoreUnavailable, WireError
from elasticd_agent.model.keys import decode_record
from elasticd_agent.node import keys as names
from elasticd_agent.node.records import NodeStatus
from elasticd_agent.rendezvous.registration import RenewalListener, renew
from elasticd_agent.store import Lease, Store


class NameTaken(ElasticdError):
    """Another daemon has this node's name; the sentence says which."""


class NodeStatusPublisher:
    """Belongs to one thread."""

    def __init__(
        self,
        store: Store,
        status: NodeStatus,
        lease_s: float,
        renewal_s: float,
        on_renewal: RenewalListener = lambda lives_s, took_s: None,
    ) -> None:
        self._store, self._key = store, names.NODES + status.node
        self._lease_s, self._renewal_s = lease_s, renewal_s
        self._on_renewal = on_renewal
        self._written = status
        self._version: int | None = None
        self._lease: Lease | None = None
        self.renew_at = 0.0

    @property
    def registered(self) -> bool:
        return self._lease is not None

    def turn(self, status: NodeStatus, now: float) -> bool:
        """Have `card` in the store. True if it was taken anew. Raises StoreUnavailable, NameTaken."""
        lease = self._lease
        if lease is not None and now >= self.renew_at:
            if renew(lease, self._on_renewal):
                self.renew_at = now + min(self._renewal_s, lease.ttl_s / 3)
            else:
                self._lease = lease = None
        if lease is not None and (status == self._written or self._replace(lease, status)):
            return False
        self._lease = None
        self._announce(status, now)
        return True

    def _announce(self, status: NodeStatus, now: float) -> None:
        for _ in range(3):
            lease = self._store.announce(self._key, status.to_json(), self._lease_s)
            if lease is not None:
                self._lease, self._written, self._version = lease, status, None
                self.renew_at = now + min(self._renewal_s, lease.ttl_s / 3)
                self._on_renewal(lease.ttl_s, None)
                return
            found = self._store.read(self._key)
            if found is None:
                continue
            other = self._read(found.value)
            if other is None or other.incarnation != status.incarnation:
                where = f", at {other.address}" if other is not None and other.address else ""
                raise NameTaken(
                    f"another agent is node {status.node!r}{where}: give this one another name (node in agent.toml), "
                    "or stop that one"
                )
            self._store.delete(self._key)
        raise StoreUnavailable(f"{self._key}: others write it as fast as we do")

    def _replace(self, lease: Lease, status: NodeStatus) -> bool:
        for _ in range(2):  # the second time with the version that a lost answer did not tell us
            if self._version is None:
                found = self._store.read(self._key)
                other = None if found is None else self._read(found.value)
                if found is None or other is None or other.incarnation != status.incarnation:
                    return False
                self._version = found.version
            self._version = lease.hold(self._key, status.to_json(), self._version)
            if self._version is not None:
                self._written = status
                return True
        return False

    def check(self) -> None:
        """Somebody may have removed the card behind our back: then it is taken anew. Raises StoreUnavailable."""
        if self._lease is not None and self._store.read(self._key) is None:
            lease, self._lease = self._lease, None
            lease.withdraw()

    def withdraw(self) -> None:
        """Take the card away. Raises StoreUnavailable; then it runs out by itself."""
        lease, self._lease = self._lease, None
        if lease is not None:
            lease.withdraw()

    def announce_with_node(self, key: str, value: bytes, ttl_s: float) -> Lease | None:
        """As `Store.announce`, for a key that shall live as long as the card does: it costs no renewal of its own.

        None: the key is there already, or the card is not. Raises StoreUnavailable.
        """
        lease = self._lease
        if lease is None or lease.hold(key, value) is None:
            return None
        return _NodeLeaseKey(self._store, key, lease, lambda: self._lease is lease)

    def _read(self, value: bytes) -> NodeStatus | None:
        try:
            return decode_record(NodeStatus, self._key, value)
        except WireError:
            return None


@dataclass(frozen=True, slots=True)
class _NodeLeaseKey:
    """A key under the card's lease. `lives`: that lease is still the card's."""

    store: Store
    key: str
    lease: Lease
    alive: Callable[[], bool]

    @property
    def ttl_s(self) -> float:
        return self.lease.ttl_s

    def hold(self, key: str, value: bytes, expected: int | None = None) -> int | None:
        return self.lease.hold(key, value, expected)

    def renew(self) -> bool:
        return self.alive()

    def withdraw(self) -> None:
        if self.alive():
            self.store.delete(self.key)
