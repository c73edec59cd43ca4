"""The list of all jobs: what is kept from one request to the next never shows in an answer."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from elasticd_agent.node.api.job_list import JobIndex, JobList
from elasticd_agent.node.records import JobResult, NodeStatus, Placement, RunnerStatus, SlotAssignment, Submission
from elasticd_agent.node.scheduler.policy import BEHIND_OTHERS, ClusterView

NOW = 1_800_000_000.0
JOBS = ("a", "b", "c")
ON_TWO = (SlotAssignment("n1", (0, 1)), SlotAssignment("n2", (0,)))
jobs, numbers = st.sampled_from(JOBS), st.sampled_from([1, 1, 1, 2])
reasons = st.sampled_from([BEHIND_OTHERS, "pending: needs a node", '"unknown":{}, "place":null}'])
records: st.SearchStrategy[Submission | Placement | JobResult | RunnerStatus] = st.one_of(
    st.builds(
        Submission,
        jobs, numbers, st.just("{}"), st.just(1), st.just(1), st.just(1), st.just(2),
        submitted_by=st.sampled_from(["", "ann at n1", "é"]), submitted_at=st.sampled_from([0.0, NOW - 0.26, NOW + 9]),
    ),
    st.builds(Placement, jobs, numbers, st.sampled_from([(), ON_TWO]), reasons),
    st.builds(
        JobResult,
        jobs, numbers, st.sampled_from(["succeeded", "failed"]), st.just(1), reasons,
        st.sampled_from([0.0, NOW - 7.77, NOW - 8]), st.sampled_from([(), ("n1", "n2")]),
    ),
    st.builds(RunnerStatus, jobs, numbers, st.just((0,)), st.sampled_from(["starting", "running", "refused"])),
)  # fmt: skip
KINDS = (Submission, Placement, JobResult, RunnerStatus)
changes = st.one_of(records, records, st.tuples(st.sampled_from(KINDS), jobs))
"""A record that is written, or one that is deleted."""


@settings(max_examples=200, deadline=None)
@given(st.lists(changes, min_size=1, max_size=20))
def test_list_after_any_changes_is_that_of_a_fresh_agent(steps: list[Any]) -> None:
    """Records that do not change stay the same objects, as in the store's cache."""
    stored: dict[type, dict[str, Any]] = {kind: {} for kind in KINDS}
    stored[Submission] = {job: Submission(job, 1, "{}", 1, 1, 1, 1) for job in JOBS}
    stored[Placement] = {job: Placement(job, 1, (), BEHIND_OTHERS if job != "a" else "pending: next") for job in JOBS}
    tuples: dict[type, tuple[Any, ...]] = {kind: tuple(found.values()) for kind, found in stored.items()}
    kept = JobIndex()
    for number, step in enumerate(steps):
        if isinstance(step, tuple):
            stored[step[0]].pop(step[1], None)
        else:
            stored[type(step)][step.job] = step
        kind = step[0] if isinstance(step, tuple) else type(step)
        tuples[kind] = tuple(stored[kind].values())
        node = NodeStatus("n1", "i", 4, runners=tuples[RunnerStatus])
        view = ClusterView(
            (node,), submissions=tuples[Submission], placements=tuples[Placement], results=tuples[JobResult]
        )
        now = NOW + number / 3
        listed, fresh = JobList.of(view, now, kept), JobList.of(view, now, JobIndex())
        kept = listed.index
        summaries = [listed.summary(row) for row in listed.in_order()]
        assert summaries == [fresh.summary(row) for row in fresh.in_order()]
        assert [json.loads(bytes(text)) for text in listed.json()] == [one.to_dict() for one in summaries]
        assert [one.ended for one in summaries] == sorted(one.ended for one in summaries)
        for state in ("", "unfinished", "running", "leaving", "succeeded"):
            for words in ((), ("ann", "n1"), ("normal",)):
                found = [listed.summary(row) for row in listed.find(state, words)]
                assert found == [fresh.summary(row) for row in fresh.find(state, words)]
                assert all(state in ("", "unfinished", one.state) for one in found)


def test_unchanged_records_are_not_looked_at_again() -> None:
    jobs = tuple(Submission(f"j{n}", n, "{}", 1, 1, 1, 1) for n in range(1, 4))
    view = ClusterView(submissions=jobs, results=(JobResult("j3", 3, "failed", 1, "", NOW),))
    first = JobIndex.of(view, JobIndex())
    assert JobIndex.of(view, first) is first
    one_more = ClusterView(submissions=jobs, results=(*view.results, JobResult("j2", 2, "failed", 1, "", NOW)))
    second = JobIndex.of(one_more, first)
    assert [name for name in second.rows if second.rows[name] is first.rows[name]] == ["j1", "j3"]
