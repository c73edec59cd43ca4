"""What a member writes of a Round that it has read: once, together with what follows from it, if that is soon."""

from __future__ import annotations

import itertools

import pytest

from elasticd_agent.model.job import Policy
from elasticd_agent.model.keys import Keys, decode_record
from elasticd_agent.model.records import NodeRecord
from elasticd_agent.rendezvous.member import RendezvousMember
from elasticd_agent.rendezvous.membership_client import SEEN_ROUND_DELAY_S, JobTerms
from elasticd_agent.rendezvous.peers import PeerNetwork
from elasticd_agent.rendezvous.view import LocalFacts, Requirements
from elasticd_agent.store.memory import MemoryStore

KEYS = Keys("job")
BEGAN = 100.0


class Job:
    """Two agents over one store, and a clock."""

    def __init__(self) -> None:
        self.now = BEGAN
        self.store = MemoryStore(lambda: self.now)
        self.agents = {name: self.agent(name) for name in "ab"}

    def agent(self, name: str) -> RendezvousMember:
        record = NodeRecord(name, f"{name}1", "", (0,), "", 0, warm=1)
        terms = JobTerms(KEYS, Policy(), Requirements(1, 1, 2, 2, 0.0, "0"), b"{}")
        return RendezvousMember(self.store, terms, record, LocalFacts(), PeerNetwork(), lambda sentence: None)

    def written(self, name: str) -> tuple[NodeRecord, int]:
        stored = self.store.read(KEYS.node(name))
        assert stored is not None
        return decode_record(NodeRecord, KEYS.node(name), stored.value), stored.version

    def publish(self) -> None:
        """Both take part, and the leader publishes their Round, which the other has not read yet."""
        agents = itertools.cycle(self.agents.values())
        while self.store.read(KEYS.round) is None:
            next(agents).turn(self.now)
            self.now += 0.01
            assert self.now < BEGAN + 10


@pytest.fixture
def job() -> Job:
    return Job()


def test_what_follows_soon_is_written_with_it(job: Job) -> None:
    job.publish()
    member = next(name for name, agent in job.agents.items() if not agent.leads)
    before = job.written(member)[1]
    notices, until = job.agents[member].turn(job.now)
    assert notices and until is not None and until <= job.now + SEEN_ROUND_DELAY_S
    assert job.written(member)[1] == before, "it says more in a moment"
    job.agents[member].update_node_record(ready_round=1)
    job.agents[member].turn(job.now + SEEN_ROUND_DELAY_S / 2)
    record, version = job.written(member)
    assert (record.seen_round, record.ready_round) == (1, 1)
    job.agents[member].turn(job.now + 2 * SEEN_ROUND_DELAY_S)
    assert job.written(member)[1] == version, "once"


def test_it_is_written_alone_where_nothing_follows(job: Job) -> None:
    job.publish()
    member = next(name for name, agent in job.agents.items() if not agent.leads)
    _, until = job.agents[member].turn(job.now)
    assert until is not None
    job.agents[member].turn(until)
    assert job.written(member)[0].seen_round == 1


def test_node_outside_the_round_writes_it_at_once(job: Job) -> None:
    job.publish()
    late = job.agent("c")
    late.turn(job.now)
    assert job.written("c")[0].seen_round == 1
