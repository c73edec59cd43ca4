"""A call with a deadline: what a file system that does not answer may cost."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

import pytest

from elasticd_agent.system import bounded_io
from elasticd_agent.system.bounded_io import DeadlineExceeded, run_within

Until = Callable[[Callable[[], object], float], object]


def test_hanging_calls_leave_a_bounded_number_of_threads(monkeypatch: pytest.MonkeyPatch, until: Until) -> None:
    monkeypatch.setattr(bounded_io, "MAX_HANGING_THREADS", 3)
    mounted, before = threading.Event(), threading.active_count()
    try:
        for _ in range(10):
            with pytest.raises(DeadlineExceeded):
                run_within(0.01, mounted.wait, "dead")
        assert threading.active_count() == before + 3
        assert run_within(20, lambda: "an answer", "another") == "an answer"
    finally:
        mounted.set()
    until(lambda: threading.active_count() == before, 20)
    assert run_within(20, lambda: "an answer") == "an answer"


def test_error_of_the_call_is_raised() -> None:
    with pytest.raises(FileNotFoundError):
        run_within(20, lambda: os.stat("/none"))
