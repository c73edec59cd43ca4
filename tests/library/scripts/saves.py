"""A checkpoint with a barrier before it that rank 1 is late for. Arguments: a directory, the barrier's seconds."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import torch

import elasticd

directory, seconds = Path(sys.argv[1]), float(sys.argv[2])
session = elasticd.init()
session.attach(model=torch.nn.Linear(2, 2))
session.checkpoint(every=3, directory=directory, barrier=seconds)
error = ""
try:
    for _ in range(9):
        session.step()
        if session.rank == 1 and session.steps == 5:
            with session.phase("eval"):
                while not (directory / "late").exists():
                    time.sleep(0.005)
except elasticd.BarrierTimeout as raised:
    error = str(raised)
    (directory / "late").touch()
sys.stdout.write(json.dumps({"steps": session.steps, "error": error}) + "\n")
sys.stdout.flush()
session.close()
