"""The arithmetic of the benchmarks of hangs and of healthy jobs: what meets the goals, and what is counted as wrong."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import hangs
from benchmarks.hang_jobs import HangOutcome, missed_call
from tests.hangs.healthy import HealthyOutcome


def outcome(situation: str, *detected: float, cause: int = -1, culprit: int = -1, tried: int = 0) -> HangOutcome:
    """All right unless said otherwise."""
    found, tried = len(detected), tried or len(detected)
    right = (found if cause < 0 else cause, found if culprit < 0 else culprit)
    return HangOutcome(
        situation, "default", tried=tried, detected=list(detected), right_cause=right[0], right_culprit=right[1]
    )


@pytest.mark.parametrize(
    ("found", "met"),
    [
        pytest.param(outcome("stopped", 2.6, 3.4), True, id="in time"),
        pytest.param(outcome("stopped", 2.4), False, id="too soon"),
        pytest.param(outcome("stopped", 3.6), False, id="too late"),
        pytest.param(outcome("skips a collective", 6.9), True, id="proven"),
        pytest.param(outcome("skips a collective", 7.1), False, id="proven, too late"),
        pytest.param(outcome("sleeps", 60.0, cause=0), False, id="wrong cause"),
        pytest.param(outcome("sleeps", 60.0, culprit=0), False, id="wrong rank"),
        pytest.param(outcome("sleeps", 60.0, tried=2), False, id="one missed"),
        pytest.param(outcome("everyone blocked", 60.0, culprit=0), True, id="no single rank"),
    ],
)
def test_goals_of_hangs(found: HangOutcome, met: bool) -> None:
    assert hangs.goals_met({"default": {found.situation: found}}) is met


def test_parts_of_a_run_are_added_up(tmp_path: Path) -> None:
    for number, seconds in enumerate((3.0, 2.8)):
        found = {"hung": {"default": {"stopped": outcome("stopped", seconds)}}}
        (tmp_path / f"{number}.json").write_text(json.dumps(found, default=hangs.as_plain))
    both = hangs.together(sorted(tmp_path.iterdir()))["default"]["stopped"]
    assert (both.tried, both.detected, both.right_cause) == (2, [3.0, 2.8], 2)


@pytest.mark.parametrize(
    ("found", "ok"),
    [
        (HealthyOutcome("", "session", 0, code=0), True),
        (HealthyOutcome("", "session", 0, code=1), False),
        (HealthyOutcome("", "session", 0, code=None), False),
        (HealthyOutcome("", "session", 0, code=0, killed=["hung"], restarts=1), False),
        (HealthyOutcome("", "session", 1, code=0, killed=["hung"], restarts=1), True),
        (HealthyOutcome("", "session", 1, code=0, killed=["hung"] * 2, restarts=2), False),
        (HealthyOutcome("", "session", 0, code=0, restarts=1), False),
    ],
)
def test_healthy_job_is_neither_killed_nor_lost(found: HealthyOutcome, ok: bool) -> None:
    assert found.ok is ok


@pytest.mark.parametrize(("error", "found"), [("elasticd.errors.MissedCall", [("missed_collective", [1])]), ("E", [])])
def test_error_of_a_session_call_is_a_verdict(error: str, found: list[object]) -> None:
    """Of the rank that raised it, not of those that were ended for it."""
    events = [
        {"kind": "worker_exited", "round": 1, "rank": 1, "requested": False},
        {"kind": "round_published", "round": 2, "reason": f"rank 1 exited with code 1 ({error}: rank 0 has not …)"},
        {"kind": "worker_exited", "round": 1, "rank": 0, "requested": True},
    ]
    run: Any = SimpleNamespace(events=lambda kind, **has: [e for e in events if {**e, **has, "kind": kind} == e])
    assert [(one["cause"], one["ranks"]) for one in missed_call(run, 1)] == found
