"""A worker without torch that tells who it is and what it was given, and ends well once the test has seen enough.

An argument ${local_rank} makes its start cold, which here is quick.
"""

from __future__ import annotations

import json
import os
import sys
import time

import faults

TOLD = ("GROUP_RANK", "LOCAL_RANK", "WORLD_SIZE", "ROLE_NAME", "ROLE_RANK", "ROLE_WORLD_SIZE")

if __name__ == "__main__":
    faults.at(0)
    told = {name: os.environ[name] for name in TOLD}
    faults.write(f"told-{faults.RANK}", json.dumps({**told, "args": sys.argv[1:]}))
    deadline = time.monotonic() + 100
    while not (faults.WORK / "enough").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
