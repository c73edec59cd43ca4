"""A Store in this process's memory, for a job on one node and for tests. It never fails.

Expired keys are deleted, and their watches called, when the store is next used. It has no thread: with one user, a
lease that ends unseen harms nobody.

It is the reference of the contract: tests/contract runs the same suite against it and the real backends, and what the
suite allows here is what the rest of elasticd may rely on.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from elasticd_agent.store import Lease, Versioned, Watch


@dataclass(eq=False, slots=True)
class _Entry:
    value: bytes
    version: int
    lease: _MemoryLease | None


class MemoryStore:
    """A thread-safe Store of this process. `clock` returns monotonic seconds; tests pass their own and move it.

    Callbacks of watches run under the lock, in the thread that has changed the key. They must not call the store (see
    Store.watch), so this cannot deadlock.
    """

    hosts, standalone, compares_one_key = False, True, False

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.RLock()
        self._entries: dict[str, _Entry] = {}
        self._watches: list[_MemoryWatch] = []
        self._version = 0

    def read(self, key: str) -> Versioned | None:
        """Return the key's value and version, after expired leases have ended."""
        with self._lock:
            self._expire()
            entry = self._entries.get(key)
            return Versioned(entry.value, entry.version) if entry else None

    def list(self, prefix: str, known: dict[str, Versioned] | None = None) -> dict[str, Versioned]:
        """Return all keys below `prefix`. `known` is not compared: nothing is sent."""
        with self._lock:
            self._expire()
            entries = sorted((k, e) for k, e in self._entries.items() if k.startswith(prefix))
            return {k: Versioned(e.value, e.version) for k, e in entries}

    def compare_and_swap(
        self, key: str, expected: int | None, value: bytes, guard: tuple[str, int] | None = None
    ) -> bool:
        with self._lock:
            self._expire()
            if self._version_of(key) != expected or (guard is not None and self._version_of(guard[0]) != guard[1]):
                return False
            entry = self._entries.get(key)
            self._set(key, value, entry.lease if entry else None)
            return True

    def delete(self, key: str) -> bool:
        with self._lock:
            self._expire()
            below = [k for k in self._entries if k.startswith(key)] if key.endswith("/") else [key]
            return sum(self._drop(k) for k in below) > 0

    def announce(self, key: str, value: bytes, ttl_s: float) -> Lease | None:
        """Create the key under a new lease; None if it exists."""
        with self._lock:
            self._expire()
            lease = _MemoryLease(self, ttl_s, self._clock() + ttl_s)
            lease.version = lease.put(key, value) or 0
            return lease if lease.version else None

    def watch(self, callback: Callable[[str], None], *prefixes: str) -> Watch:
        """Call `callback` at each change below one of `prefixes`, in the thread that makes it."""
        with self._lock:
            watch = _MemoryWatch(self, prefixes, callback)
            self._watches.append(watch)
            return watch

    def close(self) -> None:
        """End all watches."""
        with self._lock:
            self._watches.clear()

    def _version_of(self, key: str) -> int | None:
        entry = self._entries.get(key)
        return entry.version if entry else None

    def _set(self, key: str, value: bytes, lease: _MemoryLease | None) -> int:
        self._version += 1
        self._entries[key] = _Entry(value, self._version, lease)
        self._notify(key)
        return self._version

    def _drop(self, key: str) -> bool:
        if self._entries.pop(key, None) is None:
            return False
        self._notify(key)
        return True

    def _expire(self) -> None:
        """Delete the keys of ended leases."""
        now = self._clock()
        for key in [k for k, e in self._entries.items() if e.lease is not None and e.lease.expires_at <= now]:
            self._drop(key)

    def _notify(self, key: str) -> None:
        for watch in [w for w in self._watches if key.startswith(w.prefixes)]:
            watch.callback(key)


@dataclass(eq=False, slots=True)
class _MemoryLease:
    """A lease that lives until `expires_at` on the store's clock. It has ended as well when its last key is gone."""

    store: MemoryStore
    ttl_s: float
    expires_at: float
    version: int = 0

    def put(self, key: str, value: bytes, expected: int | None = None) -> int | None:
        with self.store._lock:
            self.store._expire()
            if self.store._version_of(key) != expected or self.expires_at <= self.store._clock():
                return None
            return self.store._set(key, value, self)

    def renew(self) -> bool:
        with self.store._lock:
            self.store._expire()
            if not self._keys():
                return False
            self.expires_at = self.store._clock() + self.ttl_s
            return True

    def withdraw(self) -> None:
        with self.store._lock:
            for key in self._keys():
                self.store._drop(key)
            self.expires_at = self.store._clock()

    def _keys(self) -> list[str]:
        return [key for key, entry in self.store._entries.items() if entry.lease is self]


@dataclass(eq=False, frozen=True, slots=True)
class _MemoryWatch:
    store: MemoryStore
    prefixes: tuple[str, ...]
    callback: Callable[[str], None]

    def close(self) -> None:
        with self.store._lock:
            if self in self.store._watches:
                self.store._watches.remove(self)
