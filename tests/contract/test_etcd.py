"""EtcdStore while real etcds are killed, frozen, emptied and outvoted."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from elasticd.errors import StoreUnavailable, UsageError
from elasticd_agent.store import Store
from elasticd_agent.store.etcd.requests import EtcdRequests
from elasticd_agent.store.etcd.store import EtcdStore
from elasticd_agent.store.etcd.watch import EtcdWatches
from elasticd_agent.store.etcd.watch_stream import WatchStream
from tests.contract.proxy import Proxy
from tests.etcd import EtcdServers, etcd_servers

Until = Callable[[Callable[[], object], float], object]
Open = Callable[..., EtcdStore]
SOON_S = 20.0
PROMPT_S = 0.5
"""What calls are given here; they may take 0.3 s more."""


@pytest.fixture
def opened() -> Iterator[Open]:
    """Makes stores that are closed before the servers end."""
    with ExitStack() as cleanup:

        def make(endpoints: list[tuple[str, int]], **options: object) -> EtcdStore:
            store = EtcdStore(endpoints, **{"timeout_s": 5.0, **options})  # type: ignore[arg-type]
            cleanup.callback(store.close)
            return store

        yield make


@pytest.fixture
def etcd() -> Iterator[EtcdServers]:
    with etcd_servers() as servers:
        yield servers


@pytest.fixture
def three() -> Iterator[EtcdServers]:
    with etcd_servers(3) as servers:
        yield servers


def answers(store: Store) -> bool:
    """Whether it does just now; also a way to wait until it does."""
    try:
        store.read("k")
    except StoreUnavailable:
        return False
    return True


def fails_promptly(call: Callable[[], object], within_s: float) -> None:
    """A slow machine has three tries."""
    took = []
    while len(took) < 3:
        began = time.monotonic()
        with pytest.raises(StoreUnavailable):
            call()
        took.append(time.monotonic() - began)
        if took[-1] <= within_s + 0.3:
            return
    raise AssertionError(f"took {took} s, should have taken {within_s} s")


def version(store: Store, key: str) -> int:
    found = store.read(key)
    assert found is not None
    return found.version


def put(store: Store, key: str, value: bytes) -> None:
    found = store.read(key)
    assert store.compare_and_swap(key, found.version if found else None, value)


def test_an_etcd_that_restarts_is_two_sentences(etcd: EtcdServers, opened: Open, until: Until) -> None:
    said: list[str] = []
    heard: list[str] = []
    store = opened(etcd.endpoints, timeout_s=PROMPT_S, say=said.append)
    put(store, "job/round", b"1")
    lease = store.announce("job/node", b"", 30.0)
    assert lease is not None
    store.watch("job/", heard.append)
    etcd.kill()
    fails_promptly(lambda: store.read("job/round"), PROMPT_S)
    fails_promptly(lambda: store.compare_and_swap("job/round", None, b"2"), PROMPT_S)
    fails_promptly(lease.renew, PROMPT_S)
    assert len(said) == 1
    assert f"127.0.0.1:{etcd.port}" in said[0]
    etcd.restart()
    until(lambda: answers(store), SOON_S)
    until(lambda: len(said) == 2, SOON_S)
    assert "the store is back" in said[1]
    until(lambda: "job/" in heard, SOON_S)
    assert lease.renew(), "a lease survives its etcd's restart"
    heard.clear()
    put(store, "job/round", b"2")
    until(lambda: heard, SOON_S)
    assert len(said) == 2


def test_what_happened_while_a_watch_was_cut_off_is_heard(etcd: EtcdServers, opened: Open, until: Until) -> None:
    proxy = Proxy(etcd.port)
    try:
        cut, other = opened([("127.0.0.1", proxy.port)], timeout_s=PROMPT_S), opened(etcd.endpoints)
        put(other, "job/old", b"1")
        put(other, "job/gone", b"1")
        heard: list[str] = []
        cut.watch("job/", heard.append)
        proxy.lose_answers_to(b"unmistakable")
        with pytest.raises(StoreUnavailable):
            cut.compare_and_swap("job/lost", None, b"unmistakable")
        put(other, "job/new", b"1")
        other.delete("job/gone")
        etcd.ctl("compaction", str(max(v.version for v in other.list("").values())))
        assert heard == []
        proxy.heal()
        until(lambda: "job/" in heard, SOON_S)
        heard.clear()
        put(other, "job/new", b"2")
        until(lambda: heard, SOON_S)
    finally:
        proxy.close()


class Interrupted(EtcdRequests):
    """Lets something happen just before a watch begins to follow, and counts how often one does."""

    meanwhile: Callable[[], object] = staticmethod(lambda: None)
    follows = 0

    def follow(self) -> WatchStream:
        self.follows += 1
        self.meanwhile()
        return super().follow()


def test_what_a_watch_was_not_there_for_its_caller_reads(etcd: EtcdServers, opened: Open, until: Until) -> None:
    store = opened(etcd.endpoints)
    put(store, "job/round", b"1")
    requests = Interrupted(store._requests().connection)
    requests.meanwhile = lambda: put(store, "job/round", b"2")
    heard: list[str] = []
    watches = EtcdWatches(requests)
    watches.begin("job/", heard.append)
    found = store.read("job/round")
    assert found is not None
    assert found.value == b"2"
    put(store, "job/round", b"3")
    until(lambda: heard, SOON_S)
    assert set(heard) == {"job/round"}, "a watch that began in time has nothing else to say"
    watches.close()


def test_a_watch_that_begins_late_says_so(etcd: EtcdServers, opened: Open, until: Until) -> None:
    store = opened(etcd.endpoints, timeout_s=PROMPT_S)
    assert answers(store)
    requests = Interrupted(store._requests().connection)
    go = threading.Event()
    requests.meanwhile = lambda: go.wait(SOON_S)
    heard: list[str] = []
    watches = EtcdWatches(requests)
    watches.begin("job/", heard.append)
    assert heard == []
    go.set()
    until(lambda: heard, SOON_S)
    assert heard == ["job/"]
    assert requests.follows == 1
    watches.close()


def test_a_lost_answer_is_never_taken_for_a_lost_race(etcd: EtcdServers, opened: Open, until: Until) -> None:
    proxy = Proxy(etcd.port)
    outcome: list[object] = []
    try:
        store, other = opened([("127.0.0.1", proxy.port)], timeout_s=SOON_S), opened(etcd.endpoints)
        assert answers(store)

        def swap() -> None:
            try:
                outcome.append(store.compare_and_swap("k", None, b"unmistakable"))
            except StoreUnavailable as error:
                outcome.append(error)

        proxy.lose_answers_to(b"unmistakable")
        swapping = threading.Thread(target=swap)
        swapping.start()
        until(lambda: other.read("k"), SOON_S)
        # From now on asking again would be answered: no, it is there.
        proxy.heal()
        swapping.join(2 * SOON_S)
        assert isinstance(outcome[0], StoreUnavailable), outcome
    finally:
        proxy.close()


def test_an_announcement_whose_answer_was_lost_does_not_stand_in_its_own_way(
    etcd: EtcdServers, opened: Open, until: Until
) -> None:
    proxy = Proxy(etcd.port)
    try:
        store, other = opened([("127.0.0.1", proxy.port)], timeout_s=PROMPT_S), opened(etcd.endpoints)
        assert answers(store)
        proxy.lose_answers_to(b"unmistakable")
        with pytest.raises(StoreUnavailable):
            store.announce("node", b"unmistakable", 60.0)
        until(lambda: other.read("node"), SOON_S)
        proxy.heal()
        until(lambda: answers(store), SOON_S)
        assert store.announce("node", b"second try", 60.0) is not None
        found = other.read("node")
        assert found is not None
        assert found.value == b"second try"
    finally:
        proxy.close()


def test_all_watches_share_a_stream_and_each_ends_alone(etcd: EtcdServers, opened: Open, until: Until) -> None:
    store = opened(etcd.endpoints)
    heard: dict[str, list[str]] = {"a": [], "b": []}
    watches = {name: store.watch(f"{name}/", heard[name].append) for name in heard}
    assert sum(thread.name == "etcd watches" for thread in threading.enumerate()) == 1
    put(store, "a/1", b"")
    put(store, "b/1", b"")
    until(lambda: heard == {"a": ["a/1"], "b": ["b/1"]}, SOON_S)
    watches["a"].close()
    put(store, "a/2", b"")
    put(store, "b/2", b"")
    until(lambda: heard["b"] == ["b/1", "b/2"], SOON_S)
    assert heard["a"] == ["a/1"]
    watches["b"].close()
    until(lambda: not any(thread.name == "etcd watches" for thread in threading.enumerate()), SOON_S)
    store.watch("a/", heard["a"].append)
    put(store, "a/3", b"")
    until(lambda: heard["a"] == ["a/1", "a/3"], SOON_S)


def test_a_watch_can_begin_during_an_outage(etcd: EtcdServers, opened: Open, until: Until) -> None:
    put(opened(etcd.endpoints), "job/round", b"1")
    etcd.kill()
    heard: list[str] = []
    opened(etcd.endpoints, timeout_s=PROMPT_S).watch("job/", heard.append)
    etcd.restart()
    until(lambda: heard, SOON_S)
    assert set(heard) == {"job/"}


def test_a_frozen_etcd_keeps_nobody_waiting(etcd: EtcdServers, opened: Open, until: Until) -> None:
    store = opened(etcd.endpoints, timeout_s=PROMPT_S)
    put(store, "k", b"1")
    lease = store.announce("node", b"", 30.0)
    assert lease is not None
    heard: list[str] = []
    watch = store.watch("k", heard.append)
    etcd.stop()
    fails_promptly(lambda: store.read("k"), PROMPT_S)
    fails_promptly(lambda: store.list(""), PROMPT_S)
    fails_promptly(lambda: store.compare_and_swap("k", 1, b"2"), PROMPT_S)
    fails_promptly(lambda: store.delete("other"), PROMPT_S)
    fails_promptly(lambda: store.announce("other", b"", 30.0), PROMPT_S)
    fails_promptly(lease.renew, PROMPT_S)
    fails_promptly(lambda: lease.put("other", b""), PROMPT_S)
    began = time.monotonic()
    late = store.watch("late", heard.append)
    late.close()
    assert time.monotonic() - began < 2 * PROMPT_S + 2.0
    etcd.cont()
    until(lambda: answers(store), SOON_S)
    assert lease.renew()
    put(store, "k", b"3")
    until(lambda: heard, SOON_S)
    watch.close()


def test_closing_does_not_wait_for_a_frozen_etcd(etcd: EtcdServers, opened: Open) -> None:
    store = opened(etcd.endpoints)
    for prefix in "abc":
        store.watch(prefix, lambda key: None)
    reader = threading.Thread(target=answers, args=(store,))
    etcd.stop()
    reader.start()
    began = time.monotonic()
    store.close()
    reader.join(SOON_S)
    assert time.monotonic() - began < 3.0
    with pytest.raises(StoreUnavailable, match="closed"):
        store.read("k")


def test_a_quorum_lost_and_found(three: EtcdServers, opened: Open, until: Until) -> None:
    said: list[str] = []
    heard: list[str] = []
    store = opened(three.endpoints, timeout_s=2.0, say=said.append)
    put(store, "k", b"1")
    store.watch("k", heard.append)
    three.kill(0)
    until(lambda: answers(store), SOON_S)
    three.kill(1)
    until(lambda: not answers(store), SOON_S)
    with pytest.raises(StoreUnavailable):
        store.compare_and_swap("k", None, b"2")
    until(lambda: said, SOON_S)
    three.restart(0)
    until(lambda: answers(store), SOON_S)
    heard.clear()
    until(lambda: answers(store) and (put(store, "k", b"3") or heard), SOON_S)


def test_one_of_three_frozen_is_no_outage(three: EtcdServers, opened: Open, until: Until) -> None:
    said: list[str] = []
    heard: list[str] = []
    store, other = opened(three.endpoints, timeout_s=6.0, say=said.append), opened(three.endpoints, timeout_s=6.0)
    assert answers(store)
    store.watch("job/", heard.append)
    for index in range(3):  # the one that it talks to is among them
        three.stop(index)
        assert answers(store), "a read finds another member within its time"
        until(lambda: answers(other), SOON_S)
        put(other, "job/round", b"1")
        until(lambda: heard, SOON_S)
        three.cont(index)
        heard.clear()
    assert said == []


def test_one_of_three_killed_is_no_outage_for_readers(three: EtcdServers, opened: Open) -> None:
    said: list[str] = []
    store = opened(three.endpoints, say=said.append)
    for index in range(3):
        assert answers(store)
        three.kill(index)
        assert answers(store)
        three.restart(index)
    assert said == []


def test_a_lease_ended_behind_our_back(etcd: EtcdServers, opened: Open, until: Until) -> None:
    store = opened(etcd.endpoints)
    heard: list[str] = []
    store.watch("node", heard.append)
    lease = store.announce("node", b"", 30.0)
    assert lease is not None
    assert lease.renew()
    number = etcd.ctl("lease", "list").split()[-1]
    etcd.ctl("lease", "revoke", number)
    assert not lease.renew()
    assert lease.put("planner", b"") is None
    assert store.read("node") is None
    lease.withdraw()
    until(lambda: len(heard) >= 2, SOON_S)


def test_a_store_that_comes_back_empty(etcd: EtcdServers, opened: Open, until: Until) -> None:
    store = opened(etcd.endpoints)
    heard: list[str] = []
    for value in range(20):
        put(store, "job/round", str(value).encode())
    lease = store.announce("job/node", b"", 30.0)
    assert lease is not None
    store.watch("job/", heard.append)
    etcd.restart(empty=True)
    until(lambda: answers(store), SOON_S)
    until(lambda: "job/" in heard, SOON_S)
    assert store.list("") == {}
    assert not lease.renew()
    heard.clear()
    # Its revisions begin again, far below the one that the watch had seen.
    put(store, "job/round", b"new")
    until(lambda: heard == ["job/round"], SOON_S)


def test_a_lease_lives_as_long_as_etcd_says(opened: Open) -> None:
    # etcd grants no less than 1.5 election timeouts.
    with etcd_servers(flags=["--heartbeat-interval", "200", "--election-timeout", "2000"]) as slow:
        store = opened(slow.endpoints)
        short, uneven = store.announce("a", b"", 1.0), store.announce("b", b"", 3.2)
        assert short is not None
        assert uneven is not None
        assert (short.ttl_s, uneven.ttl_s) == (3.0, 4.0)
        store.close()


def test_a_large_job_is_read_in_one_piece(etcd: EtcdServers, opened: Open) -> None:
    store = opened(etcd.endpoints)
    for number in range(8):
        assert store.compare_and_swap(f"n/{number}", None, bytes(1_000_000))
    assert sum(len(found.value) for found in store.list("n/").values()) == 8_000_000


def test_importing_it_costs_nothing_and_using_it_touches_nothing_else() -> None:
    program = """
import os, sys
before = dict(os.environ)
import elasticd_agent.store.etcd.store as etcd
store = etcd.EtcdStore([("127.0.0.1", 1)])
store.close()
assert not {"grpc", "etcd3", "tenacity", "google.protobuf"} & set(sys.modules), "loaded too early"
from elasticd_agent.store.etcd.proto import rpc
assert rpc.RangeRequest.FromString(rpc.RangeRequest(key=b"k").SerializeToString()).key == b"k"
from google.protobuf import descriptor_pool
try:
    descriptor_pool.Default().FindFileByName("rpc.proto")
except KeyError:
    assert dict(os.environ) == before
    print("fine")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == ["fine"], done.stderr


def test_endpoints_are_needed() -> None:
    with pytest.raises(UsageError, match="host:port"):
        EtcdStore([])
