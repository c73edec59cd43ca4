"""Slots whose last worker does not die: what a node announces, which Round waits, and what the others make of it."""

from __future__ import annotations

from dataclasses import replace

from elasticd_agent.job.slots import Slots
from elasticd_agent.model.job import Policy
from elasticd_agent.model.records import Failure, Member, NodeRecord, Round
from elasticd_agent.rendezvous.plan import plan
from elasticd_agent.rendezvous.view import PresentNode, Requirements, View, Wait
from elasticd_agent.workers.events import NewcomerEnded, ProcessUnkillable, UnkillableProcessEnded

NOW = 1000.0
ROUND = Round(3, (Member("a", "i", (0, 1)), Member("b", "i", (0, 1))), restarts=1)


def stuck(pid: int, slot: int | None, rank: int | None = 5) -> ProcessUnkillable:
    return ProcessUnkillable(3, pid, rank, slot, "D", "rpc_wait_bit_killable")


def test_a_slot_is_out_of_use_until_everything_on_it_has_ended() -> None:
    slots = Slots("b", (0, 1, 2), min_workers=1)
    assert slots.handle(stuck(70, 1)) == (
        "round 3: rank 5's process 70 survives SIGKILL (state D in rpc_wait_bit_killable); "
        "continuing without it; slot 1 is left out until it has ended"
    )
    slots.handle(stuck(71, 1))  # a child of the same worker
    assert slots.usable == (0, 2)
    assert slots.handle(UnkillableProcessEnded(70)) == "process 70 of round 3 has ended", "the child is still there"
    assert slots.usable == (0, 2)
    assert slots.handle(UnkillableProcessEnded(71)) == "process 71 of round 3 has ended; slot 1 can be used again"
    assert (slots.usable, slots.unusable_reason) == ((0, 1, 2), "")
    assert slots.handle(UnkillableProcessEnded(71)) is None, "said once"


def test_unkillable_process_without_a_slot() -> None:
    """What is nobodys costs no slot."""
    slots = Slots("b", (0, 1), min_workers=2)
    said = slots.handle(replace(stuck(70, None, rank=None), state="Z", wchan=""))
    assert said == "round 3: process 70 survives SIGKILL (state Z); continuing without it"
    assert (slots.usable, slots.unusable_reason) == ((0, 1), "")


def test_a_node_with_too_few_left_announces_none() -> None:
    slots = Slots("b", (0, 1, 2), min_workers=2)
    slots.handle(stuck(70, 0))
    assert slots.usable == (1, 2)
    slots.handle(stuck(71, 2))
    assert slots.usable == ()
    assert slots.unusable_reason == (
        "slot 0 of b is in use by process 70, which does not die (state D in rpc_wait_bit_killable); "
        "slot 2 of b is in use by process 71, which does not die (state D in rpc_wait_bit_killable)"
    )
    slots.handle(UnkillableProcessEnded(70))
    assert slots.usable == (0, 1)


def test_end_of_another_round_does_not_end_the_wait() -> None:
    slots = Slots("b", (0, 1), min_workers=1)
    slots.forget_blocked(3)  # nothing waits
    slots.handle(stuck(70, 1))
    assert slots.remember_if_blocked(ROUND)
    slots.forget_blocked(2)
    slots.handle(UnkillableProcessEnded(70))
    assert slots.take_unblocked() == ROUND


def test_a_round_waits_for_its_slot_unless_it_is_over() -> None:
    slots = Slots("b", (0, 1), min_workers=1)
    assert not slots.remember_if_blocked(ROUND)
    slots.handle(stuck(70, 1))
    assert slots.remember_if_blocked(ROUND)
    assert slots.take_unblocked() is None
    assert not slots.remember_if_blocked(replace(ROUND, members=(Member("b", "i", (0,)),)))
    assert slots.remember_if_blocked(ROUND)
    slots.handle(UnkillableProcessEnded(70))
    assert slots.take_unblocked() == ROUND
    assert slots.take_unblocked() is None, "once"
    slots.handle(stuck(72, 1))
    assert slots.remember_if_blocked(ROUND)
    slots.forget_blocked(ROUND.number)
    slots.handle(UnkillableProcessEnded(72))
    assert slots.take_unblocked() is None


def test_slots_that_a_full_round_does_not_use_are_spares() -> None:
    slots = Slots("a", (0, 1, 2, 3), 2, max_workers=3)
    used = Round(3, (Member("a", "i", (0, 2, 3)),))
    assert slots.spares(used) == (1,)
    assert slots.spares(replace(used, members=(Member("a", "i", (0, 2)),))) == (), "those are to come in"
    slots.handle(stuck(70, 1))
    assert slots.spares(used) == ()


def test_node_outside_a_full_round_is_a_spare() -> None:
    c = Slots("c", (0, 1), 2, max_nodes=2)
    assert c.spares(ROUND) == (0, 1)
    assert c.spares(replace(ROUND, members=ROUND.members[:1])) == ()
    assert c.spares(replace(ROUND, members=(), outcome="succeeded", exit_code=0)) == ()
    assert Slots("a", (0, 1), 2, max_nodes=2).spares(ROUND) == ()


# ---- what the planner makes of it


def present(name: str, slots: tuple[int, ...] = (0, 1), **fields: object) -> PresentNode:
    record = NodeRecord(name, "i", f"{name}:1", slots, seen_round=3, ready_round=3)
    return PresentNode(replace(record, **fields), 0.0)  # type: ignore[arg-type]


