"""Saves parameters of all sizes at three steps, and says what they add up to."""

from __future__ import annotations

import os
import time
from pathlib import Path

os.environ["NCCL_HOSTID"] = f"rank-{os.environ['RANK']}"

import torch
from torch.nn.parallel import DistributedDataParallel

import elasticd

CHUNK = 4 << 20
"""Floats in a chunk of pinned memory."""


class Sizes(torch.nn.Module):
    def __init__(self, largest: int) -> None:
        super().__init__()
        sizes = [largest, CHUNK, CHUNK + 1, CHUNK - 1, *range(1, 1000, 7)] if largest > CHUNK else [largest, 1, 2, 3]
        self.all = torch.nn.ParameterList([torch.rand(size) for size in sizes])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return sum(each.sum() for each in self.all) * x  # type: ignore[no-any-return]


def main() -> None:
    session = elasticd.init()
    torch.manual_seed(0)
    model = DistributedDataParallel(Sizes(100_000_007 if session.device.type == "cuda" else 100_003).to(session.device))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    session.attach(model=model, optimizer=optimizer)
    for step in (1, 2, 3):
        model(torch.ones(1, device=session.device)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        session.step()
        if session.device.type == "cuda":
            torch.cuda.synchronize()  # or the save waits for it
        session.save()
        if session.rank == 0:
            sums = [f"{float(each.double().sum()):.6g}" for each in model.module.state_dict().values()]
            Path(os.environ["WORK"], f"sums-{step}").write_text(" ".join(sums))
        time.sleep(0.5)  # the buffer is mapped


if __name__ == "__main__":
    main()
