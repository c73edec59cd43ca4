"""`plan()` with nodes and slots that stand by: a Round takes them in the place of lost ones, and its reason says so."""

from __future__ import annotations

from dataclasses import replace

import pytest

from elasticd_agent.model.job import Policy
from elasticd_agent.model.records import Failure, Member, NodeRecord, QuarantinedSlot, Round
from elasticd_agent.rendezvous.plan import plan
from elasticd_agent.rendezvous.view import PresentNode, Requirements, View, Wait

POLICY = Policy()
NOW = 1000.0
STEPS = {"ready_round": 3, "stepped_round": 3, "can_pause": 3, "entered": 3}
PAIR = Round(3, (Member("a", "i", (0, 1)), Member("b", "i", (0, 1))), directory="d")
SLOTS = Round(3, (Member("a", "i", (0, 1, 2)),), directory="d")
ALONE = Requirements(3, 3, 1, 1)


def present(name: str, slots: tuple[int, ...] = (0, 1), **fields: object) -> PresentNode:
    record = NodeRecord(name, "i", f"{name}:1", slots, "d", seen_round=3)
    return PresentNode(replace(record, **fields), 0.0)  # type: ignore[arg-type]


A, B = (present(name, **STEPS) for name in "ab")
SPARE = present("c", ahead=3)


def crashed(*culprits: tuple[int, int], node: str = "b") -> tuple[Failure, ...]:
    return (Failure(3, node, "crash", culprits, f"rank {culprits[0][0]} was killed by SIGKILL", high_water=9),)


def view(*nodes: PresentNode, current: Round = PAIR, asked: Requirements | None = None, **fields: object) -> View:
    asked = asked or Requirements(2, 2, 2, 2, spares=1)
    seen = View(current, nodes, asked, round_seen_at=NOW - 100, failure_seen_at=NOW - 5, next_step_due=NOW + 1)
    return replace(seen, **fields)  # type: ignore[arg-type]


def follows(view: View, policy: Policy = POLICY) -> tuple[list[tuple[str, tuple[int, ...]]], str]:
    verdict = plan(view, policy, NOW)
    assert isinstance(verdict, Round), verdict
    return [(m.node, m.slots) for m in verdict.members], verdict.reason.partition("; restart with")[0]


@pytest.mark.parametrize("grow", ["auto", "never"])
def test_a_spare_node_takes_the_place_of_a_node_whose_rank_died(grow: str) -> None:
    lost = present("b", **STEPS, starting=(1,))
    members, why = follows(view(A, lost, SPARE, failures=crashed((3, 1))), Policy(grow=grow))  # type: ignore[arg-type]
    assert members == [("a", (0, 1)), ("c", (0, 1))]
    assert why == "rank 3 was killed by SIGKILL; its place went to spare c; slot 1 of b starts"


def test_a_spare_node_takes_the_place_of_a_rank_that_hangs() -> None:
    """Its node has not said yet that a process starts there: the rank is still to be killed."""
    hangs = replace(crashed((3, 1))[0], kind="hung", why="rank 3 hangs")
    members, why = follows(view(A, B, SPARE, failures=(hangs,)))
    assert members == [("a", (0, 1)), ("c", (0, 1))]
    assert why == "rank 3 hangs; its place went to spare c; slot 1 of b starts"
    for fields in ({"entered": 0}, {"stepped_round": 2}):  # all processes are new
        assert follows(view(A, present("b", **{**STEPS, **fields}), SPARE, failures=(hangs,)))[0][1] == ("b", (0, 1))


def test_a_spare_that_is_not_at_its_entry_is_not_waited_for() -> None:
    lost, slow = present("b", **STEPS, starting=(1,)), present("c", ahead=3, starting=(0,))
    members, why = follows(view(A, lost, slow, failures=crashed((3, 1))))
    assert members == [("a", (0, 1)), ("b", (0, 1))]
    assert why == "rank 3 was killed by SIGKILL"


def test_two_spares_take_two_places() -> None:
    three = replace(PAIR, members=(*PAIR.members, Member("e", "i", (0, 1))))
    gone = {"probe_results": (("b", "refused"), ("e", "refused")), "asked": Requirements(2, 2, 3, 3, spares=2)}
    members, why = follows(view(A, SPARE, present("d", ahead=3), current=three, **gone))
    assert [node for node, _ in members] == ["a", "c", "d"]
    assert why.endswith("the port of its agent is closed; their places went to spares c and d")


def test_spares_change_nothing_while_no_rank_is_lost() -> None:
    """Nor does one that leaves, or is lost."""
    runs = Wait("round 3 runs with 4 workers", None)
    for spare in (SPARE, present("c", ahead=3, starting=(0, 1)), present("c", ahead=3, leaving="c leaves: SIGTERM")):
        assert plan(view(A, B, spare), POLICY, NOW) == runs
    assert plan(view(A, B, probe_results=(("c", "refused"),)), POLICY, NOW) == runs


@pytest.mark.parametrize("grow", ["auto", "never"])
def test_a_spare_slot_takes_a_lost_ranks_place(grow: str) -> None:
    lost = present("a", (0, 1, 2, 3), **STEPS, starting=(1,))
    seen = view(lost, current=SLOTS, asked=ALONE, failures=crashed((1, 1), node="a"))
    assert follows(seen, Policy(grow=grow)) == (  # type: ignore[arg-type]
        [("a", (0, 2, 3))],
        "rank 1 was killed by SIGKILL; its place went to spare slot 3; slot 1 of a starts",
    )


def test_slots_in_use_stay_in_use() -> None:
    """The slot that was lost is the next spare once its process is ready."""
    after = replace(SLOTS, members=(Member("a", "i", (0, 2, 3)),))
    back = present("a", (0, 1, 2, 3), **STEPS)
    assert plan(view(back, current=after, asked=ALONE), POLICY, NOW) == Wait("round 3 runs with 3 workers", None)
    raised = replace(crashed((0, 0), node="a")[0], kind="store_lost", culprits=(), why="the workers' store exited")
    assert follows(view(back, current=after, asked=ALONE, failures=(raised,)))[0] == [("a", (0, 2, 3))]


def test_a_quarantined_slot_is_replaced_by_a_spare_one() -> None:
    struck = replace(SLOTS, quarantined_slots=(QuarantinedSlot("a", 0, 1),))
    failure = replace(crashed((0, 0), node="a")[0], high_water=0)
    members, why = follows(view(present("a", (0, 1, 2, 3)), current=struck, asked=ALONE, failures=(failure,)))
    assert members == [("a", (1, 2, 3))]
    assert "slot 0 of a quarantined for 60 s after 2 failures without progress; its place went to spare slot 3" in why
