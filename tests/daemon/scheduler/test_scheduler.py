"""One scheduler at a time, over a store with a fake clock, and once over a real etcd."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields

import pytest

from elasticd.errors import StoreUnavailable
from elasticd_agent.model.keys import Keys
from elasticd_agent.model.records import Member, Round
from elasticd_agent.store import Lease, Store
from elasticd_agent.store.etcd.store import EtcdStore
from elasticd_agent.store.lease import LeasedKey
from elasticd_agent.store.memory import MemoryStore
from elasticd_daemon import keys as names
from elasticd_daemon.api import views
from elasticd_daemon.records import KnownNode, NodeStatus, Placement, RunnerStatus, SlotAssignment, Submission
from elasticd_daemon.registration import NodeStatusPublisher
from elasticd_daemon.scheduler import job_queue as queue
from elasticd_daemon.scheduler import retention
from elasticd_daemon.scheduler.scheduler import BOOT_GRACE_S, REREAD_S, Scheduler
from tests.daemon.stores import Clock, InterruptedStore
from tests.etcd import etcd_servers

Until = Callable[[Callable[[], object], float], object]


class Fleet:
    """Nodes whose status is under a lease that is renewed while they are `up`, and a scheduler on each."""

    def __init__(self, *nodes: str, slots: int = 4) -> None:
        self.clock = Clock()
        self.memory = MemoryStore(self.clock)
        self.stores = {node: InterruptedStore(self.memory) for node in nodes}
        self.statuses: dict[str, Lease] = {}
        for node in nodes:
            self.up(node, slots)
        self.schedulers = {node: Scheduler(self.stores[node], node, f"i-{node}") for node in nodes}
        self.sentences: list[str] = []

    def up(self, node: str, slots: int = 4) -> None:
        lease = self.memory.announce(names.NODES + node, NodeStatus(node, "i", slots).to_json(), 3.0)
        assert lease is not None
        self.statuses[node] = lease

    def down(self, node: str) -> None:
        self.statuses.pop(node).withdraw()

    def turn(self, seconds: float = 1.0, *only: str) -> list[str]:
        """A second passes for all nodes, then `only` these schedulers, or all, do a turn."""
        self.clock.now += seconds
        for lease in self.statuses.values():
            lease.renew()
        sentences = [s for node in only or self.schedulers for s in self.schedulers[node].turn(self.clock.now)]
        self.sentences += sentences
        return sentences

    def submit(self, job: str, nodes: tuple[int, int] = (1, 1), slots: tuple[int, int] = (4, 4)) -> None:
        queue.submit(self.memory, Submission(job, 0, "{}", *nodes, *slots))

    def placed(self, job: str) -> Placement:
        return next(p for p in queue.read_view(self.memory).placements if p.job == job)

    def nodes(self, job: str) -> list[str]:
        return [place.node for place in self.placed(job).assignments]

    @property
    def who(self) -> list[str]:
        return [node for node, scheduler in self.schedulers.items() if scheduler.holds_key]


def unavailable(n: int, verb: str, key: str) -> None:
    raise StoreUnavailable("no answer")


@pytest.mark.parametrize(("trained", "booted"), [(False, True), (True, True), (False, False)])
def test_job_that_every_node_refuses_fails_with_their_reasons(trained: bool, booted: bool) -> None:
    """One that has trained waits: a file server may be away; so do all for ten minutes after a power cut."""
    fleet = Fleet("a", "b")
    fleet.clock.now = 1000.0 if booted else 30.0
    for scheduler in fleet.schedulers.values():
        scheduler.refuse_timeout_s = 30.0
    fleet.submit("llama")
    if trained:
        last = round_of("llama", "1", "a", ended=True)  # as a drain of its only node leaves it
        fleet.memory.compare_and_swap(Keys("llama").round, None, last.to_json())
    fleet.turn()

    def refuse(*nodes: str) -> None:
        for node in nodes:
            runner = RunnerStatus("llama", 1, (), "refused", "train.py does not exist")
            fleet.down(node)
            record = NodeStatus(node, "i", 4, runners=(runner,)).to_json()
            lease = fleet.memory.announce(names.NODES + node, record, 3.0)
            assert lease is not None
            fleet.statuses[node] = lease

    def results() -> list[str]:
        return [result.reason for result in queue.read_view(fleet.memory).results]

    refuse("a")
    for _ in range(60):
        fleet.turn()
    assert results() == [], "b may run it"
    refuse("b")
    for _ in range(30):
        fleet.turn()
    assert results() == [], "time to repair it"
    (leader,) = fleet.who
    fleet.stores[leader].before = unavailable
    with pytest.raises(StoreUnavailable):
        fleet.turn()
    fleet.stores[leader].before = lambda n, verb, key: None
    for _ in range(30):
        fleet.turn()
    assert results() == [], "an outage begins it anew"
    for _ in range(5):
        fleet.turn()
    why = "every node refused it for 30 s: a and b refused it: train.py does not exist"
    assert results() == ([why] if booted and not trained else [])
    for _ in range(int(BOOT_GRACE_S)):
        fleet.turn()
    assert results() == ([] if trained else [why])


def test_only_the_scheduler_reads() -> None:
    fleet = Fleet("a", "b", "c")
    fleet.submit("llm")
    fleet.turn()
    assert fleet.who == ["a"]
    assert fleet.nodes("llm") == ["a"]
    for _ in range(50):
        fleet.turn()
    asked = {verb for node in "bc" for verb, _ in fleet.stores[node].requests}
    assert asked == {"announce", "read"}, "the scheduler's key"
    assert fleet.sentences == ["a is the scheduler now", "job llm: runs on a (slots 0-3)"]


def test_idle_turn_only_renews_the_lease() -> None:
    fleet = Fleet("a", "b")
    for job in "xyz":
        fleet.submit(job)
    fleet.turn()
    fleet.turn()
    fleet.stores["a"].requests.clear()
    turns = int(REREAD_S) - 5
    for _ in range(turns):
        assert fleet.turn() == []
    assert {verb for verb, _ in fleet.stores["a"].requests} == {"renew"}
    assert len(fleet.stores["a"].requests) == turns
    fleet.stores["a"].requests.clear()
    for _ in range(100):
        fleet.turn()
    assert not [verb for verb, _ in fleet.stores["a"].requests if verb not in ("renew", "list")]


def test_changes_are_signalled() -> None:
    fleet = Fleet("a")
    called: list[int] = []
    fleet.schedulers["a"] = Scheduler(fleet.memory, "a", "i", on_change=lambda: called.append(1))
    fleet.turn()
    called.clear()
    fleet.memory.compare_and_swap(Keys("llm").done(1) + "a", None, b"")
    assert not called, "the keys of a job's own rendezvous concern no scheduler"
    fleet.submit("llm")
    assert called
    fleet.turn(0.0)
    called.clear()
    queue.cordon(fleet.memory, "a", True, "why", "", 0.0)
    assert called
    assert "a is drained: why" in fleet.turn(0.0)[0]


def test_takeover_after_leaving_or_death() -> None:
    fleet = Fleet("a", "b", "c")
    fleet.turn()
    fleet.schedulers.pop("a").close()
    fleet.submit("one")
    fleet.turn(0.0)
    assert fleet.who == ["b"]
    assert fleet.nodes("one")
    del fleet.schedulers["b"]  # its lease ends
    fleet.submit("two")
    for _ in range(2):
        fleet.turn()
        assert fleet.who == []
    fleet.turn(1.1)
    assert fleet.who == ["c"]
    assert fleet.nodes("two")
    assert fleet.nodes("one")


def test_restarted_agent_waits_for_its_earlier_lease() -> None:
    fleet = Fleet("a")
    fleet.turn()
    fleet.schedulers["a"] = Scheduler(fleet.memory, "a", "i-a-again")
    fleet.turn()
    assert fleet.who == []
    for _ in range(3):
        fleet.turn()
    assert fleet.who == ["a"]


def test_key_whose_creation_was_not_answered_is_taken_again() -> None:
    """It lives with the lease of its agent's node, which goes on: no other agent could ever have it."""
    fleet = Fleet("a", "b")
    node = LeasedKey(fleet.memory, "node of a", 3.0, 1.0, is_own=lambda value: value == b"a")
    assert node.create(b"a", fleet.clock.now)
    answers = iter([False])

    def announce(key: str, value: bytes, ttl_s: float) -> Lease | None:
        lease = node.announce_under_lease(key, value, ttl_s)
        if not next(answers, True):
            raise StoreUnavailable("no answer")
        return lease

    fleet.schedulers["a"] = Scheduler(fleet.memory, "a", "i-a", announce=announce)
    with pytest.raises(StoreUnavailable):
        fleet.turn()
    for _ in range(30):
        assert node.renew(fleet.clock.now)
        fleet.turn()
    assert fleet.who == ["a"]


