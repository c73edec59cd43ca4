"""The few verbs agents share, as a Protocol: read, list, compare-and-swap, delete, announce with a lease, watch.

It exists so that the loop works the same over plain memory on one node and over a store on the network. Keys are
'/'-separated strings, values are bytes. A lost race is a value (False); an outage is `StoreUnavailable`, after which
nothing is known about the request. An adapter never decides anything about the job.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Versioned:
    """A value and the version it has. Versions of one key only grow, also across its deletion."""

    value: bytes
    version: int


class Lease(Protocol):
    """An announced key's life. The key is there until `ttl_s` after the last renewal, or until it is withdrawn."""

    @property
    def ttl_s(self) -> float:
        """What the store granted, which may differ from what was asked for."""
        ...

    def put(self, key: str, value: bytes, expected: int | None = None) -> int | None:
        """Set `key` if its version is `expected` (None: if it is not there), to live as long as this lease.

        Returns its version; None: the race was lost, nothing has changed.
        """
        ...

    def renew(self) -> bool:
        """Live another `ttl_s`. False: the lease has ended, and its key with it; announce anew."""
        ...

    def withdraw(self) -> None:
        """End the lease and delete its keys now. Withdrawing an ended lease does nothing."""
        ...


@dataclass(slots=True)
class Traffic:
    """What this process asked of a store so far; renewals and watches count, too."""

    requests: int = 0
    sent_bytes: int = 0
    received_bytes: int = 0


class Watch(Protocol):
    def close(self) -> None:
        """No call is begun after this returns. Closing twice does nothing."""
        ...


class Store(Protocol):
    @property
    def traffic(self) -> Traffic: ...

    def read(self, key: str) -> Versioned | None:
        """The value of `key`; None if it is not there."""
        ...

    def list(self, prefix: str) -> dict[str, Versioned]:
        """Every key that begins with `prefix`, sorted, with its value."""
        ...

    def compare_and_swap(
        self, key: str, expected: int | None, value: bytes, guard: tuple[str, int] | None = None
    ) -> bool:
        """Set `key` if its version is `expected` (None: if it is not there). False: it was not, nothing has changed.

        `guard` names another key and the version that it, too, must have. A store that cannot compare two keys at once
        (c10d) looks at it first: whoever takes that key writes `key` anew, so that who looked before finds another
        version. A leased key stays with its lease.
        """
        ...

    def delete(self, key: str) -> bool:
        """True if there was something to delete."""
        ...

    def announce(self, key: str, value: bytes, ttl_s: float) -> Lease | None:
        """Create `key` for as long as the lease is renewed. None: the key is there already."""
        ...

    def watch(self, prefix: str, callback: Callable[[str], None]) -> Watch:
        """Call `callback(key)` soon after a key that begins with `prefix` has changed or gone.

        A hint, nothing more: calls may repeat, come from any thread, or, after an outage, be missing. A call that names
        `prefix` itself stands for all keys below it. The callback must return at once, must not raise and must not call
        the store.
        """
        ...

    def close(self) -> None:
        """End every watch; leases run out. The store must not be used after this."""
        ...
