"""Several sessions, one after the other, each with its own default process group, model and directory."""

from __future__ import annotations

import sys

import faults
import torch
from torch.nn.parallel import DistributedDataParallel

import elasticd

torch.set_num_threads(1)


def main(sessions: int, steps: int) -> None:
    faults.at(0)
    for number in range(sessions):
        with elasticd.init() as session:
            model = DistributedDataParallel(torch.nn.Linear(4, 1))
            optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
            session.attach(model=model, optimizer=optimizer)
            session.restore(f"checkpoints/{number}")
            session.checkpoint(every=1, directory=f"checkpoints/{number}")
            while session.steps < steps:
                faults.at(number * steps + session.steps + 1)
                model(torch.ones(2, 4)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
                session.step()
                faults.finished(number * steps + session.steps)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
