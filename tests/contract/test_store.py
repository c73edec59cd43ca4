"""What every Store must do, whatever it is made of."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from elasticd_agent.store import Lease, Store
from elasticd_agent.store.c10d.store import C10dStore
from elasticd_agent.store.etcd.store import EtcdStore
from elasticd_agent.store.file import FileStore
from elasticd_agent.store.memory import MemoryStore
from tests.etcd import etcd_servers

Until = Callable[[Callable[[], object], float], object]
SOON_S = 20.0


@dataclass(frozen=True, slots=True)
class Place:
    """One store, and two clients of it. `pass_time` makes seconds go by where time is a lease's time."""

    store: Store
    other: Store
    client: Callable[[], Store]
    pass_time: Callable[[float], None] = time.sleep
    now: Callable[[], float] = time.monotonic


class Clock:
    """Seconds that pass when told."""

    def __init__(self) -> None:
        self.now = 100.0

    def pass_time(self, seconds: float) -> None:
        self.now += seconds


def memory(_: ExitStack) -> Place:
    clock = Clock()
    store = MemoryStore(lambda: clock.now)
    return Place(store, store, lambda: MemoryStore(lambda: clock.now), clock.pass_time, lambda: clock.now)


def kept(cleanup: ExitStack) -> Place:
    clock = Clock()
    folder = Path(cleanup.enter_context(TemporaryDirectory()))

    def client(path: Path) -> FileStore:
        store = FileStore(path, lambda: clock.now)
        cleanup.callback(store.close)
        return store

    store = client(folder / "kept")
    return Place(store, store, lambda: client(folder / "another"), clock.pass_time, lambda: clock.now)


def etcd(cleanup: ExitStack) -> Place:
    endpoints = cleanup.enter_context(etcd_servers()).endpoints

    def client() -> Store:
        store = EtcdStore(endpoints, timeout_s=10.0)
        cleanup.callback(store.close)
        return store

    return Place(client(), client(), client)


def c10d(cleanup: ExitStack) -> Place:
    def client(port: int, *, serve: bool) -> C10dStore:
        store = C10dStore("127.0.0.1", port, serve=serve, timeout_s=10.0)
        cleanup.callback(store.close)
        return store

    host = client(0, serve=True)
    return Place(host, client(host.port, serve=False), lambda: client(host.port, serve=False))


PLACES = {"memory": memory, "kept": kept, "etcd": etcd, "c10d": c10d}


@pytest.fixture(scope="module", params=PLACES)
def opened(request: pytest.FixtureRequest) -> Iterator[Place]:
    with ExitStack() as cleanup:
        made = PLACES[request.param](cleanup)
        # What a connection needs is there before the first test begins.
        made.store.read("k")
        made.other.read("k")
        yield made


@pytest.fixture
def place(opened: Place) -> Place:
    for key in opened.store.list(""):
        opened.store.delete(key)
    return opened


@pytest.fixture
def store(place: Place) -> Store:
    return place.store


def version(store: Store, key: str) -> int:
    found = store.read(key)
    assert found is not None
    return found.version


def announced(store: Store, key: str, value: bytes = b"", ttl_s: float = 3.0) -> Lease:
    lease = store.announce(key, value, ttl_s)
    assert lease is not None
    return lease


def values(store: Store, prefix: str) -> dict[str, bytes]:
    return {key: found.value for key, found in store.list(prefix).items()}


def test_a_key_that_is_not_there(store: Store) -> None:
    assert store.read("job/round") is None
    assert store.list("") == {}
    assert store.delete("job/round") is False


def test_compare_and_swap_creates_once_and_loses_races(store: Store) -> None:
    assert store.compare_and_swap("k", None, b"1")
    assert not store.compare_and_swap("k", None, b"1"), "an identical second create is a lost race too"
    seen = version(store, "k")
    assert store.compare_and_swap("k", seen, b"2")
    assert not store.compare_and_swap("k", seen, b"3")
    found = store.read("k")
    assert found is not None
    assert found.value == b"2"
    assert found.version > seen


def test_a_value_is_any_bytes_and_a_key_any_text(store: Store) -> None:
    for key, value in (("jobs/ü ñ/€", b"\x00\xff\n"), ("jobs/empty", b""), ("jobs/long", b"x" * 100_000)):
        assert store.compare_and_swap(key, None, value)
        found = store.read(key)
        assert found is not None
        assert found.value == value
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


def test_a_guard_is_compared_too(store: Store) -> None:
    store.compare_and_swap("planner", None, b"a")
    mine = version(store, "planner")
    assert store.compare_and_swap("round", None, b"1", guard=("planner", mine))
    seen = version(store, "round")
    store.compare_and_swap("planner", mine, b"b")
    assert not store.compare_and_swap("new", None, b"2", guard=("planner", mine)), "the planner was usurped"
    store.delete("planner")
    assert not store.compare_and_swap("round", seen, b"2", guard=("planner", mine)), "there is no planner"
    assert values(store, "round") == {"round": b"1"}


def test_clients_of_one_store_see_the_same(place: Place, until: Until) -> None:
    here, there = place.store, place.other
    heard: list[str] = []
    watch = there.watch("job/", heard.append)
    assert here.compare_and_swap("job/round", None, b"1")
    assert there.read("job/round") == here.read("job/round")
    until(lambda: heard, SOON_S)
    assert all(key.startswith("job/") for key in heard)
    watch.close()


