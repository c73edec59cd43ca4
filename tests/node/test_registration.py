"""The node's card and what lives under its lease: one renewal for both, and both go together."""

from __future__ import annotations

import pytest

from elasticd_agent.node import keys as names
from elasticd_agent.node.records import NodeCard
from elasticd_agent.node.registration import Announcement, NameTaken
from elasticd_agent.node.scheduler.scheduler import Placer
from elasticd_agent.store.memory import MemoryStore
from tests.node.stores import Clock, Interrupted


class Daemon:
    """As far as it announces and places."""

    def __init__(self, memory: MemoryStore, node: str, incarnation: str | None = None) -> None:
        self.card = NodeCard(node, incarnation or f"i-{node}", 4)
        self.store = Interrupted(memory)
        self.announcement = Announcement(self.store, self.card, 3.0, 1.0)
        self.placer = Placer(self.store, node, self.card.incarnation, announce=self.announcement.beneath)

    def turn(self, clock: Clock) -> list[str]:
        self.announcement.turn(self.card, clock.now)
        return self.placer.turn(clock.now)

    def close(self) -> None:
        self.placer.close()
        self.announcement.withdraw()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def memory(clock: Clock) -> MemoryStore:
    return MemoryStore(clock)


def live(clock: Clock, seconds: int, *daemons: Daemon) -> list[str]:
    said = []
    for _ in range(seconds):
        clock.now += 1.0
        said += [sentence for daemon in daemons for sentence in daemon.turn(clock)]
    return said


def test_an_idle_daemon_that_places_asks_for_one_renewal_a_second(clock: Clock, memory: MemoryStore) -> None:
    one = Daemon(memory, "a")
    live(clock, 3, one)
    assert one.placer.places
    one.store.asked.clear()
    live(clock, 10, one)
    assert [verb for verb, _ in one.store.asked] == ["renew"] * 10
    assert memory.read(names.PLACER) is not None


def test_who_is_gone_loses_both_and_who_is_left_places(clock: Clock, memory: MemoryStore) -> None:
    one, two = Daemon(memory, "a"), Daemon(memory, "b")
    live(clock, 3, one, two)
    assert (one.placer.places, two.placer.places) == (True, False)
    said = live(clock, 5, two)
    assert memory.read(names.NODES + "a") is None
    assert "b places jobs from now on" in said
    # It was only stopped, and comes back: it does not place beside the other.
    live(clock, 3, one, two)
    assert (one.placer.places, two.placer.places) == (False, True)
    assert memory.read(names.NODES + "a") is not None


def test_an_orderly_end_lets_the_other_place_at_once_and_one_that_is_replaced_keeps_its_card(
    clock: Clock, memory: MemoryStore
) -> None:
    one, two = Daemon(memory, "a"), Daemon(memory, "b")
    live(clock, 2, one, two)
    one.placer.close()  # as before it replaces itself
    assert memory.read(names.PLACER) is None
    assert memory.read(names.NODES + "a") is not None
    assert two.turn(clock) == ["b places jobs from now on"]
    two.close()
    assert memory.read(names.PLACER) is None
    assert memory.read(names.NODES + "b") is None
    two.close()  # twice is once


def test_the_next_process_of_a_killed_daemon_places_again_within_a_lease(clock: Clock, memory: MemoryStore) -> None:
    one = Daemon(memory, "a")
    live(clock, 3, one)
    again = Daemon(memory, "a", one.card.incarnation)
    again.turn(clock)  # the card is its own
    said = live(clock, 4, again)
    assert "a places jobs from now on" in said
    assert again.placer.places


def test_who_has_no_card_places_nothing(clock: Clock, memory: MemoryStore) -> None:
    memory.announce(names.NODES + "a", NodeCard("a", "somebody else", 4).to_json(), 60.0)
    twin = Daemon(memory, "a")
    with pytest.raises(NameTaken):
        twin.turn(clock)
    assert twin.placer.turn(clock.now) == []
    assert memory.read(names.PLACER) is None
