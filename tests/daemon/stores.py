"""Stores for tests of agents: a MemoryStore with a callback before each request, in which other clients act."""

from __future__ import annotations

from collections.abc import Callable

from elasticd.errors import StoreUnavailable
from elasticd_agent.store import Lease, Versioned, Watch
from elasticd_agent.store.memory import MemoryStore


class Clock:
    """A fake clock."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now

    def pass_time(self, seconds: float) -> None:
        self.now += seconds


class InterruptedStore:
    """What one client sees of `memory`. `before[n]` is called before its n-th request, and may raise.

    `late` requests are done, and only their answer is lost; a `deaf` client's watches
    say nothing. Calls of the store by what is called count as nothing.
    """

    def __init__(
        self, memory: MemoryStore, before: Callable[[int, str, str], None] = lambda n, verb, key: None
    ) -> None:
        self.memory, self.before = memory, before
        self.requests: list[tuple[str, str]] = []
        self.lost_answers: set[int] = set()
        self.watches_silent = False

    def _request(self, verb: str, key: str) -> None:
        self.requests.append((verb, key))
        self.before(len(self.requests), verb, key)

    def _answer(self) -> None:
        if len(self.requests) in self.lost_answers:
            raise StoreUnavailable("etcd at 10.0.0.1:2379 does not answer")

    def read(self, key: str) -> Versioned | None:
        self._request("read", key)
        return self.memory.read(key)

    def list(self, prefix: str, known: dict[str, Versioned] | None = None) -> dict[str, Versioned]:
        self._request("list", prefix)
        return self.memory.list(prefix, known)

    def compare_and_swap(
        self, key: str, expected: int | None, value: bytes, guard: tuple[str, int] | None = None
    ) -> bool:
        self._request("write", key)
        done = self.memory.compare_and_swap(key, expected, value, guard)
        self._answer()
        return done

    def delete(self, key: str) -> bool:
        self._request("delete", key)
        return self.memory.delete(key)

    def announce(self, key: str, value: bytes, ttl_s: float) -> Lease | None:
        self._request("announce", key)
        lease = self.memory.announce(key, value, ttl_s)
        return None if lease is None else InterruptedLease(self, lease)

    def watch(self, prefix: str, callback: Callable[[str], None]) -> Watch:
        return self.memory.watch(prefix, (lambda key: None) if self.watches_silent else callback)

    def close(self) -> None:
        self.memory.close()


class InterruptedLease:
    def __init__(self, store: InterruptedStore, lease: Lease) -> None:
        self._store, self._lease = store, lease

    @property
    def ttl_s(self) -> float:
        return self._lease.ttl_s

    def put(self, key: str, value: bytes, expected: int | None = None) -> int | None:
        self._store._request("put", key)
        return self._lease.put(key, value, expected)

    def renew(self) -> bool:
        self._store._request("renew", "")
        return self._lease.renew()

    def withdraw(self) -> None:
        self._store._request("withdraw", "")
        self._lease.withdraw()
