"""What a person sees of jobs and nodes: aligned, the reason last, and nothing in it that could steer a terminal."""

from __future__ import annotations

import pytest

from elasticd_agent.cli import tables

JOB = {
    "job": "llama", "number": 7, "state": "running", "nodes": ["a", "b"], "slots": 8, "age_seconds": 12_000.0,
    "by": "root", "wants": {"nodes": [1, 2], "slots": [4, 4]}, "submitted_at": 1_800_000_000.0, "ended_at": None,
    "reason": "runs on a (slots 0-3) and b (slots 0-3)",
}  # fmt: skip


def test_jobs() -> None:
    rows = [
        JOB,
        {**JOB, "job": "a-long-name", "state": "pending", "nodes": [], "slots": 0, "age_seconds": 65.0,
         "reason": "pending behind llama\x1b[31m\nEVIL  running"},
        {**JOB, "job": "old", "state": "failed", "nodes": list("abcde"), "slots": 0, "ended_at": 1.0,
         "ended_seconds": 400_000.0, "reason": "rank 3: ValueError"},
    ]  # fmt: skip
    assert tables.jobs(rows) == (
        "JOB          STATE    NODES     SLOTS  AGE     REASON\n"
        "llama        running  a,b       8      3h20m   runs on a (slots 0-3) and b (slots 0-3)\n"
        "a-long-name  pending  -         -      65s     pending behind llama\\x1b[31m\\nEVIL  running\n"
        "old          failed   a,b,c +2  -      4d ago  rank 3: ValueError\n"
    )
    assert tables.jobs([]) == "no jobs; elasticd submit FILE hands one in\n"


def test_nodes() -> None:
    row = {"node": "a", "state": "ready", "used": 4, "slots": 8, "gpus": ["0", "1"], "jobs": ["llama"], "reason": "",
           "address": "10.0.0.1:9411", "versions": {"elasticd": "0.1.0"}}  # fmt: skip
    away = {"node": "gpu-17", "state": "away", "used": 0, "slots": 0, "jobs": [], "reason": "cordoned: fan 3 (by root)"}
    assert tables.nodes([row, away]) == (
        "NODE    STATE  USED  GPUS  JOBS   ADDRESS        VERSION  REASON\n"
        "a       ready  4/8   2     llama  10.0.0.1:9411  0.1.0\n"
        "gpu-17  away   0/0   -     -      -              -        cordoned: fan 3 (by root)\n"
    )


def test_a_jobs_page(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "UTC")
    places = [
        {"node": "a", "slots": [0, 1, 2, 3], "state": "running", "reason": ""},
        {"node": "b", "slots": [0, 2, 3], "state": "starting", "reason": "its environment is being made"},
    ]
    rounds = [
        {"round": n, "at": 1_800_000_000.0 + n, "world_size": 8, "nodes": ["a", "b"], "reason": "why"}
        for n in range(1, 24)
    ]
    progress = {
        "round": 23, "phase": "running", "world_size": 8, "step": 12_345, "steps_per_second": 3.14159, "restarts": 22,
        "checkpoint": {"step": 12_000, "round": 22, "age_seconds": 34.0}, "goodput": 0.9321, "rounds": rounds,
    }  # fmt: skip
    rounds[-1] |= {"lost_seconds": 0.42, "lost_steps": 17}
    ranks = [
        {"rank": 0, "node": "a", "phase": "step", "step": 12_345, "idle_seconds": 0.1, "state": "S"},
        {"rank": 1, "node": "b", "phase": "barrier", "barrier": "eval", "step": 12_345, "idle_seconds": 3.0},
        {"rank": 2, "node": "b", "phase": "step", "step": 12_340, "idle_seconds": 3.0, "state": "T"},
    ]
    page = tables.status({**JOB, "places": places, "progress": {**progress, "ranks": ranks}})
    head, of_ranks, table = page.split("\n\n")
    assert head.splitlines() == [
        "llama: running",
        "  why         runs on a (slots 0-3) and b (slots 0-3)",
        "  nodes       a slots 0-3, running",
        "              b slots 0,2-3, starting: its environment is being made",
        "  round       23, running, 8 workers",
        "  step        12,345, 3.14 steps/s",
        "  checkpoint  step 12000 of round 22, 34s ago",
        "  goodput     93.2 % of the time since its start made steps that count",
        "  restarts    22",
        "  wants       1 to 2 nodes with 4 slots each",
        "  submitted   2027-01-15 08:00:00 by root, 3h20m ago, as number 7",
    ]
    assert of_ranks.splitlines() == [
        "RANK  NODE  PHASE         STEP   MOVED",
        "0     a     step          12345  0.1s ago",
        "1     b     barrier eval  12345  3.0s ago",
        "2     b     stopped       12340  3.0s ago",
    ]
    assert table.splitlines()[0].split() == ["ROUND", "SINCE", "WORKERS", "NODES", "LOST", "REASON"]
    assert table.splitlines()[-2:] == [
        "23     2027-01-15 08:00:23  8        a,b    0.4s, 17 steps  why",
        "and 3 older ones: --json",
    ]


def test_of_very_many_ranks_those_that_stand_still_are_shown() -> None:
    ranks = [{"rank": k, "node": "a", "phase": "step", "step": 9, "idle_seconds": float(k == 200)} for k in range(256)]
    page = tables.status({**JOB, "progress": {"ranks": ranks}})
    assert page.splitlines()[-tables.SHOWN_RANKS - 1].split() == ["200", "a", "step", "9", "1.0s", "ago"]
    assert page.splitlines()[-1] == "and 192 more that moved later: --json"


def test_a_page_of_a_job_of_which_nobody_knows_anything_yet() -> None:
    page = tables.status({**JOB, "state": "pending", "nodes": [], "places": [], "progress": None, "submitted_at": None})
    assert page.splitlines()[:2] == ["llama: pending", "  why         runs on a (slots 0-3) and b (slots 0-3)"]
    ended = tables.status({**JOB, "state": "failed", "ended_at": 1.0, "ended_seconds": 7.0, "exit_code": 1})
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
