"""Trains by `session.run`; each step writes its samples before it is summed. `how` is what a process does that runs
ahead of its round: "" enters; "fails" raises an error and "dies" is killed, once the others have trained beside it;
"waits" does not come to its entry; "stands" says that it is there, and never begins a round. With "ends" rank 1
ends by SIGTERM in a step for which the others wait, and not by `should_stop`.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

import faults
import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import elasticd
from elasticd.rejoin.launch_channel import LaunchChannel

SAMPLES, BATCH = 1200, 12
how, epochs = sys.argv[1], int(sys.argv[2])
if "ELASTICD_NEWCOMER" in os.environ:
    faults.write("newcomers", f"{os.getpid()}\n")
    faults.write("newcomers-at", f"{time.monotonic()}\n")
if how and how != "ends" and "ELASTICD_NEWCOMER" in os.environ:
    faults.write("newcomer", how)
    if how == "waits":
        time.sleep(600)
    if how != "stands":
        others = Path(faults.WORK / "steps-0")
        before = others.stat().st_size
        while others.stat().st_size < before + 50:
            time.sleep(0.01)
    if how == "dies":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "fails":
        raise OSError("no licence left")
session = elasticd.init()
if how == "stands" and "ELASTICD_NEWCOMER" in os.environ:
    LaunchChannel.wait_for_release = lambda _: time.sleep(600)
torch.manual_seed(1)
model = DistributedDataParallel(torch.nn.Linear(4, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
data = TensorDataset(torch.arange(float(SAMPLES)).view(-1, 1).repeat(1, 4) / SAMPLES, torch.arange(SAMPLES))
sampler = elasticd.ElasticBatchSampler(data, BATCH, seed=3)
session.attach(model=model, optimizer=optimizer, sampler=sampler)
session.checkpoint(every=100)


def train() -> None:
    entered = {"pid": os.getpid(), "round": session.round, "rank": session.rank, "size": session.world_size}
    faults.write("entered", f"{json.dumps(entered)}\n")
    for epoch in range(sampler.epoch, epochs):
        sampler.set_epoch(epoch)
        for x, which in DataLoader(data, batch_sampler=sampler):
            loss = model(x).square().mean() * sampler.loss_scale()
            optimizer.zero_grad()
            # Before the gradients are summed: a rank that is killed after that has taken part in the step.
            used = {"step": session.steps + 1, "round": session.round, "samples": which.tolist(), "epoch": epoch}
            faults.write("samples", f"{json.dumps(used)}\n")
            loss.backward()
            optimizer.step()
            session.step()
            faults.write(f"steps-{session.rank}", f"{session.round} {session.steps} {time.monotonic()}\n")
            if how == "ends" and session.rank == 1 and session.steps == 30:
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
                faults.write("ends", "at step 31")
                time.sleep(600)
            time.sleep(0.01)
            if session.should_stop:
                return


session.run(train)
session.close()
