"""A clock that only the simulation moves, and an etcd that takes time by it: latency, capacity and bandwidth.

Agents are threads, of which one runs at a time: the one whose event is next. So a run gives the same figures again,
and thousands of agents wait for each other as they would for a real store.
"""

from __future__ import annotations

import functools
import heapq
import threading
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from elasticd.errors import StoreUnavailable
from elasticd_agent.store import Lease, Versioned, Watch

OVERHEAD_BYTES = 100
"""Of a request and of an answer: the headers of HTTP/2 and gRPC."""


@dataclass(slots=True)
class Traffic:
    """One client's requests so far; renewals and watches count, too."""

    requests: int = 0
    sent_bytes: int = 0
    received_bytes: int = 0


@dataclass(frozen=True, slots=True)
class EtcdTimes:
    """Of three members in one data centre. A request costs etcd 0.2 ms of a core, as measured here over gRPC, and the
    leader has eight cores; commits to SSDs take 2 ms, and many share one."""

    one_way_s: float = 0.0002  #: of a packet between any two machines
    request_s: float = 0.0002 / 8
    commit_s: float = 0.002
    refused_s: float = 0.0005  #: until a call fails while no etcd runs
    bytes_a_second: float = 1.25e9  #: what etcd's machine sends: 10 Gbit/s
    timeout_s: float = 0.9
    byte_s: float = 4e-6  #: the writer's, for each byte: planning and encoding a Round of 4,096 nodes took 0.4 s


class Ended(BaseException):
    """The agent of this thread has been killed."""


class Clock:
    """Simulated seconds, and what happens when."""

    def __init__(self) -> None:
        self.now = 1000.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0
        self._back = threading.Lock()
        self._back.acquire()
        self._tasks: list[Task] = []

    def at(self, when: float, call: Callable[[], None]) -> None:
        self._count += 1
        heapq.heappush(self._events, (max(when, self.now), self._count, call))

    def run(self, done: Callable[[], bool], limit_s: float) -> bool:
        """Let time pass until `done()`. False: not within `limit_s`."""
        deadline = self.now + limit_s
        while not done():
            if not self._events or self._events[0][0] > deadline:
                self.now = deadline
                return False
            when, _, call = heapq.heappop(self._events)
            self.now = max(self.now, when)
            call()
        return True

    def start(self, body: Callable[[], None]) -> Task:
        task = Task(self, body)
        self._tasks.append(task)
        self.at(self.now, task.resume)
        return task

    def end(self) -> None:
        for task in self._tasks:
            task.kill()


class Task:
    """A thread that runs only between `resume` and its next wait."""

    def __init__(self, clock: Clock, body: Callable[[], None]) -> None:
        self._clock = clock
        self._body = body
        self._go = threading.Lock()
        self._go.acquire()
        self._over = False
        self._dead = False
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def resume(self) -> None:
        """From the clock's thread: run until the next wait."""
        if not self._over:
            self._go.release()
            self._clock._back.acquire()
            if self.error is not None:
                raise RuntimeError("an agent has failed") from self.error

    def suspend(self) -> None:
        """From this task's thread: wait until somebody resumes it."""
        self._clock._back.release()
        self._go.acquire()
        if self._dead:
            raise Ended

    def sleep(self, seconds: float) -> None:
        self._clock.at(self._clock.now + seconds, self.resume)
        self.suspend()

    def kill(self) -> None:
        self._dead = True
        self.resume()
        self._thread.join()

    def _run(self) -> None:
        self._go.acquire()
        try:
            if not self._dead:
                self._body()
        except Ended:
            pass
        except BaseException as error:  # noqa: BLE001 the clock's thread raises it
            self.error = error
        self._over = True
        self._clock._back.release()


@dataclass(eq=False, slots=True)
class _Grant:
    ttl_s: float
    expires_at: float
    keys: set[str] = field(default_factory=set)


@dataclass(slots=True)
class _Entry:
    value: bytes
    version: int
    lease: _Grant | None


