"""The tables of jobs and nodes: aligned, the reason last, control characters escaped."""

from __future__ import annotations

from typing import Any

import pytest

from elasticd_daemon.api.schema import JobStatus, JobSummary, NodeSummary
from elasticd_daemon.cli import tables

JOB = {
    "job": "llama", "number": 7, "state": "running", "nodes": ["a", "b"], "slots": 8, "age_seconds": 12_000.0,
    "submitted_by": "root", "requested": {"nodes": [1, 2], "slots": [4, 4]},
    "submitted_at": 1_800_000_000.0, "ended_at": None,
    "reason": "runs on a (slots 0-3) and b (slots 0-3)",
}  # fmt: skip


def page_of(answer: dict[str, Any]) -> str:
    return tables.job_page(JobStatus.from_dict(answer))


def test_jobs() -> None:
    rows = [
        JOB,
        {**JOB, "job": "a-long-name", "state": "pending", "nodes": [], "slots": 0, "age_seconds": 65.0,
         "reason": "pending behind llama\x1b[31m\nEVIL  running"},
        {**JOB, "job": "old", "state": "failed", "nodes": list("abcde"), "slots": 0, "ended_at": 1.0,
         "ended_seconds": 400_000.0, "reason": "rank 3: ValueError"},
    ]  # fmt: skip
    assert tables.jobs([JobSummary.from_dict(row) for row in rows]) == (
        "JOB          STATE    NODES     SLOTS  AGE     REASON\n"
        "llama        running  a,b       8      3h20m   runs on a (slots 0-3) and b (slots 0-3)\n"
        "a-long-name  pending  -         -      65s     pending behind llama\\x1b[31m\\nEVIL  running\n"
        "old          failed   a,b,c +2  -      4d ago  rank 3: ValueError\n"
    )
    assert tables.jobs([]) == "no jobs; elasticd submit FILE submits one\n"


def test_spares_are_in_the_page_of_a_job() -> None:
    asked = {**JOB, "requested": {"nodes": [1, 2], "slots": [4, 4], "spares": 2}}
    members = [{"node": "a", "slots": [0, 1]}]
    spares = [{"node": "a", "slots": [2]}, {"node": "c", "slots": [0, 1, 2, 3]}]
    ready = page_of({**asked, "progress": {"members": members, "spares": spares}})
    assert "  spares      2, slot 2 of a and c\n" in ready
    assert "1 to 2 nodes with 4 slots each and 2 spares\n" in ready
    assert "  spares      0, none is ready\n" in page_of({**asked, "progress": {"members": members}})
    assert "spares" not in page_of({**JOB, "progress": {"members": members}})


def test_queue_shows_the_turns_and_what_their_submitters_use() -> None:
    waiting = {**JOB, "state": "pending", "nodes": [], "slots": 0, "age_seconds": 65.0, "reason": "pending: needs"}
    rows = [
        JOB,
        {**waiting, "job": "later", "submitted_by": "root at 10.0.0.1", "place": 2, "reason": "pending behind next"},
        {**waiting, "job": "next", "submitted_by": "uid 7", "priority": "high", "place": 1},
    ]
    assert tables.queue([JobSummary.from_dict(row) for row in rows]) == (
        "PLACE  JOB    PRIORITY  BY     USES  AGE  REASON\n"
        "1      next   high      uid 7  0     65s  pending: needs\n"
        "2      later  normal    root   8     65s  pending behind next\n"
    )
    assert tables.queue([JobSummary.from_dict(JOB)]) == "no job is pending\n"


