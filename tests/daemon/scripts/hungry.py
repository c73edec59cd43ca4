"""A worker without torch that takes more and more memory or threads, or shows its control group."""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path

WORK = Path(os.environ["WORK"])
STEP = 10 << 20


def main(what: str) -> None:
    group = Path("/sys/fs/cgroup", Path("/proc/self/cgroup").read_text().rpartition("::/")[2].strip())
    (WORK / f"{what}-group").write_text(f"{group.name} {(group / 'cpu.weight').read_text()}")
    if what == "memory":
        taken = []
        for _ in range(40):
            taken.append(bytearray(os.urandom(STEP)))
            (WORK / "memory").write_text(str(len(taken) * STEP))
    elif what == "pids":
        never = threading.Event()
        for number in range(500):
            (WORK / "pids").write_text(str(number))
            threading.Thread(target=never.wait, daemon=True).start()


if __name__ == "__main__":
    main(sys.argv[1])
