"""Where one agent hosts the store: a leader that was held up cannot publish, and a host that does not lead is left."""

from __future__ import annotations

from elasticd_agent.model.job import Policy
from elasticd_agent.model.keys import Keys
from elasticd_agent.model.messages import StoreAbandoned
from elasticd_agent.model.records import NodeRecord
from elasticd_agent.rendezvous.member import RendezvousMember
from elasticd_agent.rendezvous.membership_client import JobTerms
from elasticd_agent.rendezvous.peers import PeerNetwork
from elasticd_agent.rendezvous.view import LocalFacts, Requirements
from elasticd_agent.store.memory import MemoryStore

KEYS = Keys("job")


class SingleKeyStore(MemoryStore):
    """As c10d is between the look at the guard and the swap: what the guard was worth then counts."""

    compares_one_key = True

    def compare_and_swap(
        self, key: str, expected: int | None, value: bytes, guard: tuple[str, int] | None = None
    ) -> bool:
        return super().compare_and_swap(key, expected, value)


class ForeignStore(SingleKeyStore):
    """The same as its host's clients see it."""

    standalone = False

    def __init__(self, store: SingleKeyStore) -> None:
        vars(self).update(vars(store))


def agent(store: SingleKeyStore, name: str) -> RendezvousMember:
    record = NodeRecord(name, f"{name}1", "", (0,), "", 0, warm=1)
    terms = JobTerms(KEYS, Policy(), Requirements(1, 1, 1, 2, 0.0, "0"), b"{}")
    return RendezvousMember(store, terms, record, LocalFacts(), PeerNetwork(), lambda sentence: None)


def test_new_leader_fences_the_round_key() -> None:
    """It gives the round key another version, so that a former leader that was held up cannot publish."""
    store = SingleKeyStore()
    first, second = agent(store, "a"), agent(store, "b")
    now = 100.0
    while (planned_from := store.read(KEYS.round)) is None:
        first.turn(now)
        now += 0.1
        assert now < 110
    key = store.read(KEYS.planner)
    assert key is not None
    store.delete(KEYS.planner)  # its lease has expired meanwhile
    while not second.leads:
        second.turn(now)
        now += 0.1
        assert now < 120
    late = planned_from.value.replace(b'"number":1', b'"number":2')
    guard = (KEYS.planner, key.version)
    assert not store.compare_and_swap(KEYS.round, planned_from.version, late, guard), "it was held up for too long"
    found = store.read(KEYS.round)
    assert found is not None
    assert found.value == planned_from.value, "nobody has said anything else"


def test_host_that_does_not_lead_is_abandoned() -> None:
    """Its server process answers, its agent is stuck: the others give up after store_away, and not while it leads."""
    store = SingleKeyStore(lambda: now)
    now, host, other = 100.0, agent(store, "a"), agent(ForeignStore(store), "b")
    abandoned: list[StoreAbandoned] = []

    def turns(until: float, *agents: RendezvousMember) -> None:
        nonlocal now
        while now < until:
            for one in agents:
                abandoned.extend(n for n in one.turn(now)[0] if isinstance(n, StoreAbandoned))
            now += 0.5

    turns(500.0, host, other)
    assert host.leads
    turns(500.0 + Policy().lease_s + Policy().store_away_s - 1, other)
    assert not abandoned
    turns(500.0 + Policy().lease_s + Policy().store_away_s + 11, other)
    assert "has not led the job for 30" in abandoned[0].why
