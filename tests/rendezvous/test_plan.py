"""`plan()` case by case: the next Round, when there is none, and how a job ends."""

from __future__ import annotations

from dataclasses import replace

import pytest

from elasticd_agent.model.job import Policy
from elasticd_agent.model.messages import StopRequested
from elasticd_agent.model.records import BudgetState, Failure, Member, NodeRecord, QuarantinedSlot, Round
from elasticd_agent.rendezvous.plan import plan
from elasticd_agent.rendezvous.view import PresentNode, Requirements, View, Wait

POLICY = Policy()
STOP = StopRequested("SIGTERM", 143, 5.0)


def node(name: str, *, slots: tuple[int, ...] = (0, 1), incarnation: str = "i", joined_at: float = 0.0) -> PresentNode:
    return PresentNode(NodeRecord(name, incarnation, f"{name}.lan", slots, seen_round=9, ready_round=9), joined_at)


def crash(why: str = "rank 1 was killed by SIGKILL", *, node: str = "a", slot: int = 1, step: int = 0) -> Failure:
    return Failure(1, node, "crash", ((slot, slot),), why, high_water=step)


def mistake(node: str = "a", error: str = "NameError", kind: str = "user_error") -> Failure:
    key = f"{error}: x"
    return Failure(1, node, kind, ((0, 0),), f"all ranks on {node} raised", error=error, step=0, repeat_key=key)


def shared(node: str = "a", error: str = "ValueError") -> Failure:
    return mistake(node, error, "shared_error")


def out_of_memory(step: int, node: str = "a") -> Failure:
    error = "torch.OutOfMemoryError"
    return Failure(1, node, "crash", (), "rank 0 is out of memory", error=error, step=step, repeat_key=error)


def missed_call(step: int) -> Failure:
    return Failure(1, "a", "crash", (), "rank 0 waits", error=MISSED, step=step, repeat_key=MISSED)


def refused_state(step: int, kind: str = "StateDiffers", saved: int = 0) -> Failure:
    error = f"elasticd.errors.{kind}"
    failure = Failure(1, "a", "crash", ((0, 0),), "rank 0 refused", error=error, step=step, repeat_key=error)
    return replace(failure, checkpoint=(1, saved) if saved else None)


def first(*nodes: PresentNode, fewest: int = 2, most: int = 2, at_least: int = 1) -> View:
    return View(None, _far(nodes, 0), Requirements(fewest, most, at_least, max(at_least, len(nodes))))


def _far(nodes: tuple[PresentNode, ...], number: int) -> tuple[PresentNode, ...]:
    """The nodes, once they have seen and started that round."""
    return tuple(replace(p, record=replace(p.record, seen_round=number, ready_round=number)) for p in nodes)


def running(view: View) -> View:
    """The view once its next Round was published, at time 0."""
    current = decided(view)
    return replace(view, current=current, nodes=_far(view.nodes, current.number), failures=(), done=frozenset())


def decided(view: View, now: float = 0.0, policy: Policy = POLICY) -> Round:
    verdict = plan(view, policy, now)
    assert isinstance(verdict, Round), verdict
    return verdict


def waiting(view: View, now: float = 0.0, policy: Policy = POLICY) -> Wait:
    verdict = plan(view, policy, now)
    assert isinstance(verdict, Wait), verdict
    return verdict


def test_first_round() -> None:
    view = replace(first(node("a")), first_round_number=8, checkpoint=(7, 50))
    r = decided(view)
    assert r == Round(8, (Member("a", "i", (0, 1), "", "a.lan"),), (7, 50), reason=r.reason, cause="start")
    assert r.reason == "new start after round 7: 2 workers on a, from checkpoint r7-s50 or later"
    assert decided(first(node("a"))).reason == "first round: 2 workers on a, no elasticd checkpoint yet"
    assert waiting(running(view)) == Wait("round 8 runs with 2 workers", None)


def test_workers_are_within_the_requirements() -> None:
    assert decided(first(node("a", slots=(3, 5, 7)), fewest=1, most=2)).members[0].slots == (3, 5)
    assert waiting(first(node("a"), fewest=3, most=3)).why == "a has 2 slots, the job needs 3 workers on each node"