def test_scheduler_paused_during_a_turn_loses() -> None:
    """At every request of a turn: the lease ends, another one takes over and writes, the first one wakes up."""
    requests = 1
    while requests:
        fleet = Fleet("a", "b", "c")
        fleet.turn(1.0, "a")
        fleet.submit("first", (1, 1), (3, 3))
        fleet.submit("second", (1, 1), (3, 3))

        def paused(n: int, verb: str, key: str, fleet: Fleet = fleet, at: int = requests) -> None:
            if n == at:
                for _ in range(4):
                    fleet.turn(1.0, "b")
                fleet.submit("third", (1, 1), (3, 3))
                fleet.turn(0.0, "b")

        fleet.stores["a"].requests.clear()
        fleet.stores["a"].before = paused
        fleet.turn(0.5, "a")
        reached = len(fleet.stores["a"].requests) >= requests
        used = [
            (p.node, slot)
            for placed in queue.read_view(fleet.memory).placements
            for p in placed.assignments
            for slot in p.slots
        ]
        assert len(used) == len(set(used)) == (9 if reached else 6)
        fleet.stores["a"].before = lambda n, verb, key: None
        fleet.turn(0.5, "a", "b", "c")
        assert len(fleet.who) == 1 if not reached else fleet.who == ["b"]
        requests = requests + 1 if reached else 0
        assert requests < 60