class SimulatedEtcd:
    """What all agents share. Everything here runs on the clock's thread."""

    def __init__(self, clock: Clock, times: EtcdTimes) -> None:
        self.clock = clock
        self.times = times
        self.up = True
        self.entries: dict[str, _Entry] = {}
        self.watches: dict[str, list[_SimulatedWatch]] = defaultdict(list)
        self._version = 0
        self._free_at = self._sent_at = 0.0
        self._grants: set[_Grant] = set()

    def served_at(self) -> float:
        """When a request that is sent now has been worked on."""
        self._free_at = max(self._free_at, self.clock.now + self.times.one_way_s) + self.times.request_s
        return self._free_at

    def arrives_at(self, size: int) -> float:
        """When an answer that is ready now has arrived."""
        self._sent_at = max(self._sent_at, self.clock.now) + size / self.times.bytes_a_second
        return self._sent_at + self.times.one_way_s

    def stop(self) -> None:
        self.up = False

    def restart(self, reconnect_s: Callable[[], float]) -> None:
        """It keeps its data and gives each lease its whole time again. Each agent's watches are back after
        `reconnect_s()`."""
        self.up = True
        for grant in self._grants:
            grant.expires_at = self.clock.now + grant.ttl_s
        stores: dict[int, float] = {}
        for prefix, watches in self.watches.items():
            for watch in watches:
                after_s = stores.setdefault(id(watch.store), reconnect_s())
                self.clock.at(self.clock.now + after_s, functools.partial(watch.callback, prefix))

    def grant(self, ttl_s: float) -> _Grant:
        grant = _Grant(ttl_s, self.clock.now + ttl_s)
        self._grants.add(grant)
        self.clock.at(grant.expires_at, lambda: self._expire(grant))
        return grant

    def revoke(self, grant: _Grant) -> None:
        self._grants.discard(grant)
        for key in sorted(grant.keys):
            self.drop(key)

    def _expire(self, grant: _Grant) -> None:
        if grant not in self._grants:
            return
        if self.up and self.clock.now >= grant.expires_at:
            self.revoke(grant)
        else:
            self.clock.at(max(grant.expires_at, self.clock.now + 0.1), lambda: self._expire(grant))

    def is_live(self, grant: _Grant) -> bool:
        return grant in self._grants

    def version(self, key: str) -> int | None:
        entry = self.entries.get(key)
        return None if entry is None else entry.version

    def set(self, key: str, value: bytes, lease: _Grant | None) -> int:
        self._version += 1
        self.entries[key] = _Entry(value, self._version, lease)
        if lease is not None:
            lease.keys.add(key)
        self._notify(key, len(value))
        return self._version

    def drop(self, key: str) -> bool:
        entry = self.entries.pop(key, None)
        if entry is None:
            return False
        if entry.lease is not None:
            entry.lease.keys.discard(key)
        self._notify(key, 0)
        return True

    def _notify(self, key: str, size: int) -> None:
        for watches in [watches for prefix, watches in self.watches.items() if key.startswith(prefix)]:
            for watch in watches:
                watch.store.traffic.received_bytes += size + OVERHEAD_BYTES
                arrives_at = self.arrives_at(size + OVERHEAD_BYTES)
                self.clock.at(arrives_at, lambda watch=watch: watch.named(key))  # type: ignore[misc]


