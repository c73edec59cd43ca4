"""What a worker's Session reports, as lines of the log."""

from __future__ import annotations

from typing import Any

import pytest

from elasticd.heartbeat.worker_events import WorkerEvent
from elasticd_agent.model.log_events import from_worker


@pytest.mark.parametrize(
    ("kind", "step", "extra", "expected"),
    [
        ("checkpoint_saved", 5, {"seconds": 2.0}, {"step": 5, "written_seconds": 2.0}),
        ("checkpoint_saved", None, {}, None),
        ("checkpoint_skipped", None, {}, {"step": None}),
        ("checkpoint_failed", 5, {}, {"step": 5}),
        ("resumed", 5, {"saved_at": 7.5}, {"saved_at": 7.5}),
        ("resumed", 5, {"saved_at": 0}, {"saved_at": None}),
        ("scalars", 5, {"values": {"nan": None, "half": 0.5, "on": True}}, {"values": {"nan": None, "half": 0.5}}),
        ("message", 5, {}, None),
    ],
)
def test_workers_event(kind: str, step: int | None, extra: dict[str, Any], expected: dict[str, Any] | None) -> None:
    line = from_worker(WorkerEvent(kind, 1, 0, step, 0.0, 0.0, "why", extra))
    assert (line is None) == (expected is None)
    if line is not None and expected is not None:
        assert line.kind == kind and expected.items() <= {name: getattr(line, name) for name in expected}.items()
