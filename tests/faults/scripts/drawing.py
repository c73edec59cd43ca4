"""Trains by `session.run` with a random stream of its own on every rank, until it is stopped. "drawn" has a line of
round, rank, step and a digest of the random states for each step, "entered" one for each call of `train`.
"""

from __future__ import annotations

import random
import time

import faults
import numpy as np
import torch
from donor import digest
from torch.nn.parallel import DistributedDataParallel

import elasticd

session = elasticd.init()
random.seed(session.rank)
np.random.seed(session.rank)
torch.manual_seed(session.rank)
model = DistributedDataParallel(
    torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 1))
)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
session.attach(model=model, optimizer=optimizer)
session.checkpoint(every=100000)


def write(name: str, step: int) -> None:
    found = digest([torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()])
    faults.write(name, f"{session.round} {session.rank} {step} {found}\n")


def train() -> None:
    faults.RANK, faults.ROUND = session.rank, session.round
    write("entered", session.steps)
    while not session.should_stop:
        faults.at(session.steps + 1)
        x = torch.randn(3, 4) + random.random() + np.random.rand()
        optimizer.zero_grad()
        model(x).square().sum().backward()
        optimizer.step()
        write("drawn", session.steps + 1)
        session.step()
        time.sleep(0.005)


session.run(train)
session.close()
