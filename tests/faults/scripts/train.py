"""A toy that trains with DDP over gloo, 10 ms a step, as PyTorch's tutorial would write it."""

from __future__ import annotations

import gc
import sys
import time

import faults
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


def main(steps: int) -> None:
    faults.at(0)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(16, 16))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(1, steps + 1):
        faults.at(step)
        model(torch.ones(4, 16)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        faults.finished(step)
        time.sleep(0.01)
    # Or DDP's reducer is the last to hold the process group, and may dead-lock with gloo's thread (pytorch#56297).
    del model
    gc.collect()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]))
