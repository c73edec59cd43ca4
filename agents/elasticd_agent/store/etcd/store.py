"""A Store on etcd v3, for jobs on many nodes. A version is a key's mod_revision.

A compare-and-swap, with or without a guard, is one transaction; an announced key is put by a transaction under a lease.
Reads, renewals and revocations are repeated when they fail. Changes are not: after a lost answer our own success would
look like a lost race, so StoreUnavailable says that the outcome is unknown. grpc and etcd3 are imported at first use,
because a job on one node does not need them. Only the agent process may use it: gRPC and fork do not go together.
"""

from __future__ import annotations

import contextlib
import math
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from elasticd.errors import StoreUnavailable
from elasticd_agent.model.job import Tls
from elasticd_agent.store import Lease, Versioned, Watch
from elasticd_agent.store.etcd.errors import LeaseNotFound
from elasticd_agent.store.etcd.keys import key_range, to_bytes, to_text

if TYPE_CHECKING:
    from elasticd_agent.store.etcd.connection import EtcdConnection
    from elasticd_agent.store.etcd.watch import EtcdWatches


class _Listed(dict[str, Versioned]):
    """The keys below a prefix, read as a whole when this many streams of watches had ended."""

    ended_streams = 0


class EtcdStore:
    """Thread-safe. `endpoints` are (host, port) of the members of one cluster; one that answers is used.

    A call ends within `timeout_s`, with StoreUnavailable at the latest. StoreRefused: the server at the endpoint denies
    access or is no etcd; one sentence says why. `log` receives one sentence when an outage begins and one when it ends.
    """

    hosts, standalone, compares_one_key = False, True, False

    def __init__(
        self,
        endpoints: Sequence[tuple[str, int]],
        *,
        tls: Tls | None = None,
        user: str | None = None,
        password: str | None = None,
        timeout_s: float = 0.9,
        log: Callable[[str], None] = lambda sentence: None,
    ) -> None:
        self._options = (list(endpoints), tls, user, password, timeout_s, log)
        self._lock = threading.Lock()
        self._connection: EtcdConnection | None = None
        self._closed = False
        self._watches: EtcdWatches | None = None
        self._uncertain_leases: list[int] = []

    def read(self, key: str) -> Versioned | None:
        etcd = self.connection()
        answer = etcd.call("Range", etcd.rpc.RangeRequest(key=to_bytes(key)), key=key, repeatable=True)
        return Versioned(answer.kvs[0].value, answer.kvs[0].mod_revision) if answer.kvs else None

    def list(self, prefix: str, known: dict[str, Versioned] | None = None) -> dict[str, Versioned]:
        ended_streams = self._watches.ended_streams if self._watches is not None else 0
        # No etcd is restored from a backup, where values are older ones, while a stream lasts.
        if not isinstance(known, _Listed) or known.ended_streams != ended_streams:
            known = None
        newest = max((item.version for item in known.values()), default=0) if known else 0
        answer = self.connection().range(prefix, min_mod_revision=newest + 1)
        listed = _Listed({to_text(item.key): Versioned(item.value, item.mod_revision) for item in answer.kvs})
        listed.ended_streams = ended_streams
        if not known:
            return listed
        # `count` is of all keys, and the union contains them all: if it is of that size, it contains no other one.
        # A store without watches may have been restored, and then counts revisions from an earlier one.
        if answer.header.revision < newest or answer.count != len(known.keys() | listed.keys()):
            return self.list(prefix)
        if not listed:
            return known
        merged = _Listed(sorted((known | listed).items()))
        merged.ended_streams = ended_streams
        return merged

    def compare_and_swap(
        self, key: str, expected: int | None, value: bytes, guard: tuple[str, int] | None = None
    ) -> bool:
        # A key that exists keeps its lease; etcd refuses to ignore the lease of a missing key.
        versions = [(key, expected), *([guard] if guard else [])]
        return bool(self._put(key, value, versions, ignore_lease=expected is not None))

    def delete(self, key: str) -> bool:
        etcd = self.connection()
        below = key_range(key) if key.endswith("/") else {"key": to_bytes(key)}
        return bool(etcd.call("DeleteRange", etcd.rpc.DeleteRangeRequest(**below), key=key).deleted)

    def announce(self, key: str, value: bytes, ttl_s: float) -> Lease | None:
        """etcd counts whole seconds, and grants no less than 1.5 of its election timeouts (2 s by default)."""
        etcd = self.connection()
        self._revoke_uncertain_leases()
        granted = etcd.call("LeaseGrant", etcd.rpc.LeaseGrantRequest(TTL=math.ceil(ttl_s)))
        try:
            version = self._put(key, value, [(key, None)], lease=granted.ID)
        except StoreUnavailable:
            # The key may be there, under a lease that is never renewed: the next attempt must not lose against it.
            with self._lock:
                self._uncertain_leases.append(granted.ID)
            raise
        if version:
            return _EtcdLease(self, granted.ID, float(granted.TTL), version)
        self._revoke(granted.ID)
        return None

    def watch(self, callback: Callable[[str], None], *prefixes: str) -> Watch:
        """Also during an outage: it begins when etcd answers, and names each whole prefix then."""
        etcd = self.connection()
        from elasticd_agent.store.etcd.watch import EtcdWatches

        with self._lock:
            if self._watches is None:
                self._watches = EtcdWatches(etcd)
            watches = self._watches
        return watches.begin(callback, prefixes)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            connection, watches = self._connection, self._watches
        if connection is not None:
            connection.close()
        if watches is not None:
            watches.close()

    def _put(self, key: str, value: bytes, versions: Sequence[tuple[str, int | None]], **options: Any) -> int:
        """The new version if every key has the version given (None: is missing). 0: one has not, or the lease ended."""
        etcd = self.connection()
        rpc = etcd.rpc
        # The mod_revision of a missing key compares as 0.
        compare = [
            rpc.Compare(result=rpc.Compare.EQUAL, target=rpc.Compare.MOD, key=to_bytes(k), mod_revision=version or 0)
            for k, version in versions
        ]
        put = rpc.RequestOp(request_put=rpc.PutRequest(key=to_bytes(key), value=value, **options))
        try:
            answer = etcd.call("Txn", rpc.TxnRequest(compare=compare, success=[put]), key=key)
        except LeaseNotFound:
            return 0
        return int(answer.header.revision) if answer.succeeded else 0

    def _revoke(self, lease: int) -> None:
        etcd = self.connection()
        try:
            etcd.call("LeaseRevoke", etcd.rpc.LeaseRevokeRequest(ID=lease), repeatable=True)
        except LeaseNotFound:
            pass

    def _revoke_uncertain_leases(self) -> None:
        with self._lock:
            uncertain, self._uncertain_leases = self._uncertain_leases, []
        while uncertain:
            try:
                self._revoke(uncertain[-1])
            except StoreUnavailable:
                with self._lock:
                    self._uncertain_leases += uncertain
                raise
            uncertain.pop()

    def connection(self) -> EtcdConnection:
        with self._lock:
            if self._closed:
                raise StoreUnavailable("the store has been closed")
            if self._connection is None:
                with _names_looked_up_by_libc():
                    from elasticd_agent.store.etcd.connection import EtcdConnection

                self._connection = EtcdConnection(*self._options)
            return self._connection


