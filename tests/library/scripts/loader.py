"""Dropout, and a DataLoader that draws its seeds from its own generator. Arguments: directory, step to die after."""

from __future__ import annotations

import hashlib
import json
import os
import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import elasticd

directory, die = sys.argv[1], int(sys.argv[2])
torch.set_num_threads(1)
session = elasticd.init()
torch.manual_seed(0)
dataset = TensorDataset(torch.randn(64, 4))
sampler = elasticd.ElasticBatchSampler(dataset, global_batch=8)
loader = DataLoader(dataset, batch_sampler=sampler, generator=torch.Generator())
model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 1))
optimizer = torch.optim.Adam(model.parameters())
session.attach(model=model, optimizer=optimizer, sampler=sampler)
resumed = session.restore(directory)
session.checkpoint(every=5, directory=directory)
for epoch in range(sampler.epoch, 3):
    sampler.set_epoch(epoch)
    for (x,) in loader:
        (model(x).pow(2).mean() * sampler.loss_scale()).backward()
        optimizer.step()
        optimizer.zero_grad()
        session.step()
        if session.steps == die:
            os._exit(9)
digest = hashlib.sha256(b"".join(parameter.detach().numpy().tobytes() for parameter in model.parameters()))
result = {"from": resumed and resumed.step, "steps": session.steps, "digest": digest.hexdigest()}
sys.stdout.write(json.dumps(result) + "\n")
