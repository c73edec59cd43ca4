"""`reconcile()` as a table: the runners that a node starts, stops and keeps."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from elasticd_daemon.records import ClusterView, Cordon, JobResult, Placement, RunnerStatus, SlotAssignment, Submission
from elasticd_daemon.runners.reconcile import (
    CRASH_BACKOFFS_S,
    STABLE_AFTER_S,
    LocalRunner,
    NodePlan,
    RunnerEnd,
    RunOutcomes,
    reconcile,
)
from elasticd_daemon.runners.spec import RunnerExit, RunnerSpec

NODE = "n1"
NOW = 1000.0


def submission(job: str = "a", number: int = 1) -> Submission:
    return Submission(job, number, "{}", 1, 2, 1, 4)


def placement(job: str = "a", number: int = 1, *slots: int, node: str = NODE, why: str = "runs on n1") -> Placement:
    return Placement(job, number, (SlotAssignment(node, slots),) if slots else (), why)


def runner(job: str = "a", number: int = 1, *slots: int, state: Any = "running") -> LocalRunner:
    return LocalRunner(RunnerSpec(job, number, NODE, slots or (0, 1), "{}"), state)


def exited(outcome: Any, code: int, job: str = "a", number: int = 1) -> RunnerEnd:
    spec = RunnerSpec(job, number, NODE, (0, 1), "{}")
    return RunnerEnd(spec, RunnerExit(job, number, code, outcome, "a reason", step=7), stop_requested=False)


def plan(
    view: ClusterView,
    *runners: LocalRunner,
    outcomes: RunOutcomes | None = None,
    drain_reason: str = "",
    now: float = NOW,
) -> NodePlan:
    return reconcile(view, NODE, runners, outcomes or RunOutcomes(), drain_reason, now)


MOVED = placement("a", 1, 0, 1, node="n2", why="n1 is drained: a fan; runs on n2")
BOTH = ClusterView(submissions=(submission(),), placements=(placement("a", 1, 0, 1),))


def test_start_of_a_scheduled_job() -> None:
    (start,) = plan(BOTH).start
    assert (start.submission, start.slots) == (submission(), (0, 1))
    assert not plan(BOTH, runner()).start
    assert not plan(BOTH, runner()).stop


@pytest.mark.parametrize(
    "view",
    [
        ClusterView(),
        ClusterView(submissions=(submission(),)),
        ClusterView(placements=(placement("a", 1, 0, 1),)),
        ClusterView(submissions=(submission(),), placements=(placement("a", 1, 0, 1, node="n2"),)),
        ClusterView(submissions=(submission("a", 2),), placements=(placement("a", 1, 0, 1),)),
        replace(BOTH, results=(JobResult("a", 1, "cancelled", 143, ""),)),
    ],
    ids=["nothing", "not placed", "not submitted", "placed elsewhere", "another run's submission", "outcomes"],
)
def test_no_start_without_submission_and_assignment(view: ClusterView) -> None:
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
        (ClusterView(placements=(placement("a", 1, why="n1 is drained: a fan"),)), "n1 is drained: a fan"),
        (
            ClusterView(placements=(placement("a", 1, 0, 1, node="n2", why="runs on n2"),)),
            "the job continues without it; runs on n2",
        ),
        (ClusterView(placements=(MOVED,), cordons=(Cordon("n1", True, "a fan", "ann"),)), "drained: a fan"),
        (ClusterView(placements=(MOVED,), cordons=(Cordon("n1", True, "", "ann"),)), "drained by ann"),
        (
            ClusterView(placements=(MOVED,), cordons=(Cordon("n1", False, "a fan"), Cordon("n2", True, "b"))),
            MOVED.reason,
        ),
        (ClusterView(placements=(placement("a", 2, 0, 1),)), "the job was submitted again, as number 2"),
        (ClusterView(placements=(placement("a", 1, 0, 3),)), "its slots on this node change to 0, 3"),
    ],
)
def test_stop_reasons(view: ClusterView, why: str) -> None:
    (stop,) = plan(view, runner()).stop
    assert stop.why == why


@pytest.mark.parametrize(
    "view",
    [
        ClusterView(),
        ClusterView(submissions=(submission(),)),
        replace(BOTH, results=(JobResult("a", 0, "failed", 1, ""),)),
        ClusterView(placements=(placement("a", 0, 2),)),
        ClusterView(placements=(placement("b", 9, 0, 1),)),
    ],
    ids=["an empty store", "no placement", "an earlier run's result", "an earlier placement", "another job's"],
)
def test_missing_records_stop_no_runner(view: ClusterView) -> None:
    assert not plan(view, runner()).stop


def test_running_jobs_missing_from_the_store() -> None:
    assert [spec.job for spec in plan(ClusterView(), runner()).missing_from_store] == ["a"]
    assert not plan(ClusterView(), runner(state="leaving")).missing_from_store
    for view in (ClusterView(submissions=(submission(),)), ClusterView(results=(JobResult("a", 1, "failed", 1, ""),))):
        assert not plan(view, runner()).missing_from_store


def test_slots_in_use_are_not_assigned_twice() -> None:
    view = ClusterView(submissions=(submission("b", 2),), placements=(placement("a", 1), placement("b", 2, 1, 2)))
    done = plan(view, runner("a", 1, 0, 1, state="leaving"))
    assert not done.start
    assert done.runner_statuses[1] == RunnerStatus(
        "b", 2, (1, 2), "starting", "waiting for its slots, which a still uses"
    )
    two = ClusterView(
        submissions=(submission("a", 1), submission("b", 2)),
        placements=(placement("a", 1, 0, 1), placement("b", 2, 1, 2)),
    )
    assert [start.submission.job for start in plan(two).start] == ["a"]


def test_runner_with_unknown_slots_delays_others_and_can_be_cancelled() -> None:
    """Its instructions are damaged, and it does not answer."""
    silent = LocalRunner(RunnerSpec("a", 1, "", (), ""), "starting")
    view = ClusterView(
        submissions=(submission("a", 1), submission("b", 2)), placements=(placement("a", 1, 0, 1), placement("b", 2, 2))
    )
    done = plan(view, silent)
    assert (done.start, done.stop) == ((), ())
    assert done.runner_statuses[1].why == "waiting for its slots, which a still uses"
    cancelled = plan(replace(view, results=(JobResult("a", 1, "cancelled", 143, "cancelled"),)), silent)
    assert [stop.spec.job for stop in cancelled.stop] == ["a"]


def test_drain_stops_all_runners() -> None:
    done = plan(BOTH, runner("b", 2, 3), drain_reason="the agent was stopped (SIGTERM)")
    assert not done.start
    assert [(stop.spec.job, stop.why) for stop in done.stop] == [("b", "the agent was stopped (SIGTERM)")]
    assert done.runner_statuses == (RunnerStatus("b", 2, (3,), "leaving", "the agent was stopped (SIGTERM)"),)


@pytest.mark.parametrize(("outcome", "code"), [("succeeded", 0), ("failed", 1)])
def test_result_is_written_once(outcome: Any, code: int) -> None:
    outcomes = RunOutcomes()
    assert outcomes.add(exited(outcome, code), 5.0, NOW) == f"job a has {outcome}: a reason"
    (result,) = plan(BOTH, outcomes=outcomes).results
    assert (result.job, result.number, result.outcome, result.exit_code) == ("a", 1, outcome, code)
    assert (result.reason, result.nodes, result.step) == ("a reason", ("n1",), 7)
    assert not plan(BOTH, outcomes=outcomes).start
    assert not plan(replace(BOTH, results=(result,)), outcomes=outcomes).results
    assert not plan(ClusterView(), outcomes=outcomes).results


def test_refused_job_is_not_started_again() -> None:
    outcomes = RunOutcomes()
    outcomes.add(exited("refused", 2), 0.1, NOW)
    done = plan(BOTH, outcomes=outcomes)
    assert not done.start
    assert not done.results
    assert done.runner_statuses == (RunnerStatus("a", 1, (), "refused", "a reason"),)


def test_crash_backoff() -> None:
    outcomes, lost = RunOutcomes(), RunnerEnd(RunnerSpec("a", 1, NODE, (0, 1), "{}"), None, stop_requested=False)
    for pause in [*CRASH_BACKOFFS_S, CRASH_BACKOFFS_S[-1]]:
        outcomes.add(lost, 5.0, NOW)
        if pause:
            early = plan(BOTH, outcomes=outcomes, now=NOW + pause - 0.1)
            assert not early.start
            assert early.next_start_at == NOW + pause
            assert early.runner_statuses[0].state == "starting"
        assert plan(BOTH, outcomes=outcomes, now=NOW + pause).start
    outcomes.add(lost, STABLE_AFTER_S, NOW)
    assert plan(BOTH, outcomes=outcomes).start


def test_requeue_has_a_backoff_and_a_requested_stop_has_none() -> None:
    outcomes = RunOutcomes()
    outcomes.add(exited("left", 75), 5.0, NOW)
    outcomes.add(exited("left", 75), 5.0, NOW)
    assert plan(BOTH, outcomes=outcomes).next_start_at == NOW + 1.0
    sentence = outcomes.add(replace(exited("left", 143), stop_requested=True), 5.0, NOW)
    assert sentence == "job a has left this node: a reason"
    assert plan(BOTH, outcomes=outcomes).start


@pytest.mark.parametrize(
    ("view", "is_kept"),
    [
        (BOTH, True),
        (ClusterView(), False),
        (replace(BOTH, results=(JobResult("a", 1, "failed", 1, "a reason"),)), False),
        (replace(BOTH, cordons=(Cordon(NODE, False, "a fan"),)), True),
    ],
    ids=["not in the store yet", "job removed", "in the store", "cordoned"],
)
def test_exit_is_kept_until_the_store_has_it(view: ClusterView, is_kept: bool) -> None:
    outcomes = RunOutcomes()
    outcomes.add(exited("failed", 1), 1.0, NOW)
    assert list(outcomes.exits) == [("a", 1)]
    outcomes.forget_recorded(view, NODE, NOW)
    assert bool(outcomes.exits) == is_kept


@pytest.mark.parametrize(
    ("record", "is_kept"),
    [
        (submission().to_json().decode(), True),
        ("", True),
        ("of another version", True),
        (replace(submission(), submitted_at=7.0).to_json().decode(), False),
        (replace(submission(), token="t").to_json().decode(), False),
    ],
    ids=["its own", "unreadable spec", "unreadable record", "submitted earlier", "another token"],
)
def test_exit_of_an_earlier_job_of_this_name_and_number_is_dropped(record: str, is_kept: bool) -> None:
    """A store that has lost its data numbers jobs anew, and the node has the folders of those before."""
    end = exited("succeeded", 0)
    outcomes = RunOutcomes()
    outcomes.add(replace(end, spec=replace(end.spec, submission=record)), 0.0, NOW)
    outcomes.forget_recorded(BOTH, NODE, NOW)
    assert bool(outcomes.exits) == is_kept
    assert bool(plan(BOTH, outcomes=outcomes).start) != is_kept


def test_refused_job_is_tried_again_after_a_while() -> None:
    """A file server that was away at a boot comes back, and nobody may be there to say so."""
    outcomes = RunOutcomes()
    outcomes.add(exited("refused", 2), 0.1, NOW)
    outcomes.forget_recorded(BOTH, NODE, NOW)
    assert not plan(BOTH, outcomes=outcomes).start
    outcomes.forget_recorded(BOTH, NODE, NOW + 0.1)
    done = plan(BOTH, outcomes=outcomes)
    assert (len(done.start), done.runner_statuses) == (1, ())