def test_top_has_progress_problems_and_the_queue() -> None:
    progress = {"round": 3, "phase": "stopping", "world_size": 8, "step": 12345, "steps_per_second": 3.14159,
                "goodput": 0.5, "restarts": 2}  # fmt: skip
    gpu = {"node": "a", "utilization_percent": 98, "memory_used_bytes": 61 * 10**9, "memory_total_bytes": 85 * 10**9}
    progress["gpus"] = [{**gpu, "gpu": 0}, {**gpu, "gpu": 1, "utilization_percent": 49}]
    both = {
        "jobs": [
            JOB,
            {**JOB, "job": "b", "state": "pending", "nodes": [], "slots": 0, "reason": "pending: needs", "place": 1},
        ],
        "nodes": [{"node": "a", "state": "ready", "used": 8, "slots": 16, "gpus": ["x", "y"]}],
        "status": {"llama": {**JOB, "progress": progress}},
    }
    assert tables.overview(both) == (
        "elasticd: llama: stopping: The workers of round 3 are being stopped.\n"
        "1 job running, 1 pending; 8 of 16 slots in use\n\n"
        "JOB    STATE    WORKERS  NODES  STEP    STEPS/S  GOODPUT  RESTARTS  AGE\n"
        "llama  running  8/8      a,b    12,345  3.14     50.0 %   2         3h20m\n\n"
        "NODE  STATE  USED  GPUS                    JOBS  ADDRESS  VERSION  REASON\n"
        "a     ready  8/16  2, 74 %, 122 of 170 GB  -     -        -\n\n"
        "JOB  STATE    NODES  SLOTS  AGE    REASON\n"
        "b    pending  -      -      3h20m  pending: needs\n"
    )


def test_status_of_everything_begins_with_what_is_wrong() -> None:
    ended = {**JOB, "state": "failed", "ended_at": 1.0, "ended_seconds": 700.0, "reason": "rank 3:\nValueError"}
    both = {
        "jobs": [{**ended, "job": "old", "ended_seconds": 4e3}, ended, {**ended, "job": "new", "ended_seconds": 7.0}],
        "nodes": [
            {"node": "a", "state": "ready", "used": 0, "slots": 16},
            {"node": "b", "state": "quarantined", "slots": 16, "reason": "disk: full"},
            {"node": "c", "state": "draining", "slots": 16, "reason": "by ann"},
        ],
        "status": {},
    }
    assert tables.overview(both, ended=True).startswith(
        "elasticd: b: quarantined: disk: full\n"
        "elasticd: new: failed 7s ago: rank 3:\\nValueError\n"
        "elasticd: llama: failed 11m ago: rank 3:\\nValueError\n"
        "0 jobs running, 0 pending; 0 of 48 slots in use\n\nno job runs\n\nNODE "
    )
    assert "old" in tables.overview(both, ended=True) and "old" not in tables.overview(both)


def test_nodes() -> None:
    row = {"node": "a", "state": "ready", "used": 4, "slots": 8, "gpus": ["0", "1"], "jobs": ["llama"], "reason": "",
           "address": "10.0.0.1:9411", "versions": {"elasticd": "0.1.0"}}  # fmt: skip
    offline = {
        "node": "gpu-17",
        "state": "offline",
        "used": 0,
        "slots": 0,
        "jobs": [],
        "reason": "cordoned: fan 3 (by root)",
    }
    assert tables.nodes([NodeSummary.from_dict(row), NodeSummary.from_dict(offline)]) == (
        "NODE    STATE    USED  GPUS  JOBS   ADDRESS        VERSION  REASON\n"
        "a       ready    4/8   2     llama  10.0.0.1:9411  0.1.0\n"
        "gpu-17  offline  0/0   -     -      -              -        cordoned: fan 3 (by root)\n"
    )


