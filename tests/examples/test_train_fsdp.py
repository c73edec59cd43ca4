"""A sharded model loses its worker, and another job of the same directory continues with another number of ranks."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.examples.launching import REPOSITORY, Run, json_lines

TRAIN = REPOSITORY / "examples" / "train_fsdp.py"
TINY = ("--width", 16, "--blocks", 2, "--checkpoint-every", 5)


@pytest.mark.system
def test_train_fsdp_runs_alone(run: Run) -> None:
    ran = run(TRAIN, *TINY, "--steps", 20)
    assert ran.wait() == 0, ran.output
    assert "step 20 " in ran.output


@pytest.mark.system
def test_train_fsdp_runs_under_torchrun(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ELASTICD_CHECKPOINT_DIR", str(tmp_path / "checkpoints"))
    for steps in (20, 30):
        ran = run("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2, TRAIN, *TINY, "--steps", steps)
        assert ran.wait() == 0, ran.output
    assert {path.name for path in (tmp_path / "checkpoints").glob("r2-s*")} >= {"r2-s20", "r2-s30"}


@pytest.mark.system
def test_train_fsdp_survives_kill_and_goes_on_with_more_ranks(run: Run, tmp_path: Path) -> None:
    def elastic(workers: int) -> tuple[object, ...]:
        log = tmp_path / f"events-{workers}"
        return ("-m", "elasticd_agent", "run", "--nproc-per-node", workers, "--event-log", log)

    directory = ("--checkpoint-dir", tmp_path / "checkpoints")
    killed = run(*elastic(2), *directory, TRAIN, *TINY, "--steps", 200)
    killed.until(lambda: "step 40 " in killed.output)
    group = next(event for event in json_lines(tmp_path / "events-2") if event["kind"] == "group_started")
    os.kill(group["pids"][1], signal.SIGKILL)
    assert killed.wait() == 0, killed.output
    (resumed,) = [event for event in json_lines(tmp_path / "events-2") if event["kind"] == "resumed"]
    assert resumed["step"] > 30
    replicas = ("--replicas", 2)
    more = run(*elastic(4), *directory, TRAIN, *TINY, *replicas, "--steps", 240)
    assert more.wait() == 0, more.output
    assert "step 240 " in more.output
    (resumed,) = [event for event in json_lines(tmp_path / "events-4") if event["kind"] == "resumed"]
    assert resumed["step"] == 200
