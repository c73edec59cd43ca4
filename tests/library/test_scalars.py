"""`session.log`: what of a script's numbers reaches the worker events."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from elasticd.errors import UsageError
from elasticd.heartbeat.scalars import ScalarSampler
from elasticd.heartbeat.worker_events import MAX_SCALARS, WorkerEventReader, WorkerEventWriter
from elasticd_agent.model.log_events import ScalarsEvent, from_worker


class Tensor:
    """Counts how often its value is fetched."""

    fetched = 0

    def __float__(self) -> float:
        self.fetched += 1
        return 0.5


def test_samples_become_rarer_with_age(tmp_path: Path) -> None:
    now, loss = 0.0, Tensor()
    sampler = ScalarSampler(WorkerEventWriter(tmp_path / "events", round=1), clock=lambda: now)
    for step in range(1, 86_401):
        now += 1.0
        sampler.log(step, {"loss": loss})
    events, errors = WorkerEventReader(tmp_path / "events").read()
    assert not errors and len(events) == loss.fetched and 1000 < len(events) < 1600
    assert (events[0].step, events[1].step) == (1, 2) and events[-1].step is not None and events[-1].step > 86_000
    line = from_worker(events[-1])
    assert isinstance(line, ScalarsEvent) and line.values == {"loss": 0.5}


@pytest.mark.parametrize(
    ("values", "error"),
    [
        ({f"n{n}": 1.0 for n in range(MAX_SCALARS + 1)}, UsageError),
        ({"x": "much"}, ValueError),
        ({"x": None}, TypeError),
    ],
)
def test_values_that_are_refused(tmp_path: Path, values: dict[str, object], error: type[Exception]) -> None:
    sampler = ScalarSampler(WorkerEventWriter(tmp_path / "events"))
    with pytest.raises(error):
        sampler.log(1, values)  # type: ignore[arg-type]


def test_names_that_come_later_end_no_training(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """As after the first evaluation."""
    now = 0.0
    sampler = ScalarSampler(WorkerEventWriter(tmp_path / "events", round=1), clock=lambda: now)
    for step in (1, 2, 3):
        more = {f"n{n}": 1.0 for n in range(MAX_SCALARS + 1)} if step > 1 else {}
        sampler.log(step, {"loss": 0.5, **more})
        now += 10.0
    events, errors = WorkerEventReader(tmp_path / "events").read()
    assert not errors and [event.kind for event in events] == ["scalars", "message", "scalars", "scalars"]
    assert [len(event.extra["values"]) for event in events if event.kind == "scalars"] == [1, MAX_SCALARS, MAX_SCALARS]
    assert caplog.messages == [
        f"session.log() takes at most {MAX_SCALARS} names in all: n{MAX_SCALARS - 1}, n{MAX_SCALARS} cannot be shown"
    ]


def test_values_that_are_not_finite_and_no_agent(tmp_path: Path) -> None:
    ScalarSampler(WorkerEventWriter(tmp_path / "events")).log(7, {"loss": float("nan"), "lr": 0.25})
    ((event,), _) = WorkerEventReader(tmp_path / "events").read()
    assert event.extra["values"] == {"loss": None, "lr": 0.25} and "loss nan" in event.reason
    loss = Tensor()
    ScalarSampler(WorkerEventWriter(None)).log(1, {"loss": loss})
    assert loss.fetched == 0


def test_last_values_are_kept_at_the_end(tmp_path: Path) -> None:
    sampler = ScalarSampler(WorkerEventWriter(tmp_path / "events", round=1), clock=lambda: 0.0)
    loss = torch.tensor(3.0, requires_grad=True)
    running = torch.tensor(1.0)
    for step in (1, 2, 3):
        sampler.log(step, {"loss": loss * step, "running": running})
    running.zero_()
    sampler.close()
    sampler.close()
    events, _ = WorkerEventReader(tmp_path / "events").read()
    found = [from_worker(event) for event in events]
    assert [(one.step, one.values) for one in found if isinstance(one, ScalarsEvent)] == [
        (1, {"loss": 3.0, "running": 1.0}),
        (3, {"loss": 9.0, "running": 1.0}),
    ]
    sampler.log(4, {"loss": "much"})  # type: ignore[dict-item]
    sampler.close()


def test_last_values_of_a_script_that_just_ends(tmp_path: Path) -> None:
    script = (
        "import sys; from pathlib import Path\n"
        "from elasticd.heartbeat.scalars import ScalarSampler\n"
        "from elasticd.heartbeat.worker_events import WorkerEventWriter\n"
        "sampler = ScalarSampler(WorkerEventWriter(Path(sys.argv[1]), round=1))\n"
        "for step in (1, 2, 3): sampler.log(step, {'loss': step})\n"
    )
    subprocess.run([sys.executable, "-c", script, str(tmp_path / "events")], check=True, timeout=60)
    events, _ = WorkerEventReader(tmp_path / "events").read()
    assert [(one.step, one.values) for one in map(from_worker, events)] == [(1, {"loss": 1.0}), (3, {"loss": 3.0})]
