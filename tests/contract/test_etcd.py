"""EtcdStore while real etcds are killed, frozen, emptied and outvoted."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from elasticd.errors import StoreUnavailable
from elasticd_agent.store.etcd.store import EtcdStore
from elasticd_agent.store.etcd.stream import WatchStream
from elasticd_agent.store.etcd.watch import EtcdWatches
from tests.contract.proxy import Proxy
from tests.contract.reading import answers, found, put
from tests.etcd import EtcdServers, etcd_servers

Until = Callable[[Callable[[], object], float], object]
Open = Callable[..., EtcdStore]
SOON_S = 60.0
IDLE_S = 3.0
PROMPT_S = 0.5
"""What calls are given here; they may take 0.3 s more."""


@pytest.fixture
def opened() -> Iterator[Open]:
    """Makes stores that are closed before the servers end."""
    with ExitStack() as cleanup:

        def make(endpoints: list[tuple[str, int]], **options: object) -> EtcdStore:
            store = EtcdStore(endpoints, **{"timeout_s": 20.0, **options})  # type: ignore[arg-type]
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


def wake_ups() -> dict[str, int]:
    """How often each thread of this process has waited so far, by its number."""
    found = {}
    for task in Path("/proc/self/task").iterdir():
        lines = (task / "status").read_text().splitlines()
        found[task.name] = next(int(line.split()[1]) for line in lines if line.startswith("voluntary_ctxt_switches"))
    return found


def fail_promptly(store: EtcdStore, *calls: Callable[[], object]) -> None:
    """A slow machine has ten tries. All else has the time that it needs."""
    connection = store.connection()
    before, connection.timeout_s = connection.timeout_s, PROMPT_S
    for call in calls:
        took = list[float]()
        while not took or took[-1] > PROMPT_S + 0.3:
            assert len(took) < 10, f"took {took} s, should have taken {PROMPT_S} s"
            began = time.monotonic()
            with pytest.raises(StoreUnavailable):
                call()
            took.append(time.monotonic() - began)
    connection.timeout_s = before


def test_restart_of_etcd_is_logged_twice(etcd: EtcdServers, opened: Open, until: Until) -> None:
    """Once when the outage begins, and once when it ends."""
    messages: list[str] = []
    heard: list[str] = []
    store = opened(etcd.endpoints, log=messages.append)
    put(store, "job/round", b"1")
    lease = store.announce("job/node", b"", 30.0)
    assert lease is not None
    store.watch(heard.append, "job/")
    etcd.kill()
    fail_promptly(
        store, lambda: store.read("job/round"), lambda: store.compare_and_swap("job/round", None, b"2"), lease.renew
    )
    assert len(messages) == 1
    assert f"127.0.0.1:{etcd.port}" in messages[0]
    etcd.restart()
    until(lambda: answers(store), SOON_S)
    until(lambda: len(messages) == 2, SOON_S)
    assert "answers again" in messages[1]
    until(lambda: "job/" in heard, SOON_S)
    assert lease.renew(), "a lease survives its etcd's restart"
    heard.clear()
    put(store, "job/round", b"2")
    until(lambda: heard, SOON_S)
    assert len(messages) == 2


def test_etcd_without_room_is_logged_once(opened: Open) -> None:
    """It answers all that reads: nothing is well again for that."""
    lines: list[str] = []
    with etcd_servers(flags=["--quota-backend-bytes=20000"]) as full:
        store = opened(full.endpoints, timeout_s=PROMPT_S, log=lines.append)
        for _ in range(3):
            assert store.read("/a") is None
            with pytest.raises(StoreUnavailable, match="its disk quota is used up"):
                store.compare_and_swap("/a", None, b"x" * 30_000)
        store.close()
    assert len(lines) == 1, lines


def test_watch_after_a_broken_stream(etcd: EtcdServers, opened: Open, until: Until) -> None:
    """It names its whole prefix, because it may have missed changes."""
    proxy = Proxy(etcd.port)
    try:
        cut, other = opened([("127.0.0.1", proxy.port)]), opened(etcd.endpoints)
        put(other, "job/old", b"1")
        put(other, "job/gone", b"1")
        heard: list[str] = []
        cut.watch(heard.append, "job/")
        proxy.lose_answers_to(b"unmistakable")
        cut.connection().timeout_s = PROMPT_S
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


def test_connection_that_takes_long(etcd: EtcdServers, opened: Open) -> None:
    """As of several round trips on a slow link: a connection has half of the time that a call has."""
    proxy = Proxy(etcd.port, connects_in_s=1.0)
    try:
        assert opened([("127.0.0.1", proxy.port)]).read("k") is None
    finally:
        proxy.close()


def interrupted(store: EtcdStore, meanwhile: Callable[[], object]) -> list[int]:
    """Call `meanwhile` just before a watch begins to follow. Returns the calls."""
    connection, follows = store.connection(), list[int]()
    follow = connection.open_watch_stream

    def interrupt() -> WatchStream:
        follows.append(1)
        meanwhile()
        return follow()

    connection.open_watch_stream = interrupt  # type: ignore[method-assign]
    return follows


def test_change_before_the_watch_is_confirmed(etcd: EtcdServers, opened: Open, until: Until) -> None:
    store = opened(etcd.endpoints)
    put(store, "job/round", b"1")
    interrupted(store, lambda: put(store, "job/round", b"2"))
    heard: list[str] = []
    watches = EtcdWatches(store.connection())
    watches.begin(heard.append, ("job/",))
    assert found(store, "job/round").value == b"2"
    put(store, "job/round", b"3")
    until(lambda: heard, SOON_S)
    assert set(heard) == {"job/round"}, "a watch that began in time has nothing else to say"
    watches.close()


def test_watch_that_begins_late_names_its_prefixes(etcd: EtcdServers, opened: Open, until: Until) -> None:
    store = opened(etcd.endpoints)
    assert answers(store)
    store.connection().timeout_s = PROMPT_S
    go = threading.Event()
    follows = interrupted(store, lambda: go.wait(SOON_S))
    heard: list[str] = []
    watches = EtcdWatches(store.connection())
    watches.begin(heard.append, ("job/", "other/"))
    assert heard == []
    go.set()
    until(lambda: len(heard) == 2, SOON_S)
    assert heard == ["job/", "other/"]
    assert len(follows) == 1
    watches.close()


def test_failed_requests_leave_no_garbage() -> None:
    """A hundred agents wait out an outage: what each request leaves would be theirs until garbage is collected."""
    store = EtcdStore([("127.0.0.1", 1)], timeout_s=PROMPT_S)

    def fail() -> None:
        with pytest.raises(StoreUnavailable):
            store.read("k")
        with pytest.raises(StoreUnavailable):
            store.compare_and_swap("k", None, b"v")

    fail()
    gc.collect()
    gc.disable()
    try:
        fail()
        assert gc.collect() < 100, "frames, requests and answers in cycles"
    finally:
        gc.enable()
        store.close()


def test_lost_answer_is_no_lost_race(etcd: EtcdServers, opened: Open, until: Until) -> None:
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


def test_announce_again_after_a_lost_answer(etcd: EtcdServers, opened: Open, until: Until) -> None:
    proxy = Proxy(etcd.port)
    try:
        store, other = opened([("127.0.0.1", proxy.port)]), opened(etcd.endpoints)
        assert answers(store)
        proxy.lose_answers_to(b"unmistakable")
        connection = store.connection()
        before, connection.timeout_s = connection.timeout_s, PROMPT_S
        with pytest.raises(StoreUnavailable):
            store.announce("node", b"unmistakable", 60.0)
        connection.timeout_s = before
        until(lambda: other.read("node"), SOON_S)
        proxy.heal()
        until(lambda: answers(store), SOON_S)
        assert store.announce("node", b"second try", 60.0) is not None
        assert found(other, "node").value == b"second try"
    finally:
        proxy.close()


def test_watches_on_which_nothing_happens_do_not_wake(etcd: EtcdServers, opened: Open, until: Until) -> None:
    """Python's threads wait in the kernel; gRPC's own have timers."""
    others = set(wake_ups())
    store, heard = opened(etcd.endpoints), list[str]()
    for prefix in "abcdef":
        store.watch(heard.append, prefix)
    store.watch(heard.append, "g").close()
    put(store, "a/1", b"")
    until(lambda: heard == ["a/1"], SOON_S)
    began = wake_ups()
    time.sleep(IDLE_S)
    woken = {task: count - began.get(task, 0) for task, count in wake_ups().items() if task not in others}
    ours = {str(thread.native_id): thread.name for thread in threading.enumerate()}
    assert {name for task, name in ours.items() if task in woken} >= {"etcd watches", "etcd streams"}
    assert not {name for task, name in ours.items() if woken.get(task, 0) > IDLE_S}, woken


def test_watches_share_one_stream(etcd: EtcdServers, opened: Open, until: Until) -> None:
    store = opened(etcd.endpoints)
    heard: dict[str, list[str]] = {"a": [], "b": []}
    watches = {name: store.watch(heard[name].append, f"{name}/") for name in heard}
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
    store.watch(heard["a"].append, "a/")
    put(store, "a/3", b"")
    until(lambda: heard["a"] == ["a/1", "a/3"], SOON_S)


def test_watch_begins_during_an_outage(etcd: EtcdServers, opened: Open, until: Until) -> None:
    put(opened(etcd.endpoints), "job/round", b"1")
    etcd.kill()
    heard: list[str] = []
    opened(etcd.endpoints, timeout_s=PROMPT_S).watch(heard.append, "job/")
    etcd.restart()
    until(lambda: heard, SOON_S)
    assert set(heard) == {"job/"}


def test_calls_to_a_frozen_etcd_end_in_time(etcd: EtcdServers, opened: Open, until: Until) -> None:
    store = opened(etcd.endpoints)
    put(store, "k", b"1")
    lease = store.announce("node", b"", 60.0)
    assert lease is not None
    heard: list[str] = []
    watch = store.watch(heard.append, "k")
    etcd.stop()
    fail_promptly(
        store,
        lambda: store.read("k"),
        lambda: store.list(""),
        lambda: store.compare_and_swap("k", 1, b"2"),
        lambda: store.delete("other"),
        lambda: store.announce("other", b"", 30.0),
        lease.renew,
        lambda: lease.put("other", b""),
    )
    connection = store.connection()
    before, connection.timeout_s = connection.timeout_s, PROMPT_S
    began = time.monotonic()
    late = store.watch(heard.append, "late")
    late.close()
    assert time.monotonic() - began < before
    connection.timeout_s = before
    etcd.cont()
    until(lambda: answers(store), SOON_S)
    assert lease.renew()
    put(store, "k", b"3")
    until(lambda: heard, SOON_S)
    watch.close()


def test_close_with_a_frozen_etcd(etcd: EtcdServers, opened: Open) -> None:
    store = opened(etcd.endpoints, timeout_s=100.0)
    for prefix in "abc":
        store.watch(lambda key: None, prefix)
    reader = threading.Thread(target=answers, args=(store,))
    etcd.stop()
    reader.start()
    began = time.monotonic()
    store.close()
    reader.join(SOON_S)
    assert time.monotonic() - began < 30.0
    with pytest.raises(StoreUnavailable, match="closed"):
        store.read("k")


def test_quorum_lost_and_restored(three: EtcdServers, opened: Open, until: Until) -> None:
    messages: list[str] = []
    heard: list[str] = []
    store = opened(three.endpoints, log=messages.append)
    put(store, "k", b"1")
    store.watch(heard.append, "k")
    three.kill(0)
    until(lambda: answers(store), SOON_S)
    three.kill(1)
    connection = store.connection()
    before, connection.timeout_s = connection.timeout_s, 2.0
    until(lambda: not answers(store), SOON_S)
    with pytest.raises(StoreUnavailable):
        store.compare_and_swap("k", None, b"2")
    until(lambda: messages, SOON_S)
    connection.timeout_s = before
    three.restart(0)
    until(lambda: answers(store), SOON_S)
    heard.clear()
    until(lambda: answers(store) and (put(store, "k", b"3") or heard), SOON_S)


@pytest.mark.system
def test_one_of_three_members_frozen(three: EtcdServers, opened: Open, until: Until) -> None:
    messages: list[str] = []
    heard: list[str] = []
    store, other = opened(three.endpoints, timeout_s=6.0, log=messages.append), opened(three.endpoints, timeout_s=6.0)
    assert answers(store)
    store.watch(heard.append, "job/")
    for index in range(3):  # the one that it talks to is among them
        three.stop(index)
        assert answers(store), "a read finds another member within its time"
        until(lambda: answers(other), SOON_S)
        put(other, "job/round", b"1")
        until(lambda: heard, SOON_S)
        three.cont(index)
        heard.clear()
    assert messages == []


def test_one_of_three_members_killed(three: EtcdServers, opened: Open) -> None:
    messages: list[str] = []
    store = opened(three.endpoints, log=messages.append)
    for index in range(3):
        assert answers(store)
        three.kill(index)
        assert answers(store)
        three.restart(index)
    assert messages == []


def test_lease_revoked_by_another_client(etcd: EtcdServers, opened: Open, until: Until) -> None:
    store = opened(etcd.endpoints)
    heard: list[str] = []
    store.watch(heard.append, "node")
    lease = store.announce("node", b"", 30.0)
    assert lease.renew()
    number = etcd.ctl("lease", "list").split()[-1]
    etcd.ctl("lease", "revoke", number)
    assert not lease.renew()
    assert lease.put("planner", b"") is None
    assert store.read("node") is None
    lease.withdraw()
    until(lambda: len(heard) >= 2, SOON_S)


def test_etcd_that_lost_its_data(etcd: EtcdServers, opened: Open, until: Until) -> None:
    store = opened(etcd.endpoints)
    heard: list[str] = []
    for value in range(20):
        put(store, "job/round", str(value).encode())
    lease = store.announce("job/node", b"", 30.0)
    assert lease is not None
    store.watch(heard.append, "job/")
    etcd.restart(empty=True)
    until(lambda: answers(store), SOON_S)
    until(lambda: "job/" in heard, SOON_S)
    assert store.list("") == {}
    assert not lease.renew()
    heard.clear()
    # Its revisions begin again, far below the one that the watch had seen.
    put(store, "job/round", b"new")
    until(lambda: heard == ["job/round"], SOON_S)


def test_list_of_an_etcd_restored_from_a_backup(etcd: EtcdServers, opened: Open, until: Until) -> None:
    """Also once its revisions have come as far as before."""
    store = opened(etcd.endpoints)
    heard: list[str] = []
    put(store, "job/a", b"older")
    etcd.back_up()
    until(lambda: answers(store), SOON_S)
    store.watch(heard.append, "job/")
    put(store, "job/a", b"newer")
    known = store.list("job/")
    heard.clear()
    etcd.restart(restored=True)
    until(lambda: answers(store), SOON_S)
    for value in range(9):
        put(store, "other", str(value).encode())
    until(lambda: "job/" in heard, SOON_S)
    assert [item.value for item in store.list("job/", known).values()] == [b"older"]


def test_granted_time_of_a_lease(opened: Open) -> None:
    # etcd grants no less than 1.5 election timeouts.
    with etcd_servers(flags=["--heartbeat-interval", "200", "--election-timeout", "2000"]) as slow:
        store = opened(slow.endpoints)
        short, uneven = store.announce("a", b"", 1.0), store.announce("b", b"", 3.2)
        assert (short.ttl_s, uneven.ttl_s) == (3.0, 4.0)
        store.close()


def test_list_of_a_large_job(etcd: EtcdServers, opened: Open) -> None:
    store = opened(etcd.endpoints)
    for number in range(8):
        assert store.compare_and_swap(f"n/{number}", None, bytes(1_000_000))
    assert sum(len(found.value) for found in store.list("n/").values()) == 8_000_000


def test_grpc_is_imported_at_first_use() -> None:
    """Nothing else in the process that uses protobuf is affected."""
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
