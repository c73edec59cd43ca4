"""Runs a script, and appends "MONOTONIC PID" to a file after each step of any optimizer: LOG SCRIPT ARGUMENTS."""

from __future__ import annotations

import os
import runpy
import sys
import time
from typing import Any

from torch.optim.optimizer import register_optimizer_step_post_hook

LOG, SCRIPT = sys.argv[1:3]


def stepped(*_: Any) -> None:
    with open(LOG, "a") as file:
        file.write(f"{time.monotonic():.6f} {os.getpid()}\n")
    time.sleep(0.02)


register_optimizer_step_post_hook(stepped)
sys.argv = sys.argv[2:]
runpy.run_path(SCRIPT, run_name="__main__")
