"""Stores for tests of agents: a MemoryStore with a callback before each request, in which other clients act."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from elasticd.errors import StoreUnavailable
from elasticd_agent.store import Lease, Versioned, Watch
from elasticd_agent.store.memory import MemoryStore

T = TypeVar("T")


class Clock:
    """A fake clock."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now

    def pass_time(self, seconds: float) -> None:
        self.now += seconds


class InterruptedStore:
    """What one client sees of `memory`. `before` is called before each request, with its number, and may raise.

    The answers to the requests in `lost_answers` are lost after they were done; while `watches_silent`, new watches say
    nothing. Calls of `memory` itself count as nothing.
    """

    def __init__(
        self, memory: MemoryStore, before: Callable[[int, str, str], None] = lambda n, verb, key: None
    ) -> None:
        self.memory, self.before = memory, before
        self.requests: list[tuple[str, str]] = []
        self.lost_answers: set[int] = set()
        self.watches_silent = False

    def ask(self, verb: str, key: str, call: Callable[[], T]) -> T:
        """One request."""
        self.requests.append((verb, key))
        number = len(self.requests)
        self.before(number, verb, key)
        answer = call()
        if number in self.lost_answers:
            raise StoreUnavailable("etcd at 10.0.0.1:2379 does not answer")
        return answer

    def written(self, value: bytes) -> bytes:
        """The bytes that this client writes for `value`."""
        return value

    def read(self, key: str) -> Versioned | None:
        return self.ask("read", key, lambda: self.memory.read(key))

    def list(self, prefix: str, known: dict[str, Versioned] | None = None) -> dict[str, Versioned]:
        return self.ask("list", prefix, lambda: self.memory.list(prefix, known))

    def compare_and_swap(
        self, key: str, expected: int | None, value: bytes, guard: tuple[str, int] | None = None
    ) -> bool:
        return self.ask("write", key, lambda: self.memory.compare_and_swap(key, expected, self.written(value), guard))

    def delete(self, key: str) -> bool:
        return self.ask("delete", key, lambda: self.memory.delete(key))

    def announce(self, key: str, value: bytes, ttl_s: float) -> Lease | None:
        lease = self.ask("announce", key, lambda: self.memory.announce(key, self.written(value), ttl_s))
        return None if lease is None else InterruptedLease(self, lease)

    def watch(self, callback: Callable[[str], None], *prefixes: str) -> Watch:
        return self.memory.watch((lambda key: None) if self.watches_silent else callback, *prefixes)

    def close(self) -> None:
        self.memory.close()


@dataclass(frozen=True, slots=True)
class InterruptedLease:
    store: InterruptedStore
    lease: Lease

    @property
    def ttl_s(self) -> float:
        return self.lease.ttl_s

    @property
    def version(self) -> int:
        return self.lease.version

    def put(self, key: str, value: bytes, expected: int | None = None) -> int | None:
        return self.store.ask("put", key, lambda: self.lease.put(key, self.store.written(value), expected))

    def renew(self) -> bool:
        return self.store.ask("renew", "", self.lease.renew)

    def withdraw(self) -> None:
        self.store.ask("withdraw", "", self.lease.withdraw)
