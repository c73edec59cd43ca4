"""Rank 0 never comes to its decision point; the other rank must not go on without it."""

from __future__ import annotations

import json
import sys
import time
from datetime import timedelta

import torch.distributed

import elasticd

session = elasticd.init(decision_timeout=timedelta(seconds=2.5))
start, error = time.monotonic(), ""
if session.rank != 0:
    try:
        session.step()
    except elasticd.DecisionTimeout as raised:
        error = str(raised)
seconds = time.monotonic() - start
# Rank 0 serves the store: it leaves last.
with session.phase("eval"):
    torch.distributed.barrier()
sys.stdout.write(json.dumps({"steps": session.steps, "error": error, "seconds": seconds}) + "\n")
