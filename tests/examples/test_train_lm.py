"""The language model trains under every launcher, and a worker's death changes nothing but the time it takes."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.examples.launching import REPOSITORY, Run, json_lines

TRAIN = REPOSITORY / "examples" / "train_lm.py"
TINY = ("--width", 16, "--blocks", 1, "--heads", 2, "--context", 16, "--global-batch", 8, "--megabytes", 0.1)
ELASTICD = ("-m", "elasticd_agent", "run", "--nproc-per-node")
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node")


@pytest.mark.parametrize(
    "launcher", [(), pytest.param((*TORCHRUN, 2), marks=pytest.mark.system)], ids=["python", "torchrun"]
)
def test_train_lm_runs_without_elasticd_run(run: Run, tmp_path: Path, launcher: tuple[object, ...]) -> None:
    ran = run(*launcher, TRAIN, *TINY, "--steps", 12, "--loss-log", tmp_path / "loss")
    assert ran.wait() == 0, ran.output
    lines = json_lines(tmp_path / "loss")
    assert [line["step"] for line in lines] == list(range(1, 13))
    assert {line["world_size"] for line in lines} == {2 if launcher else 1}
    assert lines[-1]["loss"] < lines[0]["loss"]


@pytest.mark.system
def test_train_lm_losses_survive_kill(run: Run, tmp_path: Path) -> None:
    # Three workers: with two, a sum of gradients cannot be rounded differently, whatever DDP does to its buckets.
    workers, steps, kill_at = 3, 120, 45
    arguments = (TRAIN, *TINY, "--steps", steps, "--checkpoint-every", 20, "--loss-log")
    undisturbed = run(*ELASTICD, workers, "--checkpoint-dir", tmp_path / "a", *arguments, tmp_path / "loss-a")
    assert undisturbed.wait() == 0, undisturbed.output

    events = tmp_path / "events"
    elastic = (*ELASTICD, workers, "--checkpoint-dir", tmp_path / "b", "--event-log", events)
    killed = run(*elastic, *arguments, tmp_path / "loss-b")
    killed.until(lambda: len(json_lines(tmp_path / "loss-b")) >= kill_at)
    group = [event for event in json_lines(events) if event["kind"] == "group_started"][-1]
    os.kill(group["pids"][0], signal.SIGKILL)
    assert killed.wait() == 0, killed.output

    expected = {line["step"]: line["loss"] for line in json_lines(tmp_path / "loss-a")}
    lines = json_lines(tmp_path / "loss-b")
    assert sorted(expected) == sorted({line["step"] for line in lines}) == list(range(1, steps + 1))
    second = [line for line in lines if line["round"] > lines[0]["round"]]
    assert second, "the fault did not fire: nothing was trained in a second round"
    last = max(line["step"] for line in lines if line["round"] == lines[0]["round"])
    assert last <= second[0]["step"] <= last + 1, "a step was trained again, or lost"
    assert [line for line in lines if line["loss"] != expected[line["step"]]] == []
