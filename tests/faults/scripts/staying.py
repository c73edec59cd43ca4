"""Trains by `session.run`: a line of round, step, digest of the state and process for each step.

It ends after --steps, or after the step that the test has written to the file "last".
"""

from __future__ import annotations

import argparse
import os
import time

import faults
import torch
from donor import digest
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import elasticd

parser = argparse.ArgumentParser()
parser.add_argument("args", nargs="*")
parser.add_argument("--steps", type=int, required=True)
parser.add_argument("--new-objects", action="store_true", help="each call of train makes its model")
options = parser.parse_args()

faults.at(0)
session = elasticd.init()
inputs = torch.randn(512, 16, generator=torch.Generator().manual_seed(1))
dataset = TensorDataset(inputs, inputs.square().sum(dim=1, keepdim=True))


def make() -> tuple[torch.nn.Module, torch.optim.Optimizer, elasticd.ElasticBatchSampler]:
    torch.manual_seed(session.rank)
    layers: list[torch.nn.Module] = [torch.nn.Linear(16, 64), torch.nn.ReLU(), torch.nn.Dropout(0.3)]
    model = DistributedDataParallel(torch.nn.Sequential(*layers, torch.nn.Linear(64, 1)), find_unused_parameters=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    sampler = elasticd.ElasticBatchSampler(dataset, global_batch=12)
    session.attach(model=model, optimizer=optimizer, sampler=sampler)
    session.checkpoint(every=1000)
    return model, optimizer, sampler


made = None if options.new_objects else make()


def train() -> int:
    faults.RANK, faults.ROUND = session.rank, session.round
    model, optimizer, sampler = made or make()
    if options.new_objects:
        session.restore()
    for epoch in range(sampler.epoch, sampler.epoch + 1000):
        sampler.set_epoch(epoch)
        for x, y in DataLoader(dataset, batch_sampler=sampler, generator=torch.Generator()):
            step = session.steps + 1
            faults.at(step)
            loss = torch.nn.functional.mse_loss(model(x), y) * sampler.loss_scale()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            found = digest([model.state_dict(), optimizer.state_dict(), torch.get_rng_state()])
            faults.write(f"steps-{session.rank}", f"{session.round} {step} {found} {os.getpid()}\n")
            session.step()  # which a pause for the next round leaves by an exception, once the step is saved
            time.sleep(0.002)
            last = faults.WORK / "last"
            if step >= options.steps or (last.exists() and step >= int(last.read_text())):
                return step
    return 0


faults.write(f"ended-{session.rank}", f"{session.run(train)}\n")
session.close()
