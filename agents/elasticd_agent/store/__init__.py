"""The shared key-value store: the `Store` protocol, its backends, a cache fed by watches, keys kept under a lease.

Entry points: `open_store` (open.py), LeasedKey (lease.py), StoreCache (cache.py). Backends: memory.py, file.py, etcd/,
c10d/; tests/contract checks each. Keys are '/'-separated strings, values are bytes. A lost race is a value (False,
None); StoreRefused: repeating will not help; StoreUnavailable: the outcome of the request is unknown. Every store is
thread-safe; a watch's callback runs on a thread of the store.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Versioned:
    """Versions of one key only grow, also across its deletion."""

    value: bytes
    version: int


class Lease(Protocol):
    """The life of announced keys: until `ttl_s` after the last renewal, or until it is withdrawn."""

    @property
    def ttl_s(self) -> float:
        """Granted by the store; it may differ from the request."""

    @property
    def version(self) -> int:
        """The version that the announced key was created with."""

    def put(self, key: str, value: bytes, expected: int | None = None) -> int | None:
        """Set `key` if its version is `expected` (None: if it does not exist), to live as long as this lease.

        Returns its version; None: the race was lost, nothing has changed.
        """

    def renew(self) -> bool:
        """Live another `ttl_s`. False: the lease has ended, and its keys with it."""

    def withdraw(self) -> None:
        """End the lease and delete its keys. Withdrawing an ended lease does nothing."""


class Watch(Protocol):
    def close(self) -> None:
        """No call begins after this returns. Closing twice does nothing."""


class Store(Protocol):
    def read(self, key: str) -> Versioned | None:
        """None: the key does not exist."""

    def list(self, prefix: str, known: dict[str, Versioned] | None = None) -> dict[str, Versioned]:
        """Every key that begins with `prefix`, sorted, with its value.

        `known`: an earlier answer. A store that can compares it with what it holds instead of sending all of it again,
        and returns `known` itself if nothing has changed.
        """

    def compare_and_swap(
        self, key: str, expected: int | None, value: bytes, guard: tuple[str, int] | None = None
    ) -> bool:
        """Set `key` if its version is `expected` (None: if it does not exist). False: the race was lost.

        `guard` names another key and the version that it, too, must have. A store that cannot compare two keys at once
        (c10d) reads it first: a process that takes the guard key rewrites `key`, so that a writer that read the guard
        before finds another version. A leased key keeps its lease.
        """

    def delete(self, key: str) -> bool:
        """False: the key did not exist. One that ends in "/" stands for all keys below it."""

    def announce(self, key: str, value: bytes, ttl_s: float) -> Lease | None:
        """Create `key` for as long as the lease is renewed. None: the key exists already."""

    def watch(self, callback: Callable[[str], None], *prefixes: str) -> Watch:
        """Call `callback(key)` soon after a key that begins with one of `prefixes` was written or deleted.

        A hint: calls may repeat, come from any thread, or be missing after an outage. A call with a prefix itself
        stands for all keys below it. The callback must return at once, must not raise and must not call the store.
        """

    def close(self) -> None:
        """End every watch; leases expire. The store must not be used after this."""


class JobStore(Store, Protocol):
    """A store in which the agents of one job meet."""

    @property
    def hosts(self) -> bool:
        """This agent hosts it: the store ends with this agent."""

    @property
    def standalone(self) -> bool:
        """No agent of the job hosts it, so that any of them may lead; else the host leads alone."""

    @property
    def compares_one_key(self) -> bool:
        """A guard is read before the swap, not with it: see `compare_and_swap`."""
