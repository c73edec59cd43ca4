"""Trains as PyTorch's tutorial would write it, 20 ms a step; knows nothing of elasticd."""

from __future__ import annotations

from datetime import timedelta

import mishaps
import torch
import torch.distributed as dist
import toy
from torch.nn.parallel import DistributedDataParallel


def main() -> None:
    args = toy.arguments()
    mishaps.at("start", 0)
    dist.init_process_group("gloo", timeout=timedelta(seconds=args.timeout))
    ddp = DistributedDataParallel(toy.model())
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
    mishaps.step_again.append(optimizer.step)
    toy.make_groups(args)
    enough = False
    for step, batch in toy.batches(1, args):
        toy.gradients(ddp, batch, args)
        enough = args.late or toy.metric(step)
        optimizer.step()
        optimizer.zero_grad()
        mishaps.at("evaluate", step)
        mishaps.at("save", step)
        mishaps.finished(step)
        if enough and (not args.late or toy.metric(step)):
            break
    toy.end()


if __name__ == "__main__":
    main()
