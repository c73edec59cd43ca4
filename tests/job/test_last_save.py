"""How long the end of a job waits for its last state to reach the disk."""

from __future__ import annotations

import queue
from types import SimpleNamespace
from typing import Any

import pytest

from elasticd_agent.job.loop import JobLoop
from elasticd_agent.rendezvous.view import LocalFacts
from elasticd_agent.workers.launcher.messages import Flushed, Flushing
from elasticd_agent.workers.launcher.owner_client import OwnerMessage


class SlowDisk:
    """The loop's inbox, on a clock of its own: the owner answers at once, and again when the state is written."""

    def __init__(self, size: int, seconds: float) -> None:
        self.now, self._at = 0.0, seconds
        self._first: list[Any] = [OwnerMessage(Flushing(size))]

    def get(self, timeout: float) -> Any:
        if self._first:
            return self._first.pop()
        self.now = min(self.now + timeout, self._at)
        if self.now < self._at:
            raise queue.Empty
        return OwnerMessage(Flushed(7, "r1-s7"))


@pytest.mark.parametrize(
    ("outcome", "size", "seconds", "said"),
    [
        ("failed", 1000, 29.0, "the next run resumes from step 7"),
        ("failed", 1000, 31.0, "the next run resumes from step 5"),
        ("failed", 2_000_000_000, 69.0, "the next run resumes from step 7"),
        ("failed", 2_000_000_000, 71.0, "the next run resumes from step 5"),
        ("stopped", 2_000_000_000, 5.0, "the next run resumes from step 7"),
        ("stopped", 2_000_000_000, 7.0, ""),
    ],
)
def test_larger_state_has_more_time_where_the_job_has_failed(
    monkeypatch: pytest.MonkeyPatch, outcome: str, size: int, seconds: float, said: str
) -> None:
    disk = SlowDisk(size, seconds)
    monkeypatch.setattr("time.monotonic", lambda: disk.now)
    logged: list[str] = []
    loop: Any = SimpleNamespace(
        round=SimpleNamespace(outcome=outcome),
        workers=SimpleNamespace(flush=lambda: None),
        _saved_last=True,
        _inbox=disk,
        _rendezvous=SimpleNamespace(facts=LocalFacts(checkpoint=(1, 5), high_water=7)),
        _listener=SimpleNamespace(log=logged.append),
    )
    assert JobLoop._save_last_step(loop) == said
    assert any("2.0 GB" in line for line in logged) == (outcome == "failed" and size > 1000)
