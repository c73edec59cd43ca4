"""The contract of every Store."""

from __future__ import annotations

import threading
from collections.abc import Callable

from elasticd_agent.store import Lease, Store, Versioned
from elasticd_agent.store.etcd.store import EtcdStore
from tests.contract.conftest import Backend
from tests.contract.reading import found, values, version

Until = Callable[[Callable[[], object], float], object]
SOON_S = 60.0


def announced(store: Store, key: str, value: bytes = b"", ttl_s: float = 60.0) -> Lease:
    lease = store.announce(key, value, ttl_s)
    assert lease is not None
    return lease


def test_missing_key(store: Store) -> None:
    assert store.read("job/round") is None
    assert store.list("") == {}
    assert store.delete("job/round") is False


def test_compare_and_swap(store: Store) -> None:
    assert store.compare_and_swap("k", None, b"1")
    assert not store.compare_and_swap("k", None, b"1"), "an identical second create is a lost race too"
    seen = version(store, "k")
    assert store.compare_and_swap("k", seen, b"2")
    assert not store.compare_and_swap("k", seen, b"3")
    found = store.read("k")
    assert found.value == b"2"
    assert found.version > seen


def test_values_are_bytes_and_keys_any_text(store: Store) -> None:
    for key, value in (("jobs/ü ñ/€", b"\x00\xff\n"), ("jobs/empty", b""), ("jobs/long", b"x" * 100_000)):
        assert store.compare_and_swap(key, None, value)
        assert found(store, key).value == value
        assert key in store.list("jobs/")


def test_versions_grow_across_deletion(store: Store) -> None:
    store.compare_and_swap("k", None, b"1")
    old = version(store, "k")
    assert store.delete("k")
    assert not store.compare_and_swap("k", old, b"2"), "it is not there any more"
    assert store.compare_and_swap("k", None, b"1")
    assert version(store, "k") > old
    assert not store.compare_and_swap("k", old, b"2"), "the same value is not the same version"


def test_list_is_sorted_and_takes_the_prefix_literally(store: Store) -> None:
    for key in ("n/b", "n/a", "nn", "m"):
        store.compare_and_swap(key, None, key.encode())
    assert list(values(store, "n/").items()) == [("n/a", b"n/a"), ("n/b", b"n/b")]
    assert list(store.list("")) == ["m", "n/a", "n/b", "nn"]
    assert list(store.list("n.")) == []
    found = store.list("n/")["n/a"]
    assert found == store.read("n/a")


def test_list_with_an_earlier_answer(backend: Backend) -> None:
    """Whatever has happened since, it is the list without one; `other` is another client."""
    store, other = backend.store, backend.other
    known: dict[str, Versioned] = {}
    for changes in (
        ("n/b", "n/a", "n/c"),
        (),
        ("n/a",),
        ("-n/b",),
        ("-n/a", "n/d"),
        ("-n/c", "n/c"),
        ("m", "-n/d", "n/e", "n/f"),
        ("-m",),
        ("-n/c", "-n/e", "-n/f"),
        ("n/a",),
    ):
        for change in changes:
            key = change.removeprefix("-")
            before = other.read(key)
            if change != key:
                assert other.delete(key)
            else:
                assert other.compare_and_swap(key, before and before.version, str(changes).encode())
        found = store.list("n/", known)
        assert list(found.items()) == list(store.list("n/").items()), changes
        known = found
    if isinstance(store, EtcdStore):
        assert store.list("n/", known) is known, "nothing had to be read"


def test_compare_and_swap_with_a_guard(store: Store) -> None:
    store.compare_and_swap("planner", None, b"a")
    mine = version(store, "planner")
    assert store.compare_and_swap("round", None, b"1", guard=("planner", mine))
    seen = version(store, "round")
    store.compare_and_swap("planner", mine, b"b")
    assert not store.compare_and_swap("new", None, b"2", guard=("planner", mine)), "the planner was usurped"
    store.delete("planner")
    assert not store.compare_and_swap("round", seen, b"2", guard=("planner", mine)), "there is no planner"
    assert values(store, "round") == {"round": b"1"}


def test_deleted_prefix(backend: Backend) -> None:
    store = backend.store
    for key in ("job/a/1", "job/a/2", "job/ab", "job/b"):
        assert store.compare_and_swap(key, None, b"v")
    assert store.delete("job/a/") and not store.delete("job/a/")
    assert list(store.list("job/")) == ["job/ab", "job/b"]


def test_two_clients_of_one_store(backend: Backend, until: Until) -> None:
    here, there = backend.store, backend.other
    heard: list[str] = []
    watch = there.watch(heard.append, "job/")
    assert here.compare_and_swap("job/round", None, b"1")
    assert there.read("job/round") == here.read("job/round")
    until(lambda: heard, SOON_S)
    assert all(key.startswith("job/") for key in heard)
    watch.close()


