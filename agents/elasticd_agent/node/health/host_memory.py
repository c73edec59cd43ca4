"""Is there memory left on this machine? Asked only while no job runs here: what a job takes is not the node's fault."""

from __future__ import annotations

import re

from elasticd_agent.node.health.directories import size
from elasticd_agent.node.health.result import Reading, bad, good, skipped
from elasticd_agent.system.procfs import read

CHECK = "memory"
LEAST_SHARE = 0.05
LEAST_BYTES = 1 << 30
"""Of a large machine; a worker that has imported torch takes a quarter of it."""


def look(idle: bool, path: str = "/proc/meminfo") -> Reading:
    found = {name: int(kib) << 10 for name, kib in re.findall(rb"^(\w+): +(\d+) kB", read(path), re.MULTILINE)}
    total, left = found.get(b"MemTotal"), found.get(b"MemAvailable")
    if total is None or left is None:
        return skipped(CHECK, f"{path} does not say how much is available")
    said = f"{size(left)} of {size(total)} available"
    if not idle:
        return skipped(CHECK, f"{said}; not judged while jobs run here")
    if left < min(LEAST_BYTES, LEAST_SHARE * total):
        return bad(CHECK, f"{said}, and no job runs here: see who holds the rest")
    return good(CHECK, said)