def test_job_ends_once() -> None:
    view = running(first(node("a")))
    done = decided(replace(view, done=frozenset({"a"}), stop=STOP))
    assert (done.number, done.outcome, done.exit_code, done.members) == (2, "succeeded", 0, ())
    assert waiting(replace(view, current=done, failures=(crash(),), stop=STOP)).until is None
    stopped = decided(replace(view, failures=(crash(),), stop=STOP))
    assert (stopped.outcome, stopped.exit_code, stopped.reason) == ("stopped", 143, "stopped by SIGTERM")
    early = decided(replace(first(node("a")), first_round_number=4, stop=STOP))
    assert (early.number, early.outcome) == (4, "stopped")


def test_crash_after_others_are_done_restarts_all() -> None:
    view = running(first(node("a"), node("b")))
    r = decided(replace(view, done=frozenset({"a"}), failures=(crash(node="b"),)))
    assert [m.node for m in r.members] == ["a", "b"]
    assert (r.restarts, r.terminal) == (1, False)
    still = replace(view, done=frozenset({"a", "b"}), failures=(crash(node="b"),))
    assert not decided(still).terminal, "a member that failed has not succeeded"


def test_foreign_failures_are_not_counted() -> None:
    """Failures of another round, or of a node outside the round, change nothing."""
    view = running(first(node("a")))
    for failure in (replace(crash(), round=7), crash(node="z")):
        assert waiting(replace(view, failures=(failure,))).until is None


def test_backoff_starts_at_the_failure() -> None:
    """Time spent on waiting for reports is part of the backoff."""
    view = running(first(node("a")))
    assert view.current is not None
    tired = replace(view.current, budget=BudgetState(counted=2, streak=2))
    view = replace(view, current=tired, failures=(crash(),), failure_seen_at=100.0)
    why = "rank 1 was killed by SIGKILL; restart 2 s after the failure (backoff)"
    assert waiting(view, 100.0) == Wait(why, 102.0, notable=True)
    r = decided(view, 102.0)
    assert r.budget == BudgetState(counted=3, streak=3, tokens=59.0)
    assert r.reason == "rank 1 was killed by SIGKILL; restart with 2 workers on a, no elasticd checkpoint yet"


def test_user_error_ends_the_job_if_every_node_reports_it() -> None:
    """An error that only some nodes report is a crash, and costs a restart."""
    view = replace(running(first(node("a"), node("b"))), failure_seen_at=10.0)
    one = replace(view, failures=(mistake("a"),))
    assert [waiting(replace(one, round_seen_at=at), 10.0).until for at in (9.9, 8.0)] == [10.5, 12.0]
    assert waiting(replace(view, failures=(mistake("a", "ValueError", "shared_error"),)), 10.0).until == 10.5
    assert not decided(replace(one, round_seen_at=9.9), 10.5).terminal
    assert not decided(replace(view, failures=(mistake("a"), mistake("b", "OSError"))), 10.0).terminal
    assert not decided(replace(view, failures=(mistake("a"), crash(node="b"))), 10.0).terminal
    end = decided(replace(view, failures=(mistake("a"), mistake("b"))), 10.0)
    assert (end.outcome, end.exit_code) == ("failed", 1)
    assert end.reason == "an error in the script, not restarted: all ranks on a raised"


HARD = Policy(max_restarts=9)
ONCE = BudgetState(counted=1, step=0, repeat_key="ValueError: x")
TWICE = "an error in the script, twice before the first step: all ranks on a raised"
MISSED = "elasticd.errors.MissedCall"
OUT = BudgetState(counted=1, step=4, repeat_key="torch.OutOfMemoryError", high_water=4)
DIFFERS = replace(OUT, repeat_key="elasticd.errors.StateDiffers")


