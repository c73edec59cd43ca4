"""A training script as PyTorch's DDP tutorials write it: without elasticd, and it survives under it.

Run it with `elasticd run --nproc-per-node 2 examples/plain_torchrun_script.py`, or with torchrun, unchanged. After a
crash every worker starts again from the last snapshot, so the epochs since then are trained once more.
"""

from __future__ import annotations

import argparse
import os
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def main() -> None:
    args = parse_args()
    device = set_up_process_group()
    dataset, held_out = swirled_points(4096, seed=0), swirled_points(512, seed=1)
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=args.batch_size, sampler=sampler)
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 2)).to(device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    first_epoch = load_snapshot(args.snapshot, model, optimizer, device)

    for epoch in range(first_epoch, args.epochs):
        sampler.set_epoch(epoch)
        for points, targets in loader:
            loss = nn.functional.mse_loss(model(points.to(device)), targets.to(device))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        if dist.get_rank() == 0:
            print(f"epoch {epoch} error {error_on(held_out, model.module, device):.5f}", flush=True)
        if (epoch + 1) % args.save_every == 0:
            save_snapshot(args.snapshot, model, optimizer, epoch + 1)

    time.sleep(0.1)  # gloo's thread may still drop the last all-reduce, and torch aborts then (pytorch/pytorch#56297)
    dist.destroy_process_group()


def set_up_process_group() -> torch.device:
    local_rank = int(os.environ["LOCAL_RANK"])
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if accelerator is None:
        device = torch.device("cpu")
    else:
        torch.accelerator.set_device_index(local_rank)
        device = torch.device(accelerator.type, local_rank)
    dist.init_process_group(dist.get_default_backend_for_device(device))
    return device


def load_snapshot(path: str, model: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device) -> int:
    """The epoch to start with: 0, or where the snapshot stands."""
    if not os.path.exists(path):
        return 0
    snapshot = torch.load(path, map_location=device, weights_only=True)
    model.load_state_dict(snapshot["model"])
    optimizer.load_state_dict(snapshot["optimizer"])
    print(f"rank {dist.get_rank()} resumes at epoch {snapshot['epoch']}", flush=True)
    return int(snapshot["epoch"])


def save_snapshot(path: str, model: nn.Module, optimizer: torch.optim.Optimizer, epoch: int) -> None:
    """Rank 0 writes, the others wait; renamed into place, or a kill in the middle would leave half a snapshot."""
    if dist.get_rank() == 0:
        snapshot = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}
        torch.save(snapshot, path + ".new")
        os.replace(path + ".new", path)
    dist.barrier()


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
    parser.add_argument("--batch-size", type=int, default=32, help="samples a step on each rank")
    parser.add_argument("--save-every", type=int, default=2, help="epochs between snapshots")
    parser.add_argument("--snapshot", default="snapshot.pt")
    return parser.parse_args()


if __name__ == "__main__":
    main()
