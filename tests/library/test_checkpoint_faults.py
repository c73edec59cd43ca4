"""Checkpoints whose writers are stopped, and disks that are full."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

SCRIPT = Path(__file__).parent / "scripts" / "checkpoint_faults.py"


def run(*arguments: object) -> list[dict[str, Any]]:
    """The script's JSON lines. OPENBLAS_NUM_THREADS=1 keeps it at one thread, so that it may fork."""
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        "OPENBLAS_NUM_THREADS": "1",
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-W", "error", str(SCRIPT), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=110)
    assert done.returncode == 0, done.stdout + done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_checkpoint_of_a_writer_that_is_stopped_stays_until_it_is_dead(tmp_path: Path) -> None:
    (stopped,) = run("stop", tmp_path)
    assert stopped == {"while_alive": 1, "when_dead": 0, "loadable": 30}


def test_save_on_full_disk(tmp_path: Path) -> None:
    """The tests of the writer have a real one."""
    (tmp_path / "disk").mkdir()
    full, then, no_directory = run("full", tmp_path / "disk")
    assert full == {"full": "EFBIG", "again": "EFBIG", "left": ["r1-s10"], "loadable": 10}
    assert then == {"loadable": 30}
    assert no_directory == {"refused": ["ENOTDIR"] * 3, "loadable": 30, "left": ["r1-s10", "r1-s30"]}