def test_write_that_loses_a_race_is_repeated() -> None:
    fleet = Fleet("a")
    fleet.turn()
    fleet.submit("llm")

    def another(n: int, verb: str, key: str) -> None:
        if verb == "write" and key == names.PLACEMENTS + "llm":
            fleet.stores["a"].before = lambda n, verb, key: None
            mine = Placement("llm", 1, (), "another process wrote this").to_json()
            assert fleet.memory.compare_and_swap(key, None, mine)

    fleet.stores["a"].before = another
    assert fleet.turn() == []
    assert fleet.turn() == ["job llm: runs on a (slots 0-3)"]


def test_silent_watches_cost_only_time() -> None:
    fleet = Fleet("a")
    fleet.stores["a"].watches_silent = True
    fleet.turn()
    fleet.submit("llm")
    for _ in range(int(REREAD_S)):
        fleet.turn()
    assert fleet.nodes("llm") == ["a"]
    fleet.stores["a"].requests.clear()
    fleet.turn()
    assert "write" not in {verb for verb, _ in fleet.stores["a"].requests}, "its own writes are known"
    fleet.submit("next", (1, 1), (4, 4))
    for _ in range(int(REREAD_S)):
        fleet.turn()
    found = fleet.memory.read(names.PLACEMENTS + "next")
    mine = Placement("next", 2, (), "another process wrote this").to_json()
    assert fleet.memory.compare_and_swap(names.PLACEMENTS + "next", found.version, mine)
    queue.cancel(fleet.memory, "llm", "", 0.0)
    for _ in range(int(REREAD_S) + 1):
        fleet.turn()
    assert fleet.nodes("next") == ["a"]

    fleet = Fleet("a", "b")
    fleet.stores["b"].watches_silent = True
    fleet.turn()
    fleet.schedulers.pop("a").close()
    for _ in range(int(REREAD_S)):
        fleet.turn()
    assert fleet.who == ["b"]


