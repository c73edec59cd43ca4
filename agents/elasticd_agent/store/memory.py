"""A Store in this process's memory, for a job on one node and for tests. It never talks to anyone, so never fails.

Time is given from outside: keys whose leases have run out go when the store is next used. A watch is told of them
then too.
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
    expires_at: float | None  # None: not leased


class MemoryStore:
    """Thread-safe. `clock` is monotonic seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.RLock()
        self._entries: dict[str, _Entry] = {}
        self._watches: list[_MemoryWatch] = []
        self._version = 0

    def read(self, key: str) -> Versioned | None:
        with self._lock:
            self._expire()
            entry = self._entries.get(key)
            return Versioned(entry.value, entry.version) if entry else None

    def list(self, prefix: str) -> dict[str, Versioned]:
        with self._lock:
            self._expire()
            found = sorted((k, e) for k, e in self._entries.items() if k.startswith(prefix))
            return {k: Versioned(e.value, e.version) for k, e in found}

    def compare_and_swap(self, key: str, expected: int | None, value: bytes) -> bool:
        with self._lock:
            self._expire()
            entry = self._entries.get(key)
            if (entry.version if entry else None) != expected:
                return False
            self._set(key, value, entry.expires_at if entry else None)
            return True

    def delete(self, key: str) -> bool:
        with self._lock:
            self._expire()
            return self._drop(key)

    def announce(self, key: str, value: bytes, ttl_s: float) -> Lease | None:
        with self._lock:
            self._expire()
            if key in self._entries:
                return None
            return _MemoryLease(self, key, self._set(key, value, self._clock() + ttl_s), ttl_s)

    def watch(self, prefix: str, callback: Callable[[str], None]) -> Watch:
        with self._lock:
            watch = _MemoryWatch(self, prefix, callback)
            self._watches.append(watch)
            return watch

    def close(self) -> None:
        with self._lock:
            self._watches.clear()

    def _set(self, key: str, value: bytes, expires_at: float | None) -> _Entry:
        self._version += 1
        entry = self._entries.get(key)
        if entry is None:
            entry = self._entries[key] = _Entry(value, self._version, expires_at)
        else:  # the same entry, so that a lease of this key keeps it
            entry.value, entry.version = value, self._version
        self._tell(key)
        return entry

    def _drop(self, key: str) -> bool:
        if self._entries.pop(key, None) is None:
            return False
        self._tell(key)
        return True

    def _expire(self) -> None:
        now = self._clock()
        for key in [k for k, e in self._entries.items() if e.expires_at is not None and e.expires_at <= now]:
            self._drop(key)

    def _tell(self, key: str) -> None:
        for watch in [w for w in self._watches if key.startswith(w.prefix)]:
            watch.callback(key)


@dataclass(frozen=True, slots=True)
class _MemoryLease:
    store: MemoryStore
    key: str
    entry: _Entry
    ttl_s: float

    def renew(self) -> bool:
        with self.store._lock:
            self.store._expire()
            if self.store._entries.get(self.key) is not self.entry:
                return False
            self.entry.expires_at = self.store._clock() + self.ttl_s
            return True

    def withdraw(self) -> None:
        with self.store._lock:
            if self.store._entries.get(self.key) is self.entry:
                self.store._drop(self.key)


@dataclass(eq=False, frozen=True, slots=True)
class _MemoryWatch:
    store: MemoryStore
    prefix: str
    callback: Callable[[str], None]

    def close(self) -> None:
        with self.store._lock:
            if self in self.store._watches:
                self.store._watches.remove(self)
