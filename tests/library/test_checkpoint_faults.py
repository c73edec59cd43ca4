"""Checkpoints whose writers are stopped, and disks that are full."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.library.conftest import Start, read


def run(start: Start, *arguments: object) -> list[dict[str, Any]]:
    """The script's JSON lines."""
    job = start("checkpoint_faults.py", *map(str, arguments), world_size=1)
    job.results()
    return [json.loads(line) for line in read(job.ranks[0].folder / "out").splitlines()]


def test_checkpoint_of_a_writer_that_is_stopped_stays_until_it_is_dead(start: Start, tmp_path: Path) -> None:
    (stopped,) = run(start, "stop", tmp_path)
    assert stopped == {"while_alive": 1, "when_dead": 0, "loadable": 30}


def test_save_on_full_disk(start: Start, tmp_path: Path) -> None:
    """The tests of the writer have a real one."""
    (tmp_path / "disk").mkdir()
    full, then, no_directory = run(start, "full", tmp_path / "disk")
    assert full == {"full": "EFBIG", "again": "EFBIG", "left": ["r1-s10"], "loadable": 10}
    assert then == {"loadable": 30}
    assert no_directory == {"refused": ["ENOTDIR"] * 3, "loadable": 30, "left": ["r1-s10", "r1-s30"]}
