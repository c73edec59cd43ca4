"""`schedule()` against its rules: properties of random clusters, and cases that no transcript shows."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from elasticd_agent.model.phrases import MAX_ITEMS
from elasticd_daemon.config.job_file import JobFile, to_json
from elasticd_daemon.health.result import EVERY_JOBS_DIRECTORY
from elasticd_daemon.records import (
    ClusterView,
    Cordon,
    JobResult,
    NodeStatus,
    Placement,
    Refusal,
    RunnerStatus,
    SlotAssignment,
    Submission,
)
from elasticd_daemon.scheduler.policy import (
    BEHIND_OTHERS_REASON,
    BLOCKS_NOBODY_PHRASE,
    describe_reason,
    head_of_queue,
    jobs_refused_everywhere,
    queue,
    schedule,
)

NAMES = [f"n{i}" for i in range(1, 6)]
JOBS = list("abcdef")

slot_sets = st.sets(st.integers(0, 5), min_size=1, max_size=4).map(lambda s: tuple(sorted(s)))


@st.composite
def submissions(draw: st.DrawFn) -> tuple[Submission, ...]:
    found = []
    for job in draw(st.lists(st.sampled_from(JOBS), unique=True)):
        nodes = sorted((draw(st.integers(1, 4)), draw(st.integers(1, 4))))
        slots = sorted((draw(st.integers(1, 5)), draw(st.integers(1, 5))))
        by = draw(st.sampled_from(["", "ann", "bob at 10.0.0.1"]))
        spares = draw(st.integers(0, 2))
        wants = Submission(job, len(found) + 1, "{}", nodes[0], nodes[1], slots[0], slots[1], by, spares=spares)
        found.append(wants)
    return tuple(draw(st.permutations(found)))


@st.composite
def node_statuses(draw: st.DrawFn, names: list[str]) -> tuple[NodeStatus, ...]:
    states = st.sampled_from(["ready", "ready", "ready", "ready", "draining", "quarantined", "cordoned"])
    runners = st.builds(
        RunnerStatus,
        st.sampled_from(JOBS),
        st.integers(1, 6),
        slot_sets,
        st.sampled_from(["running", "leaving", "refused"]),
    )
    return tuple(
        NodeStatus(
            name,
            "i",
            draw(st.integers(0, 6)),
            state=draw(states),
            runners=tuple(draw(st.lists(runners, max_size=2))) if draw(st.booleans()) else (),
        )
        for name in names
    )


@st.composite
def views(draw: st.DrawFn) -> ClusterView:
    """Anything that may be in the store, consistent or not."""
    names = draw(st.lists(st.sampled_from(NAMES), unique=True))
    gone = draw(st.integers(0, len(names)))
    jobs = draw(submissions())
    places = st.lists(
        st.builds(SlotAssignment, st.sampled_from(NAMES), slot_sets), max_size=3, unique_by=lambda p: p.node
    )
    placements = tuple(
        Placement(job, draw(st.integers(1, 6)), tuple(draw(places)), "before", tuple(draw(refusals)))
        for job in draw(st.lists(st.sampled_from(JOBS), unique=True))
    )
    return ClusterView(
        draw(node_statuses(names[gone:])),
        tuple(Cordon(n, draw(st.booleans()), "why") for n in draw(st.lists(st.sampled_from(NAMES), unique=True))[:2]),
        jobs,
        placements,
        tuple(JobResult(job, draw(st.integers(1, 6)), "failed", 1, "") for job in draw(st.sets(st.sampled_from(JOBS)))),
        draw(node_statuses(names[:gone])),
        frozenset(draw(st.sets(st.tuples(st.sampled_from(JOBS), st.sampled_from(NAMES)), max_size=3))),
    )


refusals = st.lists(st.builds(Refusal, st.sampled_from(NAMES)), max_size=1)


@st.composite
def sane_views(draw: st.DrawFn) -> ClusterView:
    """Reached by scheduling: jobs were submitted and ended and nodes came, one after the other."""
    view = ClusterView()
    for name in draw(st.permutations(NAMES))[: draw(st.integers(1, 5))]:
        view = replace(view, nodes=(*view.nodes, NodeStatus(name, "i", draw(st.integers(1, 6)))))
    for number, job in enumerate(draw(st.permutations(JOBS))[: draw(st.integers(1, 6))], 1):
        nodes = sorted((draw(st.integers(1, 4)), draw(st.integers(1, 4))))
        slots = sorted((draw(st.integers(1, 5)), draw(st.integers(1, 5))))
        wants = Submission(job, number, "{}", nodes[0], nodes[1], slots[0], slots[1])
        view = after(replace(view, submissions=(*view.submissions, wants)))
        if draw(st.integers(0, 3)) == 0:
            over = draw(st.sampled_from([s.job for s in view.submissions]))
            last = next(s for s in view.submissions if s.job == over)
            view = after(replace(view, results=(*view.results, JobResult(over, last.number, "succeeded", 0, ""))))
    return view


def after(view: ClusterView) -> ClusterView:
    """The view once the schedule is written."""
    written = {p.job: p for p in view.placements} | {p.job: p for p in schedule(view)}
    return replace(view, placements=tuple(written.values()))


def live(view: ClusterView) -> dict[str, Placement]:
    """The placements that count, of jobs that have not ended."""
    numbers = {s.job: s.number for s in view.unfinished()}
    return {p.job: p for p in view.placements if numbers.get(p.job) == p.number}


def words(view: ClusterView, job: str) -> str:
    return live(view)[job].reason


@settings(max_examples=250, deadline=None)
@given(views())
def test_rules_hold_for_every_view(view: ClusterView) -> None:
    then = after(view)
    placed = live(then)
    assert set(placed) == {s.job for s in view.unfinished()}, "every unfinished job runs or is pending"
    used = [(at.node, slot) for p in placed.values() for at in p.assignments for slot in at.slots]
    assert len(used) == len(set(used)), "no slot twice"
    strange = {(at.node, slot) for p in then.orphaned() for at in p.assignments for slot in at.slots}
    running = {(c.node, r.job, r.number) for c in (*view.nodes, *view.absent_nodes) for r in c.runners}
    for p in placed.values():
        for at in p.assignments:
            taken = strange & {(at.node, slot) for slot in at.slots}
            assert not taken or (at.node, p.job, p.number) in running, "an orphaned placement keeps its slots"
    here = {c.node: c for c in view.nodes}
    absent = {c.node: c for c in view.absent_nodes}
    emptied = {c.node for c in view.cordons if c.drain}
    for wants in view.unfinished():
        mine = placed[wants.job]
        before = live(view).get(wants.job)
        assert mine.reason.strip()
        assert not mine.assignments or len(mine.assignments) >= wants.min_nodes, "never fewer"
        # A store that has lost a placement learns it again from the nodes where the job runs.
        runs = {
            (c.node, r.slots)
            for c in view.nodes
            for r in c.runners
            if before is None and (r.job, r.number, r.state) == (wants.job, wants.number, "running")
        }
        kept = {p.node for p in before.assignments} if before is not None else {node for node, _ in runs}
        assert len(mine.assignments) <= max(wants.max_nodes_with_spares, len(kept)), "never more"
        assert len({p.node for p in mine.assignments}) == len(mine.assignments)
        for at in mine.assignments:
            status = here.get(at.node) or absent[at.node]
            assert at.node not in emptied
            assert status.state != "draining"
            assert at.node not in {r.node for r in mine.refusals}
            if (before is None or before.assignment(at.node) != at) and (at.node, at.slots) not in runs:
                assert at.node in here, "nothing new on an absent node"
                assert status.state == "ready"
                assert at.node not in {c.node for c in view.cordons}
                assert wants.min_slots <= len(at.slots) <= wants.max_slots_with_spares
                assert max(at.slots) < status.slots
                busy = {s for r in status.runners if r.state != "refused" for s in r.slots}
                assert not busy & set(at.slots), "a process still runs there"
        if not mine.assignments:
            assert "pending" in mine.reason
    assert schedule(then) == (), "nothing is left to change"
    other_order = replace(
        view, nodes=view.nodes[::-1], submissions=view.submissions[::-1], placements=view.placements[::-1]
    )
    assert sorted(schedule(other_order), key=lambda p: p.job) == sorted(schedule(view), key=lambda p: p.job), (
        "deterministic"
    )


@settings(max_examples=150, deadline=None)
@given(sane_views(), submissions())
def test_new_submissions_change_no_running_job(view: ClusterView, more: tuple[Submission, ...]) -> None:
    known = {s.job for s in view.submissions}
    newcomers = tuple(replace(s, number=100 + s.number) for s in more if s.job not in known)
    then = after(replace(view, submissions=(*view.submissions, *newcomers)))
    for job, placement in live(view).items():
        if placement.assignments:
            assert live(then)[job] == placement
    assert [p.job for p in schedule(replace(view, submissions=(*view.submissions, *newcomers)))] == [
        s.job for s in sorted(newcomers, key=lambda s: s.number)
    ], "nor any pending job"


@settings(max_examples=150, deadline=None)
@given(sane_views())
def test_pending_jobs_start_in_order(view: ClusterView) -> None:
    """A pending job that these nodes could run if they were empty blocks all jobs behind it."""
    then = after(view)
    held_up = False
    for wants in then.unfinished():
        fit = [c for c in then.nodes if c.slots >= wants.min_slots]
        waits = not live(then)[wants.job].assignments
        fresh = wants.job not in live(view) or not live(view)[wants.job].assignments
        if held_up and fresh:
            assert waits, f"{wants.job} overtook somebody"
        held_up = held_up or (waits and len(fit) >= wants.min_nodes)
        if waits:
            assert (BLOCKS_NOBODY_PHRASE in words(then, wants.job)) == (len(fit) < wants.min_nodes)


@settings(max_examples=150, deadline=None)
@given(sane_views(), st.sampled_from(NAMES))
def test_head_of_queue_is_short_of_slots(view: ClusterView, name: str) -> None:
    """No job that could run is pending: the first in the queue is short of nodes with enough free slots."""
    first = next((s for s in view.unfinished() if not live(view)[s.job].assignments), None)
    assume(first is not None)
    assert first is not None
    used = {(at.node, slot) for p in live(view).values() for at in p.assignments for slot in at.slots}
    room = {c.node: sum((c.node, s) not in used for s in range(c.slots)) for c in view.nodes}
    assert sum(free >= first.min_slots for free in room.values()) < first.min_nodes


@settings(max_examples=100, deadline=None)
@given(sane_views(), st.sampled_from(NAMES), st.booleans())
def test_absent_node_moves_no_job(view: ClusterView, name: str, drained_elsewhere: bool) -> None:
    status = next((c for c in view.nodes if c.node == name), None)
    assume(status is not None)
    assert status is not None
    absent = replace(view, nodes=tuple(c for c in view.nodes if c is not status), absent_nodes=(status,))
    then = after(absent)
    for job, placement in live(view).items():
        if placement.assignments:
            assert live(then)[job].assignments[: len(placement.assignments)] == placement.assignments
    back = after(replace(then, nodes=(*then.nodes, status), absent_nodes=()))
    for job, placement in live(then).items():
        assert live(back)[job].assignments[: len(placement.assignments)] == placement.assignments


def view(*jobs: Submission, nodes: dict[str, int] | None = None, **fields: object) -> ClusterView:
    found = tuple(NodeStatus(name, "i", slots) for name, slots in (nodes or {"n1": 4, "n2": 4}).items())
    return replace(ClusterView(nodes=found, submissions=jobs), **fields)  # type: ignore[arg-type]


def job(
    name: str = "a", number: int = 1, nodes: tuple[int, int] = (1, 1), slots: tuple[int, int] = (4, 4)
) -> Submission:
    return Submission(name, number, "{}", *nodes, *slots)


def test_ended_job_releases_its_slots() -> None:
    """Its record stays as it is."""
    one = after(view(job(), nodes={"n1": 4}))
    two = replace(one, submissions=(*one.submissions, job("b", 2)))
    assert "n1 has 0 of 4 free" in words(after(two), "b")
    ended = replace(two, results=(JobResult("a", 1, "succeeded", 0, "done"),))
    assert [p.job for p in schedule(ended)] == ["b"]
    assert after(ended).placements[0] == one.placements[0]


def test_spares_are_nodes_beyond_the_most_or_slots_of_the_only_node() -> None:
    nodes = {"n1": 6, "n2": 4, "n3": 4, "n4": 4}
    wide, one = (after(view(replace(job(nodes=(n, n)), spares=1), nodes=nodes)) for n in (2, 1))
    assert [(at.node, len(at.slots)) for at in live(wide)["a"].assignments] == [("n2", 4), ("n3", 4), ("n4", 4)]
    assert [(at.node, len(at.slots)) for at in live(one)["a"].assignments] == [("n1", 5)]
    without = after(view(replace(job(nodes=(4, 4)), spares=1), nodes=nodes))
    assert len(live(without)["a"].assignments) == 4, "no job waits for its spares"


def test_result_of_an_earlier_run() -> None:
    """It does not end the run that was submitted later."""
    again = view(job(number=7), nodes={"n1": 4}, results=(JobResult("a", 3, "failed", 1, ""),))
    (placement,) = schedule(replace(again, placements=(Placement("a", 3, (SlotAssignment("n1", (0,)),), ""),)))
    assert (placement.number, placement.assignments) == (7, (SlotAssignment("n1", (0, 1, 2, 3)),))


def test_orphaned_placement_keeps_its_slots() -> None:
    """Its submission was written by a newer version and cannot be read here, but its runners run."""
    strange = Placement("theirs", 1, (SlotAssignment("n1", (0, 1)),), "placed by a newer version")
    then = view(job(number=2), nodes={"n1": 4}, placements=(strange,))
    assert words(after(then), "a").endswith("n1 has 2 of 4 free")
    assert strange in after(then).placements


def test_orphaned_placement_ends_no_job() -> None:
    forged = Placement("%2e%2e", 99_999, (SlotAssignment("n1", (0,)),), "")
    placed = Placement("a", 1, (SlotAssignment("n1", (0, 1)),), "runs on n1 (slots 0-1)")
    both = view(job("a", 1, slots=(2, 2)), nodes={"n1": 4}, placements=(placed, forged))
    running = replace(both.nodes[0], runners=(RunnerStatus("a", 1, (0, 1), "running"),))
    assert schedule(replace(both, nodes=(running,))) == ()


def test_two_placements_of_one_slot() -> None:
    """The job submitted first keeps it."""
    both = tuple(Placement(name, number, (SlotAssignment("n1", (0, 1)),), "") for name, number in (("a", 1), ("b", 2)))
    wants = tuple(job(name, number, slots=(2, 2)) for name, number in (("a", 1), ("b", 2)))
    (moved,) = schedule(view(*wants, placements=both))
    assert (moved.job, moved.reason) == ("b", "n1's slots are in use by a; runs on n1 (slots 2-3)")


def test_node_that_returns_with_fewer_slots() -> None:
    """A job that has not started there yet needs all of those that it was given."""
    placed = Placement("a", 1, (SlotAssignment("n1", (2, 3)),), "")
    assert schedule(view(job(slots=(2, 2)), nodes={"n1": 4}, placements=(placed,))) == ()
    (moved,) = schedule(view(job(slots=(2, 2)), nodes={"n1": 3}, placements=(placed,)))
    assert moved.reason == "n1 has 3 slots now; runs on n1 (slots 0-1)"


def test_refusal_is_kept_while_its_node_is_absent() -> None:
    """One that is there and does not report it any more tries the job again; another run may start there, too."""
    one = after(view(job(), nodes={"n1": 4, "n2": 4}))
    refused = RunnerStatus("a", 1, (0, 1, 2, 3), "refused", "no such script")
    node_statuses = (replace(one.nodes[0], runners=(refused,)), one.nodes[1])
    two = after(replace(one, nodes=node_statuses))
    assert words(two, "a") == "n1 refused it: no such script; runs on n2 (slots 0-3)"
    three = after(replace(two, nodes=(), absent_nodes=(one.nodes[0],)))
    assert "pending" in words(three, "a")
    assert [refusal.node for refusal in three.placements[0].refusals] == ["n1"]
    back = replace(three, nodes=(one.nodes[0],), absent_nodes=())
    assert words(after(back), "a") == "runs on n1 (slots 0-3)"
    other_run = replace(two, nodes=(node_statuses[0],), submissions=(job(number=5),))
    assert words(after(other_run), "a") == "runs on n1 (slots 0-3)"


def test_job_that_every_node_refused_is_named_with_their_reasons() -> None:
    refused = RunnerStatus("a", 1, (), "refused", "no script")
    first = view(job(), job("b", 2), nodes={"n1": 4})
    assert jobs_refused_everywhere(first) == {}, "nothing is placed yet"
    one = after(first)
    (node,) = one.nodes
    then = after(replace(one, nodes=(replace(node, runners=(refused,)),)))
    assert words(then, "a").endswith(f"the only node cannot run it: n1 refused it: no script; {BLOCKS_NOBODY_PHRASE}")
    assert words(then, "b") == "runs on n1 (slots 0-3)"
    assert jobs_refused_everywhere(then) == {("a", 1): "n1 refused it: no script"}
    assert jobs_refused_everywhere(replace(then, cordons=(Cordon("n1", False, "repair"),))) == {}
    assert jobs_refused_everywhere(replace(then, nodes=(*then.nodes, NodeStatus("n2", "i", 4)))) == {}, "n2 may run it"
    assert jobs_refused_everywhere(replace(then, absent_nodes=(NodeStatus("n2", "i", 4),))) == {}


def test_job_that_needs_more_nodes_than_refuse_it_waits_for_them() -> None:
    refused = RunnerStatus("a", 1, (), "refused", "the workdir is not there")
    one = after(view(job(nodes=(2, 2)), nodes={"n1": 4, "n2": 4}))
    alone = replace(one, nodes=(replace(one.nodes[0], runners=(refused,)),))
    assert jobs_refused_everywhere(after(alone)) == {}, "n2 is not up yet"
    both = replace(one, nodes=tuple(replace(node, runners=(refused,)) for node in one.nodes))
    assert list(jobs_refused_everywhere(after(both))) == [("a", 1)]


def test_reason_names_equal_refusals_once() -> None:
    refusing = tuple(
        NodeStatus(f"n{i}", "i", 4, runners=(RunnerStatus("a", 1, (), "refused", "no such script"),)) for i in (1, 2, 3)
    )
    placed = Placement("a", 1, (SlotAssignment("n1", (0,)),), "runs on n1 (slot 0)")
    then = after(ClusterView(nodes=refusing, submissions=(job(slots=(1, 1)),), placements=(placed,)))
    assert words(then, "a") == (
        "pending: needs 1 node with 1 free slot, and none of the 3 nodes can run it: "
        "n1, n2 and n3 refused it: no such script; it blocks no other job"
    )


def test_start_of_the_head_rewrites_only_the_next() -> None:
    """A queue of 200 must not be written and logged 200 times, whenever one of its jobs starts."""
    full = RunnerStatus("z", 999, (0, 1, 2, 3), "leaving")
    waiting = after(
        ClusterView(
            nodes=(NodeStatus("n1", "i", 4, runners=(full,)),),
            submissions=tuple(job(f"j{i}", i, slots=(4, 4)) for i in range(1, 201)),
        )
    )
    head = head_of_queue(waiting)
    assert (head.job, words(waiting, "j200")) == ("j1", BEHIND_OTHERS_REASON)
    assert (
        describe_reason(BEHIND_OTHERS_REASON, head)
        == "pending behind j1, which is next and needs 1 node with 4 free slots"
    )
    free = replace(waiting, nodes=(NodeStatus("n1", "i", 4),))
    assert [p.job for p in schedule(free)] == ["j1", "j2"]
    assert head_of_queue(after(free)) == free.submissions[1]


def test_two_jobs_below_their_minimum() -> None:
    """The younger releases its slots, which helps the older."""
    wants = job("a", 1, (2, 2)), job("b", 2, (2, 2))
    placed = tuple(
        Placement(
            s.job,
            s.number,
            (SlotAssignment(f"n{s.number}", (0, 1, 2, 3)), SlotAssignment(f"gone{s.number}", (0, 1, 2, 3))),
            "",
        )
        for s in wants
    )
    then = after(view(*wants, placements=placed))
    assert words(then, "a") == "gone1 is gone; runs on n1 (slots 0-3) and n2 (slots 0-3)"
    assert words(then, "b").startswith(
        "gone2 is gone; n2 alone is too few; pending: needs 2 nodes with 4 free slots each"
    )


def test_pending_job_prefers_its_previous_nodes() -> None:
    one = after(view(job(slots=(2, 4)), nodes={"n2": 4}))
    drained = after(replace(one, cordons=(Cordon("n2", True, ""),)))
    assert not live(drained)["a"].assignments
    more = replace(drained, nodes=(NodeStatus("n1", "i", 4), *drained.nodes), cordons=())
    assert words(after(more), "a") == "runs on n2 (slots 0-3)"


def test_running_job_without_placement() -> None:
    """The store has lost its data: the job gets the slots in which it runs."""
    both = tuple(NodeStatus(f"n{i}", "i", 4, runners=(RunnerStatus("a", 1, (2, 3), "running"),)) for i in (1, 2))
    then = after(ClusterView(nodes=both, submissions=(job(nodes=(1, 2), slots=(1, 2)),)))
    assert words(then, "a") == "runs on n1 (slots 2-3) and n2 (slots 2-3)"


@pytest.mark.parametrize("state", ["draining", "quarantined"])
def test_draining_or_quarantined_node_is_emptied(state: str) -> None:
    one = after(view(job(nodes=(1, 2)), nodes={"n1": 4, "n2": 4}))
    node_statuses = (replace(one.nodes[0], state=state, why="its reasons"), one.nodes[1])  # type: ignore[arg-type]
    assert words(after(replace(one, nodes=node_statuses)), "a") == f"n1 is {state}: its reasons; runs on n2 (slots 0-3)"


def test_higher_priority_starts_first_and_evicts_nobody() -> None:
    low, normal, high = (
        replace(job(name, number), priority=name) for number, name in enumerate(("low", "normal", "high"), 1)
    )
    running = after(view(low, nodes={"n1": 4}))
    waiting = after(replace(running, submissions=(low, normal, high)))
    assert words(waiting, "low") == "runs on n1 (slots 0-3)"
    assert [one.job for one in waiting.unfinished()] == ["high", "normal", "low"]
    assert head_of_queue(waiting) == high
    ended = replace(waiting, results=(JobResult("low", 1, "succeeded", 0, ""),))
    assert words(after(ended), "high") == "runs on n1 (slots 0-3)"


def test_queue_alternates_between_submitters() -> None:
    """A sweep of one person does not hold up everybody behind it; jobs that cannot run count for nothing."""
    sweep = tuple(replace(job(f"a{n}", n, slots=(1, 1)), submitted_by="ann") for n in range(1, 6))
    too_large = replace(job("b6", 6, nodes=(9, 9)), submitted_by="bob")
    others = tuple(replace(job(f"b{n}", n, slots=(1, 1)), submitted_by=f"bob at host{n}") for n in (7, 8))
    waiting = after(view(*sweep, too_large, *others, nodes={"n1": 1}))
    assert [one.job for one in queue(waiting)[1]] == ["b7", "a2", "b6", "b8", "a3", "a4", "a5"]


def test_job_runs_only_on_nodes_with_its_labels() -> None:
    wants = replace(job(), labels=("gpu=h100", "rack=7"))
    nodes = tuple(
        NodeStatus(f"n{n}", "i", 4, labels=labels) for n, labels in enumerate((("rack=7",), ("rack=7", "gpu=h100")))
    )
    one = after(ClusterView(nodes, submissions=(wants,)))
    assert words(one, "a") == "runs on n1 (slots 0-3)"
    none = after(ClusterView(nodes[:1], submissions=(wants,)))
    assert words(none, "a").startswith("pending: needs 1 node with")
    assert words(none, "a").endswith("the only node cannot run it: n0 has no label gpu=h100; it blocks no other job")


def test_job_that_may_not_grow() -> None:
    """It gets nodes only in exchange for those it loses."""
    wants = replace(job(nodes=(1, 3)), grow=False)
    one = after(view(wants, nodes={"n1": 4}))
    more = replace(one, nodes=(*one.nodes, NodeStatus("n2", "i", 4)))
    assert schedule(more) == ()
    moved = after(replace(more, cordons=(Cordon("n1", True, ""),)))
    assert words(moved, "a") == "n1 is drained; runs on n2 (slots 0-3)"


def test_reason_names_a_bounded_number_of_nodes() -> None:
    nodes = {f"n{i:04}": 1 for i in range(2000)}
    reason = words(after(view(job(nodes=(3, 3), slots=(2, 2)), nodes=nodes)), "a")
    assert reason.count("n0") == MAX_ITEMS
    assert reason.endswith("n0005 has 1 slot and 1994 more; it blocks no other job")
    assert len(reason) < 300


def test_reason_names_slots_as_ranges() -> None:
    taken = RunnerStatus("z", 9, (1, 4, 5), "leaving")
    node_statuses = (NodeStatus("n1", "i", 8, runners=(taken,)),)
    assert words(after(replace(view(job(slots=(1, 8))), nodes=node_statuses)), "a") == "runs on n1 (slots 0, 2-3, 6-7)"
    assert words(after(replace(view(job(slots=(1, 1))), nodes=node_statuses)), "a") == "runs on n1 (slot 0)"


def test_large_cluster_is_scheduled_quickly() -> None:
    """A turn with 500 nodes and 500 jobs must not block the loop: 100 ms would be noticed."""
    nodes = {f"n{i}": 8 for i in range(500)}
    jobs = [job(f"j{i}", i + 1, (1 + i % 4, 4), (1 + i % 8, 8)) for i in range(500)]
    big = view(*jobs, nodes=nodes)
    began = time.process_time()
    then = after(big)
    assert time.process_time() - began < 10
    began = time.process_time()
    assert schedule(then) == ()
    assert time.process_time() - began < 5


def test_previous_nodes_newest_first() -> None:
    view = ClusterView(nodes=tuple(NodeStatus(f"n{i}", "i", 1) for i in range(1, 13)))
    view = after(replace(view, submissions=(Submission("a", 1, "{}", 1, 1, 1, 1),)))
    ran = []
    for _ in range(10):
        ((at,),) = (live(view)["a"].assignments,)
        ran.append(at.node)
        view = after(replace(view, cordons=(*view.cordons, Cordon(at.node, drain=True, reason="fan"))))
    assert live(view)["a"].assignments[0].node not in ran
    assert live(view)["a"].previous_nodes == tuple(reversed(ran))[:8]
    view = after(replace(view, cordons=tuple(Cordon(status.node, drain=True, reason="fan") for status in view.nodes)))
    assert not live(view)["a"].assignments
    assert live(view)["a"].previous_nodes[1:] == tuple(reversed(ran))[:7]
    view = after(replace(view, cordons=view.cordons[:-1]))  # n12 is repaired
    assert live(view)["a"].assignments[0].node == "n12"


def _fleet(size: int, **failing: str) -> ClusterView:
    """Nodes n0 to n9 with one slot and a job each; the named ones are quarantined, with the check that fails."""
    names = [f"n{i}" for i in range(size)]
    nodes = tuple(
        NodeStatus(
            name,
            "i",
            1,
            state="quarantined" if name in failing else "ready",
            failing=tuple(filter(None, [failing.get(name)])),
        )
        for name in names
    )
    jobs = tuple(Submission(f"j{i}", i + 1, "{}", 1, 1, 1, 1) for i in range(size))
    placed = tuple(Placement(f"j{i}", i + 1, (SlotAssignment(name, (0,)),), "before") for i, name in enumerate(names))
    return ClusterView(nodes, submissions=jobs, placements=placed)


@pytest.mark.parametrize(
    ("size", "failing", "emptied"),
    [
        (1, {"n0": "disk"}, 1),
        (3, {"n0": "plugin", "n1": "plugin", "n2": "plugin"}, 1),
        (3, {"n0": "gpus", "n1": "plugin", "n2": "memory"}, 3),  # three causes
        (10, {f"n{i}": "plugin" for i in range(10)}, 2),
        (10, {f"n{i}": "" for i in range(10)}, 2),  # all cool off
        (10, {**{f"n{i}": "plugin" for i in range(9)}, "n9": "gpus"}, 3),
    ],
)
def test_one_check_empties_at_most_a_fifth(size: int, failing: dict[str, str], emptied: int) -> None:
    view = _fleet(size, **failing)
    for _ in range(3):  # a node that has been emptied makes room for no other
        view = after(view)
        assert sum(not p.assignments for p in view.placements) == emptied
    newcomer = Submission("new", 99, "{}", 1, 1, 1, 1)
    view = after(replace(view, submissions=(*view.submissions, newcomer)))
    assert not live(view)["new"].assignments, "no quarantined node takes new work"


def test_bad_shared_directory_blocks_new_jobs_that_use_it() -> None:
    def job(name: str, number: int, workdir: str, checkpoint_dir: str) -> Submission:
        spec = JobFile(command=("x.py",), workdir=Path(workdir), checkpoint_dir=Path(checkpoint_dir))
        return Submission(name, number, to_json(spec), 1, 1, 1, 1)

    view = after(ClusterView((NodeStatus("n1", "i", 4),), submissions=(job("a", 1, "/home", "/checkpoints/a"),)))
    running = live(view)["a"]
    full = NodeStatus("n1", "i", 4, why="disk /checkpoints: full", unusable=("/checkpoints",))
    jobs = (job("b", 2, "/home", "/checkpoints"), job("c", 3, "/checkpoints2", "/home/x/../c"))
    view = after(replace(view, nodes=(full,), submissions=(*view.submissions, *jobs)))
    assert live(view)["a"] == running
    assert live(view)["c"].assignments, "it uses another directory"
    assert "n1 cannot use /checkpoints: disk /checkpoints: full" in words(view, "b")
    assert live(after(replace(view, nodes=(NodeStatus("n1", "i", 4),))))["b"].assignments
    everywhere = NodeStatus("n1", "i", 4, why="disk /var/lib/elasticd: full", unusable=(EVERY_JOBS_DIRECTORY,))
    view = after(replace(view, nodes=(everywhere,), submissions=(*view.submissions, job("d", 4, "/any", "/where"))))
    assert live(view)["a"] == running, "a user who fills the disk stops no other user's job"
    for waits in "bd":
        assert "n1 cannot start a job: disk /var/lib/elasticd: full" in words(view, waits)
