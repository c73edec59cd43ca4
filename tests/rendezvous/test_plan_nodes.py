"""`plan()` where nodes join, leave and are lost: pauses, waits, the members that continue, and the job's end."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import pytest

from elasticd_agent.model.job import Policy
from elasticd_agent.model.records import Failure, Member, NodeRecord, QuarantinedSlot, Round
from elasticd_agent.rendezvous.membership import REREGISTRATION_S
from elasticd_agent.rendezvous.plan import ROOT_CAUSE_WAIT_S, plan
from elasticd_agent.rendezvous.view import Pause, PresentNode, Requirements, View, Wait

POLICY = Policy()
NOW = 1000.0
ROUND = Round(3, tuple(Member(n, "i", (0,)) for n in "abc"), directory="d", restarts=1)


def present(name: str, joined_at: float = 0.0, **fields: object) -> PresentNode:
    record = NodeRecord(name, "i", f"{name}:1", (0,), "d", seen_round=3, ready_round=3 if name in "abc" else 0)
    return PresentNode(replace(record, **fields), joined_at)  # type: ignore[arg-type]


FIRST = present("a", stepped_round=3, can_pause=3)
VIEW = View(
    ROUND,
    (FIRST, present("b"), present("c")),
    Requirements(1, 1, 2, 4),
    round_seen_at=NOW - 100,
    failure_seen_at=NOW,
    next_step_due=NOW + 1,
    store_up_since=NOW - 1000,
)


def with_(*nodes: PresentNode, view: View = VIEW) -> View:
    names = {p.record.id for p in nodes}
    return replace(view, nodes=(*nodes, *(p for p in view.nodes if p.record.id not in names)))


def decided(view: View, now: float = NOW, policy: Policy = POLICY) -> Round:
    verdict = plan(view, policy, now)
    assert isinstance(verdict, Round), verdict
    return verdict


def nodes(round: Round) -> str:
    return "".join(m.node for m in round.members)


def test_growth_waits_for_more_joiners_then_pauses() -> None:
    view = with_(present("d", NOW))
    assert plan(view, POLICY, NOW) == Wait("d joined; waiting for more nodes to join", NOW + POLICY.grow_debounce_s)
    assert plan(view, POLICY, NOW + 1) == Pause(3, "d joined")
    held = with_(present("a", stepped_round=3, can_pause=3, paused=3), view=view)
    grown = decided(held, NOW + 1)
    assert nodes(grown) == "abcd"
    assert grown.reason == "d joined; restart with 4 workers on 4 nodes, no elasticd checkpoint yet"


@pytest.mark.parametrize("gone", [{"leaving": "a leaves: SIGTERM"}, {"slots": (), "unusable": "slot 0 of a is in use"}])
def test_the_last_node_has_fewer_workers_than_the_leader(gone: dict[str, Any]) -> None:
    """--nproc-per-node is each node's own."""
    pair = Round(3, (Member("a", "i", (0, 1)), Member("b", "i", (0,))), directory="d")
    view = replace(VIEW, current=pair, nodes=VIEW.nodes[:2], requirements=Requirements(2, 2, 1, 2))
    assert nodes(decided(with_(present("a", stepped_round=3, **gone), view=view))) == "b"


@pytest.mark.parametrize(("leader", "own", "left"), [(4, 3, 3), (2, 4, 4), (2, 0, 3)])
def test_fewest_workers_of_a_node_are_its_own(leader: int, own: int, left: int) -> None:
    """A slot of b fails again: it is quarantined if b may run without it. An earlier version's agent does not say."""
    slots = (0, 1, 2, 3)
    pair = Round(3, (Member("a", "i", slots), Member("b", "i", slots)), directory="d")
    pair = replace(pair, quarantined_slots=(QuarantinedSlot("b", 2, strikes=1),))
    here = (present("a", slots=slots), present("b", slots=slots, min_workers=own))
    failed = Failure(3, "b", "crash", ((6, 2),), "rank 6 was killed by SIGKILL")
    view = replace(VIEW, current=pair, nodes=here, requirements=Requirements(leader, 4, 2, 2), failures=(failed,))
    assert len(decided(view).members[1].slots) == left


