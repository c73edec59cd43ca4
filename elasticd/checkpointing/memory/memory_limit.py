"""The memory that this process may still use: what the machine has left and what its cgroups allow.

Pages of a memfd are charged to the cgroup of the process that touches them first, as any memory is, and cannot be
reclaimed. Sources: Documentation/admin-guide/cgroup-v2.rst, cgroup-v1/memory.rst, proc_meminfo(5).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from elasticd.errors import Reason

SPARE_BYTES = 64 << 20
"""Memory that states leave for everything else."""
_CGROUP_ROOT = Path("/sys/fs/cgroup")
_OWN_CGROUPS_FILE = Path("/proc/self/cgroup")


def available_bytes() -> tuple[int, str]:
    """The smallest of the limits, and its name. What cannot be read is no limit."""
    limits = [(_machine_available_bytes(), "of this machine's memory")]
    for group, unified in _own_cgroups():
        while group.is_relative_to(_CGROUP_ROOT):
            try:
                limit = int((group / ("memory.max" if unified else "memory.limit_in_bytes")).read_bytes())
                used = int((group / ("memory.current" if unified else "memory.usage_in_bytes")).read_bytes())
                limits.append((limit - used + _reclaimable_bytes(group), f"below the memory limit of {limit >> 20} MB"))
            except (OSError, ValueError):
                pass  # the root group, or no limit ("max")
            group = group.parent
    return min(limits)


def oom_kills() -> int:
    """The number of processes of this process's cgroup that the kernel has killed for lack of memory; 0 where it does
    not say.
    """
    for group, unified in _own_cgroups():
        try:
            lines = (group / ("memory.events" if unified else "memory.oom_control")).read_bytes().splitlines()
            return next(int(count) for name, count in map(bytes.split, lines) if name == b"oom_kill")
        except (OSError, ValueError, StopIteration):
            pass
    return 0


def _own_cgroups() -> Iterator[tuple[Path, bool]]:
    """This process's cgroup, in version 2 (True) and under version 1's memory controller."""
    for unified, controller in ((True, ""), (False, "memory")):
        group = _CGROUP_ROOT / controller / _own_cgroup_path(controller).lstrip("/")
        # A container may see its own group as the root.
        yield group if group.exists() else _CGROUP_ROOT / controller, unified


def _machine_available_bytes() -> int:
    try:
        lines = Path("/proc/meminfo").read_text(errors="replace").splitlines()
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, ValueError, StopIteration):
        return 1 << 62


def _own_cgroup_path(controller: str) -> str:
    """The group of this process, in version 2 ("") or under a controller of version 1."""
    try:
        lines = os.fsdecode(_OWN_CGROUPS_FILE.read_bytes()).splitlines()
    except OSError:
        return ""
    fields = [line.split(":", 2) for line in lines]
    return next((path for _, controllers, path in fields if controller in controllers.split(",")), "")


def _reclaimable_bytes(group: Path) -> int:
    """Pages of files: the kernel drops them before it refuses memory."""
    fields = dict(line.split() for line in (group / "memory.stat").read_text(errors="replace").splitlines())
    return int(fields.get("inactive_file", 0)) + int(fields.get("active_file", 0))


def no_memory_reason(size: int, buffers: list[int]) -> Reason:
    """Why there is no memory for a state of `size` bytes in each of these files, "" if there is."""
    sizes = [os.fstat(fd).st_blocks * 512 for fd in buffers]
    need = sum(max(size - used, 0) for used in sizes) + SPARE_BYTES
    left, where = available_bytes()
    if need <= left:
        return ""
    what = f"two copies of a state of {size >> 20} MB take" if len(sizes) == 2 else f"a part of {size >> 20} MB takes"
    return f"{what} {need >> 20} MB more, and {max(left, 0) >> 20} MB are left {where}"