class SimulatedStore:
    """One agent's client. Its calls are made from that agent's task."""

    hosts, standalone, compares_one_key = False, True, False

    def __init__(self, etcd: SimulatedEtcd) -> None:
        self.traffic = Traffic()
        self.task: Task | None = None
        self._etcd = etcd

    def ask(self, call: Callable[[], Any], sent: int = 0, write: bool = False) -> Any:
        """Raises StoreUnavailable, as a real client does, where etcd is away or the answer comes too late."""
        etcd, task = self._etcd, self.task
        assert task is not None
        self.traffic.requests += 1
        self.traffic.sent_bytes += sent + OVERHEAD_BYTES
        if not etcd.up:
            task.sleep(etcd.times.refused_s)
            raise StoreUnavailable("no etcd answers")
        answer: list[Any] = []
        waiting = True

        def serve() -> None:
            if etcd.up:
                answer.append(call())
                self.traffic.received_bytes += (size := _size(answer[0]) + OVERHEAD_BYTES)
                etcd.clock.at(etcd.arrives_at(size) + (etcd.times.commit_s if write else 0.0), resume)

        def resume() -> None:
            nonlocal waiting
            if waiting:
                waiting = False
                task.resume()

        etcd.clock.at(etcd.served_at(), serve)
        deadline = etcd.clock.now + etcd.times.timeout_s
        etcd.clock.at(deadline, resume)
        task.suspend()
        if etcd.clock.now >= deadline or not answer:
            raise StoreUnavailable(f"no answer from etcd within {etcd.times.timeout_s:g} s")
        return answer[0]

    def read(self, key: str) -> Versioned | None:
        found: Versioned | None = self.ask(lambda: self._read(key), len(key))
        return found

    def list(self, prefix: str, known: dict[str, Versioned] | None = None) -> dict[str, Versioned]:
        entries = self._etcd.entries

        def below() -> dict[str, Versioned]:
            return {key: Versioned(e.value, e.version) for key, e in sorted(entries.items()) if key.startswith(prefix)}

        found: dict[str, Versioned] = self.ask(below, len(prefix))
        return found

    def compare_and_swap(
        self, key: str, expected: int | None, value: bytes, guard: tuple[str, int] | None = None
    ) -> bool:
        etcd = self._etcd
        assert self.task is not None
        self.task.sleep(etcd.times.byte_s * len(value))

        def swap() -> bool:
            if etcd.version(key) != expected or (guard is not None and etcd.version(guard[0]) != guard[1]):
                return False
            entry = etcd.entries.get(key)
            etcd.set(key, value, entry.lease if entry is not None else None)
            return True

        return bool(self.ask(swap, len(key) + len(value), write=True))

    def delete(self, key: str) -> bool:
        def drop() -> bool:
            below = [k for k in self._etcd.entries if k.startswith(key)] if key.endswith("/") else [key]
            return sum(self._etcd.drop(k) for k in below) > 0

        return bool(self.ask(drop, len(key), write=True))

    def announce(self, key: str, value: bytes, ttl_s: float) -> Lease | None:
        lease = _SimulatedLease(self, self.ask(lambda: self._etcd.grant(ttl_s), 8, write=True), ttl_s)
        if (version := lease.put(key, value)) is None:
            lease.withdraw()
            return None
        lease.version = version
        return lease

    def watch(self, callback: Callable[[str], None], *prefixes: str) -> Watch:
        self.traffic.requests += len(prefixes)
        watch = _SimulatedWatch(self, prefixes, callback)
        for prefix in prefixes:
            self._etcd.watches[prefix].append(watch)
        return watch

    def close(self) -> None:
        for watches in self._etcd.watches.values():
            watches[:] = [watch for watch in watches if watch.store is not self]

    def _read(self, key: str) -> Versioned | None:
        entry = self._etcd.entries.get(key)
        return None if entry is None else Versioned(entry.value, entry.version)


@dataclass(eq=False, slots=True)
class _SimulatedWatch:
    store: SimulatedStore
    prefixes: tuple[str, ...]
    callback: Callable[[str], None]

    def named(self, key: str) -> None:
        if self.store._etcd.up:
            self.callback(key)

    def close(self) -> None:
        for prefix in self.prefixes:
            if self in (watches := self.store._etcd.watches[prefix]):
                watches.remove(self)


@dataclass(eq=False, slots=True)
class _SimulatedLease:
    store: SimulatedStore
    grant: _Grant
    ttl_s: float
    version: int = 0

    def put(self, key: str, value: bytes, expected: int | None = None) -> int | None:
        etcd = self.store._etcd

        def put() -> int | None:
            if not etcd.is_live(self.grant) or etcd.version(key) != expected:
                return None
            return etcd.set(key, value, self.grant)

        version: int | None = self.store.ask(put, len(key) + len(value), write=True)
        return version

    def renew(self) -> bool:
        etcd = self.store._etcd

        def renew() -> bool:
            self.grant.expires_at = etcd.clock.now + self.ttl_s
            return etcd.is_live(self.grant)

        return bool(self.store.ask(renew, 8))

    def withdraw(self) -> None:
        self.store.ask(lambda: self.store._etcd.revoke(self.grant), 8, write=True)


def _size(answer: object) -> int:
    if isinstance(answer, Versioned):
        return len(answer.value)
    if isinstance(answer, dict):
        return sum(len(key) + len(found.value) for key, found in answer.items())
    return 8
