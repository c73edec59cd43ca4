"""The plain script with elasticd imported: compare the two with `diff -u`.

Run it with `elasticd run --nproc-per-node 2 --checkpoint-dir DIR examples/plain_with_elasticd.py`. After a crash every
worker continues at the step of the last checkpoint: in the middle of an epoch, on any number of workers.
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import elasticd


def main() -> None:
    args = parse_args()
    session = elasticd.init()
    device = session.device
    dataset, held_out = swirled_points(4096, seed=0), swirled_points(512, seed=1)
    sampler = elasticd.ElasticBatchSampler(dataset, global_batch=args.global_batch)
    loader = DataLoader(dataset, batch_sampler=sampler)
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 2)).to(device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    session.attach(model=model, optimizer=optimizer, sampler=sampler).restore()
    session.checkpoint(every=args.save_every)

    for epoch in range(sampler.epoch, args.epochs):
        sampler.set_epoch(epoch)
        for points, targets in loader:
            loss = nn.functional.mse_loss(model(points.to(device)), targets.to(device)) * sampler.loss_scale()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            session.step()
            if session.should_stop:
                return
        if dist.get_rank() == 0:
            print(f"epoch {epoch} error {error_on(held_out, model.module, device):.5f}", flush=True)

    session.close()


@torch.no_grad()
def error_on(dataset: TensorDataset, model: nn.Module, device: torch.device) -> float:
    points, targets = (tensor.to(device) for tensor in dataset.tensors)
    return nn.functional.mse_loss(model(points), targets).item()


def swirled_points(samples: int, seed: int) -> TensorDataset:
    """Points of the plane, and where a swirl takes each of them."""
    points = torch.randn(samples, 2, generator=torch.Generator().manual_seed(seed))
    angle = points.norm(dim=1)
    x, y = points.unbind(1)
    swirled = torch.stack([x * angle.cos() - y * angle.sin(), x * angle.sin() + y * angle.cos()], dim=1)
    return TensorDataset(points, swirled)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--global-batch", type=int, default=64, help="samples a step over all ranks")
    parser.add_argument("--save-every", type=int, default=20, help="steps between checkpoints")
    return parser.parse_args()


if __name__ == "__main__":
    main()
