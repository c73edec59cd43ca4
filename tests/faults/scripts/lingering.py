"""Trains with a group of its own making; in round 1 rank 1 raises, closes the group, and has long exit handlers."""

from __future__ import annotations

import atexit
import time

import faults
import torch
import torch.distributed as dist


def main() -> None:
    dist.init_process_group("gloo")
    parameter = torch.zeros(1, requires_grad=True)
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    for step in range(1, 21):
        if (faults.RANK, faults.ROUND, step) == (1, 1, 10):
            atexit.register(time.sleep, 20)
            dist.destroy_process_group()
            raise ValueError("a fault")
        parameter.grad = torch.ones(1)
        dist.all_reduce(parameter.grad)
        optimizer.step()
        time.sleep(0.01)


if __name__ == "__main__":
    main()