@pytest.mark.parametrize(
    ("budget", "high_water", "failures", "policy", "ends"),
    [
        (BudgetState(), 0, (mistake("a"), mistake("b")), POLICY, "an error in the script, not restarted"),
        (BudgetState(), 1, (mistake("a"), mistake("b")), POLICY, None),
        (BudgetState(high_water=1), 1, (mistake("a"), mistake("b")), POLICY, None),
        (BudgetState(), 0, (mistake("a"), mistake("b")), HARD, None),
        (BudgetState(), 0, (mistake("a"), shared("b", "NameError")), POLICY, "an error in the script, not restarted"),
        (BudgetState(), 0, (shared("a"), shared("b")), POLICY, None),
        (ONCE, 0, (shared("a"), shared("b")), POLICY, TWICE),
        (ONCE, 7, (shared("a"), shared("b")), POLICY, TWICE),
        (ONCE, 0, (shared("a"), shared("b")), HARD, None),
        (ONCE, 0, (shared("a", "KeyError"), shared("b", "KeyError")), POLICY, None),
        (ONCE, 0, (shared("a"), crash(node="b")), POLICY, None),
        (replace(ONCE, step=None), 0, (shared("a"), shared("b")), POLICY, None),
        (BudgetState(), 4, (out_of_memory(4),), POLICY, None),
        (OUT, 4, (out_of_memory(4),), POLICY, "an error in the script, twice after step 4: rank 0 is out of memory"),
        (
            OUT,
            4,
            (replace(crash(node="a"), culprits=()), out_of_memory(4, "b")),
            POLICY,
            "an error in the script, twice",
        ),
        (OUT, 5, (out_of_memory(5),), POLICY, None),
        (OUT, 4, (out_of_memory(4),), HARD, None),
        (replace(OUT, repeat_key=""), 4, (out_of_memory(4),), POLICY, None),
        (BudgetState(), 4, (missed_call(4),), POLICY, None),
        (replace(OUT, repeat_key=MISSED), 9, (missed_call(9),), POLICY, "an error in the script, twice: rank 0 waits"),
        (replace(OUT, repeat_key=MISSED), 9, (missed_call(9),), HARD, None),
        (
            BudgetState(),
            4,
            (refused_state(4, "CheckpointRefused"),),
            POLICY,
            "an error in the script, not restarted: rank 0 refused",
        ),
        (BudgetState(), 4, (refused_state(4, "CheckpointRefused"),), HARD, None),
        (BudgetState(), 4, (refused_state(4, "CheckpointRefused", saved=3),), POLICY, None),
        (BudgetState(), 4, (refused_state(4),), POLICY, None),
        (DIFFERS, 9, (refused_state(9),), POLICY, "an error in the script, twice: rank 0 refused"),
        (DIFFERS, 9, (refused_state(9, saved=8),), POLICY, None),
        (replace(DIFFERS, step=9), 9, (refused_state(9, saved=8),), POLICY, None),
        (DIFFERS, 9, (refused_state(9),), HARD, None),
    ],
)
def test_what_shows_an_error_of_the_script(
    budget: BudgetState, high_water: int, failures: tuple[Failure, ...], policy: Policy, ends: str | None
) -> None:
    """`budget`: after the failure before. Everything else costs a restart."""
    view = running(first(node("a"), node("b")))
    assert view.current is not None
    view = replace(view, current=replace(view.current, budget=budget), failures=failures, high_water=high_water)
    r = decided(replace(view, failure_seen_at=-99.0), policy=policy)
    assert r.terminal is (ends is not None), r.reason
    if ends is not None:
        assert (r.outcome, r.exit_code) == ("failed", 1)
        assert r.reason.startswith(ends), r.reason
    else:
        assert r.budget.counted == budget.counted + 1
        assert r.cause == "crash"
        named = next((f for f in failures if f.culprits), failures[0])
        assert (r.budget.step, r.budget.repeat_key) == (named.step, named.repeat_key)


def refused(*present: PresentNode, size: int = 2, nodes: int = 1, error: Failure | None = None) -> View:
    """Round 1 of nodes a, b ... has stepped with `size` workers; then `nodes` of them shared this error."""
    view = running(first(*(node(name) for name in "abc"[:nodes]), at_least=1))
    assert view.current is not None
    here = replace(view.current, stepped_size=size)
    failures = tuple(replace(error or shared(m.node), node=m.node) for m in here.members)
    asked = replace(view.requirements, max_nodes=3)
    others = tuple(replace(p, record=replace(p.record, seen_round=1, ready_round=0)) for p in present[nodes:])
    found = (*_far(present[:nodes], 1), *others)
    return replace(view, current=here, requirements=asked, nodes=found, failures=failures, high_water=9)


