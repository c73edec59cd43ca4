"""docs/frameworks.md's recipes in one script: torch.compile, gradient accumulation, TensorBoard."""

from __future__ import annotations

import argparse
import contextlib
import time

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.tensorboard import SummaryWriter

import elasticd


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--output")
    parser.add_argument("--accumulate", type=int, default=2)
    options = parser.parse_args()
    session = elasticd.init()
    torch.manual_seed(0)
    dataset = TensorDataset(x := torch.randn(800, 4), x.sum(1, keepdim=True))
    sampler = elasticd.ElasticBatchSampler(dataset, global_batch=16, accumulate=options.accumulate)
    loader = DataLoader(dataset, batch_sampler=sampler)
    ddp = DistributedDataParallel(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)))
    model = torch.compile(ddp, backend="aot_eager")
    optimizer = torch.optim.AdamW(model.parameters())
    session.attach(model=model, optimizer=optimizer, sampler=sampler)
    session.restore()
    session.checkpoint(every=10)
    writer = SummaryWriter(options.output, purge_step=session.steps + 1) if session.rank == 0 else None
    for epoch in range(sampler.epoch, 2):
        sampler.set_epoch(epoch)
        for number, (points, targets) in enumerate(loader):
            micro = number % sampler.accumulate
            with contextlib.nullcontext() if micro == sampler.accumulate - 1 else ddp.no_sync():
                loss = nn.functional.mse_loss(model(points), targets)
                (loss * sampler.loss_scale(micro)).backward()
            if micro < sampler.accumulate - 1:
                continue
            optimizer.step()
            optimizer.zero_grad()
            time.sleep(0.01)
            if writer is not None:
                writer.add_scalar("loss", loss.item(), session.steps + 1)
                writer.flush()
            session.step()
    session.close()
    if session.rank == 0:
        torch.save(ddp.module.state_dict(), f"{options.output}/final.pt")


if __name__ == "__main__":
    main()
