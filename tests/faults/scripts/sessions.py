"""Several sessions, one after the other, each with its own default process group, model and directory.

Writes round, session, step and process for each step. With a third argument "run" each trains by `session.run`, with
"moves" the directories are others in each round.
"""

from __future__ import annotations

import os
import sys

import faults
import torch
from torch.nn.parallel import DistributedDataParallel

import elasticd

torch.set_num_threads(1)


def train(number: int, steps: int, how: str) -> None:
    with elasticd.init() as session:
        model = DistributedDataParallel(torch.nn.Linear(4, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        session.attach(model=model, optimizer=optimizer)
        session.checkpoint(every=1, directory=f"checkpoints/{session.round if how == 'moves' else ''}/{number}")

        def loop() -> None:
            faults.RANK, faults.ROUND = session.rank, session.round
            while session.steps < steps:
                faults.at(number * steps + session.steps + 1)
                model(torch.ones(2, 4)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
                session.step()
                faults.write(f"trained-{session.rank}", f"{session.round} {number} {session.steps} {os.getpid()}\n")

        if how == "run":
            session.run(loop)
        else:
            session.restore()
            loop()


faults.at(0)
for number in range(int(sys.argv[1])):
    train(number, int(sys.argv[2]), sys.argv[3] if len(sys.argv) > 3 else "")
