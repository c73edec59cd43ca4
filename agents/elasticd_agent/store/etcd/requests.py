"""Our few questions in etcd's words, and its answers in ours. A version is a key's mod_revision.

Which of them may be asked twice is decided here: reads, renewals and revocations. Asking for a compare-and-swap again
after its answer was lost would make our own success look like a lost race.
"""

from __future__ import annotations

from typing import Any

from elasticd_agent.store import Versioned
from elasticd_agent.store.etcd.connection import EtcdConnection, LeaseNotFound, Method
from elasticd_agent.store.etcd.proto import rpc
from elasticd_agent.store.etcd.watch_stream import WatchStream


class EtcdRequests:
    """Each raises StoreUnavailable or StoreRefused."""

    def __init__(self, link: EtcdConnection) -> None:
        self.connection = link

    def read(self, key: str) -> Versioned | None:
        answer = self.connection.call(Method.RANGE, rpc.RangeRequest(key=data(key)), key=key, repeatable=True)
        return Versioned(answer.kvs[0].value, answer.kvs[0].mod_revision) if answer.kvs else None

    def list(self, prefix: str) -> dict[str, Versioned]:
        answer = self._range(prefix)
        return {text(item.key): Versioned(item.value, item.mod_revision) for item in answer.kvs}

    def count(self, prefix: str) -> int:
        """How many are there: the cheapest question about a prefix that etcd answers or refuses."""
        return int(self._range(prefix, count_only=True).count)

    def put_if_version(
        self,
        key: str,
        expected: int | None,
        value: bytes,
        guard: tuple[str, int] | None = None,
        lease: int | None = None,
    ) -> int | None:
        """The new version; None: a comparison failed, or the lease has ended. Without a lease the key keeps its own."""
        # etcd refuses to ignore the lease of a key that is not there.
        kept = lease is None and expected is not None
        put = rpc.PutRequest(key=data(key), value=value, lease=lease or 0, ignore_lease=kept)
        compare = [_at(key, expected), *([_at(*guard)] if guard else [])]
        request = rpc.TxnRequest(compare=compare, success=[rpc.RequestOp(request_put=put)])
        try:
            answer = self.connection.call(Method.TXN, request, key=key)
        except LeaseNotFound:
            return None
        return int(answer.header.revision) if answer.succeeded else None

    def delete(self, key: str) -> bool:
        return bool(self.connection.call(Method.DELETE, rpc.DeleteRangeRequest(key=data(key)), key=key).deleted)

    def grant(self, ttl_s: int) -> tuple[int, int]:
        """(lease, seconds granted)."""
        answer = self.connection.call(Method.GRANT, rpc.LeaseGrantRequest(TTL=ttl_s))
        return answer.ID, answer.TTL

    def renew(self, lease: int) -> bool:
        answer = self.connection.call(Method.KEEP_ALIVE, rpc.LeaseKeepAliveRequest(ID=lease), repeatable=True)
        # A lease that is gone is no error to etcd: it has 0 s left.
        return bool(answer.TTL > 0)

    def revoke(self, lease: int) -> None:
        try:
            self.connection.call(Method.REVOKE, rpc.LeaseRevokeRequest(ID=lease), repeatable=True)
        except LeaseNotFound:
            return

    def follow(self) -> WatchStream:
        """A stream for watches."""
        return self.connection.follow()

    def begin_watch(self, stream: WatchStream, prefix: str) -> None:
        """What happens to these keys after the response that says `created`, and which number the watch has."""
        first, end = _span(prefix)
        stream.send(rpc.WatchRequest(create_request=rpc.WatchCreateRequest(key=first, range_end=end)))

    def end_watch(self, stream: WatchStream, number: int) -> None:
        stream.send(rpc.WatchRequest(cancel_request=rpc.WatchCancelRequest(watch_id=number)))

    def _range(self, prefix: str, *, count_only: bool = False) -> Any:
        first, end = _span(prefix)
        request = rpc.RangeRequest(key=first, range_end=end, count_only=count_only)
        return self.connection.call(Method.RANGE, request, key=prefix, repeatable=True)


def data(key: str) -> bytes:
    # Other people's keys need not be UTF-8; ours are.
    return key.encode("utf-8", "surrogateescape")


def text(key: bytes) -> str:
    return key.decode("utf-8", "surrogateescape")


def _span(prefix: str) -> tuple[bytes, bytes]:
    """(first key, first key after the last) of all keys that begin with `prefix`; b"\\0" as an end means no end."""
    first = data(prefix)
    stem = first.rstrip(b"\xff")
    return first or b"\0", stem[:-1] + bytes([stem[-1] + 1]) if stem else b"\0"


def _at(key: str, version: int | None) -> Any:
    # The mod_revision of a key that is not there compares as 0.
    return rpc.Compare(result=rpc.Compare.EQUAL, target=rpc.Compare.MOD, key=data(key), mod_revision=version or 0)
