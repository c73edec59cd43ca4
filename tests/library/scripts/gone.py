"""Rank 0, which serves the store, is gone while the other rank waits for its verdict."""

from __future__ import annotations

import json
import os
import sys
import time

import torch.distributed as dist

import elasticd

session = elasticd.init()
dist.barrier()
if session.rank == 0:
    os._exit(0)
start, error = time.monotonic(), ""
try:
    session.step()
except dist.DistError as raised:
    error = type(raised).__name__
sys.stdout.write(json.dumps({"error": error, "seconds": time.monotonic() - start}) + "\n")
sys.stdout.flush()
os._exit(0)
