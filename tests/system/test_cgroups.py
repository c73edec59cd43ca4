"""Control groups: of this machine, and from files as systemd and container runtimes lay them out.

tests/daemon/runners/test_control_groups.py has the limits of jobs on a real kernel.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from elasticd_agent.system.processes.cgroups import (
    LimitsUnavailable,
    make_job_group,
    remove_empty_job_groups,
    throttled_s,
)
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


# ---- groups of jobs

UNIT = "elasticd.slice/elasticd-agent.service"


def tree(tmp_path: Path, own: str, controllers: str = "cpu io memory pids") -> tuple[str, str]:
    """A delegated group as the kernel shows it: (proc, root)."""
    (tmp_path / "proc" / "self").mkdir(parents=True)
    (tmp_path / "proc" / "self" / "cgroup").write_text(own)
    unit = tmp_path / "root" / UNIT
    unit.mkdir(parents=True)
    (unit / "cgroup.controllers").write_text(controllers)
    return str(tmp_path / "proc"), str(tmp_path / "root")


def test_job_gets_a_group_beside_the_agents(tmp_path: Path) -> None:
    proc, root = tree(tmp_path, f"1:name=x:/other\n0::/{UNIT}/agent\n")
    for memory in (1000, 2000):  # the second time it exists
        group = make_job_group("llama.7", {"memory": memory, "cpu": 50}, proc, root)
        assert group == Path(root, UNIT, "job.llama.7")
        assert {path.name: path.read_text() for path in group.iterdir()} == {
            "memory.max": str(memory),
            "cpu.weight": "50",
        }
    assert Path(root, UNIT, "cgroup.subtree_control").read_text() == "+cpu +memory"
    for empty in ("job.old.1", "job.starts.2"):
        Path(root, UNIT, empty).mkdir()
    remove_empty_job_groups([f"{root}/{UNIT}/job.starts.2"], proc, root)
    left = sorted(path.name for path in Path(root, UNIT).glob("job.*"))
    assert left == ["job.llama.7", "job.starts.2"], "only empty ones go, of which no runner is about to start"


@pytest.mark.parametrize(
    ("own", "controllers", "why"),
    [
        (f"0::/{UNIT}", "memory", f"started in the control group /{UNIT}, not in one named 'agent'"),
        ("4:memory:/a\n", "memory", "started in the control group of version 1"),
        ("", "memory", "started in the control group of version 1"),
        (f"0::/{UNIT}/agent", "cpu pids", "does not offer the controller memory"),
        ("0::/other/agent", "memory", "cgroup.controllers: No such file"),
    ],
)
def test_why_there_are_no_limits(tmp_path: Path, own: str, controllers: str, why: str) -> None:
    proc, root = tree(tmp_path, own, controllers)
    with pytest.raises(LimitsUnavailable, match=re.escape(why)):
        make_job_group("llama.7", {"memory": 1}, proc, root)