def view(*nodes: PresentNode, asked: Requirements = Requirements(1, 2, 1, 2)) -> View:  # noqa: B008  a frozen value
    return View(ROUND, nodes, asked, round_seen_at=NOW - 5, next_step_due=NOW + 1, store_up_since=NOW - 1000)


def decided(view: View) -> Round:
    verdict = plan(view, Policy(), NOW)
    assert isinstance(verdict, Round), verdict
    return verdict


def test_next_round_avoids_an_unusable_slot() -> None:
    """A round that needs what cannot be used is followed by one that does not."""
    why = "slot 1 of b is in use by process 70, which does not die (state D)"
    after = decided(view(present("a"), present("b", (0,), unusable=why)))
    assert [(m.node, m.slots) for m in after.members] == [("a", (0, 1)), ("b", (0,))]
    assert after.reason == f"{why}; restart with 3 workers on 2 nodes, no elasticd checkpoint yet"
    assert (after.cause, after.budget.counted, after.excluded) == ("resize", 0, ()), "it costs nobody anything"


def test_node_without_usable_slots() -> None:
    """A node without usable slots is left out and taken again when it has some."""
    after = decided(view(present("a"), present("b", (), unusable="slots 0 and 1 of b are held")))
    assert [m.node for m in after.members] == ["a"]
    here = replace(
        view(present("a", seen_round=4, ready_round=4, stepped_round=4), present("b", (), seen_round=4)), current=after
    )
    assert plan(here, Policy(grow="always"), NOW) == Wait("round 4 runs with 2 workers", None)
    back = replace(here, nodes=(here.nodes[0], present("b", seen_round=4)))
    assert [m.node for m in decided_growing(back).members] == ["a", "b"]


def decided_growing(view: View) -> Round:
    verdict = plan(view, Policy(grow="always"), NOW)
    assert isinstance(verdict, Round), verdict
    return verdict


def test_wait_for_usable_slots_is_bounded() -> None:
    """Too few nodes with usable slots are waited for a bounded time."""
    short = view(present("a"), present("b", (), unusable="slot 1 of b is held"), asked=Requirements(2, 2, 2, 2))
    short = replace(short, too_few_nodes_since=NOW)
    waits = plan(short, Policy(), NOW)
    assert waits == Wait(
        "slot 1 of b is held; 1 of at least 2 nodes present", NOW + Policy().replace_timeout_s, too_few_nodes=True
    )
    end = plan(short, Policy(), NOW + Policy().replace_timeout_s)
    assert isinstance(end, Round)
    assert (end.outcome, end.exit_code) == ("failed", 1)


def test_a_failure_is_answered_with_the_slots_there_are() -> None:
    crash = Failure(3, "a", "crash", ((0, 0),), "rank 0 was killed by SIGKILL")
    after = decided(replace(view(present("a"), present("b", (1,))), failures=(crash,), failure_seen_at=NOW - 5))
    assert [(m.node, m.slots) for m in after.members] == [("a", (0, 1)), ("b", (1,))]
    assert after.budget.counted == 1


# ---- slots whose process starts ahead of its round


def test_slot_starts_until_its_process_is_ready() -> None:
    slots = Slots("b", (0, 1, 2), min_workers=2)
    slots.mark_starting([2, 1])
    assert (slots.starting, slots.usable) == ((1, 2), (0, 1, 2)), "the leader decides whether they are waited for"
    slots.mark_ready([1])
    assert slots.starting == (2,)
    slots.handle(stuck(70, 2))
    slots.handle(UnkillableProcessEnded(70))
    assert slots.starting == (), "no process was released for it meanwhile"


def test_slots_of_a_job_whose_processes_do_not_come_ahead() -> None:
    slots = Slots("b", (0, 1, 2), min_workers=2)
    slots.mark_starting([1, 2])
    raised = NewcomerEnded(2, "exited with code 1 before session.run")
    who = "the new process of slot 2 exited with code 1 before session.run"
    assert [slots.record_failure(raised) for _ in range(2)] == [f"{who}: another one starts ({n} of 3)" for n in (2, 3)]
    assert slots.starting == (1, 2) and slots.to_start_ahead == {1, 2}
    slots.mark_ready([2])
    slots.mark_starting([2])
    assert "(2 of 3)" in slots.record_failure(raised), "they are counted in a row"
    slots.record_failure(raised)
    last = f"{who}: from now on new processes start together with their round, and the other ranks wait for them"
    assert slots.record_failure(raised) == last
    slots.mark_starting([0])
    assert slots.starting == ()


def test_another_process_would_repeat_a_wrong_use_of_the_library() -> None:
    slots = Slots("b", (0, 1), min_workers=1)
    slots.mark_starting([1])
    assert "from now on" in slots.record_failure(NewcomerEnded(1, "exited with code 1", is_refused=True))


def test_slot_whose_processes_hang_is_left_out_until_a_round_needs_it() -> None:
    slots = Slots("b", (0, 1, 2), min_workers=2)
    slots.mark_starting([0, 2])
    late = NewcomerEnded(2, "did not come to session.run within 600 s", is_late=True)
    who = "the new process of slot 2 did not come to session.run within 600 s"
    slots.record_failure(late)
    assert slots.record_failure(late) == f"{who}: another one starts (3 of 3)"
    assert slots.record_failure(late) == f"{who}, as 2 before it: the job continues without the slot"
    assert (slots.starting, slots.to_start_ahead) == ((0, 2), {0})
    slots.mark_starting([2])
    assert slots.to_start_ahead == {0}, "another fault elsewhere gives it no new process"
    slots.mark_ready([0, 2])
    slots.mark_starting([2])
    assert slots.to_start_ahead == {2}
