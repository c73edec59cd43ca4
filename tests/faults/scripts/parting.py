"""Trains like train.py, but a rank that raises closes its group first, and ends only after the others and a while.

As a script does that ends with `finally: dist.destroy_process_group()` and then has something to write.
"""

from __future__ import annotations

import gc
import os
import sys
import time
from pathlib import Path

import faults
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


def main(steps: int, seconds: float) -> None:
    dist.init_process_group("gloo")
    model = DistributedDataParallel(torch.nn.Linear(16, 16))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    pids = torch.zeros(dist.get_world_size(), dtype=torch.int64)
    pids[dist.get_rank()] = os.getpid()
    dist.all_reduce(pids)
    try:
        for step in range(1, steps + 1):
            faults.at(step)
            model(torch.ones(4, 16)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            faults.finished(step)
            time.sleep(0.01)
    except ValueError:
        others = set(pids.tolist()) - {os.getpid()}
        del model, optimizer  # DDP holds the group, and with it the connections
        gc.collect()
        dist.destroy_process_group()
        faults.write(f"parting-{faults.ROUND}", "x")
        until = time.monotonic() + 20
        while time.monotonic() < until and any(Path(f"/proc/{pid}").exists() for pid in others):
            time.sleep(0.01)
        time.sleep(seconds)
        raise


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]))
