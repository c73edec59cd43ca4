"""A toy that trains with DDP over gloo, 10 ms a step, until the test that shares its directory has seen enough.

All ranks learn of it in the same step, so that they all end in success. Nothing is torn down at the end: gloo's thread
may still want the GIL to drop the last collective, while DDP's reducer joins it under the GIL (pytorch/pytorch#56297).
"""

from __future__ import annotations

import os
import time

import faults
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


def main() -> None:
    faults.at(0)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(16, 16))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    step, enough = 0, torch.zeros(1)
    while not enough:
        step += 1
        faults.at(step)
        model(torch.ones(4, 16)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        faults.finished(step)
        time.sleep(0.01)
        enough[0] = (faults.WORK / "enough").exists()
        dist.all_reduce(enough)
    os._exit(0)


if __name__ == "__main__":
    main()
