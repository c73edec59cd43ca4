"""Rank 0 logs each step to one W&B run, offline, as docs/recipes.md has it."""

from __future__ import annotations

import argparse
import time

import torch
import wandb
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import elasticd


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--output", required=True)
    parser.add_argument("--every", type=int, default=10)
    options = parser.parse_args()
    session = elasticd.init()
    dataset = TensorDataset(x := torch.randn(1600, 4), x.sum(1, keepdim=True))
    sampler = elasticd.ElasticBatchSampler(dataset, global_batch=16)
    model = DistributedDataParallel(nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    session.attach(model=model, optimizer=optimizer, sampler=sampler)
    session.restore()
    session.checkpoint(every=options.every)
    run = wandb.init(id="job", resume="allow", mode="offline", dir=options.output) if session.rank == 0 else None
    for points, targets in DataLoader(dataset, batch_sampler=sampler):
        loss = nn.functional.mse_loss(model(points), targets) * sampler.loss_scale()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        session.step()
        if run is not None:
            run.log({"loss": loss.item()}, step=session.steps)
        time.sleep(0.02)
    session.close()
    if run is not None:
        run.finish()


if __name__ == "__main__":
    main()
