"""LeasedKey over every store."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from elasticd.errors import StoreUnavailable
from elasticd_agent.store import Lease, Store
from elasticd_agent.store.lease import LeasedKey
from elasticd_agent.store.memory import MemoryStore
from tests.contract.conftest import Backend
from tests.contract.reading import version
from tests.daemon.stores import Clock, InterruptedStore

Until = Callable[[Callable[[], object], float], object]
SOON_S = 60.0
KEY = "nodes/a"


def leased(store: Store, lease_s: float = 60.0, own: bytes = b"own", **more: object) -> LeasedKey:
    return LeasedKey(
        store,
        KEY,
        lease_s,
        1.0,
        is_own=lambda value: value.startswith(own),
        **more,  # type: ignore[arg-type]
    )


def value(store: Store, key: str = KEY) -> bytes | None:
    found = store.read(key)
    return None if found is None else found.value


def test_create_and_replace(store: Store) -> None:
    key = leased(store)
    assert not key.replace(b"own 0"), "there is no key yet"
    assert key.create(b"own 1", 0.0)
    assert key.replace(b"own 1")
    assert key.replace(b"own 2")
    assert key.replace(b"own 3")
    assert value(store) == b"own 3"
    key.withdraw()
    key.withdraw()
    assert value(store) is None


def test_create_of_a_key_in_use(backend: Backend) -> None:
    other = leased(backend.other, own=b"other")
    assert other.create(b"other", 0.0)
    key = leased(backend.store)
    assert not key.create(b"own", 0.0)
    assert not key.create(b"own", 0.0, may_replace=lambda found: False)
    assert value(backend.store) == b"other"
    assert key.create(b"own", 0.0, may_replace=lambda found: found == b"other")
    assert value(backend.store) == b"own"
    assert not other.replace(b"other 2"), "its key was taken over"
    assert value(backend.store) == b"own"
    key.withdraw()


def test_an_ended_lease_is_noticed_and_the_key_created_again(backend: Backend, until: Until) -> None:
    key = leased(backend.store, lease_s=1.0)
    assert key.create(b"own", backend.now())
    backend.pass_time(1.0)
    until(lambda: value(backend.store) is None, SOON_S)
    assert not key.renew(key.renew_at)
    assert not key.replace(b"own 2")
    began = backend.now()
    assert key.create(b"own 3", began)
    assert value(backend.store) == b"own 3" or backend.now() - began > 0.9
    key.withdraw()


def test_check_after_the_key_was_deleted(store: Store) -> None:
    """A lease without its key would be renewed for ever."""
    key = leased(store)
    assert key.create(b"own", 0.0)
    assert key.announce_under_lease("leader", b"own", 3.0) is not None
    key.withdraw_if_lost()
    assert key.lease is not None
    store.delete(KEY)
    assert key.renew(0.0)
    key.withdraw_if_lost()
    assert key.lease is None
    assert value(store, "leader") is None


def test_older_value_is_replaced_after_a_check(backend: Backend) -> None:
    """As in a store that was restored from a backup."""
    key = leased(backend.store)
    assert key.create(b"own 1", 0.0)
    assert key.replace(b"own 2")
    assert backend.other.compare_and_swap(KEY, version(backend.other, KEY), b"own 1")
    key.withdraw_if_lost()
    assert key.lease is not None
    assert key.replace(b"own 2")
    assert value(backend.store) == b"own 2"


def test_replace_after_the_key_was_deleted(store: Store) -> None:
    key = leased(store)
    assert key.create(b"own", 0.0)
    store.delete(KEY)
    assert not key.replace(b"own 2")
    assert key.lease is None


def test_a_key_beside_lives_and_ends_with_the_first(store: Store) -> None:
    key = leased(store)
    assert key.announce_under_lease("leader", b"own", 3.0) is None, "there is no lease yet"
    assert key.create(b"own", 0.0)
    beside = key.announce_under_lease("leader", b"own", 3.0)
    assert key.announce_under_lease("leader", b"own", 3.0) is None, "it is there already"
    assert beside.renew()
    assert beside.ttl_s == key.lease.ttl_s if key.lease else 0.0
    beside.withdraw()
    assert (value(store), value(store, "leader")) == (b"own", None)
    again = key.announce_under_lease("leader", b"own", 3.0)
    assert again is not None
    key.withdraw()
    assert store.list("") == {}
    assert not again.renew()


def test_renewals_follow_the_granted_time() -> None:
    """At min(renewal, ttl / 3): three attempts fit into what the store grants, whatever was requested."""
    clock, times = Clock(), list[float | None]()
    key = leased(MemoryStore(clock), lease_s=1.5, on_renewal=lambda ttl_s, took_s: times.append(took_s))
    assert key.create(b"own", clock.now)
    assert key.renew_at == clock.now + 0.5
    assert key.renew(clock.now)
    assert times == [None], "it is not due yet"
    clock.now += 0.5
    assert key.renew(clock.now)
    assert key.renew_at == clock.now + 0.5
    assert len(times) == 2


def test_a_renewal_that_fails_is_reported_and_tried_again() -> None:
    clock, times = Clock(), list[float | None]()
    store = InterruptedStore(MemoryStore(clock))
    key = leased(store, on_renewal=lambda ttl_s, took_s: times.append(took_s))
    assert key.create(b"own", clock.now)

    def fail(n: int, verb: str, key: str) -> None:
        raise StoreUnavailable("no answer")

    store.before = fail
    clock.now += 1.0
    with pytest.raises(StoreUnavailable):
        key.renew(clock.now)
    assert len(times) == 2
    store.before = lambda n, verb, key: None
    assert key.renew(clock.now)
    assert key.renew_at == clock.now + 1.0


def test_a_new_key_is_replaced_without_being_read() -> None:
    """Hundreds of nodes create theirs at once, and write into it a moment later."""
    store = InterruptedStore(MemoryStore(Clock()))
    key = leased(store)
    assert key.create(b"own 1", 0.0) and key.replace(b"own 2")
    assert [verb for verb, _ in store.requests] == ["announce", "put"]


def test_replace_after_a_lost_answer() -> None:
    """The first write succeeds without an answer: the version is read again, and our own success is no lost race."""

    class LateLease:
        ttl_s = 3.0

        def __init__(self, lease: Lease) -> None:
            self._lease, self.version = lease, lease.version
            self.late = True

        def put(self, key: str, value: bytes, expected: int | None = None) -> int | None:
            version = self._lease.put(key, value, expected)
            if self.late:
                self.late = False
                raise StoreUnavailable("the answer was lost")
            return version

        def renew(self) -> bool:
            return self._lease.renew()

        def withdraw(self) -> None:
            self._lease.withdraw()

    def announce(key: str, value: bytes, ttl_s: float) -> Lease | None:
        lease = store.announce(key, value, ttl_s)
        return None if lease is None else LateLease(lease)

    store = MemoryStore(Clock())
    key = leased(store, announce=announce)
    assert key.create(b"own", 0.0)
    with pytest.raises(StoreUnavailable):
        key.replace(b"own 2")
    assert value(store) == b"own 2"
    assert key.replace(b"own 3")
    assert value(store) == b"own 3"
