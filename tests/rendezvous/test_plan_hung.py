"""`plan()` after hangs: strikes and quarantines of slots, and nodes that are left out."""

from __future__ import annotations

from dataclasses import replace

import pytest

from elasticd_agent.hangs.judge import failures
from elasticd_agent.model.job import Policy
from elasticd_agent.model.records import Failure, Member, NodeRecord, Round
from elasticd_agent.model.reports import HangVerdict
from elasticd_agent.rendezvous.plan import plan
from elasticd_agent.rendezvous.view import PresentNode, Requirements, View

POLICY = Policy()
NOW = 1000.0
Place = tuple[str, int, int]


class Job:
    """Rounds of two slots on each of nodes a (who plans), b, c; each hang is answered with the next Round."""

    def __init__(self, nodes: str = "abc", min_nodes: int = 1, min_workers: int = 1) -> None:
        self.nodes, self.now = nodes, NOW
        self.asked = Requirements(min_workers, 2, min_nodes, len(nodes))
        self.round = Round(1, tuple(Member(n, "i", (0, 1)) for n in nodes))
        self.steps = 0

    def slots(self) -> dict[str, tuple[int, ...]]:
        return {m.node: m.slots for m in self.round.members}

    def hang(self, *culprits: tuple[str, int], after_s: float = 10.0) -> str:
        """The planner's judge finds these (node, slot) to blame, and the Round that follows says why it is so."""
        self.steps += 100  # it trains before it hangs: that shows nothing
        ranks = {(node, slot): rank for rank, node, _, slot in self.round.assignments()}
        places = tuple((node, ranks[node, slot], slot) for node, slot in culprits)
        judged = HangVerdict(self.round.number, places, "stopped", "somebody hangs", 5.0, True, ())
        return self.answer(*failures(judged, "a", self.steps, None), after_s=after_s)

    def answer(self, *found: Failure, after_s: float = 10.0) -> str:
        self.now += after_s
        here = tuple(PresentNode(self.record(n), 0.0) for n in self.nodes)
        view = View(
            self.round, here, self.asked, failures=found, round_seen_at=self.now - after_s, failure_seen_at=self.now - 5
        )
        verdict = plan(replace(view, high_water=self.steps), POLICY, self.now)
        assert isinstance(verdict, Round), verdict
        self.round = verdict
        return verdict.reason

    def record(self, node: str) -> NodeRecord:
        number = self.round.number
        return NodeRecord(node, "i", f"{node}:1", (0, 1), seen_round=number, ready_round=number, stepped_round=number)


BOTH = (0, 1)


def test_hang_strikes_the_culprits_slot() -> None:
    """The node that found the hang gets no strike."""
    job = Job()
    job.hang(("b", 1))
    assert [(b.node, b.slot, b.strikes, b.left_s) for b in job.round.quarantined_slots] == [("b", 1, 1, 0.0)]
    assert job.slots() == {"a": BOTH, "b": BOTH, "c": BOTH}
    assert job.round.cause == "hung"


def test_second_hang_quarantines_the_slot_for_longer() -> None:
    job = Job()
    job.hang(("b", 1))
    said = job.hang(("b", 1))
    assert job.slots() == {"a": BOTH, "b": (0,), "c": BOTH}
    first_s = POLICY.slot_quarantine_s(1)
    assert f"slot 1 of b quarantined for {first_s:g} s after 2 hangs" in said
    job.hang(("a", 0), after_s=first_s + 1)
    assert job.slots()["b"] == BOTH, "tried again at the next restart after its cool-off"
    job.hang(("b", 1))
    (bench,) = (b for b in job.round.quarantined_slots if (b.node, b.slot) == ("b", 1))
    assert (bench.times, bench.left_s) == (2, POLICY.slot_quarantine_s(2))
    assert POLICY.slot_quarantine_s(2) > first_s


def test_node_with_all_slots_quarantined_is_left_out() -> None:
    job = Job()
    for slot in (1, 1, 0, 0):
        job.hang(("b", slot))
    assert job.slots() == {"a": BOTH, "c": BOTH}
    assert {(b.node, b.slot) for b in job.round.quarantined_slots if b.left_s} == {("b", 0), ("b", 1)}
    job.hang(("a", 0), after_s=POLICY.slot_quarantine_s(1) + 1)
    assert job.slots() == {"a": BOTH, "b": BOTH, "c": BOTH}, "after its cool-off it is one like any other"


def test_node_that_cannot_spare_a_slot_is_left_out() -> None:
    job = Job(min_workers=2)
    job.hang(("b", 1))
    job.hang(("b", 1))
    assert job.slots() == {"a": BOTH, "c": BOTH}


def test_hung_slot_stays_where_none_can_be_spared() -> None:
    """A slot that hangs is better than none."""
    job = Job("ab", min_nodes=2, min_workers=2)
    job.hang(("b", 1))
    said = job.hang(("b", 1))
    assert job.slots() == {"a": BOTH, "b": BOTH}
    assert "set aside" not in said


def test_each_culprit_has_its_own_strikes() -> None:
    job = Job()
    job.hang(("b", 0), ("c", 1))
    job.hang(("b", 0), ("c", 1))
    assert job.slots() == {"a": BOTH, "b": (1,), "c": (0,)}


@pytest.mark.parametrize("times", [1, 5])
def test_hang_without_culprit_strikes_no_slot(times: int) -> None:
    job = Job()
    for _ in range(times):
        job.hang()
    assert job.round.quarantined_slots == ()
    assert job.slots() == {"a": BOTH, "b": BOTH, "c": BOTH}


def test_another_culprit_clears_the_strikes() -> None:
    """Strikes count only in a row."""
    job = Job()
    for culprit in (("b", 1), ("c", 0), ("b", 1), ("c", 0)):
        job.hang(culprit)
    assert job.slots() == {"a": BOTH, "b": BOTH, "c": BOTH}