def test_job_page(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "UTC")
    assignments = [
        {"node": "a", "slots": [0, 1, 2, 3], "state": "running", "reason": ""},
        {"node": "b", "slots": [0, 2, 3], "state": "starting", "reason": "its environment is being made"},
    ]
    rounds = [
        {"round": n, "at": 1_800_000_000.0 + n, "world_size": 8, "nodes": ["a", "b"], "reason": "why"}
        for n in range(1, 24)
    ]
    progress = {
        "round": 23, "phase": "running", "world_size": 8, "step": 12_345, "steps_per_second": 3.14159, "restarts": 22,
        "checkpoint": {"step": 12_000, "round": 22, "age_seconds": 34.0, "bytes": 600_000_000, "blocked_seconds": 0.04},
        "snapshot": {"step": 12_340, "round": 23, "age_seconds": 4.0}, "donor_resumes": 2, "donor_steps": 812,
        "goodput": 0.9321, "rounds": rounds, "scalars": [{"name": "loss", "points": [[1, 2.0], [12_340, 0.25]]}],
    }  # fmt: skip
    rounds[-1] |= {
        "cause": "crash",
        "lost_seconds": 0.42,
        "lost_steps": 17,
        "resumed_step": 1237,
        "donor": 2,
        "first_step_at": 1.8e9,
    }
    ranks = [
        {"rank": 0, "node": "a", "phase": "step", "step": 12_345, "idle_seconds": 0.1, "state": "S"},
        {"rank": 1, "node": "b", "phase": "barrier", "barrier": "eval", "step": 12_345, "idle_seconds": 3.0},
        {"rank": 2, "node": "b", "phase": "step", "step": 12_340, "idle_seconds": 3.0, "state": "T"},
    ]
    page = page_of({**JOB, "assignments": assignments, "progress": {**progress, "ranks": ranks}})
    head, of_ranks, table = page.split("\n\n")
    assert head.splitlines() == [
        "elasticd: stalled: Rank 2 on b is stopped: no progress for 3.0 s. The other ranks wait for it.",
        "llama: running",
        "  reason      runs on a (slots 0-3) and b (slots 0-3)",
        "  nodes       a slots 0-3, running",
        "              b slots 0,2-3, starting: its environment is being made",
        "  step        12,345, 3.14 steps/s",
        "  workers     8",
        "  round       23, 22 restarts",
        "  checkpoint  step 12,000, 34 s ago, 600 MB, training blocked 0.04 s",
        "  in memory   step 12,340, 4.0 s ago",
        "  goodput     93.2 %, the share of its time that counted",
        "  lost        0.4 s, 1 fault, 17 steps again, 812 steps saved after a fault",
        "  loss        0.25, at step 12,340",
        "  requested   1 to 2 nodes with 4 slots each",
        "  submitted   2027-01-15 08:00:00+0000 by root, 3h20m ago, as number 7",
    ]
    assert of_ranks.splitlines() == [
        "RANK  NODE  PHASE            STEP   PROGRESS",
        "0     a     step             12345  0.1s ago",
        "1     b     at barrier eval  12345  3.0s ago",
        "2     b     stopped          12340  3.0s ago",
    ]
    assert table.splitlines()[0].split() == ["ROUND", "SINCE", "WORKERS", "NODES", "LOST", "REASON"]
    assert table.splitlines()[-2:] == [
        "23     2027-01-15 08:00:23+0000  8        a,b    0.4s, 17 steps  "
        "why, resumed from step 1237, saved by rank 2 after the fault",
        "and 3 older rounds: --json",
    ]


def test_of_many_ranks_the_stalled_ones_are_shown() -> None:
    ranks = [{"rank": k, "node": "a", "phase": "step", "step": 9, "idle_seconds": float(k == 200)} for k in range(256)]
    page = page_of({**JOB, "progress": {"ranks": ranks}})
    assert page.splitlines()[-tables.MAX_SHOWN_RANKS - 1].split() == ["200", "a", "step", "9", "1.0s", "ago"]
    assert page.splitlines()[-1] == "and 192 more with newer progress: --json"


def test_job_page_without_progress() -> None:
    page = page_of({**JOB, "state": "pending", "nodes": [], "assignments": [], "progress": None, "submitted_at": None})
    assert page.splitlines()[:2] == ["llama: pending", "  reason      runs on a (slots 0-3) and b (slots 0-3)"]
    ended = page_of({**JOB, "state": "failed", "ended_at": 1.0, "ended_seconds": 7.0, "exit_code": 1})
    assert ended.startswith("llama: failed, 7s ago, with exit code 1\n")


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0s"),
        (119.9, "119s"),
        (120, "2m"),
        (7199, "119m"),
        (7200, "2h00m"),
        (100_000, "27h46m"),
        (10**6, "11d"),
        (-5, "0s"),
    ],
)
def test_ages(seconds: float, text: str) -> None:
    assert tables.age(seconds) == text
