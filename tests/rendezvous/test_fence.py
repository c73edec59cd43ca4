"""Where one agent hosts the store: a leader that was held up cannot publish, and a host that does not lead is left."""

from __future__ import annotations

from dataclasses import replace

import pytest

from elasticd_agent.model.job import Policy
from elasticd_agent.model.keys import Keys, encode_record
from elasticd_agent.model.messages import RoundPublished, StoreAbandoned, WaitingFor
from elasticd_agent.model.records import Member, NodeRecord, Round
from elasticd_agent.rendezvous.member import RendezvousMember
from elasticd_agent.rendezvous.membership_client import JobTerms
from elasticd_agent.rendezvous.peers import PeerNetwork
from elasticd_agent.rendezvous.spec_check import stopped_round
from elasticd_agent.rendezvous.view import LocalFacts, Requirements
from elasticd_agent.store import JobStore
from elasticd_agent.store.memory import MemoryStore
from tests.scenarios.waystore import NodeStore

KEYS = Keys("job")


class SingleKeyStore(MemoryStore):
    """As c10d is between the look at the guard and the swap: what the guard was worth then counts."""

    compares_one_key = True

    def compare_and_swap(
        self, key: str, expected: int | None, value: bytes, guard: tuple[str, int] | None = None
    ) -> bool:
        return super().compare_and_swap(key, expected, value)


def client(store: MemoryStore, *, standalone: bool = True) -> NodeStore:
    """One agent's client of such a store; `standalone`: it may lead."""
    client = NodeStore(store, lambda: True, lambda deliver: deliver())
    client.compares_one_key, client.standalone = True, standalone
    return client


def agent(store: JobStore, name: str, keys: Keys = KEYS) -> RendezvousMember:
    record = NodeRecord(name, f"{name}1", "", (0,), "", 0, warm=1)
    terms = JobTerms(keys, Policy(), Requirements(1, 1, 1, 2, 0.0, "0"), b"{}")
    return RendezvousMember(store, terms, record, LocalFacts(), PeerNetwork(), lambda sentence: None)


@pytest.mark.parametrize("lost", range(20))
def test_new_leader_fences_the_round_key(lost: int) -> None:
    """It gives the round key another version, so that a former leader that was held up cannot publish.

    Also where the answer to any of its requests is lost, as that to the write that took the leader key.
    """
    store = SingleKeyStore()
    own = client(store)
    first, second = agent(store, "a"), agent(own, "b")
    now = 100.0
    while (planned_from := store.read(KEYS.round)) is None:
        first.turn(now)
        now += 0.1
        assert now < 110
    key = store.read(KEYS.planner)
    assert key is not None
    store.delete(KEYS.planner)  # its lease has expired meanwhile
    own.fates = {lost: "answer lost"} if lost else {}
    while not (second.leads and not own.fates):
        second.turn(now)
        now += 0.1
        assert now < 120
    second.turn(now)  # the next one, where an answer was lost after it took the key
    late = planned_from.value.replace(b'"number":1', b'"number":2')
    guard = (KEYS.planner, key.version)
    assert not store.compare_and_swap(KEYS.round, planned_from.version, late, guard), "it was held up for too long"
    fenced = store.read(KEYS.round)
    assert fenced.value == planned_from.value, "nobody has said anything else"


def test_host_that_does_not_lead_is_abandoned() -> None:
    """Its server process answers, its agent is stuck: the others give up after store_away, and not while it leads."""
    store = SingleKeyStore(lambda: now)
    now, host, other = 100.0, agent(store, "a"), agent(client(store, standalone=False), "b")
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


def test_store_of_another_jobs_host() -> None:
    """Two jobs at one port, or two ids of one job: nobody will lead the second one."""
    store = SingleKeyStore()
    host, other = agent(store, "a"), agent(client(store, standalone=False), "b", Keys("other"))
    now, told = 100.0, list[WaitingFor | StoreAbandoned]()
    while now < 110.0 + Policy().store_away_s:
        host.turn(now)
        told += [notice for notice in other.turn(now)[0] if isinstance(notice, WaitingFor | StoreAbandoned)]
        if now == 105:
            assert "the store there is that of job 'job', and this is job 'other'" in told[0].why
        now += 0.5
    assert len({notice.why for notice in told}) == 1
    assert isinstance(told[1], StoreAbandoned)


@pytest.mark.parametrize("standalone", [True, False])
def test_node_that_comes_after_the_end(standalone: bool) -> None:
    """A store that outlives the run tells it of the end; one that an agent hosts ends soon, and the next run begins."""
    store = SingleKeyStore()
    end = stopped_round(Round(1, (Member("a", "a1", (0,)),), run="0"), "over")
    store.compare_and_swap(KEYS.round, None, encode_record(replace(end, outcome="succeeded", exit_code=0)))
    late, now, seen = agent(client(store, standalone=standalone), "b"), 100.0, list[Round]()
    while now < 130:
        seen += [notice.round for notice in late.turn(now)[0] if isinstance(notice, RoundPublished)]
        now += 0.5
    assert [round.outcome for round in seen] == (["succeeded"] if standalone else [])
