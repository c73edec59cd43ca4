"""Is there memory left on this machine? Asked only while no job runs here: what a job takes is not the node's fault."""

from __future__ import annotations

import re

from elasticd_agent.node.health.directories import format_size
from elasticd_agent.node.health.result import CheckResult, failed, passed, skipped
from elasticd_agent.system.procfs import read

CHECK = "memory"
MIN_FREE_SHARE = 0.05
MIN_FREE_BYTES = 1 << 30
"""Of a large machine; a worker that has imported torch takes a quarter of it."""


def check_memory(idle: bool, path: str = "/proc/meminfo") -> CheckResult:
    found = {name: int(kib) << 10 for name, kib in re.findall(rb"^(\w+): +(\d+) kB", read(path), re.MULTILINE)}
    total, left = found.get(b"MemTotal"), found.get(b"MemAvailable")
    if total is None or left is None:
        return skipped(CHECK, f"{path} does not say how much is available")
    said = f"{format_size(left)} of {format_size(total)} available"
    if not idle:
        return skipped(CHECK, f"{said}; not judged while jobs run here")
    if left < min(MIN_FREE_BYTES, MIN_FREE_SHARE * total):
        return failed(CHECK, f"{said}, and no job runs here: see who holds the rest")
    return passed(CHECK, said)
