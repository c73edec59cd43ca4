"""Control groups (cgroups(7)): for how long a CPU quota has kept processes from running, and a group for each job.

A quota counts against a group and all groups below it, so those above a process are read, too: a pod's limit, a slice's
CPUQuota. In a container without a control group namespace the paths are the host's, and only the container's own
group, at the mount's root, can be read.

Jobs get groups, of version 2 only, where the agent was started in a group named `agent` of a parent that it may change:
systemd's Delegate= and DelegateSubgroup=. A group with processes of its own cannot have limited groups below it, so the
agent cannot make them below a group that it was started in directly.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path, PurePosixPath

from elasticd_agent.system.processes import procfs

ROOT = "/sys/fs/cgroup"
_THROTTLED_UNITS_S = {b"throttled_usec": 1e-6, b"throttled_time": 1e-9}
"""The key of version 2, and that of version 1. Both add up the processors."""


def throttled_s(pids: Iterable[int], proc: str = "/proc", root: str = ROOT) -> float:
    """The seconds in which all their groups together were throttled; 0 where none has a quota, or nothing can be read.

    The sum, not the longest: a group that was throttled for long, and is not any more, would hide the others.
    """
    groups = {procfs.read(f"{proc}/{pid}/cgroup") for pid in pids}
    directories = {path for text in groups for path in _cpu_groups_and_ancestors(os.fsdecode(text), root)}
    return sum(_parse_throttled_s(procfs.read(f"{path}/cpu.stat")) for path in directories)


def _cpu_groups_and_ancestors(groups: str, root: str) -> Iterator[str]:
    """The groups in /proc/PID/cgroup: "0::/a/b" is version 2, "3:cpu,cpuacct:/a/b" the CPU controller of version 1."""
    for line in groups.splitlines():
        number, controllers, group = (*line.split(":", 2), "", "")[:3]
        if number == "0" or "cpu" in controllers.split(","):
            path = PurePosixPath(f"/{group.strip('/')}")
            yield from (f"{root}/{controllers}/{above}" for above in (path, *path.parents))


def _parse_throttled_s(text: bytes) -> float:
    pairs = (line.partition(b" ") for line in text.splitlines())
    return sum(
        int(value) * _THROTTLED_UNITS_S[name]
        for name, _, value in pairs
        if name in _THROTTLED_UNITS_S and value.isdigit()
    )


# ---- groups of jobs

AGENT_GROUP = "agent"
_JOB_GROUP_PREFIX = "job."
_LIMIT_FILES = {"memory": "memory.max", "pids": "pids.max", "cpu": "cpu.weight"}
"""The file of each controller's limit."""


class LimitsUnavailable(Exception):
    """Why no group of a job can be limited here: the end of a sentence."""


def make_job_group(name: str, limits: Mapping[str, int], proc: str = "/proc", root: str = ROOT) -> Path:
    """A group with these limits, by controller: memory in bytes, pids, cpu as a weight from 1 to 10,000.

    One of that name that exists gets the limits. Raises LimitsUnavailable.
    """
    parent = _delegated_group(proc, root)
    try:
        missing = limits.keys() - (parent / "cgroup.controllers").read_text(errors="replace").split()
        if missing:
            raise LimitsUnavailable(
                f"the kernel or the group {parent} does not offer the controller {', '.join(missing)}"
            )
        (parent / "cgroup.subtree_control").write_bytes(
            " ".join(f"+{controller}" for controller in sorted(limits)).encode()
        )
        group = parent / f"{_JOB_GROUP_PREFIX}{name}"
        with contextlib.suppress(FileExistsError):
            group.mkdir(mode=0o755)
        for controller, limit in limits.items():
            (group / _LIMIT_FILES[controller]).write_bytes(b"%d" % limit)
    except OSError as error:
        raise LimitsUnavailable(f"{error.filename}: {error.strerror}") from None
    return group


def join_group(group: Path) -> None:
    """Move this process there; its children are born there. Raises OSError."""
    (group / "cgroup.procs").write_bytes(b"%d" % os.getpid())


def remove_empty_job_groups(except_groups: Iterable[str] = (), proc: str = "/proc", root: str = ROOT) -> None:
    """The groups of jobs of which no process is left; the kernel keeps the others. `except_groups`: a runner that has
    just been started has yet to join its own.
    """
    kept = {*except_groups}
    with contextlib.suppress(LimitsUnavailable, OSError):
        for group in _delegated_group(proc, root).glob(f"{_JOB_GROUP_PREFIX}*"):
            with contextlib.suppress(OSError):
                if str(group) not in kept:
                    group.rmdir()


def _delegated_group(proc: str, root: str) -> Path:
    lines = os.fsdecode(procfs.read(f"{proc}/self/cgroup")).splitlines()
    own = next((PurePosixPath(line[3:]) for line in lines if line.startswith("0::")), None)
    if own is None or own.name != AGENT_GROUP:
        raise LimitsUnavailable(
            f"this agent was started in the control group {own or 'of version 1'}, not in one named {AGENT_GROUP!r} of "
            "a parent that was delegated to it (elasticd docs systemd)"
        )
    return Path(root) / own.parent.relative_to("/")
