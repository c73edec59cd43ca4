"""A Store on etcd v3, for jobs on many nodes: what the Store protocol promises, kept by an etcd.

A compare-and-swap, with or without a guard, is one transaction; an announced key is put by a transaction under a
lease. When etcd does not answer, the outcome of a change is unknown, and that is what StoreUnavailable says. grpc and
etcd3 are imported when the store is first used, because a job on one node shall not pay for them. Only the agent
process may use it: gRPC and fork do not go together.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from elasticd.errors import StoreUnavailable, UsageError
from elasticd_agent.model.job import Tls
from elasticd_agent.store import Lease, Traffic, Versioned, Watch

if TYPE_CHECKING:
    from elasticd_agent.store.etcd.requests import EtcdRequests
    from elasticd_agent.store.etcd.watch import EtcdWatches


def _ignore(sentence: str) -> None:
    """For those who do not want to hear of outages."""


class EtcdStore:
    """Thread-safe. `endpoints` are (host, port) of the members of one cluster; one that answers is used.

    A call ends within `timeout_s`, with StoreUnavailable at the latest. StoreRefused: etcd, or what is in its place,
    will not have us; one sentence says why. `say` hears one sentence when an outage begins and one when it is over.
    """

    def __init__(
        self,
        endpoints: Sequence[tuple[str, int]],
        *,
        tls: Tls | None = None,
        user: str | None = None,
        password: str | None = None,
        timeout_s: float = 0.9,
        log: Callable[[str], None] = _ignore,
    ) -> None:
        if not endpoints:
            raise UsageError("etcd needs an endpoint; give host:port, or several with commas between them")
        self._endpoints = list(endpoints)
        self._tls = tls
        self._user = user
        self._password = password
        self._timeout_s = timeout_s
        self._say = log
        self.traffic = Traffic()
        self._lock = threading.Lock()
        self._opened: EtcdRequests | None = None
        self._closed = False
        self._watches: EtcdWatches | None = None
        self._uncertain_leases: list[int] = []

    def read(self, key: str) -> Versioned | None:
        return self._requests().read(key)

    def list(self, prefix: str) -> dict[str, Versioned]:
        return self._requests().list(prefix)

    def compare_and_swap(
        self, key: str, expected: int | None, value: bytes, guard: tuple[str, int] | None = None
    ) -> bool:
        return self._requests().put_if_version(key, expected, value, guard) is not None

    def delete(self, key: str) -> bool:
        return self._requests().delete(key)

    def announce(self, key: str, value: bytes, ttl_s: float) -> Lease | None:
        """etcd counts whole seconds, and grants no less than 1.5 of its election timeouts (2 s by default)."""
        etcd = self._requests()
        self._revoke_uncertain_leases(etcd)
        number, granted_s = etcd.grant(math.ceil(ttl_s))
        try:
            made = etcd.put_if_version(key, None, value, lease=number)
        except StoreUnavailable:
            # The key may be there now, under a lease that nobody renews: our next try must not lose against it.
            with self._lock:
                self._uncertain_leases.append(number)
            raise
        if made is None:
            etcd.revoke(number)
            return None
        return _EtcdLease(etcd, number, float(granted_s))

    def watch(self, prefix: str, callback: Callable[[str], None]) -> Watch:
        """Also during an outage: it begins when etcd is back, and names then the whole prefix."""
        etcd = self._requests()
        from elasticd_agent.store.etcd.watch import EtcdWatches

        with self._lock:
            if self._watches is None:
                self._watches = EtcdWatches(etcd)
            watches = self._watches
        return watches.begin(prefix, callback)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            made, watches = self._opened, self._watches
        if made is not None:
            made.connection.close()
        if watches is not None:
            watches.close()

    def _revoke_uncertain_leases(self, etcd: EtcdRequests) -> None:
        with self._lock:
            unsure, self._uncertain_leases = self._uncertain_leases, []
        while unsure:
            try:
                etcd.revoke(unsure[-1])
            except StoreUnavailable:
                with self._lock:
                    self._uncertain_leases += unsure
                raise
            unsure.pop()

    def _requests(self) -> EtcdRequests:
        with self._lock:
            if self._closed:
                raise StoreUnavailable("the store has been closed")
            if self._opened is None:
                from elasticd_agent.store.etcd.connection import EtcdConnection
                from elasticd_agent.store.etcd.requests import EtcdRequests

                self._opened = EtcdRequests(
                    EtcdConnection(
                        self._endpoints,
                        self._tls,
                        self._user,
                        self._password,
                        self._timeout_s,
                        self._say,
                        self.traffic,
                    )
                )
            return self._opened


class _EtcdLease:
    def __init__(self, etcd: EtcdRequests, number: int, ttl_s: float) -> None:
        self._etcd = etcd
        self._number = number
        self._ttl_s = ttl_s

    @property
    def ttl_s(self) -> float:
        return self._ttl_s

    def put(self, key: str, value: bytes, expected: int | None = None) -> int | None:
        return self._etcd.put_if_version(key, expected, value, lease=self._number)

    def renew(self) -> bool:
        return self._etcd.renew(self._number)

    def withdraw(self) -> None:
        self._etcd.revoke(self._number)
