"""`hanging(script, faults, ...)` starts a job of one of the toy scripts under a short policy, and ends it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol

import pytest

from tests.faults.job import Fault, Job
from tests.hangs.situations import SCRIPTS, SESSION
from tests.hangs.stuck_worker import evidence, posted, takes, worker  # noqa: F401 fixtures

# A job that has made few steps is given five times the factor: its first seconds are when these tests strike.
TUNED = ("--hang-floor", "1.5s", "--stopped-after", "1s", "--hang-factor", "2")


class StartHanging(Protocol):
    def __call__(
        self, script: str, faults: Sequence[Fault], *args: str, workers: int = 2, flags: Sequence[str] = TUNED
    ) -> Job: ...


@pytest.fixture
def hanging(tmp_path: Path) -> Iterator[StartHanging]:
    started: list[Job] = []

    def start(script: str, faults: Sequence[Fault], *args: str, workers: int = 2, flags: Sequence[str] = TUNED) -> Job:
        work = tmp_path / f"job-{len(started)}"
        flags = ["--log-dir", str(work / "log"), "--max-restarts", "100", *flags]
        if script == SESSION:
            flags += ["--checkpoint-dir", str(work / "checkpoints")]
        started.append(Job(work, SCRIPTS / script, *args, workers=str(workers), flags=flags, faults=faults))
        return started[-1]

    yield start
    for job in started:
        job.end()