def test_absent_agent_back_within_adopt_timeout() -> None:
    """Its job keeps its slots; after the timeout it loses them."""
    fleet = Fleet("a", "b")
    fleet.submit("llm", (2, 2))
    fleet.turn()
    before = fleet.placed("llm")
    for seconds in (5, 59):
        fleet.down("b")
        for _ in range(seconds):
            fleet.turn(1.0, "a")
        assert fleet.placed("llm") == before
        fleet.up("b")
        fleet.turn()
        assert fleet.placed("llm") == before
    fleet.down("b")
    for _ in range(61):
        fleet.turn(1.0, "a")
    assert fleet.placed("llm").reason.startswith("b is gone; a alone is too few; pending: needs 2 nodes")
    fleet.up("b")
    fleet.turn()
    assert fleet.nodes("llm") == ["a", "b"]


def test_outage_or_new_scheduler_restarts_the_absence() -> None:
    fleet = Fleet("a", "b", "c")
    fleet.submit("llm", (3, 3))
    fleet.turn()
    before = fleet.placed("llm")
    fleet.down("c")
    for _ in range(50):
        fleet.turn()

    fleet.stores["a"].before = unavailable
    with pytest.raises(StoreUnavailable):
        fleet.turn(1.0, "a")
    fleet.stores["a"].before = lambda n, verb, key: None
    for _ in range(58):
        fleet.turn(1.0, "a", "b")
        assert fleet.placed("llm") == before
    assert fleet.who == ["a"]
    fleet.schedulers.pop("a").close()
    for _ in range(58):
        fleet.turn(1.0, "b")
        assert fleet.placed("llm") == before
    for _ in range(4):
        fleet.turn(1.0, "b")
    assert not fleet.nodes("llm")


def round_of(job: str, run: str, *nodes: str, ended: bool = False) -> Round:
    members = () if ended else tuple(Member(node, "i", (0, 1)) for node in nodes)
    end = {"outcome": "failed", "exit_code": 1} if ended else {}
    return Round(3, members, run=run, reason="why", **end)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("round", "moves"),
    [
        (round_of("llm", "1", "a"), True),
        (round_of("llm", "1", "a", "b"), False),
        (round_of("llm", "0", "a"), False),
        (round_of("llm", "1", ended=True), False),
        (b"garbage", False),
        (None, False),
    ],
)
def test_job_that_continued_without_an_absent_node(round: Round | bytes | None, moves: bool) -> None:
    """The slots there are given up at once, but only if the job's own round shows it."""
    fleet = Fleet("a", "b", "c")
    fleet.down("c")
    fleet.submit("llm", (1, 2))
    fleet.turn()
    assert fleet.nodes("llm") == ["a", "b"]
    fleet.up("c")
    if round is not None:
        value = round.to_json() if isinstance(round, Round) else round
        assert fleet.memory.compare_and_swap(Keys("llm").round, None, value)
    fleet.turn()
    assert fleet.nodes("llm") == ["a", "b"], "for a node whose agent is there the round does not count"
    fleet.down("b")
    fleet.turn(1.0, "a")
    fleet.turn(1.0, "a")
    assert fleet.nodes("llm") == (["a", "c"] if moves else ["a", "b"])


