"""The recipes of docs/frameworks.md keep what they promise through a kill."""

from __future__ import annotations

from pathlib import Path

import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.examples.launching import Run
from tests.frameworks.jobs import Job

SCRIPT = Path(__file__).parent / "scripts" / "recipes_job.py"


def test_compiled_model_with_accumulation_and_tensorboard(run: Run, tmp_path: Path) -> None:
    finals = []
    for name in ("undisturbed", "killed"):
        (tmp_path / name).mkdir()
        job = Job(run, tmp_path / name, SCRIPT, "torch.utils.tensorboard")
        ran = job.start(2)
        if name == "killed":
            ran.until(lambda job=job: job.saved(30))
            job.kill(1)  # rank 0 logs: if it is killed itself, its last point may be missing
        assert ran.wait() == 0, ran.output
        assert len(job.events("resumed")) == (name == "killed"), "the fault did not fire"
        events = EventAccumulator(str(job.folder / "output")).Reload()
        assert [point.step for point in events.Scalars("loss")] == list(range(1, 101))
        finals.append(torch.load(job.folder / "output" / "final.pt", weights_only=True))
    assert all(torch.equal(finals[1][key], value) for key, value in finals[0].items())
    assert not any("_orig_mod" in key for key in job.checkpoint()["model"])