def test_announced_key_lives_as_long_as_its_lease(backend: Backend, until: Until) -> None:
    store, renewed = backend.store, backend.now()
    lease = announced(store, "n/a", b"v", 2.0)
    assert lease.ttl_s == 2.0

    def lost() -> bool:
        """A machine that was away for a lease's time has lost it, and rightly so."""
        return backend.now() - renewed > 0.9 * lease.ttl_s

    assert store.announce("n/a", b"w", 2.0) is None or lost()
    for _ in range(2):
        backend.pass_time(1.2)
        began = backend.now()
        if lease.renew():
            renewed = began
        else:
            assert lost()
    assert store.read("n/a") is not None or lost()
    backend.pass_time(2.0)
    until(lambda: store.read("n/a") is None, SOON_S)
    assert not lease.renew(), "renewing too late does not bring it back"
    assert store.read("n/a") is None


def test_ended_lease_leaves_its_successor_alone(backend: Backend, until: Until) -> None:
    store = backend.store
    first = announced(store, "n/a", b"v", 1.0)
    backend.pass_time(1.0)
    until(lambda: store.read("n/a") is None, SOON_S)
    second = announced(store, "n/a", b"w")
    first.withdraw()
    assert not first.renew()
    assert first.put("n/b", b"") is None, "an ended lease puts nothing"
    assert values(store, "") == {"n/a": b"w"}
    second.withdraw()
    second.withdraw()
    assert store.read("n/a") is None


def test_several_keys_under_one_lease(backend: Backend, until: Until) -> None:
    store = backend.store
    lease = announced(store, "nodes/a", b"record")
    assert lease.version == version(store, "nodes/a")
    held = lease.put("planner", b"a")
    assert held == version(store, "planner")
    assert lease.put("planner", b"a") is None, "it exists already"
    again = lease.put("planner", b"a2", expected=held)
    assert again == version(store, "planner")
    assert lease.put("planner", b"a3", expected=held) is None
    assert values(store, "") == {"nodes/a": b"record", "planner": b"a2"}
    lease.withdraw()
    assert store.list("") == {}


def test_put_takes_a_key_from_another_lease(backend: Backend) -> None:
    store, other = backend.store, backend.other
    first = announced(store, "nodes/a")
    assert first.put("planner", b"a") is not None
    second = announced(other, "nodes/b")
    assert second.put("planner", b"b", expected=version(other, "planner")) is not None
    first.withdraw()
    assert values(store, "") == {"nodes/b": b"", "planner": b"b"}
    second.withdraw()


def test_compare_and_swap_keeps_the_lease(backend: Backend, until: Until) -> None:
    store, began = backend.store, backend.now()
    lease = announced(store, "planner", b"a", 1.0)
    seen = store.read("planner")
    assert (seen and store.compare_and_swap("planner", seen.version, b"b")) or backend.now() - began > 0.9
    backend.pass_time(1.0)
    until(lambda: store.read("planner") is None, SOON_S)
    assert not lease.renew()


def test_watch_names_changes_below_its_prefix(backend: Backend, until: Until) -> None:
    store = backend.store
    heard: list[str] = []
    watch = store.watch(heard.append, "job/", "run/")

    def expect_call(key: str) -> None:
        # The list makes a store with a fake clock notice that time has passed.
        until(lambda: store.list("") is not None and key in heard, SOON_S)
        assert all(heard_of.startswith(("job/", "run/")) for heard_of in heard)
        heard.clear()

    store.compare_and_swap("job/round", None, b"1")
    expect_call("job/round")
    store.compare_and_swap("other", None, b"1")
    store.compare_and_swap("job/round", version(store, "job/round"), b"2")
    expect_call("job/round")
    store.delete("job/round")
    expect_call("job/round")
    store.compare_and_swap("run/round", None, b"1")
    expect_call("run/round")
    announced(store, "job/n", ttl_s=1.0)
    backend.pass_time(1.0)
    until(lambda: store.list("") is not None and len(heard) > 1, SOON_S)
    assert set(heard) == {"job/n"}
    heard.clear()
    watch.close()
    watch.close()
    store.compare_and_swap("job/round", None, b"1")
    store.delete("run/round")
    assert heard == []


def test_watch_closed_by_its_callback(store: Store, until: Until) -> None:
    heard: list[str] = []
    closed = threading.Event()

    def once(key: str) -> None:
        heard.append(key)
        watch.close()
        closed.set()

    watch = store.watch(once, "")
    store.compare_and_swap("a", None, b"")
    until(closed.is_set, SOON_S)
    store.compare_and_swap("b", None, b"")
    assert len(heard) == 1


def test_concurrent_writes_have_one_winner(backend: Backend) -> None:
    store = backend.store
    store.compare_and_swap("k", None, b"0")
    wins: list[int] = []
    start = threading.Barrier(4)
    clients = [store, backend.other]

    def count_up(me: int) -> None:
        mine = clients[me % 2]
        start.wait(SOON_S)
        for _ in range(25):
            while True:
                found = mine.read("k")
                if mine.compare_and_swap("k", found.version, str(int(found.value) + 1).encode()):
                    wins.append(me)
                    break

    threads = [threading.Thread(target=count_up, args=(i,)) for i in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(SOON_S)
    found = store.read("k")
    assert (found.value, len(wins)) == (b"100", 100)


def test_close_ends_watches(backend: Backend) -> None:
    store = backend.client()
    store.watch(lambda key: None, "")
    store.close()
    store.close()