def test_script_that_refuses_fewer_workers() -> None:
    """One refused round; then the job waits for as many as have trained, and never tries fewer again."""
    alone = refused(node("a"), size=4)
    wait = waiting(alone)
    why = "the script has refused to start with less than 4 workers, and there is room for 2"
    assert wait == Wait(f"all ranks on a raised; {why}", None, too_few_nodes=True, notable=True)
    assert waiting(replace(alone, too_few_nodes_since=0.0), 599.0).until == 600.0
    end = decided(replace(alone, too_few_nodes_since=0.0), 600.0)
    assert end.reason == f"all ranks on a raised; {why}, and no more joined within 600 s (--replace-timeout)"
    r = decided(refused(node("a"), node("b", joined_at=1), size=4))
    assert (r.world_size, r.required_size, r.budget, r.cause) == (4, 4, BudgetState(high_water=9), "resize")
    gone = replace(running(first(node("a"))), current=r, nodes=_far((node("a"),), 2), absent_since=(("b", -99.0),))
    assert waiting(replace(gone, store_up_since=-99.0)).why == f"b is lost: its lease has expired; {why}"
    drain = replace(gone, absent_since=(), nodes=_far((node("a"), _leaving(node("b"))), 2))
    assert waiting(drain) == Wait(f"b leaves; {why}", None, notable=True), "a group that trains goes on"


def _leaving(p: PresentNode) -> PresentNode:
    return replace(p, record=replace(p.record, leaving=f"{p.record.id} leaves"))


def test_script_that_needs_its_quarantined_slot() -> None:
    """One node of two slots: the one that failed twice is used again, since one worker is refused."""
    view = running(first(node("a"), fewest=1))
    one = replace(view.current.members[0], slots=(0,))
    out = (QuarantinedSlot("a", 1, strikes=2, times=1, left_s=60.0),)
    current = replace(view.current, members=(one,), stepped_size=2, quarantined_slots=out)
    assert decided(replace(view, current=current, failures=(shared(),))).world_size == 2


@pytest.mark.parametrize(
    "view", [refused(node("a"), size=2), refused(node("a"), size=0), refused(node("a"), size=4, error=crash(node="a"))]
)
def test_failure_that_is_no_refusal(view: View) -> None:
    """The size is the one that has trained; none has; or the error is not shared."""
    assert decided(view).required_size == 0


def test_smallest_size_that_has_stepped() -> None:
    view = running(first(node("a"), node("b"), at_least=1))
    assert view.current is not None
    for known, stepped, expected in ((0, 0, 0), (0, 1, 4), (2, 1, 2), (6, 1, 4)):
        current = replace(view.current, stepped_size=known)
        here = tuple(replace(p, record=replace(p.record, stepped_round=stepped)) for p in view.nodes)
        r = decided(replace(view, current=current, nodes=here, failures=(crash(),)))
        assert r.stepped_size == expected


def test_lost_node_costs_no_restart() -> None:
    view = running(first(node("c", joined_at=1), node("a", joined_at=2), node("b", joined_at=3)))
    assert [m.node for m in view.current.members] == ["c", "a", "b"]
    gone = (("c", -100.0),)  # for longer than anyone may be away
    view = replace(
        view,
        high_water=40,
        requirements=replace(view.requirements, min_nodes=1),
        absent_since=gone,
        store_up_since=-100.0,
    )
    left = (node("aa", joined_at=9), node("b", joined_at=3), node("a", joined_at=2, incarnation="new"), node("c"))
    r = decided(replace(view, nodes=left[:3]))
    assert [(m.node, m.incarnation) for m in r.members] == [("b", "i"), ("a", "new"), ("aa", "i")]
    assert r.reason.startswith(
        "c is lost: its lease has expired; a was restarted; aa joined; restart with 6 workers on 3"
    )
    assert r.budget == BudgetState(high_water=40)
    assert waiting(replace(view, nodes=left[1:], done=frozenset({"a"}))).until is None, "who is done cannot be lost"


