"""Hangs of ranks that keep their process over a change of ranks: their flight recorders have an earlier round, too."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from elasticd_agent.model.phrases import count
from tests.faults.job import REPOSITORY, Job
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
    kept = stays.event("group_started", round=3)["kept"]
    (stays.work / "enough").touch()
    assert stays.wait() == 0
    command = [sys.executable, "-m", "elasticd_agent", "explain", str(stays.work.parent / "log")]
    command += ["--event-log", str(stays.work / "events.jsonl")]
    page = " ".join(subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True).stdout.split())
    assert kept > 0, "or the next line says nothing"
    assert f"the workers were killed (SIGKILL), except {count(kept, 'worker')} here, which kept the process" in page
