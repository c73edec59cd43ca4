"""What every Store must do, whatever it is made of."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from elasticd_agent.store import Store
from elasticd_agent.store.memory import MemoryStore


class Clock:
    """Seconds that pass when told."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture(params=["memory"])
def store(request: pytest.FixtureRequest, clock: Clock) -> Iterator[Store]:
    made = {"memory": MemoryStore}[request.param](clock)
    yield made
    made.close()


def version(store: Store, key: str) -> int:
    found = store.read(key)
    assert found is not None
    return found.version


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
    assert [(k, v.value) for k, v in store.list("n/").items()] == [("n/a", b"n/a"), ("n/b", b"n/b")]
    assert list(store.list("")) == ["m", "n/a", "n/b", "nn"]
    assert list(store.list("n.")) == []


def test_an_announced_key_lives_as_long_as_its_lease(store: Store, clock: Clock) -> None:
    lease = store.announce("n/a", b"v", 3.0)
    assert lease is not None
    assert lease.ttl_s == 3.0
    assert store.announce("n/a", b"w", 3.0) is None
    clock.now += 2.9
    assert lease.renew()
    clock.now += 2.9
    assert store.read("n/a") is not None
    clock.now += 0.1
    assert store.read("n/a") is None
    assert not lease.renew(), "renewing too late does not bring it back"
    assert store.read("n/a") is None


def test_a_lease_never_touches_a_successor(store: Store, clock: Clock) -> None:
    first = store.announce("n/a", b"v", 1.0)
    clock.now += 1.0
    second = store.announce("n/a", b"w", 1.0)
    assert first is not None
    assert second is not None
    first.withdraw()
    assert not first.renew()
    assert second.renew()
    second.withdraw()
    second.withdraw()
    assert store.read("n/a") is None


def test_an_announced_key_can_be_swapped_and_stays_leased(store: Store, clock: Clock) -> None:
    lease = store.announce("planner", b"a", 1.0)
    assert lease is not None
    assert store.compare_and_swap("planner", version(store, "planner"), b"b")
    clock.now += 0.9
    assert lease.renew()
    clock.now += 1.0
    assert store.read("planner") is None


def test_a_watch_hears_of_every_change_below_its_prefix(store: Store, clock: Clock) -> None:
    heard: list[str] = []
    with_changes = store.watch("job/", heard.append)
    store.compare_and_swap("job/round", None, b"1")
    store.compare_and_swap("other", None, b"1")
    store.compare_and_swap("job/round", version(store, "job/round"), b"2")
    store.delete("job/round")
    store.announce("job/n", b"", 1.0)
    clock.now += 1.0
    store.list("")
    assert heard == ["job/round", "job/round", "job/round", "job/n", "job/n"]
    with_changes.close()
    with_changes.close()
    store.compare_and_swap("job/round", None, b"1")
    assert len(heard) == 5


def test_of_many_at_once_one_wins(store: Store) -> None:
    store.compare_and_swap("k", None, b"0")
    wins: list[int] = []
    start = threading.Barrier(8)

    def count_up(me: int) -> None:
        start.wait(5)
        for _ in range(50):
            while True:
                found = store.read("k")
                assert found is not None
                if store.compare_and_swap("k", found.version, str(int(found.value) + 1).encode()):
                    wins.append(me)
                    break

    threads = [threading.Thread(target=count_up, args=(i,)) for i in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(20)
    found = store.read("k")
    assert found is not None
    assert (found.value, len(wins)) == (b"400", 400)
