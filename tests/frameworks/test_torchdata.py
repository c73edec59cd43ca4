"""torchdata's loaders: exact on the same number of ranks, and what is not exact on another number is said."""

from __future__ import annotations

import signal
from collections import Counter
from pathlib import Path

import pytest

from tests.examples.launching import Run, json_lines
from tests.frameworks.jobs import Job

SCRIPT = Path(__file__).parent / "scripts" / "stream_job.py"
SAMPLES = 600


def trained(job: Job) -> list[Counter[int]]:
    """Samples of each of the two epochs, as often as they were trained on, without the steps that were undone."""
    resumed = {each["round"]: each["step"] for each in job.events("resumed")}
    found = [Counter[int](), Counter[int]()]
    for path in (job.folder / "output").iterdir():
        for line in json_lines(path):
            undone = [step for number, step in resumed.items() if number > line["round"]]
            if line["step"] <= min(undone, default=line["step"]):
                found[line["epoch"]].update(line["samples"])
    return found


def make(run: Run, folder: Path) -> Job:
    return Job(run, folder, SCRIPT, "torchdata")


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", ["stream", "webdataset", "map"])
def test_same_number_of_ranks_is_exact(run: Run, tmp_path: Path, kind: str, workers: int) -> None:
    job = make(run, tmp_path)
    ran = job.start(2, "--kind", kind, "--workers", workers)
    ran.until(lambda: job.saved(30))
    job.kill(1)
    assert ran.wait() == 0, ran.output
    assert len(job.events("resumed")) == 1, "the fault did not fire"
    assert trained(job) == [Counter(range(SAMPLES))] * 2


@pytest.mark.parametrize("kind", ["stream", "webdataset", "map"])
def test_another_number_of_ranks_is_said(run: Run, tmp_path: Path, kind: str) -> None:
    job = make(run, tmp_path)
    ran = job.start(2, "--kind", kind)
    ran.until(lambda: job.saved(30))
    ran.process.send_signal(signal.SIGTERM)
    assert ran.wait() == 128 + signal.SIGTERM, ran.output
    job.finish(3, "--kind", kind)
    (resumed,) = job.events("resumed")
    first, second = trained(job)
    assert second == Counter(range(SAMPLES))
    assert set(first) == set(range(SAMPLES))
    again = first.total() - SAMPLES
    if kind != "map":
        assert "loader: epoch 0 begins again: its stream was read by 2 ranks, and now there are 3" in resumed["reason"]
        assert again == resumed["step"] * 8
    else:
        assert again == resumed["step"] * 8 % 3
        assert (f"loader: {again} samples are trained on again" in resumed["reason"]) == (again > 0)
