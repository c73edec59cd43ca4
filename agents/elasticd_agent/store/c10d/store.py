"""A Store over torch's TCPStore, for jobs without an etcd. One of the agents hosts it; no agent process loads torch.

TCPStore has neither versions nor leases nor watches: client_process.py builds them, server_process.py maintains them.
A restarted host has lost everything: the store is empty, every lease has ended, and no earlier version is valid. It
cannot compare two keys at once, so a guard is checked first: see Store.
"""

from __future__ import annotations

import base64
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from elasticd_agent.store import Lease, Versioned, Watch
from elasticd_agent.store.c10d.connection import C10dConnection


class C10dStore(C10dConnection):
    """Thread-safe. Every call ends within `timeout_s`; the first ones wait for the start, up to `start_timeout_s`."""

    compares_one_key = True

    def __init__(self, host: str, port: int, **options: Any) -> None:
        """`options` as of C10dConnection."""
        self._watch_lock = threading.RLock()
        self._watches: list[_C10dWatch] = []
        super().__init__(host, port, **options)

    def read(self, key: str) -> Versioned | None:
        """Return the key's value and version; None: it does not exist."""
        answer = self.call("read", key=_checked_key(key))
        return None if answer is None else _versioned(answer)

    def list(self, prefix: str, known: dict[str, Versioned] | None = None) -> dict[str, Versioned]:
        return {key: _versioned(answer) for key, answer in self.call("list_below", prefix=prefix).items()}

    def compare_and_swap(
        self, key: str, expected: int | None, value: bytes, guard: tuple[str, int] | None = None
    ) -> bool:
        args = {"key": _checked_key(key), "expected": expected, "value": _to_base64(value), "guard": guard}
        return bool(self.call("compare_and_swap", **args))

    def delete(self, key: str) -> bool:
        if key.endswith("/"):  # a host of an earlier version deletes one key at a time
            return sum(self.delete(below) for below in self.list(key)) > 0
        return bool(self.call("delete", key=_checked_key(key)))

    def announce(self, key: str, value: bytes, ttl_s: float) -> Lease | None:
        """Create the key under a lease that the host ends when its renewals stop."""
        granted = self.call("announce", key=_checked_key(key), value=_to_base64(value), ttl_s=ttl_s)
        return None if granted is None else _C10dLease(self, ttl_s, *granted)

    def watch(self, callback: Callable[[str], None], *prefixes: str) -> Watch:
        """Follow `prefixes`; watches of one prefix share one connection of the client."""
        watch = _C10dWatch(self, prefixes, callback)
        with self._watch_lock:
            self._watches.append(watch)
        for prefix in prefixes:
            self.follow(prefix)
        return watch

    def close(self) -> None:
        with self._watch_lock:
            self._watches.clear()
        super().close()

    def on_change(self, prefix: str, key: str) -> None:
        """Pass a change to the watches of its prefix, under the lock, so that no call begins after a watch's close has
        returned.
        """
        with self._watch_lock:
            for watch in [watch for watch in self._watches if prefix in watch.prefixes]:
                watch.callback(key)

    def _end_watch(self, watch: _C10dWatch) -> None:
        with self._watch_lock:
            if watch not in self._watches:
                return
            self._watches.remove(watch)
        for prefix in watch.prefixes:
            self.unfollow(prefix)


@dataclass(eq=False, slots=True)
class _C10dLease:
    store: C10dStore
    ttl_s: float
    name: str
    first_count: int
    version: int
    ended: bool = False

    def put(self, key: str, value: bytes, expected: int | None = None) -> int | None:
        if self.ended:
            return None
        args = {"lease": self.name, "first": self.first_count, "key": _checked_key(key), "value": _to_base64(value)}
        version: int | None = self.store.call("put", expected=expected, **args)
        return version

    def renew(self) -> bool:
        if not self.ended and not self.store.call("renew", lease=self.name, first=self.first_count):
            self.ended = True
        return not self.ended

    def withdraw(self) -> None:
        if not self.ended:
            self.store.call("withdraw", lease=self.name, first=self.first_count)
            self.ended = True


@dataclass(eq=False, frozen=True, slots=True)
class _C10dWatch:
    store: C10dStore
    prefixes: tuple[str, ...]
    callback: Callable[[str], None]

    def close(self) -> None:
        self.store._end_watch(self)


def _checked_key(key: str) -> str:
    if "\n" in key:
        raise ValueError(f"a key cannot have a line break in it: {key!r}")
    return key


def _to_base64(value: bytes) -> str:
    return base64.b64encode(value).decode("ascii")


def _versioned(answer: list[Any]) -> Versioned:
    version, value = answer
    return Versioned(base64.b64decode(value), version)
