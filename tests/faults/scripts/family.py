"""Trains with a DataLoader worker, a daemonised child, a child in a session of its own and a plain one in each rank."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import time

import faults
import torch
import torch.distributed as dist
from plain import SLEEP, daemonise
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset


def main(steps: int) -> None:
    faults.at(0)
    daemonise()
    for apart in (False, True):
        faults.write("family", f"{subprocess.Popen(SLEEP, start_new_session=apart).pid}\n")
    loader = DataLoader(TensorDataset(torch.ones(steps, 16)), num_workers=1, worker_init_fn=introduce)
    dist.init_process_group("gloo")
    model = DistributedDataParallel(torch.nn.Linear(16, 16))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step, (batch,) in enumerate(loader, start=1):
        faults.at(step)
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        faults.finished(step)
        time.sleep(0.01)
    # Or DDP's reducer is the last to hold the process group, and may dead-lock with gloo's thread (pytorch#56297).
    del model
    gc.collect()
    dist.destroy_process_group()


def introduce(_: int) -> None:
    faults.write("family", f"{os.getpid()}\n")


if __name__ == "__main__":
    main(int(sys.argv[1]))