@pytest.mark.parametrize(
    "view",
    [
        with_(present("d"), view=replace(VIEW, done=frozenset("b"))),
        with_(present("a", can_pause=3), present("d")),
        with_(present("d"), view=replace(VIEW, requirements=Requirements(1, 1, 2, 3))),
        with_(present("d", seen_round=2)),
    ],
    ids=["one is done", "before the first step", "no room", "a dead one's record"],
)
def test_no_growth(view: View) -> None:
    """Policy, room, leaving or unseen rounds keep a joiner out."""
    assert plan(view, POLICY, NOW) == Wait("round 3 runs with 3 workers", None)


def test_growth_without_pause_depends_on_the_policy() -> None:
    plain = with_(present("a", stepped_round=3), present("d"))
    waits = plan(plain, POLICY, NOW)
    assert isinstance(waits, Wait)
    assert waits.notable
    assert waits.why == "d joined; the script cannot pause at a checkpoint, so this waits for the next restart"
    assert nodes(decided(plain, policy=Policy(grow="always"))) == "abcd"
    assert plan(with_(present("d")), Policy(grow="never"), NOW) == Wait("round 3 runs with 3 workers", None)


def test_leaving_node_is_released_at_a_checkpoint() -> None:
    leaving = with_(present("b", leaving="b leaves: SIGTERM"))
    assert plan(leaving, POLICY, NOW) == Pause(3, "b leaves: SIGTERM")
    held = with_(present("a", stepped_round=3, can_pause=3, paused=3), view=leaving)
    assert nodes(decided(held)) == "ac"
    plain = with_(present("a", stepped_round=3), view=leaving)
    assert decided(plain).reason.startswith("b leaves: SIGTERM; restart with 2 workers on 2 nodes")
    taken_over = with_(present("d"), view=replace(held, requirements=Requirements(1, 1, 3, 3)))
    assert nodes(decided(taken_over)) == "acd"


def test_leaving_before_the_first_step_pauses_if_an_earlier_round_could() -> None:
    """Rank 0 reads the request at its first step."""
    b = present("b", leaving="b leaves")
    for young in (
        with_(present("a", can_pause=2), b),
        with_(present("a"), present("b", leaving="b leaves", can_pause=1)),
    ):
        assert plan(young, POLICY, NOW) == Pause(3, "b leaves")
        held = with_(present("a", can_pause=3, paused=3), view=young)
        assert nodes(decided(held)) == "ac"
    assert nodes(decided(with_(present("a"), b))) == "ac", "nothing is known of holding: nobody waits"
    begins = with_(present("a", can_pause=2, entered=3), b)
    assert plan(begins, POLICY, NOW) == Pause(3, "b leaves")
    for waits in ("a", "c"):
        meets = with_(present(waits, can_pause=2, entered=2), view=begins)
        assert decided(meets), "some wait for a new process, which may never come"
    cannot = with_(present("a", stepped_round=3), present("b", leaving="b leaves", can_pause=2))
    assert nodes(decided(cannot)) == "ac", "it steps, and has not said that it can be held"
    came = with_(present("a", can_pause=2), present("d"))
    assert plan(came, POLICY, NOW) == Wait("round 3 runs with 3 workers", None)


def test_leaving_waits_for_a_replacement_where_too_few_remain() -> None:
    gone = [present(n, leaving=f"{n} leaves") for n in "bc"]
    waits = plan(with_(*gone), POLICY, NOW)
    assert waits == Wait("b leaves; c leaves; too few nodes would remain", None, notable=True)
    assert plan(with_(*gone, present("d")), POLICY, NOW) == Pause(3, "b leaves; c leaves; d joined")
    soon = with_(gone[0], present("c", leaving="c leaves", leaving_soon=True))
    pause = Pause(3, "b leaves; c leaves; too few nodes would remain")
    assert plan(soon, POLICY, NOW) == pause
    assert plan(with_(present("a", stepped_round=3, can_pause=3, paused=3), view=soon), POLICY, NOW) == pause
    over = with_(present("a", stepped_round=3), view=soon)  # it took too long, or the script cannot pause
    assert plan(over, POLICY, NOW) == waits


