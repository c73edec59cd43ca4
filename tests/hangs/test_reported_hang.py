"""A wait of a minute in a plain script: everything that a hang has but the kill."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.job import REPOSITORY, Job, until
from tests.hangs.situations import SCRIPTS


@pytest.fixture
def waits(tmp_path: Path) -> Iterator[Job]:
    flags = ["--log-dir", str(tmp_path / "log")]
    job = Job(tmp_path / "job", SCRIPTS / "waits.py", "rank0", "idle", "75", flags=flags)
    yield job
    job.end()


@pytest.mark.system
@pytest.mark.timeout(300)
def test_wait_of_a_plain_script_is_reported_and_passes(waits: Job) -> None:
    until(lambda: waits.events("hang_detected"), "the report", within=200)
    reported = waits.event("hang_detected")
    assert (reported["action"], reported["cause"], reported["ranks"]) == ("report", "blocked", [0])
    assert reported["seconds"] >= 60
    assert "it may still resume: the limit is 1803 s" in reported["reason"], reported
    assert waits.wait(within=120) == 0
    assert waits.events("hang_cleared")
    assert [event["round"] for event in waits.events("group_started")] == [1]
    evidence = waits.err.rpartition("elasticd explain ")[2].split()[0]  # not in the log directory if that is slow
    command = [sys.executable, "-m", "elasticd_agent", "explain", evidence]
    page = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True).stdout
    assert page.startswith("Round 1 may have hung, and rank 0 is at fault"), page
    assert "only reported: no process was killed" in page
