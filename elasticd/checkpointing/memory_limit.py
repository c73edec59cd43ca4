"""How much memory this process may still use: what the machine has left and what its cgroups allow.

Pages of a memfd are charged to the cgroup of the process that touches them first, as any memory is, and cannot be
reclaimed. Sources: Documentation/admin-guide/cgroup-v2.rst, proc_meminfo(5).
"""

from __future__ import annotations

from pathlib import Path

_CGROUPS = Path("/sys/fs/cgroup")


def available_bytes() -> tuple[int, str]:
    """The smallest of the limits, and its name. What cannot be read is no limit."""
    limits = [(_machine(), "of this machine's memory")]
    group = _CGROUPS / _own_group().lstrip("/")
    while group.is_relative_to(_CGROUPS):
        try:
            limit = int((group / "memory.max").read_text())
            used = int((group / "memory.current").read_text())
            limits.append((limit - used + _reclaimable(group), f"below the memory limit of {limit >> 20} MB"))
        except (OSError, ValueError):
            pass  # the root group, or no limit ("max")
        group = group.parent
    return min(limits)


def _machine() -> int:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, ValueError, StopIteration):
        return 1 << 62


def _own_group() -> str:
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return ""
    return next((line[3:] for line in lines if line.startswith("0::")), "")


def _reclaimable(group: Path) -> int:
    """Pages of files: the kernel drops them before it refuses memory."""
    fields = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    return int(fields.get("inactive_file", 0)) + int(fields.get("active_file", 0))
