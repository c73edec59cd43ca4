"""For how long a CPU quota has kept the control groups of processes from running (cgroups(7), version 1 and 2).

A quota counts against a group and all groups below it, so those above a process are read, too: a pod's limit, a slice's
CPUQuota. In a container without a control group namespace the paths are the host's, and only the container's own
group, at the mount's root, can be read.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import PurePosixPath

from elasticd_agent.system import procfs

ROOT = "/sys/fs/cgroup"
_UNITS_S = {b"throttled_usec": 1e-6, b"throttled_time": 1e-9}
"""Of version 2 and of version 1. Both add up the processors."""


def throttled_s(pids: Iterable[int], proc: str = "/proc", root: str = ROOT) -> float:
    """Of all their groups together; 0 where none has a quota, or nothing can be read.

    Not of the group with the most: a group that was throttled for long, and is not any more, would hide the others.
    """
    groups = {procfs.read(f"{proc}/{pid}/cgroup") for pid in pids}
    directories = {path for text in groups for path in _directories(text.decode("utf-8", "replace"), root)}
    return sum(_throttled(procfs.read(f"{path}/cpu.stat")) for path in directories)


def _directories(groups: str, root: str) -> Iterator[str]:
    """Of /proc/PID/cgroup: "0::/a/b" is version 2, "3:cpu,cpuacct:/a/b" the CPU controller of version 1."""
    for line in groups.splitlines():
        number, controllers, group = (*line.split(":", 2), "", "")[:3]
        if number == "0" or "cpu" in controllers.split(","):
            path = PurePosixPath(f"/{group.strip('/')}")
            yield from (f"{root}/{controllers}/{above}" for above in (path, *path.parents))


def _throttled(text: bytes) -> float:
    pairs = (line.partition(b" ") for line in text.splitlines())
    return sum(int(value) * _UNITS_S[name] for name, _, value in pairs if name in _UNITS_S and value.isdigit())
