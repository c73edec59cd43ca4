"""`job(script, *args, ...)` starts a Job in a directory of its own, of which nothing outlives the test."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import pytest

from tests.faults.job import Job


class StartJob(Protocol):
    def __call__(self, script: str | Path, *args: str, work: Path | None = None, **how: Any) -> Job: ...


@pytest.fixture
def job(tmp_path: Path) -> Iterator[StartJob]:
    started: list[Job] = []

    def start(script: str | Path, *args: str, work: Path | None = None, **how: Any) -> Job:
        started.append(Job(work or tmp_path / f"job-{len(started)}", script, *args, **how))
        return started[-1]

    yield start
    for job in started:
        job.end()
