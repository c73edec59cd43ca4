"""Hangs of ranks that keep their process over a change of ranks: their flight recorders have an earlier round, too."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.job import Job
from tests.hangs.situations import MISMATCH, SCRIPTS


@pytest.fixture
def stays(tmp_path: Path) -> Iterator[Job]:
    flags = ["--log-dir", str(tmp_path / "log"), "--checkpoint-dir", str(tmp_path / "checkpoints")]
    job = Job(tmp_path / "job", SCRIPTS / "stays.py", workers="3", flags=flags)
    yield job
    job.end()


@pytest.mark.system
@pytest.mark.timeout(240)
def test_groups_that_are_crossed_in_a_later_round_are_a_proof(stays: Job) -> None:
    """It takes 5 s as in a first round, and no minute: what they waited for then says nothing about now."""
    stays.step(100)
    stays.kill(2, round=1)
    hung = stays.event("hang_detected", round=2)
    assert stays.event("group_started", round=2)["kept"] == 2
    assert (hung["action"], hung["cause"] in MISMATCH, hung["seconds"] < 50) == ("restart", True, True), hung
    stays.step(1, round=3)
    (stays.work / "enough").touch()
    assert stays.wait() == 0
