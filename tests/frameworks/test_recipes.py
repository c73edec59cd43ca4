"""Recipes that need a framework: they run under torchrun as well, and a log keeps its steps through a kill."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from wandb.proto.wandb_internal_pb2 import Record

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


def wandb_steps(log: Path) -> Iterator[int]:
    """The steps in the log of an offline run: LevelDB's format, with a header of its own."""
    data, at, record = log.read_bytes(), 7, b""
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:  # no header crosses the end of a block
            at += 32768 - at % 32768
            continue
        size, kind = struct.unpack_from("<HB", data, at + 4)
        record += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # whole, or the last part
            found = Record.FromString(record)
            if found.WhichOneof("record_type") == "history":
                yield found.history.step.num
            record = b""


@pytest.mark.parametrize("rank", [1, 0])
def test_wandb_has_each_step_once(run: Run, tmp_path: Path, rank: int) -> None:
    job = Job(run, tmp_path, REPOSITORY / "tests" / "frameworks" / "scripts" / "wandb_job.py", "wandb")
    (tmp_path / "output").mkdir()
    ran = job.start(2)
    ran.until(lambda: job.saved(30))
    job.kill(rank)
    assert ran.wait() == 0, ran.output
    assert len(job.events("resumed")) == 1, "the fault did not fire"
    logs = sorted(tmp_path.glob("output/wandb/offline-run-*-job/run-job.wandb"))
    found = [step for log in logs for step in wandb_steps(log)]
    assert len(logs) == 2
    assert sorted(set(found)) == found
    # W&B's own process ends with the group, and with it what it has not written yet: the last steps before the fault.
    resumed = job.events("resumed")[0]["step"]
    before = [step for step in found if step <= resumed]
    assert (before, found[len(before) :]) == ([*range(1, len(before) + 1)], [*range(resumed + 1, 101)])
