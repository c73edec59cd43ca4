"""Trains as a person's script does, slowly enough to be watched, and writes what a page must not take for markup."""

from __future__ import annotations

import math
import os
import time

import torch
from torch.nn.parallel import DistributedDataParallel

import elasticd

WICKED = "</pre><script>document.title = 'stolen'</script><img src=x onerror=\"document.title='stolen'\">"


def main() -> None:
    session = elasticd.init()
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(16, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    session.attach(model=model, optimizer=optimizer)
    session.restore()
    session.checkpoint(every=int(os.environ.get("EVERY", "20")))
    print(f"rank {session.rank} of {session.world_size} goes on from step {session.steps}", flush=True)
    print(WICKED, flush=True)
    while not session.should_stop:
        step = session.steps + 1
        loss = model(torch.randn(8, 16)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        session.step()
        print(f"step {step}: loss {2.1 * math.exp(-step / 900) + 0.04 * math.sin(step / 7):.4f}", flush=True)
        time.sleep(float(os.environ.get("STEP_S", "0.05")) * (1.3 + 0.3 * math.sin(step / 50)))


if __name__ == "__main__":
    main()
