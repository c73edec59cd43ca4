"""Trains by `session.run`, with a process group that each round makes anew; two of three ranks keep their process.

In round 2 rank 1 reduces in its two groups in the other order, once: all ranks wait for each other.
"""

from __future__ import annotations

import time

import mishaps
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import elasticd

session = elasticd.init()
model = DistributedDataParallel(torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
session.attach(model=model, optimizer=optimizer)
session.checkpoint(every=1000)


def train() -> None:
    groups, enough, first = [None, dist.new_group()], torch.zeros(1), session.steps
    while not enough and not session.should_stop:
        model(torch.ones(2, 4)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        crossed = (session.round, session.rank, session.steps) == (2, 1, first + 20)
        enough[0] = (mishaps.WORK / "enough").exists()
        for group in reversed(groups) if crossed else groups:
            dist.all_reduce(enough if group is None else torch.zeros(1), group=group)
        session.step()
        mishaps.write(f"steps-{session.rank}", f"{session.round} {session.steps} {time.monotonic():.6f}\n")
        time.sleep(0.01)


session.run(train)
session.close()
