"""Trains with DDP on one GPU that all ranks share, over NCCL; on the CPU over gloo, where TEST_DEVICE says so.

Each rank says that it is a machine of its own (NCCL_HOSTID), or NCCL would refuse two ranks on one device. Each round
makes several communicators, and fills more than half of the GPU: what the last round's dead still held would be missed.
"""

from __future__ import annotations

import os
import sys
from datetime import timedelta
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "hangs" / "scripts"))

import time

import mishaps
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import elasticd

DEVICE = torch.device(os.environ["TEST_DEVICE"])
COMMUNICATORS = int(os.environ["TEST_COMMUNICATORS"])
FILLED = 0.55
PAUSE_S = 0.02


def main() -> None:
    os.environ["NCCL_HOSTID"] = f"rank-{mishaps.RANK}"
    mishaps.at("start", 0)
    session = elasticd.init(timeout=timedelta(seconds=300))
    ballast = fill()
    say_hello()
    ddp = DistributedDataParallel(model().to(session.device))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
    session.attach(model=ddp, optimizer=optimizer)
    session.restore()
    session.checkpoint(every=10)
    enough = False
    while not (enough or session.should_stop):
        step = session.steps + 1
        mishaps.at("data", step)
        batch = torch.ones(4, 64, device=session.device)
        mishaps.at("step", step)
        time.sleep(PAUSE_S)
        ddp(batch).square().mean().backward()
        enough = metric(step)
        optimizer.step()
        optimizer.zero_grad()
        session.step()
        mishaps.finished(step)
    del ballast
    os._exit(0)


def model() -> torch.nn.Module:
    """With buffers: their broadcast at each forward is a collective of another kind than the reduction of gradients."""
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.BatchNorm1d(64), torch.nn.Linear(64, 1))


def fill() -> torch.Tensor | None:
    """This rank's share of most of the GPU."""
    if DEVICE.type == "cpu":
        return None
    _, total = torch.cuda.mem_get_info()
    return torch.zeros(int(total * FILLED / dist.get_world_size()), dtype=torch.uint8, device=DEVICE)


def say_hello() -> None:
    """Over as many communicators as asked for, the default one included."""
    groups = [dist.group.WORLD, *(dist.new_group() for _ in range(COMMUNICATORS - 1))]
    for group in groups:
        figure = torch.ones(1, device=DEVICE)
        dist.all_reduce(figure, group=group)
        assert figure.item() == dist.get_world_size()
    mishaps.write("communicators", f"{mishaps.ROUND} {mishaps.RANK} {len(groups)}\n")


def metric(step: int) -> bool:
    """A reduction of some figure, once a step: whether all have had enough. Here ranks part, where they shall."""
    figure = torch.tensor([float((mishaps.WORK / "enough").exists())], device=DEVICE)
    how = mishaps.collective(step)
    if how == "skip":
        return False
    if how == "other":
        dist.broadcast(figure, src=0)
    elif how == "shape":  # to reduce nothing returns at once; any other shape gloo refuses
        dist.all_reduce(torch.zeros(0, device=DEVICE))
    else:
        dist.all_reduce(figure)
    return bool(figure.item())


if __name__ == "__main__":
    main()
