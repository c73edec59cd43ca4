"""Recipes that need a framework: they run under torchrun as well, and a log keeps its steps through a kill."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.examples.launching import REPOSITORY, Run
from tests.frameworks.jobs import Job

SCRIPTS = ["hf_trainer.py", "accelerate_loop.py", "lightning_fit.py", "train_compiled.py"]
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2)


@pytest.mark.parametrize("script", SCRIPTS)
def test_the_same_script_under_torchrun(script: str, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And again: the second run continues where the first one ended."""
    monkeypatch.setenv("ELASTICD_CHECKPOINT_DIR", str(tmp_path / "checkpoints"))
    for epochs in (1, 2):
        output = ("--output", tmp_path / "output", "--epochs", epochs)
        ran = run(*TORCHRUN, REPOSITORY / "examples" / script, *output)
        assert ran.wait() == 0, ran.output
    saved = {int(path.name.removeprefix("r2-s")) for path in (tmp_path / "checkpoints").glob("r2-s*")}
    assert min(saved) >= 50, "it began again"
    assert max(saved) >= 100
    assert any((tmp_path / "output").rglob("*")), "no result"


def test_compiled_model_with_accumulation_and_tensorboard(run: Run, tmp_path: Path) -> None:
    finals = []
    for name in ("undisturbed", "killed"):
        (tmp_path / name).mkdir()
        job = Job(run, tmp_path / name, REPOSITORY / "examples" / "train_compiled.py", "torch.utils.tensorboard")
        ran = job.start(2, "--pause", 0.01)
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
