"""`worker(code)` starts a process that is stuck; `evidence` gathers evidence and posts it to `posted`."""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

import pytest

from elasticd_agent.hangs.collector.record import NodeEvidence, RankEvidence
from elasticd_agent.hangs.evidence import EvidenceCollector, GatheredEvidence
from elasticd_agent.system.processes import procfs

Posted = queue.SimpleQueue[GatheredEvidence]
Until = Callable[[Callable[[], object], float], object]
BUDGET_S = 20.0
"""Enough on any machine: tests that are about the budget set their own."""


class StartWorker(Protocol):
    def __call__(self, code: str, *args: str, state: str = "S") -> int: ...


@pytest.fixture
def worker(until: Until) -> Iterator[StartWorker]:
    """Starts a process that prints "ready" just before it is where it is to be, in that state; returns its pid."""
    started: list[subprocess.Popen[bytes]] = []

    def start(code: str, *args: str, state: str = "S") -> int:
        command = [sys.executable, "-I", "-c", code, *args]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True)
        started.append(process)
        assert process.stdout.readline() == b"ready\n"
        until(lambda: procfs.state(process.pid) == state, 20)
        return process.pid

    yield start
    for process in started:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        process.stdout.close()


@pytest.fixture
def posted() -> Posted:
    return queue.SimpleQueue()


def published(final: Path) -> dict[int, RankEvidence]:
    """The ranks of the record in the directory."""
    return {rank.rank: rank for rank in NodeEvidence.from_json((final / "evidence-a.json").read_bytes()).ranks}


def functions(rank: RankEvidence) -> set[str]:
    """The functions in all of its stacks."""
    return {frame.bare_name for thread in rank.threads for frame in thread.frames}


class MakeEvidence(Protocol):
    def __call__(
        self,
        budget_s: float = BUDGET_S,
        *,
        keep: int = 8,
        job: str = "",
        spy: str | None = None,
        temporary: Path | None = None,
        nvml: str | None = None,
        ras: int = 0,
    ) -> EvidenceCollector: ...


@pytest.fixture
def takes(tmp_path: Path, posted: Posted) -> Iterator[MakeEvidence]:
    """Makes an Evidence that is closed after the test."""
    made: list[EvidenceCollector] = []

    def make(budget_s: float = BUDGET_S, **more: Any) -> EvidenceCollector:
        made.append(EvidenceCollector(tmp_path / "scratch", posted.put, budget_s, node="a", **more))
        return made[-1]

    yield make
    for evidence in made:
        evidence.close()


@pytest.fixture
def evidence(takes: MakeEvidence) -> EvidenceCollector:
    return takes()
