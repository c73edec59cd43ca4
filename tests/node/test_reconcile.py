"""`reconcile()` as a table: what a node starts and stops, from values; and what it leaves alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from elasticd_agent.node.reconcile import BACKOFF_S, STABLE_S, LocalRunner, NodePlan, RunnerEnd, RunOutcomes, reconcile
from elasticd_agent.node.records import Cordon, JobResult, Placement, RunnerStatus, SlotAssignment, Submission
from elasticd_agent.node.runners.spec import RunnerExit, RunnerSpec
from elasticd_agent.node.scheduler.policy import ClusterView

NODE = "n1"
NOW = 1000.0


def wants(job: str = "a", number: int = 1) -> Submission:
    return Submission(job, number, "{}", 1, 2, 1, 4)


def placed(job: str = "a", number: int = 1, *slots: int, node: str = NODE, why: str = "runs on n1") -> Placement:
    return Placement(job, number, (SlotAssignment(node, slots),) if slots else (), why)


def runs(job: str = "a", number: int = 1, *slots: int, state: Any = "running") -> LocalRunner:
    return LocalRunner(RunnerSpec(job, number, NODE, slots or (0, 1), "{}"), state)


def last(outcome: Any, code: int, job: str = "a", number: int = 1) -> RunnerEnd:
    order = RunnerSpec(job, number, NODE, (0, 1), "{}")
    return RunnerEnd(order, RunnerExit(job, number, code, outcome, "it said why", step=7), requested=False)


def plan(
    view: ClusterView, *living: LocalRunner, ended: RunOutcomes | None = None, leaving: str = "", now: float = NOW
) -> NodePlan:
    return reconcile(view, NODE, living, ended or RunOutcomes(), leaving, now)


MOVED = placed("a", 1, 0, 1, node="n2", why="n1 is drained: a fan; runs on n2")
BOTH = ClusterView(submissions=(wants(),), placements=(placed("a", 1, 0, 1),))


def test_what_is_placed_here_is_started_once() -> None:
    (start,) = plan(BOTH).start
    assert (start.submission, start.slots) == (wants(), (0, 1))
    assert not plan(BOTH, runs()).start
    assert not plan(BOTH, runs()).stop


@pytest.mark.parametrize(
    "view",
    [
        ClusterView(),
        ClusterView(submissions=(wants(),)),
        ClusterView(placements=(placed("a", 1, 0, 1),)),
        ClusterView(submissions=(wants(),), placements=(placed("a", 1, 0, 1, node="n2"),)),
        ClusterView(submissions=(wants("a", 2),), placements=(placed("a", 1, 0, 1),)),
        replace(BOTH, results=(JobResult("a", 1, "cancelled", 143, ""),)),
    ],
    ids=["nothing", "not placed", "not submitted", "placed elsewhere", "another run's submission", "ended"],
)
def test_nothing_else_is_started(view: ClusterView) -> None:
    assert not plan(view).start


@pytest.mark.parametrize(
    ("view", "why"),
    [
        (
            replace(BOTH, results=(JobResult("a", 1, "cancelled", 143, "cancelled by ann"),)),
            "the job was cancelled by ann",
        ),
        (replace(BOTH, results=(JobResult("a", 1, "failed", 1, ""),)), "the job has failed"),
        (replace(BOTH, results=(JobResult("a", 2, "succeeded", 0, ""),)), "the job has succeeded"),
        (ClusterView(placements=(placed("a", 1, why="n1 is drained: a fan"),)), "n1 is drained: a fan"),
        (
            ClusterView(placements=(placed("a", 1, 0, 1, node="n2", why="runs on n2"),)),
            "the job went on without it; runs on n2",
        ),
        (ClusterView(placements=(MOVED,), cordons=(Cordon("n1", True, "a fan", "ann"),)), "drained: a fan"),
        (ClusterView(placements=(MOVED,), cordons=(Cordon("n1", True, "", "ann"),)), "drained by ann"),
        (
            ClusterView(placements=(MOVED,), cordons=(Cordon("n1", False, "a fan"), Cordon("n2", True, "b"))),
            MOVED.reason,
        ),
        (ClusterView(placements=(placed("a", 2, 0, 1),)), "the job runs anew, as number 2"),
        (ClusterView(placements=(placed("a", 1, 0, 3),)), "its slots here are 0, 3 from now on"),
    ],
)
def test_a_runner_is_stopped_for_a_reason_that_the_store_gives(view: ClusterView, why: str) -> None:
    (stop,) = plan(view, runs()).stop
    assert stop.why == why


@pytest.mark.parametrize(
    "view",
    [
        ClusterView(),
        ClusterView(submissions=(wants(),)),
        replace(BOTH, results=(JobResult("a", 0, "failed", 1, ""),)),
        ClusterView(placements=(placed("a", 0, 2),)),
        ClusterView(placements=(placed("b", 9, 0, 1),)),
    ],
    ids=["an empty store", "no placement", "an earlier run's ending", "an earlier placement", "another job's"],
)
def test_what_the_store_does_not_say_stops_nobody(view: ClusterView) -> None:
    assert not plan(view, runs()).stop


def test_a_store_that_does_not_know_what_runs_is_told_again() -> None:
    assert [order.job for order in plan(ClusterView(), runs()).missing] == ["a"]
    assert not plan(ClusterView(), runs(state="leaving")).missing
    for knows in (ClusterView(submissions=(wants(),)), ClusterView(results=(JobResult("a", 1, "failed", 1, ""),))):
        assert not plan(knows, runs()).missing


def test_no_slot_is_given_twice_while_somebody_leaves_it() -> None:
    view = ClusterView(submissions=(wants("b", 2),), placements=(placed("a", 1), placed("b", 2, 1, 2)))
    done = plan(view, runs("a", 1, 0, 1, state="leaving"))
    assert not done.start
    assert done.runners[1] == RunnerStatus("b", 2, (1, 2), "starting", "waits for its slots: a leaves")
    two = ClusterView(
        submissions=(wants("a", 1), wants("b", 2)), placements=(placed("a", 1, 0, 1), placed("b", 2, 1, 2))
    )
    assert [start.submission.job for start in plan(two).start] == ["a"]


def test_nothing_runs_on_a_node_whose_agent_leaves() -> None:
    done = plan(BOTH, runs("b", 2, 3), leaving="the agent was stopped (SIGTERM)")
    assert not done.start
    assert [(stop.spec.job, stop.why) for stop in done.stop] == [("b", "the agent was stopped (SIGTERM)")]
    assert done.runners == (RunnerStatus("b", 2, (3,), "leaving", "the agent was stopped (SIGTERM)"),)


@pytest.mark.parametrize(("outcome", "code"), [("succeeded", 0), ("failed", 1)])
def test_the_end_of_a_job_is_told_once_and_it_is_not_started_again(outcome: Any, code: int) -> None:
    ended = RunOutcomes()
    assert ended.add(last(outcome, code), 5.0, NOW) == f"job a has {outcome}: it said why"
    (ending,) = plan(BOTH, ended=ended).results
    assert (ending.job, ending.number, ending.outcome, ending.exit_code) == ("a", 1, outcome, code)
    assert (ending.reason, ending.nodes, ending.step) == ("it said why", ("n1",), 7)
    assert not plan(BOTH, ended=ended).start
    assert not plan(replace(BOTH, results=(ending,)), ended=ended).results
    assert not plan(ClusterView(), ended=ended).results


def test_a_job_that_this_node_cannot_run_is_shown_as_refused_and_not_tried_again() -> None:
    ended = RunOutcomes()
    ended.add(last("refused", 2), 0.1, NOW)
    done = plan(BOTH, ended=ended)
    assert not done.start
    assert not done.results
    assert done.runners == (RunnerStatus("a", 1, (), "refused", "it said why"),)


def test_a_runner_that_was_lost_is_started_again_later_and_later() -> None:
    ended, lost = RunOutcomes(), RunnerEnd(RunnerSpec("a", 1, NODE, (0, 1), "{}"), None, requested=False)
    for pause in [*BACKOFF_S, BACKOFF_S[-1]]:
        ended.add(lost, 5.0, NOW)
        if pause:
            early = plan(BOTH, ended=ended, now=NOW + pause - 0.1)
            assert not early.start
            assert early.next_start_at == NOW + pause
            assert early.runners[0].state == "starting"
        assert plan(BOTH, ended=ended, now=NOW + pause).start
    ended.add(lost, STABLE_S, NOW)
    assert plan(BOTH, ended=ended).start


def test_one_that_wants_to_be_requeued_is_started_again_and_one_that_left_at_once() -> None:
    ended = RunOutcomes()
    ended.add(last("left", 75), 5.0, NOW)
    ended.add(last("left", 75), 5.0, NOW)
    assert plan(BOTH, ended=ended).next_start_at == NOW + 1.0
    sentence = ended.add(replace(last("left", 143), requested=True), 5.0, NOW)
    assert sentence == "job a has left this node: it said why"
    assert plan(BOTH, ended=ended).start
