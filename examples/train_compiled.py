"""torch.compile, gradient accumulation and a TensorBoard log, through faults and on any number of workers.

elasticd run --nproc-per-node 2 --checkpoint-dir checkpoints examples/train_compiled.py
"""

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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", default="compiled-output")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--accumulate", type=int, default=2)
    parser.add_argument("--pause", type=float, default=0.0, help="seconds of rest after each step")
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
    for epoch in range(sampler.epoch, options.epochs):
        sampler.set_epoch(epoch)
        for number, (points, targets) in enumerate(loader):
            micro = number % sampler.accumulate
            with contextlib.nullcontext() if micro == sampler.accumulate - 1 else ddp.no_sync():
                loss = nn.functional.mse_loss(model(points), targets) * sampler.loss_scale(micro)
                loss.backward()
            if micro < sampler.accumulate - 1:
                continue
            optimizer.step()
            optimizer.zero_grad()
            time.sleep(options.pause)
            if writer is not None:
                writer.add_scalar("loss", loss.item(), session.steps + 1)
                writer.flush()
            session.step()
            if session.should_stop:
                return
    session.close()
    if session.rank == 0:
        torch.save(ddp.module.state_dict(), f"{options.output}/final.pt")


if __name__ == "__main__":
    main()