def test_undecodable_node_status_keeps_its_jobs() -> None:
    fleet = Fleet("a", "b")
    fleet.submit("llm", (2, 2), (2, 2))
    fleet.turn()
    found = fleet.memory.read(names.NODES + "b")
    newer = found.value.replace(b'"version":"1.0"', b'"version":"2.0"')
    assert fleet.memory.compare_and_swap(names.NODES + "b", found.version, newer)
    sentences = fleet.turn()
    assert len([s for s in sentences if "nodes/b in the store cannot be decoded" in s]) == 1
    for _ in range(100):
        assert not fleet.turn()
    assert fleet.nodes("llm") == ["a", "b"]
    fleet.submit("next", (2, 2), (2, 2))
    fleet.schedulers["a"].close()
    fleet.schedulers = {"a": Scheduler(fleet.stores["a"], "a", "i-again")}
    assert "a is the scheduler now" in fleet.turn()
    fleet.turn()
    assert fleet.nodes("llm") == ["a", "b"], "a new scheduler cannot read it either"
    assert "b is cordoned: its status cannot be decoded" in fleet.placed("next").reason


def test_node_registers_during_the_first_read() -> None:
    """After an outage nodes register one by one: here between two reads."""
    fleet = Fleet("a", "b")
    fleet.submit("llm", (2, 2), (2, 2))
    fleet.turn()
    fleet.schedulers["a"].close()
    fleet.down("b")
    came = []

    def comes(n: int, verb: str, key: str) -> None:
        if (verb, key) == ("list", names.PLACEMENTS) and not came:
            came.append(n)
            fleet.up("b")

    fleet.stores["a"].before = comes
    fleet.schedulers = {"a": Scheduler(fleet.stores["a"], "a", "i-again")}
    sentences = [*fleet.turn(), *fleet.turn()]
    assert came
    assert sentences == ["a is the scheduler now"]
    assert fleet.nodes("llm") == ["a", "b"]


def test_undecodable_job_records_keep_their_slots() -> None:
    fleet = Fleet("a")
    for job in ("good", "bad"):
        fleet.submit(job, (1, 1), (1, 1))
    fleet.turn()
    for prefix in (names.SUBMISSIONS, names.PLACEMENTS, names.RESULTS):
        key = prefix + "bad"
        before = fleet.memory.read(key)
        assert fleet.memory.compare_and_swap(key, None if before is None else before.version, b"\xff{")
        fleet.turn()
        now = fleet.memory.read(key)
        assert now.value == b"\xff{"
        if before is not None:
            assert fleet.memory.compare_and_swap(key, now.version, before.value)
            fleet.turn()
    assert fleet.nodes("good") == ["a"]
    fleet.submit("more", (1, 1), (3, 3))
    fleet.turn()
    assert fleet.placed("more").reason.endswith("a has 2 of 4 free"), "bad keeps its slot"


def test_emptied_store() -> None:
    fleet = Fleet("a", "b")
    fleet.submit("llm")
    fleet.turn()
    for key in fleet.memory.list(""):
        fleet.memory.delete(key)
    fleet.statuses.clear()
    for _ in range(5):
        fleet.turn()
    fleet.up("a")
    fleet.submit("again")
    for _ in range(5):
        fleet.turn()
    assert fleet.who
    assert fleet.nodes("again") == ["a"]


def test_lost_nodes_are_dropped_from_memory() -> None:
    fleet = Fleet("a")
    for n in range(30):
        fleet.up(f"pod-{n}")
        fleet.turn()
        fleet.down(f"pod-{n}")
    for _ in range(70):
        fleet.turn()
    kept = [getattr(fleet.schedulers["a"], field.name) for field in fields(Scheduler)]
    assert [value for value in kept if isinstance(value, (dict, set, list)) and len(value) > 1] == []


