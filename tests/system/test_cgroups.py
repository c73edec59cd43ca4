"""Throttled time: of a real control group, and from files as systemd and container runtimes lay them out."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from elasticd_agent.system.cgroups import throttled_s
from tests.hangs import harms

V2 = "nr_periods 40\nnr_throttled 39\nthrottled_usec 2500000\n"
V1 = "nr_periods 40\nnr_throttled 39\nthrottled_time 2500000000\n"
CASES = {
    "version 2": ("0::/pod/worker", {"pod/worker": V2}, 2.5),
    "the quota of a group above": ("0::/pod/worker", {"pod": V2, "pod/worker": "usage_usec 9\n"}, 2.5),
    "quotas of two groups": ("0::/pod/worker", {"pod": V2, "pod/worker": V2}, 5.0),
    "version 1": ("4:memory:/a\n3:cpu,cpuacct:/job", {"cpu,cpuacct/job": V1}, 2.5),
    "both": ("1:cpu:/\n0::/", {"cpu": V1, "": "usage_usec 9\n"}, 2.5),
    "a container that sees the host's path": ("0::/kubepods/pod1/x", {"": V2}, 2.5),
    "another controller": ("3:cpuset:/job", {"cpuset/job": V1}, 0.0),
    "no quota": ("0::/pod", {"pod": "usage_usec 9\n"}, 0.0),
    "nothing to read": ("0::/pod", {}, 0.0),
    "nonsense": ("0\n::\n\n0::", {"": "throttled_usec\nthrottled_usec x\n"}, 0.0),
}


@pytest.mark.parametrize("name", CASES)
def test_throttled_time(name: str, tmp_path: Path) -> None:
    groups, files, expected = CASES[name]
    (tmp_path / "proc" / "7").mkdir(parents=True)
    (tmp_path / "proc" / "7" / "cgroup").write_text(groups)
    for directory, text in files.items():
        (tmp_path / "root" / directory).mkdir(parents=True, exist_ok=True)
        (tmp_path / "root" / directory / "cpu.stat").write_text(text)
    assert throttled_s([7, 8], str(tmp_path / "proc"), str(tmp_path / "root")) == expected


def test_process_under_a_quota(until: Callable[[Callable[[], object], float], object]) -> None:
    if why := harms.no_quota():
        pytest.skip(why)
    with harms.quota(0.01) as group:
        process = subprocess.Popen([sys.executable, "-c", "while True: pass"])
        try:
            harms.enter(group, [process.pid])
            until(lambda: throttled_s([process.pid]) > 0.5, 20)
        finally:
            process.kill()
            process.wait()