@contextlib.contextmanager
def _names_looked_up_by_libc() -> Iterator[None]:
    """Names mean to gRPC, which is imported meanwhile, what they mean to this machine.

    gRPC's own resolver knows no nsswitch.conf, and no second address of a name in /etc/hosts. It reads the variable at
    its import; workers, which may use gRPC as well, must not inherit it.
    """
    variable = "GRPC_DNS_RESOLVER"
    given = os.environ.get(variable)
    os.environ.setdefault(variable, "native")
    try:
        yield
    finally:
        if given is None:
            del os.environ[variable]


@dataclass(eq=False, frozen=True, slots=True)
class _EtcdLease:
    _store: EtcdStore
    _lease_id: int
    ttl_s: float
    version: int

    def put(self, key: str, value: bytes, expected: int | None = None) -> int | None:
        return self._store._put(key, value, [(key, expected)], lease=self._lease_id) or None

    def renew(self) -> bool:
        etcd = self._store.connection()
        answer = etcd.call("LeaseKeepAlive", etcd.rpc.LeaseKeepAliveRequest(ID=self._lease_id), repeatable=True)
        return bool(answer.TTL > 0)  # a lease that has ended is no error to etcd: it has 0 s left

    def withdraw(self) -> None:
        self._store._revoke(self._lease_id)