def test_an_announced_key_lives_as_long_as_its_lease(place: Place, until: Until) -> None:
    store = place.store
    lease = announced(store, "n/a", b"v", 2.0)
    assert lease.ttl_s == 2.0
    assert store.announce("n/a", b"w", 2.0) is None
    renewed = place.now()
    for _ in range(2):
        place.pass_time(1.2)
        began = place.now()
        renewal = lease.renew()
        # A machine that was away for a lease's time has lost it, and rightly so.
        assert renewal or place.now() - renewed > 0.9 * lease.ttl_s
        renewed = began
    assert store.read("n/a") is not None or place.now() - renewed > 0.9 * lease.ttl_s
    place.pass_time(2.0)
    until(lambda: store.read("n/a") is None, SOON_S)
    assert not lease.renew(), "renewing too late does not bring it back"
    assert store.read("n/a") is None


def test_a_lease_never_touches_a_successor(place: Place, until: Until) -> None:
    store = place.store
    first = announced(store, "n/a", b"v", 1.0)
    place.pass_time(1.0)
    until(lambda: store.read("n/a") is None, SOON_S)
    second = announced(store, "n/a", b"w", 3.0)
    first.withdraw()
    assert not first.renew()
    assert first.hold("n/b", b"") is None, "an ended lease holds nothing"
    assert values(store, "") == {"n/a": b"w"}
    second.withdraw()
    second.withdraw()
    assert store.read("n/a") is None


def test_one_lease_holds_several_keys(place: Place, until: Until) -> None:
    store = place.store
    lease = announced(store, "nodes/a", b"record", 3.0)
    held = lease.hold("planner", b"a")
    assert held == version(store, "planner")
    assert lease.hold("planner", b"a") is None, "it is there already"
    again = lease.hold("planner", b"a2", expected=held)
    assert again == version(store, "planner")
    assert lease.hold("planner", b"a3", expected=held) is None
    assert values(store, "") == {"nodes/a": b"record", "planner": b"a2"}
    lease.withdraw()
    assert store.list("") == {}


def test_a_key_can_be_taken_from_anothers_lease(place: Place) -> None:
    store, other = place.store, place.other
    first = announced(store, "nodes/a")
    assert first.hold("planner", b"a") is not None
    second = announced(other, "nodes/b")
    assert second.hold("planner", b"b", expected=version(other, "planner")) is not None
    first.withdraw()
    assert values(store, "") == {"nodes/b": b"", "planner": b"b"}
    second.withdraw()


def test_an_announced_key_can_be_swapped_and_stays_leased(place: Place, until: Until) -> None:
    store = place.store
    lease = announced(store, "planner", b"a", 1.0)
    assert store.compare_and_swap("planner", version(store, "planner"), b"b")
    place.pass_time(1.0)
    until(lambda: store.read("planner") is None, SOON_S)
    assert not lease.renew()


def test_a_watch_hears_of_every_change_below_its_prefix(place: Place, until: Until) -> None:
    store = place.store
    heard: list[str] = []
    watch = store.watch("job/", heard.append)

    def hears(key: str) -> None:
        # The list makes a store whose time is told from outside notice that it has passed.
        until(lambda: store.list("") is not None and key in heard, SOON_S)
        assert all(heard_of.startswith("job/") for heard_of in heard)
        heard.clear()

    store.compare_and_swap("job/round", None, b"1")
    hears("job/round")
    store.compare_and_swap("other", None, b"1")
    store.compare_and_swap("job/round", version(store, "job/round"), b"2")
    hears("job/round")
    store.delete("job/round")
    hears("job/round")
    announced(store, "job/n", ttl_s=1.0)
    hears("job/n")
    place.pass_time(1.0)
    hears("job/n")
    watch.close()
    watch.close()
    store.compare_and_swap("job/round", None, b"1")
    assert heard == []


def test_a_watch_may_be_closed_by_what_it_calls(store: Store, until: Until) -> None:
    heard: list[str] = []
    closed = threading.Event()

    def once(key: str) -> None:
        heard.append(key)
        watch.close()
        closed.set()

    watch = store.watch("", once)
    store.compare_and_swap("a", None, b"")
    until(closed.is_set, SOON_S)
    store.compare_and_swap("b", None, b"")
    assert len(heard) == 1


def test_traffic_is_counted(place: Place) -> None:
    if isinstance(place.store, MemoryStore):
        return  # it has none
    traffic = place.store.traffic
    before = replace(traffic)
    place.store.compare_and_swap("k", None, b"x" * 1000)
    assert traffic.requests - before.requests >= 1
    # c10d carries bytes as base64.
    assert 1000 < traffic.sent_bytes - before.sent_bytes < 3000
    before = replace(traffic)
    for _ in range(10):
        place.store.read("k")
    assert traffic.requests - before.requests >= 10
    assert 10_000 < traffic.received_bytes - before.received_bytes < 30_000


def test_of_many_at_once_one_wins(place: Place) -> None:
    store = place.store
    store.compare_and_swap("k", None, b"0")
    wins: list[int] = []
    start = threading.Barrier(4)
    clients = [store, place.other]

    def count_up(me: int) -> None:
        mine = clients[me % 2]
        start.wait(5)
        for _ in range(25):
            while True:
                found = mine.read("k")
                assert found is not None
                if mine.compare_and_swap("k", found.version, str(int(found.value) + 1).encode()):
                    wins.append(me)
                    break

    threads = [threading.Thread(target=count_up, args=(i,)) for i in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(20)
    found = store.read("k")
    assert found is not None
    assert (found.value, len(wins)) == (b"100", 100)


def test_closing_ends_watches_and_may_be_done_twice(place: Place) -> None:
    store = place.client()
    store.watch("", lambda key: None)
    store.close()
    store.close()
