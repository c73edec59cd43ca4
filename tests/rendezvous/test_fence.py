"""A leader that was held up cannot publish once another one has the key, also where one key is compared at a time."""

from __future__ import annotations

from elasticd_agent.model.job import Policy
from elasticd_agent.model.keys import Keys
from elasticd_agent.model.records import NodeRecord
from elasticd_agent.rendezvous.member import RendezvousMember
from elasticd_agent.rendezvous.view import LocalFacts, Requirements
from elasticd_agent.store.memory import MemoryStore

KEYS = Keys("job")


class SingleKeyStore(MemoryStore):
    """As c10d is between the look at the guard and the swap: what the guard was worth then counts."""

    def compare_and_swap(
        self, key: str, expected: int | None, value: bytes, guard: tuple[str, int] | None = None
    ) -> bool:
        return super().compare_and_swap(key, expected, value)


def agent(store: MemoryStore, name: str) -> RendezvousMember:
    record = NodeRecord(name, f"{name}1", "", (0,), "", 0, warm=1)
    return RendezvousMember(
        store,
        KEYS,
        Policy(),
        record,
        Requirements(1, 1, 1, 2, 0.0, "0"),
        LocalFacts(),
        b"{}",
        lambda mine, theirs: None,
        lambda nodes: {},
        lambda sentence: None,
        single_key_cas=True,
    )


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
