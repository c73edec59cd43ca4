"""Rank 1 waits at a barrier when SIGINT comes, which rank 0 sends it; then every rank prints what the barrier said."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
from pathlib import Path

import elasticd
from elasticd.heartbeat.record import Phase, from_environment

folder = Path(os.environ["FOLDER"])
signal.signal(signal.SIGINT, signal.default_int_handler)
session = elasticd.init()
start, error = time.monotonic(), ""
try:
    if session.rank == 2:
        while not (folder / "over.1").exists():
            time.sleep(0.005)
    session.barrier("epoch", 600)
except KeyboardInterrupt:
    error = "KeyboardInterrupt"
except elasticd.BarrierTimeout as raised:
    error = str(raised)
phase = Phase(from_environment().current_phase).name
(folder / f"over.{session.rank}").touch()
sys.stdout.write(json.dumps({"error": error, "seconds": time.monotonic() - start, "phase": phase}) + "\n")
sys.stdout.flush()
with contextlib.suppress(KeyboardInterrupt):
    for rank in range(session.world_size):
        while not (folder / f"over.{rank}").exists():
            time.sleep(0.005)
