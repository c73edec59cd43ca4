"""A session and a `session.run` for each fold of a cross-validation, in one process."""

from __future__ import annotations

import os
import sys

import faults
import torch
from torch.nn.parallel import DistributedDataParallel

import elasticd

torch.set_num_threads(1)


def train_fold(fold: int, steps: int) -> None:
    with elasticd.init() as session:
        model = DistributedDataParallel(torch.nn.Linear(4, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        session.attach(model=model, optimizer=optimizer)
        session.checkpoint(every=1, directory=f"checkpoints/{fold}")

        def train() -> None:
            faults.RANK, faults.ROUND = session.rank, session.round
            while session.steps < steps:
                faults.at(fold * steps + session.steps + 1)
                model(torch.ones(2, 4)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
                session.step()
                faults.write(f"folds-{session.rank}", f"{session.round} {fold} {session.steps} {os.getpid()}\n")

        session.run(train)


faults.at(0)
for number in range(int(sys.argv[1])):
    train_fold(number, int(sys.argv[2]))
