"""Where our own files are."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from elasticd_agent.system import installation


@pytest.mark.parametrize("name", sorted(installation._PROGRAMS))
def test_program_exists(name: str) -> None:
    assert Path(installation.program(name)).exists()


def test_a_process_of_a_snapshot_uses_only_the_snapshot(tmp_path: Path) -> None:
    copy = installation.snapshot(tmp_path / "copy")
    code = (
        "import json, elasticd, elasticd_agent; from elasticd_agent.system import installation as i\n"
        "print(json.dumps([i.program('owner'), i.library_file('elasticd.heartbeat.record'), *i.import_path()]))"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": copy}, cwd="/", capture_output=True, check=True
    )
    paths = json.loads(ran.stdout)
    assert len(paths) == 3
    assert all(Path(path).is_relative_to(copy) and Path(path).exists() for path in paths)
