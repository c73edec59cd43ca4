"""A full disk of the state directory: jobs continue, are adopted, and their results are written."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.daemon.conftest import MakeNode
from tests.daemon.node import COLD, lives, until


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "disk"
    path.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "none", str(path)], check=True)
    yield path
    subprocess.run(["umount", "--lazy", str(path)], check=True)


def fill(disk: Path) -> Path:
    """Until not one byte more fits."""
    filler = disk / "filler"
    with open(filler, "ab", buffering=0) as file:
        for size in (1 << 16, 1 << 12, 1):
            try:
                while file.write(b"x" * size):
                    pass
            except OSError:
                continue
    return filler


@pytest.mark.system
def test_full_disk_costs_neither_a_job_nor_its_result(node: MakeNode, small_disk: Path) -> None:
    n1 = node(state_dir=small_disk / "state", health={"all_reduce": False, "disk_free_min": 0})
    n1.state = small_disk / "state"
    n1.job("one", "plain.py", COLD, "sleep", workers=1)
    n1.start()
    until(lambda: (n1.work / "ready-0").exists(), n1.diagnostics)
    workers, runner = n1.workers("one"), n1.runner("one")
    filler = fill(small_disk)
    n1.kill()
    os.truncate(n1.state / "node.json", 5)  # under which name it was here, it cannot even write down anew
    n1.start(wait=False)
    n1.wait_for_log(f"adopted its runner (pid {runner})")
    n1.wait_for_log("node n1 is registered")
    assert n1.workers("one") == workers
    assert all(map(lives, workers))
    assert n1.drain() == 0
    assert n1.wait_for_exit("one").exit_code == 143
    assert os.statvfs(small_disk).f_bavail < 64, "the test had filled it"
    assert not any(map(lives, workers))
    # A node with a full disk starts, and says what it cannot do; with room again it does it.
    (n1.work / "ready-0").unlink()
    fill(small_disk)
    aways = n1.log.count("continue without the store")
    n1.start(wait=False)
    until(lambda: n1.log.count("continue without the store") > aways, n1.diagnostics)
    assert not (n1.work / "ready-0").exists()
    filler.unlink()
    until(lambda: (n1.work / "ready-0").exists(), n1.diagnostics)
    assert n1.drain() == 0
    n1.assert_gone()