def test_last_call() -> None:
    view = View(None, _far((node("a", joined_at=1), node("b", joined_at=3)), 0), Requirements(2, 2, 1, 3))
    assert waiting(view, 3.0).until == 8.0
    assert len(decided(view, 8.0).members) == 2
    assert len(decided(replace(view, nodes=(*view.nodes, *_far((node("c", joined_at=4),), 0))), 4.0).members) == 3
    few = replace(view, requirements=Requirements(2, 2, 3, 3))
    assert waiting(few, 99.0).why == "2 of at least 3 nodes present"


def failing(view: View, r: Round, *slots: int, step: int = 0, now: float = 0.0) -> Round:
    failures = tuple(replace(crash(slot=s), round=r.number, high_water=step) for s in slots)
    return decided(replace(view, current=r, failures=failures, failure_seen_at=-99.0), now)


def test_failing_slot_is_quarantined_while_enough_remain() -> None:
    view = first(node("a", slots=(0, 1, 2)), fewest=1, most=3)
    r = failing(view, decided(view), 1)
    assert r.quarantined_slots == (QuarantinedSlot("a", 1, strikes=1),)
    r = failing(view, r, 1)
    assert r.quarantined_slots == (QuarantinedSlot("a", 1, strikes=2, times=1, left_s=60.0),)
    assert r.members[0].slots == (0, 2)
    assert r.budget.streak == 1, "what runs next is not what failed"
    assert "; slot 1 of a quarantined for 60 s after 2 failures without progress; " in r.reason
    r = failing(view, failing(view, r, 2), 2)
    assert r.members[0].slots == (0,)
    r = failing(view, r, 0)
    assert r.members[0].slots == (0,)
    end = failing(view, r, 0)
    assert end.terminal, "the last one is never set aside, nor forgiven"


def test_quarantine_ends_and_is_longer_the_next_time() -> None:
    """A slot comes back after its cool-off; the next quarantine comes sooner and lasts longer."""
    view = first(node("a", slots=(0, 1, 2)), fewest=2, most=3)
    r = failing(view, failing(view, decided(view), 1), 1)
    early = failing(view, r, 0, step=5, now=59.0)
    assert early.members[0].slots == (0, 2)
    assert early.quarantined_slots == (
        QuarantinedSlot("a", 0, strikes=1),
        QuarantinedSlot("a", 1, strikes=2, times=1, left_s=1.0),
    )
    late = failing(view, r, 0, step=5, now=60.0)
    assert late.members[0].slots == (0, 1, 2)
    again = failing(view, late, 1, step=5)
    assert again.quarantined_slots[1] == QuarantinedSlot("a", 1, strikes=3, times=2, left_s=120.0)
    proven = failing(view, late, 1, step=9)
    assert proven.quarantined_slots == (QuarantinedSlot("a", 1, strikes=1),), (
        "progress with the slot in use wipes its record"
    )


def test_spare_slot_replaces_a_quarantined_one() -> None:
    view = first(node("a", slots=(0, 1, 2)), fewest=2, most=2)
    r = failing(view, failing(view, decided(view), 1), 1)
    assert r.members[0].slots == (0, 2)


def test_quarantined_slots_are_used_where_too_few_remain() -> None:
    view = first(node("a", slots=(0, 1, 2)), fewest=2, most=3)
    r = replace(
        decided(view), quarantined_slots=(QuarantinedSlot("a", 0, 2, 1, 50.0), QuarantinedSlot("a", 1, 2, 1, 40.0))
    )
    assert failing(view, r, 2, step=5).members[0].slots == (0, 1, 2), "those in use had no record to lose"
    idle = replace(r, members=(Member("a", "i", (2,)),))
    assert failing(view, idle, 2, step=5).members[0].slots == (1, 2), "the one nearest its return"


def test_unknown_fields_of_a_round_are_kept() -> None:
    """A newer leader may have written them."""
    view = first(node("a"))
    r = Round.from_json(decided(view).to_json().replace(b'"version":"1.0"', b'"version":"1.7","mood":"good"'))
    after = failing(view, r, 0)
    assert (after.version, after.unknown) == ("1.7", {"mood": "good"})