def test_job_stops_when_all_leave_and_may_start_again() -> None:
    """A scheduler asks all nodes to leave, and starts them again later."""
    gone = with_(*(present(n, leaving=f"{n} leaves", stepped_round=3, can_pause=3) for n in "abc"))
    assert plan(gone, POLICY, NOW) == Pause(3, "a leaves; b leaves; c leaves")
    held = with_(present("a", leaving="a leaves", can_pause=3, paused=3), view=gone)
    end = decided(held)
    assert (end.outcome, end.exit_code, end.reason) == ("stopped", 143, "a leaves; b leaves; c leaves")
    for codes, code in (((130, 130, 130), 130), ((130, 0, 130), 130), ((130, 143, 130), 143), ((1, 130, 129), 143)):
        asked = [replace(p, record=replace(p.record, leaving_code=c)) for p, c in zip(held.nodes, codes, strict=True)]
        assert decided(replace(held, nodes=tuple(asked))).exit_code == code
    other = with_(present("d"), view=held)
    assert not isinstance(plan(other, POLICY, NOW), Round), "d could still become one of many"
    again = replace(VIEW, current=end, requirements=Requirements(1, 1, 2, 3))
    assert (decided(again).number, nodes(decided(again))) == (5, "abc")
    were_in_it = with_(*(present(n, ready_round=4, joined_at=NOW) for n in "abc"), view=again)
    assert decided(were_in_it).number == 5, "nobody waits for the round that is the newest"
    for outcome in ("succeeded", "failed"):
        assert isinstance(plan(replace(again, current=replace(end, outcome=outcome)), POLICY, NOW), Wait)


def test_conflicting_rounds_end_with_the_next_one() -> None:
    stranger = present("x", ready_round=3)
    grown = decided(with_(stranger))
    assert (grown.number, nodes(grown)) == (4, "abcx")
    assert grown.reason.startswith(
        "x started a conflicting round 3 after the store lost its data; x joined; restart with 4"
    )
    full = decided(replace(with_(stranger), requirements=Requirements(1, 1, 2, 3)))
    assert (full.number, nodes(full)) == (4, "abc"), "where there is no room its round ends, too"
    before = present("x", ready_round=2)
    assert not isinstance(plan(with_(before), POLICY, NOW), Round), "that is over"


def test_first_round_waits_for_a_running_one_and_is_numbered_above() -> None:
    """After the store lost its data, a member restores the round that runs before joiners start another one."""
    runs, stranger = present("a", joined_at=NOW, highest_round=1), present("x", joined_at=NOW, seen_round=0)
    view = replace(VIEW, current=None, nodes=(runs, stranger), requirements=Requirements(1, 1, 2, 2))
    why = "waiting for a to restore a round that is missing from the store"
    assert plan(view, POLICY, NOW) == Wait(why, NOW + REREGISTRATION_S)
    assert decided(view, NOW + REREGISTRATION_S).number == 4


def test_round_is_numbered_above_what_its_nodes_have_on_disk() -> None:
    """A node that joins may have checkpoints and logs of an earlier job in directories of its own."""
    stranger = present("x", directory="e", highest_round=7, ready_round=3)
    assert decided(with_(stranger)).number == 8


def victim(node: str) -> Failure:
    return Failure(3, node, "crash", (), f"{node} lost its peers")


def test_secondary_failures_wait_for_the_root_cause() -> None:
    """Ranks that lost a peer report before the peer's node does."""
    view = replace(VIEW, failures=(victim("a"),))
    assert plan(view, POLICY, NOW) == Wait("a lost its peers; waiting for the root cause", NOW + ROOT_CAUSE_WAIT_S)
    culprit = Failure(3, "b", "crash", ((1, 0),), "rank 1 was killed by SIGKILL")
    named = decided(replace(view, failures=(victim("a"), culprit)))
    assert named.reason.startswith("rank 1 was killed by SIGKILL; ")
    assert named.budget.counted == 1
    assert decided(replace(view, failures=tuple(victim(n) for n in "abc"))).budget.counted == 1, "nobody is missing"
    assert decided(view, NOW + ROOT_CAUSE_WAIT_S).budget.counted == 1


