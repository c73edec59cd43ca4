"""The pages from agents' answers, hostile and senseless ones included."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elasticd.errors import WireError
from elasticd_daemon.api.schema import JobStatus, JobSummary, NodeSummary
from elasticd_daemon.api.views import JobList
from elasticd_daemon.dashboard import job_page, overview, status
from elasticd_daemon.dashboard.job_page import EvidencePages, LogTail, PageQuery
from elasticd_daemon.dashboard.layout import render_page
from elasticd_daemon.records import (
    ClusterView,
    JobResult,
    NodeStatus,
    Placement,
    RunnerStatus,
    SlotAssignment,
    Submission,
)
from tests.daemon.dashboard.hostile_texts import PAYLOADS, WICKED, Read, read
from tests.daemon.dashboard.samples import NOW, a_job, a_rank, a_round


def rendered(
    answer: dict[str, Any] | JobStatus, tail: LogTail | None = None, evidence: list[dict[str, Any]] | None = None
) -> Read:
    job = answer if isinstance(answer, JobStatus) else JobStatus.from_dict(answer)
    return read(job_html(job, tail or LogTail("a line\n", "on a"), job_page.evidence_pages(evidence or [], brief=True)))


def job_html(
    job: JobStatus, tail: LogTail, evidence: EvidencePages | None = None, failure: LogTail | None = None
) -> str:
    values = job_page.template_values(job, PageQuery(), NOW, tail, evidence, failure)
    return render_page("job.html", job.job, "a", "0.1.0", values, now=NOW, has_logout_button=True)


def overview_html(
    jobs: JobList, nodes: list[NodeSummary], here: str, *, problems: Sequence[str] = (), state: str = "", key: str = ""
) -> str:
    values = overview.template_values(jobs, nodes, here, problems, state, key)
    return render_page("overview.html", "jobs", here, "0", values, now=NOW, has_logout_button=True)


def text_of(answer: dict[str, Any]) -> str:
    return " ".join(" ".join(rendered(answer).text).split())


def test_running_job() -> None:
    text = text_of(a_job())
    for part in (
        "287", "1 steps/s", "the share of its time that counted", "step 280", "7.0 s ago", "93.0 %", "4.0 s",
        "7.0 s ago, 600 MB, training blocked 0.04 s",
        "In memory", "step 286", "1 fault, 11 steps again, 12 steps saved after a fault",
        "rank 1 was killed by SIGKILL",
        "loss 0.29 at step 271", "lr 0.1 at step 1",
        "GPU 0: 97 %, 61 of 80 GB", "training for 3 min 16 s", "−4.0 s", "trained for 1 min 40 s", "a line",
    ):  # fmt: skip
        assert part in text, part
    assert status.job_state_chip(JobStatus.from_dict(a_job())) == ("running", "good")


@pytest.mark.parametrize(
    ("progress", "word", "sentence"),
    [
        ({"ranks": [a_rank(0), a_rank(2, state="T", idle_seconds=2.5)]}, "stalled",
         "Rank 2 on b is stopped: no progress for 2.5 s. The other ranks wait for it."),
        ({"ranks": [a_rank(0, state="Z")]}, "stalled", "Rank 0 on a is dead: no progress for 0.1 s."),
        ({"ranks": [a_rank(0, idle_seconds=30.0)]}, "stalled", "Rank 0 on a has made no progress for 30 s."),
        ({"ranks": [a_rank(k, idle_seconds=30.0) for k in range(4)]}, "stalled",
         "4 ranks have made no progress for 30 s."),
        ({"phase": "stopping"}, "stopping", "The workers of round 2 are being stopped."),
        ({"rounds": [a_round(7, NOW, first_step_at=None, cause="hung", reason="rank 3 hangs", lost_seconds=3.0)]},
         "recovering", "No step for 3.0 s: round 7 is starting: rank 3 hangs"),
    ],
)  # fmt: skip
def test_problem_comes_first(progress: dict[str, Any], word: str, sentence: str) -> None:
    answer = a_job(**progress)
    assert status.job_problem(JobStatus.from_dict(answer)) == (word, sentence)
    assert f"running, {word}" in text_of(answer)
    assert status.job_problem(JobStatus.from_dict({**answer, "ended_at": NOW})) is None


def test_planned_round_is_not_counted_as_lost() -> None:
    rounds = [
        a_round(1, NOW - 300, ended_at=NOW - 200),
        a_round(2, NOW - 199, cause="resize", reason="b joined", lost_seconds=0.8, lost_steps=0),
    ]
    text = text_of(a_job(rounds=rounds))
    assert "paused 0.8 s" in text and "no step lost" in text and "Lost nothing" in text


def test_round_after_a_lost_node_is_not_planned() -> None:
    """Its cause is a resize, as after a drain, but the pause was not planned."""
    why = {"cause": "resize", "reason": "b is lost: its lease has expired", "lost_nodes": ["b"]}
    why |= {"resumed_step": 40, "donor": 3}
    rounds = [a_round(1, NOW - 300, ended_at=NOW - 200), a_round(2, NOW - 199, **why, lost_seconds=0.8, lost_steps=11)]
    text = text_of(a_job(rounds=rounds))
    assert "node lost b is lost" in text and "−0.8 s" in text and "1 fault, 11 steps again" in text
    assert "resumed from step 40, saved by rank 3 after the fault" in text
    assert "paused" not in text


def test_slow_steps_are_not_a_problem() -> None:
    answer = a_job(steps_per_second=0.05, ranks=[a_rank(0, idle_seconds=60.0)])
    assert status.job_problem(JobStatus.from_dict(answer)) is None
    waiting = a_job(ranks=[a_rank(0, phase="checkpoint", idle_seconds=60.0)])
    assert status.job_problem(JobStatus.from_dict(waiting)) is None


def test_job_before_its_first_round_and_after_its_end() -> None:
    nothing = {**a_job(), "progress": None, "assignments": [], "state": "pending", "nodes": []}
    assert "No step yet" in text_of(nothing)
    ended = {
        **a_job(),
        "ended_at": NOW - 60,
        "ended_seconds": 60.0,
        "exit_code": 1,
        "state": "failed",
        "reason": "gave up",
    }
    assert "Ended 1 min ago with exit code 1: gave up" in text_of(ended)
    text = text_of({**ended, "progress": None})
    assert "yet" not in text and "It made no step." in text, "nothing more is to come"
    hung = a_round(7, NOW - 63, first_step_at=None, cause="hung", reason="rank 3 hangs", lost_seconds=3.0)
    assert "so far" in text_of(a_job(rounds=[hung]))
    text = text_of({**ended, "progress": a_job(rounds=[hung])["progress"]})
    assert "without a step" in text and "so far" not in text


def test_failed_job_begins_with_the_traceback_of_its_rank() -> None:
    failed = {**a_job(), "ended_at": NOW - 60, "ended_seconds": 60.0, "state": "failed"}
    job = JobStatus.from_dict({**failed, "reason": "rank 3 raised ValueError: no; rank 0 followed"})
    assert job.failed_rank == 3
    noise = "Traceback (most recent call last):\n  an earlier one\n" + "step\n" * 99
    wrote = LogTail(noise + "Traceback (most recent call last):\n  File x, line 7\nValueError: no\n", "on b")
    text = "".join(read(job_html(job, LogTail(), None, wrote)).text)
    assert "What rank 3 wrote last" in text and "line 7\nValueError: no" in text and "an earlier one" not in text
    assert text.index("ValueError: no") < text.index("Step rate")
    assert JobStatus.from_dict({**failed, "reason": "cancelled"}).failed_rank is None
    assert JobStatus.from_dict(a_job()).failed_rank is None


def test_list_shows_the_end_of_a_reason() -> None:
    reason = "3 of 3 restarts used (--max-restarts): " + "the group of round 4 failed on node gpu-0017; " * 5
    reason += "rank 3 raised ValueError: no such column"
    ended = JobSummary("a", 1, "failed", reason=reason, ended_at=NOW, ended_seconds=1.0)
    node = NodeSummary("n", "quarantined", reason=reason)
    text = overview_html(JobList({"a": ended}, (), (ended,)), [node], "n")
    assert text.count(f'title="{reason}"') == 2
    shown = text.partition(f'title="{reason}">')[2].partition("<")[0]
    assert shown.startswith("3 of 3 restarts used") and "… " in shown
    assert shown.endswith("rank 3 raised ValueError: no such column")
    assert len(shown) < 170


def test_pages_of_a_large_cluster_stay_small() -> None:
    ranks = [a_rank(0) | {"rank": k, "node": f"gpu-{k // 8:04}", "idle_seconds": k / 100} for k in range(4096)]
    job = {**a_job(ranks=ranks, world_size=4096), "nodes": [f"gpu-{n:04}" for n in range(512)]}
    whole = job_html(JobStatus.from_dict(job), LogTail("x" * 16_000))
    assert len(whole) < 125_000 and "3,968 more ranks" in whole
    nodes = [NodeSummary(f"gpu-{n:04}", "cordoned" if n == 400 else "ready", 8, 8) for n in range(512)]
    rows = [JobSummary(f"j{n}", n, "pending", reason="pending behind other jobs") for n in range(10_000)]
    jobs = JobList({row.job: row for row in rows}, tuple(rows), ())
    whole = overview_html(jobs, nodes, "gpu-0001", key="k" * 64)
    assert len(whole) < 125_000 and whole.index("gpu-0001</b>") < whole.index("gpu-0400") < whole.index("gpu-0002")
    assert "and 448 more nodes" in whole and "and 9,850 more jobs" in whole


def test_list_begins_with_unfinished_jobs() -> None:
    submitted = [Submission(f"j{n}", n, "{}", 1, 1, 1, 1, submitted_by="uid 7") for n in range(1, 103)]
    failed = [JobResult(f"j{n}", n, "failed", 1, "rank 3: ValueError", NOW + n) for n in (101, 102)]
    placed = Placement("j100", 100, (SlotAssignment("gpu-7", (0,)),), "runs on gpu-7")
    node = NodeStatus("gpu-7", "i", 8, runners=(RunnerStatus("j100", 100, (0,), "running"),))
    view = ClusterView((node,), submissions=tuple(submitted), placements=(placed,), results=tuple(failed))
    jobs = JobList.of(view, NOW)

    def names(state: str = "") -> list[str]:
        links = read(overview_html(jobs, [], "a", state=state)).links
        return [link.removeprefix("/jobs/") for link in links if link.startswith("/jobs/")]

    assert names()[:2] == ["j100", "j1"] and names()[-2:] == ["j102", "j101"]
    assert (len(names("pending")), len(names("unfinished"))) == (99, 100)
    assert names("running") == ["j100"] and names("failed") == ["j102", "j101"] and names("cancelled") == []


def test_unreachable_node_is_named() -> None:
    assert "b does not answer: it did not answer within 2 s" in text_of(
        a_job(unreachable={"b": "it did not answer within 2 s"})
    )


def wicked(value: Any) -> Any:
    """The same with every text replaced."""
    if is_dataclass(value) and not isinstance(value, type):
        known = {one.name: wicked(getattr(value, one.name)) for one in fields(value) if one.name != "unknown"}
        return replace(value, **known)
    if isinstance(value, tuple):
        return tuple(wicked(one) for one in value)
    if isinstance(value, dict):
        return {wicked(key): wicked(one) for key, one in value.items()}
    return WICKED if isinstance(value, str) else value


def test_job_page_escapes_everything() -> None:
    ranks = [a_rank(0, phase="barrier", barrier="x"), a_rank(1, state="")]
    job = wicked(JobStatus.from_dict(a_job(unreachable={"b": "x"}, ranks=ranks)))
    evidence = [{"node": WICKED, "page": WICKED, "document": {"verdict": {}}}, {"node": "b", "page": WICKED}]
    text = "".join(rendered(job, LogTail(WICKED, WICKED), evidence).text)
    assert text.count("onmouseover='alert(1)") > 20
    assert "".join(rendered(job, LogTail(why=WICKED)).text).count("CDATA") > 10
    shown = job_page.evidence_pages(evidence, brief=False)
    values = {"job": WICKED, "evidence": shown}
    read(render_page("evidence.html", WICKED, WICKED, WICKED, values, now=NOW, has_logout_button=False))


def test_overview_escapes_everything() -> None:
    summary = {key: value for key, value in a_job().items() if key not in ("assignments", "progress")}
    job = wicked(JobSummary.from_dict(summary))
    node = wicked(NodeSummary("n", "ready", 4, 2, ("j",), "r", "a:1", ("g",)))
    jobs = JobList({WICKED: job}, (job,), ())
    for here in (WICKED, "elsewhere"):
        whole = overview_html(jobs, [node], here, problems=list(PAYLOADS), key=WICKED)
        assert "".join(read(whole).text).count("onmouseover") > 5


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 70), 1 << 70) | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=8,
)
_KEYS = sorted(a_job()["progress"])


@settings(max_examples=40, deadline=None)
@given(st.dictionaries(st.sampled_from(_KEYS), JSON | st.lists(st.dictionaries(
    st.sampled_from(sorted({*a_round(1, 0.0), *a_rank(0)})), JSON, max_size=6), max_size=3)))  # fmt: skip
def test_any_runner_answer_gives_a_page_or_is_refused(progress: dict[str, Any]) -> None:
    """A senseless answer of a runner is refused where it comes in; every other one can be drawn."""
    try:
        JobStatus.from_dict(a_job(**progress))
    except WireError:
        return
    rendered(a_job(**progress))
