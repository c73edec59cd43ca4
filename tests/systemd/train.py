"""The training script of these tests: `train.py FOLDER`, 50 ms a step, a checkpoint every 20, ends at FOLDER/enough.

Rank 0 appends one line a step to FOLDER/steps: the step, its own pid, when it was (monotonic seconds).
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import elasticd

FOLDER = Path(sys.argv[1])


def main() -> None:
    session = elasticd.init()
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(8, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    session.attach(model=model, optimizer=optimizer)
    session.restore()
    session.checkpoint(every=20)
    enough = torch.zeros(1)
    with (FOLDER / "steps").open("a", buffering=1) as steps:
        while not enough:
            model(torch.ones(4, 8)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            time.sleep(0.05)
            enough[0] = (FOLDER / "enough").exists()
            dist.all_reduce(enough)
            if dist.get_rank() == 0:
                print(session.steps + 1, os.getpid(), f"{time.monotonic():.3f}", file=steps)
            session.step()
            if session.should_stop:
                break
    session.close()


main()