def test_pending_exception_explains_secondary_failures() -> None:
    """Its last words are known before it ends, which may take any time."""

    def says(node: str, **more: Any) -> View:
        there = [replace(p, record=replace(p.record, **more)) if p.record.id == node else p for p in VIEW.nodes]
        return replace(VIEW, nodes=tuple(there), failures=(victim("a"),))

    view = says("b", pending_exception="rank 1 raised ValueError: a fault")
    assert decided(view, NOW + ROOT_CAUSE_WAIT_S).reason.startswith(
        "rank 1 raised ValueError: a fault, and then a lost its peers; "
    )
    ended = Failure(3, "b", "crash", (), "rank 1 exited with code 1 (MemoryError: a fault)")
    itself = replace(says("b", pending_exception="rank 1 raised MemoryError: a fault"), failures=(ended,))
    assert decided(itself, NOW + ROOT_CAUSE_WAIT_S).reason.startswith(f"{ended.why}; "), "once is enough"
    culprit = Failure(3, "c", "crash", ((2, 0),), "rank 2 was killed by SIGKILL")
    assert decided(replace(view, failures=(victim("a"), culprit))).reason.startswith("rank 2 was killed")
    old = says("b", pending_exception="rank 1 raised ValueError: a fault", ready_round=2)
    assert "ValueError" not in decided(old, NOW + ROOT_CAUSE_WAIT_S).reason, "that was in the round before"


def test_lost_node_explains_secondary_failures() -> None:
    """It costs no restart of the budget."""
    view = replace(VIEW, failures=(victim("a"), victim("c")), probe_results=(("b", "refused"),))
    after = decided(view)
    assert (nodes(after), after.budget.counted) == ("ac", 0)
    assert after.reason.startswith("b is lost: the port of its agent is closed; restart with 2")


def test_failed_round_waits_for_a_returning_member() -> None:
    """A member that has only lost the store registers again within REREGISTRATION_S."""
    view = replace(
        VIEW,
        nodes=VIEW.nodes[:2],
        failures=(victim("a"),),
        absent_since=(("c", NOW),),
        probe_results=(("c", "answered"),),
    )
    assert plan(view, POLICY, NOW) == Wait("a lost its peers; waiting for c to register again", NOW + REREGISTRATION_S)
    assert nodes(decided(view, NOW + REREGISTRATION_S)) == "ab"


def test_wait_for_too_few_nodes_is_bounded() -> None:
    lost = replace(VIEW, nodes=(FIRST,), probe_results=(("b", "refused"), ("c", "refused")), too_few_nodes_since=NOW)
    waits = plan(lost, POLICY, NOW)
    assert isinstance(waits, Wait)
    assert waits.too_few_nodes
    assert waits.until == NOW + POLICY.replace_timeout_s
    end = decided(lost, NOW + POLICY.replace_timeout_s)
    assert (end.outcome, end.exit_code) == ("failed", 1)
    assert end.reason.endswith("1 of at least 2 nodes present, and no more joined within 600 s (--replace-timeout)")
    never = View(None, (FIRST,), Requirements(1, 1, 2, 2), too_few_nodes_since=NOW)
    waits = plan(never, Policy(join_timeout_s=60), NOW)
    assert waits.until == NOW + 60
    assert decided(never, NOW + 60, Policy(join_timeout_s=60)).outcome == "failed"
    waits = plan(replace(never, store_up_since=NOW + 59), Policy(join_timeout_s=60), NOW + 60)
    assert waits.until == NOW + 59 + REREGISTRATION_S, "nodes that the outage has sent away are on their way"


def test_a_turn_takes_time_in_proportion_to_the_nodes() -> None:
    """The first Round, the loss of a node that all others report, and a turn in which nothing happens."""

    def planned_s(count: int) -> float:
        names = [f"n{i}" for i in range(count)]
        first = View(None, tuple(present(n) for n in names), Requirements(1, 1, 2, count))
        began = time.thread_time()
        round = decided(first)
        at = dict.fromkeys(("seen_round", "ready_round", "stepped_round"), round.number)
        trains = tuple(present(n, **at) for n in names)
        running = replace(first, current=round, nodes=trains, next_step_due=NOW + 1)
        assert isinstance(plan(running, POLICY, NOW), Wait)
        failures = tuple(Failure(round.number, n, "crash", (), "lost its peers") for n in names[1:])
        lost = decided(replace(running, failures=failures, failure_seen_at=NOW, probe_results=((names[0], "refused"),)))
        assert len(lost.members) == count - 1
        return time.thread_time() - began

    few = min(planned_s(400) for _ in range(3))
    many = min(planned_s(1600) for _ in range(3))
    assert many < 8 * few, (few, many)  # 4 if linear, 16 if every node is compared with every other one
