"""The script that knows nothing of elasticd survives under it; importing elasticd costs a few lines and saves work."""

from __future__ import annotations

import difflib
import os
import signal
from pathlib import Path

import pytest

from tests.examples.launching import REPOSITORY, Run, json_lines

PLAIN = REPOSITORY / "examples" / "plain_torchrun_script.py"
WITH_ELASTICD = REPOSITORY / "examples" / "plain_with_elasticd.py"
ELASTICD = ("-m", "elasticd_agent", "run", "--nproc-per-node", 2)


@pytest.mark.system
def test_plain_script_runs_under_torchrun(run: Run) -> None:
    ran = run("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2, PLAIN, "--epochs", 3)
    assert ran.wait() == 0, ran.output
    assert "epoch 2 error" in ran.output


@pytest.mark.parametrize(
    "script", [pytest.param(PLAIN, marks=pytest.mark.system), WITH_ELASTICD], ids=["plain", "with elasticd"]
)
def test_plain_script_survives_kill(run: Run, tmp_path: Path, script: Path) -> None:
    events = tmp_path / "events"
    options = ("--checkpoint-dir", tmp_path / "checkpoints", "--event-log", events)
    ran = run(*ELASTICD, *options, script, "--epochs", 24)  # long enough for a test that is late
    ran.until(lambda: "epoch 3 error" in ran.output)
    group = next(event for event in json_lines(events) if event["kind"] == "group_started")
    os.kill(group["pids"][1], signal.SIGKILL)
    assert ran.wait() == 0, ran.output
    started = [event["round"] for event in json_lines(events) if event["kind"] == "group_started"]
    assert len(started) == 2, "the fault did not fire"
    assert "epoch 23 error" in ran.output
    assert ran.output.count("epoch 0 error") == 1, "it began again instead of going on"


def test_diff_of_plain_scripts_is_short() -> None:
    plain, changed = PLAIN.read_text(), WITH_ELASTICD.read_text()
    assert "import elasticd" not in plain
    diff = list(difflib.unified_diff(plain.splitlines(), changed.splitlines(), n=0))
    added = [line for line in diff if line.startswith("+") and not line.startswith("+++")]
    removed = [line for line in diff if line.startswith("-") and not line.startswith("---")]
    assert len(added) < 25 < len(removed)
