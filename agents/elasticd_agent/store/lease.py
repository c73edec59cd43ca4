"""Keeps one key of this process in the store under a lease.

A LeasedKey is created, renewed, replaced by compare-and-swap and, once its lease has ended or the key was deleted,
created again by its owner. Two cases need care, and are handled here only:

- The answer to a write may be lost. The version it made is unknown then, so it is read again before the next write;
  without that, our own success would look like a lost race.
- The key may be deleted while its lease lives. `withdraw_if_lost` gives that lease up, because a lease without its key
  would be renewed for ever and the process would stay invisible.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from elasticd_agent.store import Lease, Store

CREATE_ATTEMPTS = 2
"""Attempts to create a key again after its obsolete record was deleted; each may lose against another process."""

Announce = Callable[[str, bytes, float], Lease | None]
RenewalListener = Callable[[float, float | None], None]
"""Receives a lease's lifetime in seconds and how long its renewal took; None: the lease was just granted."""


def ignore_renewals(ttl_s: float, took_s: float | None) -> None:
    """The listener of a lease that no metric shows."""


@dataclass(eq=False, slots=True)
class LeasedKey:
    """Belongs to one thread. Times are monotonic seconds. Every method may raise StoreUnavailable."""

    _store: Store
    key: str
    _lease_s: float
    _renewal_s: float
    is_own: Callable[[bytes], bool] = field(kw_only=True)  #: whether a value is this process's
    on_renewal: RenewalListener = field(default=ignore_renewals, kw_only=True)
    announce: Announce | None = field(default=None, kw_only=True)  #: replaces `Store.announce`, for a shared lease
    lease: Lease | None = None  #: None: the key is not in the store, as far as known here
    renew_at: float = 0.0
    _written: bytes = b""
    _version: int | None = None

    def renew(self, now: float) -> bool:
        """Renew the lease if that is due. False: there is no lease, or it has ended, and the key with it."""
        lease = self.lease
        if lease is not None and now >= self.renew_at:
            began = time.monotonic()
            try:
                alive = lease.renew()
            finally:
                self.on_renewal(lease.ttl_s, time.monotonic() - began)
            if alive:
                self._schedule_renewal(now, lease)
            else:
                self.lease = None
        return self.lease is not None

    def create(self, value: bytes, now: float, may_replace: Callable[[bytes], bool] | None = None) -> bool:
        """Create the key under a new lease. False: another process has it.

        `may_replace` decides about a value found there, e.g. one of this process before it was killed: True deletes it.
        """
        if self._create(value, now):
            return True
        if may_replace is None:
            return False
        for _ in range(CREATE_ATTEMPTS):
            stored = self._store.read(self.key)
            if stored is not None:
                if not may_replace(stored.value):
                    return False
                self._store.delete(self.key)
            if self._create(value, now):
                return True
        return False

    def replace(self, value: bytes) -> bool:
        """Write `value` unless the key has it already. False: the key or its lease is lost; create it again."""
        lease = self.lease
        if lease is None or value == self._written:
            return lease is not None
        for _ in range(2):  # the second attempt uses the version that a lost answer did not report
            if self._version is None and self.read_version() is None:
                break
            self._version = lease.put(self.key, value, self._version)
            if self._version is not None:
                self._written = value
                return True
        self.lease = None
        return False

    def read_version(self) -> int | None:
        """The version of the key in the store; None: it is not there, or it is another process's.

        `replace` writes the value again if another one is there, as in a store that was restored from a backup.
        """
        stored = self._store.read(self.key)
        if stored is None or not self.is_own(stored.value):
            self._version = None
        else:
            self._version, self._written = stored.version, stored.value
        return self._version

    def withdraw_if_lost(self) -> None:
        """Give the lease up if the key was deleted or replaced by another process while the lease lives."""
        if self.lease is not None and self.read_version() is None:
            self.withdraw()

    def withdraw(self) -> None:
        """End the lease; every key under it goes. On StoreUnavailable it runs out by itself, unless it is another
        key's: then `create` finds the key as this process's own.
        """
        lease, self.lease = self.lease, None
        if lease is not None:
            lease.withdraw()

    def announce_under_lease(self, key: str, value: bytes, ttl_s: float) -> Lease | None:
        """Create a key as `Store.announce` does, to live as long as this one: it costs no renewal of its own.

        None: the key is there already, or this one is not.
        """
        lease = self.lease
        if lease is None or (version := lease.put(key, value)) is None:
            return None
        return _SharedLease(self._store, key, lease, lambda: self.lease is lease, version)

    def _create(self, value: bytes, now: float) -> bool:
        lease = self.lease = (self.announce or self._store.announce)(self.key, value, self._lease_s)
        if lease is None:
            return False
        self._written = value
        self._version = lease.version
        self.on_renewal(lease.ttl_s, None)
        self._schedule_renewal(now, lease)
        return True

    def _schedule_renewal(self, now: float, lease: Lease) -> None:
        # The store may grant less than was requested: three attempts fit into any lease.
        self.renew_at = now + min(self._renewal_s, lease.ttl_s / 3)


@dataclass(frozen=True, slots=True)
class _SharedLease:
    """The lease of a key that lives under another key's lease."""

    store: Store
    key: str
    lease: Lease
    is_alive: Callable[[], bool]
    version: int

    @property
    def ttl_s(self) -> float:
        return self.lease.ttl_s

    def put(self, key: str, value: bytes, expected: int | None = None) -> int | None:
        return self.lease.put(key, value, expected)

    def renew(self) -> bool:
        return self.is_alive()

    def withdraw(self) -> None:
        if self.is_alive():
            self.store.delete(self.key)
