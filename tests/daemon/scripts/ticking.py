"""A worker without torch that notes a step every 10 ms, and ends well once the test has seen enough."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

WORK, RANK, ROUND = Path(os.environ["WORK"]), os.environ["RANK"], os.environ["ELASTICD_ROUND"]


def main() -> None:
    deadline = time.monotonic() + 600
    step = 0
    with open(WORK / f"steps-{RANK}", "a", buffering=1) as steps:
        while not (WORK / "enough").exists() and time.monotonic() < deadline:
            step += 1
            steps.write(f"{ROUND} {step}\n")
            time.sleep(0.01)


if __name__ == "__main__":
    sys.exit(main())