def test_two_schedulers_on_etcd(until: Until) -> None:
    with etcd_servers() as etcd:
        stores: list[Store] = [EtcdStore(etcd.endpoints, timeout_s=30.0) for _ in range(2)]
        one, two = (Scheduler(store, name, f"i-{name}", lease_s=60.0) for store, name in zip(stores, "ab", strict=True))
        try:
            status = stores[0].announce(names.NODES + "a", NodeStatus("a", "i", 4).to_json(), 60.0)
            assert status is not None
            queue.submit(stores[1], Submission("llm", 0, "{}", 1, 1, 2, 2))
            assert one.turn(0.0) == ["a is the scheduler now", "job llm: runs on a (slots 0-1)"]
            assert two.turn(0.0) == []
            # The key goes, as at the end of its lease.
            stores[1].delete(names.SCHEDULER)
            until(lambda: "b is the scheduler now" in two.turn(0.1), 60.0)
            queue.submit(stores[1], Submission("next", 0, "{}", 1, 1, 2, 2))

            def noticed() -> bool:
                return "another agent is the scheduler now" in one.turn(0.2)

            until(noticed, 60.0)
            assert not one.holds_key
            assert "next" not in {p.job for p in queue.read_view(stores[0]).placements}
            until(lambda: "job next: runs on a (slots 2-3)" in two.turn(0.3), 60.0)
            assert {p.job: p.assignments for p in queue.read_view(stores[0]).placements} == {
                "llm": (SlotAssignment("a", (0, 1)),),
                "next": (SlotAssignment("a", (2, 3)),),
            }
            two.close()
            one.close()
            assert stores[0].read(names.SCHEDULER) is None
        finally:
            for store in stores:
                store.close()


def test_lost_node_is_shown_until_it_is_back_or_long_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Since when, and what ran there; also by a scheduler that has never seen it. A node that left is not missed."""
    monkeypatch.setattr("time.time", lambda: 1_800_000_000.0)
    fleet = Fleet("a", "b")
    publishers = {node: NodeStatusPublisher(fleet.memory, NodeStatus(node, "i", 4, "h:1"), 3.0, 1.0) for node in "cd"}

    def turn(*nodes: str, seconds: float = 1.0) -> None:
        for node in nodes:
            publishers[node].publish(NodeStatus(node, "i", 4, "h:1"), fleet.clock.now)
        fleet.turn(seconds)

    def shown(after_s: float = 0.0) -> dict[str, tuple[str, str]]:
        rows = views.node_summaries(queue.read_view(fleet.memory), 1_800_000_000.0 + after_s)
        return {row.node: (row.state, row.reason) for row in rows if row.node in "cd"}

    for _ in range(3):
        turn("c", "d")
    fleet.submit("llama", (4, 4))
    turn("c", "d")
    assert shown() == {"c": ("ready", ""), "d": ("ready", "")}
    for scheduler in fleet.schedulers.values():
        scheduler.close()  # the next one knows no node yet
        scheduler.retention_s = 30.0
    publishers["d"].leave()
    fleet.clock.now += 4.0
    assert shown() == {"c": ("lost", "its agent, the machine or its network is down")}
    for _ in range(4):
        turn()
    why = "for 12 min, since 2027-01-15 08:00:00 UTC: its agent, the machine or its network is down; it ran llama"
    assert shown(720.0) == {"c": ("lost", why)}
    queue.cordon(fleet.memory, "c", True, "fan", "ann", 0.0)
    assert shown(720.0) == {"c": ("lost", f"{why}; cordoned: fan (by ann)")}
    queue.uncordon(fleet.memory, "c")
    for _ in range(3):
        turn("c")
    assert shown() == {"c": ("ready", "")}
    fleet.clock.now += 4.0
    turn()
    assert shown()["c"][0] == "lost"
    for _ in range(40):
        turn()
    assert shown() == {}


def test_lost_nodes_are_bounded_by_number() -> None:
    lost = tuple(KnownNode(f"spot-{at:03}", lost_s=float(at)) for at in range(retention.MAX_LOST_NODES + 2))
    view = queue.ClusterView(known_nodes=lost)
    assert retention.nodes_to_forget(view, 300.0, retention.RETENTION_S) == ("spot-000", "spot-001")
