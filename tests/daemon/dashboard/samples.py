"""Answers of an agent about a job, to draw pages from."""

from __future__ import annotations

from typing import Any

NOW = 1_800_000_000.0


def a_round(number: int, at: float, **more: Any) -> dict[str, Any]:
    first = {"first_step": 1, "first_step_at": at + 5, "last_step": 101, "ended_at": None}
    return {
        "round": number, "at": at, "world_size": 4, "nodes": ["a", "b"], "cause": "start", "reason": "first round",
        "lost_seconds": None, "lost_steps": None, **first, **more,
    }  # fmt: skip


def a_rank(rank: int, **more: Any) -> dict[str, Any]:
    one = {"rank": rank, "node": "ab"[rank // 2], "slot": rank % 2, "phase": "step", "step": 240, "idle_seconds": 0.1}
    return {**one, "state": "S", "barrier": "", "exited": False, **more}


def a_job(**progress: Any) -> dict[str, Any]:
    """100 steps in 100 s, then killed; 4 s later the second round continued from step 91."""
    rounds = [
        a_round(1, NOW - 305, ended_at=NOW - 200),
        a_round(
            2, NOW - 199, cause="crash", reason="rank 1 was killed by SIGKILL", first_step=91, first_step_at=NOW - 196,
            last_step=91, lost_seconds=4.0, lost_steps=11,
        ),
    ]  # fmt: skip
    samples = [[NOW - 300 + 10 * i, 1, 1 + 10 * i] for i in range(11)]
    samples += [[NOW - 196 + 14 * i, 2, 91 + 14 * i] for i in range(15)]
    known = {
        "node": "a", "round": 2, "phase": "running", "world_size": 4, "step": 287, "steps_per_second": 1.0,
        "restarts": 1, "checkpoint": {"step": 280, "round": 2, "at": NOW - 7, "age_seconds": 7.0,
        "bytes": 600_000_000, "blocked_seconds": 0.04},
        "snapshot": {"step": 286, "round": 2, "at": NOW - 1, "age_seconds": 1.0},
        "donor_resumes": 1, "donor_steps": 12, "goodput": 0.93,
        "started_at": NOW - 310, "rounds": rounds, "ranks": [a_rank(k) for k in range(4)], "step_samples": samples,
        "scalars": [{"name": "loss", "points": [[step, 3.0 - step / 100] for step in range(1, 280, 9)]},
                    {"name": "lr", "points": [[1, 0.1]]}],
        "gpus": [{"node": "a", "gpu": 0, "utilization_percent": 97, "memory_used_bytes": 61_000_000_000,
                  "memory_total_bytes": 80_000_000_000}],
        "unreachable": {}, "runner_problem": "", "members": [],
    }  # fmt: skip
    return {
        "job": "llama", "number": 1, "state": "running", "nodes": ["a", "b"], "slots": 4, "reason": "runs on a and b",
        "requested": {"nodes": [1, 2], "slots": [2, 2]}, "submitted_at": NOW - 400, "age_seconds": 400.0,
        "submitted_by": "root", "ended_at": None, "ended_seconds": None, "exit_code": None, "leaving": [],
        "assignments": [{"node": n, "slots": [0, 1], "state": "running", "reason": ""} for n in "ab"],
        "progress": {**known, **progress},
    }  # fmt: skip
