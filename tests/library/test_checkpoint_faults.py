"""Checkpoints whose writers are killed at every moment, and real disks that are full or read-only."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).parent / "scripts" / "checkpoint_faults.py"


def run(*arguments: object, inside: tuple[str, ...] = ()) -> list[dict[str, Any]]:
    """The script's JSON lines. OPENBLAS_NUM_THREADS=1 keeps it at one thread, so that it may fork."""
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        "OPENBLAS_NUM_THREADS": "1",
        "OMP_NUM_THREADS": "1",
    }
    command = [*inside, sys.executable, "-W", "error", str(SCRIPT), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=110)
    assert done.returncode == 0, done.stdout + done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_writer_killed_at_every_file_operation(tmp_path: Path) -> None:
    """A writer killed at any file operation of its life leaves a loadable checkpoint."""
    points = run("kill", tmp_path)
    assert len(points) > 40
    assert [each["killed"] for each in points] == [True] * (len(points) - 1) + [False]
    assert {"open", "os.mkdir", "os.rename", "os.link", "os.remove", "os.rmdir"} <= {each["event"] for each in points}
    for each in points:
        assert each["saved"] <= each["loadable"], each  # what save() returned is there, whatever came after
        assert each["after"] in (["r3-s50"], None), each  # and nothing is left behind once another round has saved


@pytest.mark.system
def test_writer_killed_or_stopped_at_random_moments(tmp_path: Path) -> None:
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    times = 25
    lines = run("random", tmp_path, times, seed)
    kills, rest = lines[:times], lines[times:]
    for each in kills:
        assert each["saved"] <= each["loadable"] <= each["saved"] + 1, each
    assert kills[-1]["loadable"] > 1, "no writer ever got to its first save"
    assert any(each["unfinished"] for each in kills), "no kill hit a save"
    *bytes_written, stopped = rest
    for each in bytes_written:
        assert each == {"limit": each["limit"], "signal": 25, "written": each["limit"], "loadable": 10}
    assert len(bytes_written) == 6
    assert stopped == {"while_alive": 1, "when_dead": 0, "loadable": 30}


def may_mount(*inside: str) -> bool:
    command = [*inside, "sh", "-c", "mount -t tmpfs none /mnt"]
    try:
        return subprocess.run(command, capture_output=True, timeout=20).returncode == 0
    except FileNotFoundError:
        return False


def test_save_on_full_and_read_only_disk(tmp_path: Path) -> None:
    directory = tmp_path / "disk"
    directory.mkdir()
    mount = 'mount -t tmpfs -o size=4m none "$0" && exec "$@"'
    for unshare in (("unshare", "-m"), ("unshare", "-r", "-m")):
        if may_mount(*unshare):
            lines = run("mounted", directory, inside=(*unshare, "sh", "-c", mount, str(directory)))
            errors, refused = "ENOSPC", ["EROFS"] * 3
            break
    else:
        lines = run("limited", directory)
        errors, refused = "EFBIG", ["ENOTDIR"] * 3
    full, then, read_only = lines
    assert full == {"full": errors, "again": errors, "left": ["r1-s10"], "loadable": 10}
    assert then == {"loadable": 30}
    assert read_only == {"read_only": refused, "loadable": 30, "left": ["r1-s10", "r1-s30"]}


def test_save_on_full_disk_without_mount(tmp_path: Path) -> None:
    """The same where this machine may not mount a small file system."""
    (tmp_path / "disk").mkdir()
    full, then, read_only = run("limited", tmp_path / "disk")
    assert full == {"full": "EFBIG", "again": "EFBIG", "left": ["r1-s10"], "loadable": 10}
    assert then == {"loadable": 30}
    assert read_only["read_only"] == ["ENOTDIR"] * 3
