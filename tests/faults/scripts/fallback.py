"""Trains by `session.run`, in a way in which processes cannot stay or are stopped on their way: the argument is a kind
of `test_fallback.py`, or the place at which a new process stops.
"""

from __future__ import annotations

import os
import sys
import time

import faults
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import elasticd

kind = sys.argv[1]
faults.at(0)


def stop(place: str) -> None:
    if place == kind and int(os.environ["ELASTICD_ROUND"]) > 1:
        faults.write("stopped", place)
        time.sleep(3600)


stop("before the group")
session = elasticd.init()
stop("before the model")
if kind == "group":
    dist.new_group()
if kind == "collective":
    dist.all_reduce(torch.ones(1))
model = DistributedDataParallel(torch.nn.Linear(4, 1))
optimizer = torch.optim.Adam(model.parameters())
session.attach(model=model, optimizer=optimizer)
session.checkpoint(every=5 if kind == "finally everywhere" else 1000)


calls = 0


def train() -> None:
    global calls
    calls += 1
    if kind == "once" and calls > 1:
        raise FileExistsError("results")
    faults.RANK, faults.ROUND = session.rank, session.round
    while session.steps < 20:
        faults.at(session.steps + 1)
        optimizer.zero_grad()
        model(torch.ones(3, 4)).sum().backward()
        optimizer.step()
        session.step()
        faults.write(f"steps-{session.rank}", f"{session.round} {session.steps}\n")


def train_until_unwound() -> None:
    try:
        train()
    except BaseException:
        if [session.rank, session.round] == [2, 1] and kind == "returns":
            return
        if [session.rank, session.round] == [2, 1] and kind == "late":
            time.sleep(3600)
        if [session.rank, session.round] == [2, 1] and kind == "device":
            raise RuntimeError("CUDA error: an illegal memory access was encountered") from None
        raise
    finally:
        if kind == "finally everywhere" or (kind == "finally" and session.rank == 2):
            model.module.weight.data.mul_(2.0)


session.run(train_until_unwound)
if kind == "returns" and session.steps < 20:
    time.sleep(3600)
session.close()
