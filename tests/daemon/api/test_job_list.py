"""The list of all jobs, whatever records there are of them."""

from __future__ import annotations

import json
from typing import Any

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from elasticd_daemon.api.views import JobList, encode_answer
from elasticd_daemon.records import (
    ClusterView,
    JobResult,
    NodeStatus,
    Placement,
    RunnerStatus,
    SlotAssignment,
    Submission,
)
from elasticd_daemon.scheduler.policy import BEHIND_OTHERS_REASON

NOW = 1_800_000_000.0
ON_TWO = (SlotAssignment("n1", (0, 1)), SlotAssignment("n2", (0,)))
jobs, numbers = st.sampled_from(["a", "b", "c"]), st.sampled_from([1, 1, 1, 2])
reasons = st.sampled_from([BEHIND_OTHERS_REASON, "pending: needs a node", '"unknown":{}, "place":null}'])


def some(kind: type, *values: Any, **more: Any) -> st.SearchStrategy[tuple[Any, ...]]:
    """Records of different jobs."""
    records = st.builds(kind, jobs, numbers, *values, **more)
    return st.lists(records, max_size=3, unique_by=lambda record: record.job).map(tuple)


views = st.builds(
    ClusterView,
    st.tuples(st.builds(
        NodeStatus, st.just("n1"), st.just("i"), st.just(4),
        runners=some(RunnerStatus, st.just((0,)), st.sampled_from(["starting", "running", "refused"])),
    )),
    submissions=some(
        Submission, st.just("{}"), st.just(1), st.just(1), st.just(1), st.just(2),
        submitted_by=st.sampled_from(["", "ann at n1", "é"]), submitted_at=st.sampled_from([0.0, NOW - 0.26, NOW + 9]),
    ),
    placements=some(Placement, st.sampled_from([(), ON_TWO]), reasons),
    results=some(
        JobResult, st.sampled_from(["succeeded", "failed"]), st.just(1), reasons,
        st.sampled_from([0.0, NOW - 7.77, NOW - 8]), st.sampled_from([(), ("n1", "n2")]),
    ),
)  # fmt: skip


@settings(max_examples=200, deadline=None)
@given(views)
def test_every_job_is_listed_once_and_found_by_its_state(view: ClusterView) -> None:
    listed = JobList.of(view, NOW)
    summaries = listed.summaries()
    assert {one.job for one in summaries} == {one.job for one in (*view.submissions, *view.results)}
    assert len({one.job for one in summaries}) == len(summaries) == len(listed.by_name)
    assert [json.loads(encode_answer(one)) for one in summaries] == [one.to_dict() for one in summaries]
    assert [one.ended for one in summaries] == sorted(one.ended for one in summaries)
    queued = sorted((one.place, one.job) for one in summaries if one.place is not None)
    assert [place for place, _ in queued] == list(range(1, len(queued) + 1))
    assert [row.job for row in listed.unfinished][len(listed.unfinished) - len(queued) :] == [job for _, job in queued]
    for state in ("", "unfinished", "running", "leaving", "succeeded"):
        rows = listed.find(state)
        alike = [one for one in summaries if state in ("", one.state) or (state == "unfinished" and not one.ended)]
        assert {row.job for row in rows} == {one.job for one in alike}
        assert [row.ended for row in rows] == sorted(row.ended for row in rows)


def test_reply_with_quotes_is_json() -> None:
    (summary,) = JobList.of(
        ClusterView(results=(JobResult("a", 1, "failed", 1, '"unknown":{},', NOW),)), NOW
    ).summaries()
    assert msgspec.json.decode(encode_answer(summary))["reason"] == '"unknown":{},'
