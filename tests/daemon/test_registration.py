"""The node's status and other keys under its lease: one renewal for both, and both expire together."""

from __future__ import annotations

from pathlib import Path

import pytest

from elasticd_agent.store.memory import MemoryStore
from elasticd_daemon import keys as names
from elasticd_daemon.records import NodeStatus
from elasticd_daemon.registration import NodeNameConflict, NodeStatusPublisher
from elasticd_daemon.runners import liveness
from elasticd_daemon.scheduler.scheduler import Scheduler
from elasticd_daemon.state_dir import persistent_incarnation
from tests.daemon.stores import Clock, InterruptedStore


class PublishingAgent:
    """As far as it announces and places."""

    def __init__(self, memory: MemoryStore, node: str, incarnation: str | None = None) -> None:
        self.card = NodeStatus(node, incarnation or f"i-{node}", 4)
        self.store = InterruptedStore(memory)
        self.announcement = NodeStatusPublisher(self.store, self.card, 3.0, 1.0)
        self.placer = Scheduler(
            self.store, node, self.card.incarnation, announce=self.announcement.key.announce_under_lease
        )

    def turn(self, clock: Clock) -> list[str]:
        self.announcement.publish(self.card, clock.now)
        return self.placer.turn(clock.now)

    def close(self) -> None:
        self.placer.close()
        self.announcement.key.withdraw()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def memory(clock: Clock) -> MemoryStore:
    return MemoryStore(clock)


def live(clock: Clock, seconds: int, *daemons: PublishingAgent) -> list[str]:
    lines = []
    for _ in range(seconds):
        clock.now += 1.0
        lines += [sentence for daemon in daemons for sentence in daemon.turn(clock)]
    return lines


def test_idle_scheduler_makes_one_renewal_a_second(clock: Clock, memory: MemoryStore) -> None:
    one = PublishingAgent(memory, "a")
    live(clock, 3, one)
    assert one.placer.holds_key
    one.store.requests.clear()
    live(clock, 10, one)
    assert [verb for verb, _ in one.store.requests] == ["renew"] * 10
    assert memory.read(names.SCHEDULER) is not None


def test_lost_agent_loses_status_and_scheduler_role(clock: Clock, memory: MemoryStore) -> None:
    one, two = PublishingAgent(memory, "a"), PublishingAgent(memory, "b")
    live(clock, 3, one, two)
    assert (one.placer.holds_key, two.placer.holds_key) == (True, False)
    lines = live(clock, 5, two)
    assert memory.read(names.NODES + "a") is None
    assert "b is the scheduler now" in lines
    # It was only stopped, and comes back: it does not place beside the other.
    live(clock, 3, one, two)
    assert (one.placer.holds_key, two.placer.holds_key) == (False, True)
    assert memory.read(names.NODES + "a") is not None


def test_orderly_end_passes_the_role_on_and_replacement_keeps_the_status(clock: Clock, memory: MemoryStore) -> None:
    one, two = PublishingAgent(memory, "a"), PublishingAgent(memory, "b")
    live(clock, 2, one, two)
    one.placer.close()  # as before it replaces itself
    assert memory.read(names.SCHEDULER) is None
    assert memory.read(names.NODES + "a") is not None
    assert two.turn(clock) == ["b is the scheduler now"]
    two.close()
    assert memory.read(names.SCHEDULER) is None
    assert memory.read(names.NODES + "b") is None
    two.close()  # twice is once


def test_restarted_agent_is_scheduler_again_within_a_lease(clock: Clock, memory: MemoryStore) -> None:
    one = PublishingAgent(memory, "a")
    live(clock, 3, one)
    again = PublishingAgent(memory, "a", one.card.incarnation)
    lines = again.turn(clock)  # the card is its own, and so is the key
    lines += live(clock, 4, again)
    assert "a is the scheduler now" in lines
    assert again.placer.holds_key


def test_unregistered_agent_schedules_nothing(clock: Clock, memory: MemoryStore) -> None:
    memory.announce(names.NODES + "a", NodeStatus("a", "somebody else", 4).to_json(), 60.0)
    twin = PublishingAgent(memory, "a")
    with pytest.raises(NodeNameConflict):
        twin.turn(clock)
    assert twin.placer.turn(clock.now) == []
    assert memory.read(names.SCHEDULER) is None


def test_agent_whose_name_another_one_has_leaves_that_one_known(clock: Clock, memory: MemoryStore) -> None:
    """Its loss would be noted by nobody."""
    one, twin = PublishingAgent(memory, "a"), PublishingAgent(memory, "a", "i-twin")
    live(clock, 2, one)
    with pytest.raises(NodeNameConflict):
        twin.turn(clock)
    twin.announcement.leave()
    assert memory.read(names.KNOWN_NODES + "a") is not None
    one.announcement.leave()
    assert memory.read(names.KNOWN_NODES + "a") is None


def test_copy_of_the_state_directory_on_another_machine_is_another_agent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Machines of one disk image, with one name: each would take the other's status for its own."""
    own = persistent_incarnation(tmp_path, "a")
    assert persistent_incarnation(tmp_path, "a") == own
    monkeypatch.setattr(liveness, "boot_id", lambda: "another machine's")
    assert persistent_incarnation(tmp_path, "a") != own
