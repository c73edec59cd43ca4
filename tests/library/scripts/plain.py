"""The least a script does with a session: DDP, a few steps, no checkpoint. Prints what it saw."""

from __future__ import annotations

import json
import sys

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import elasticd

session = elasticd.init()
torch.manual_seed(session.rank)
model = DistributedDataParallel(nn.Linear(4, 2).to(session.device))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(int(sys.argv[1])):
    model(torch.randn(8, 4, device=session.device)).pow(2).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    session.step()
session.barrier("trained", 60)
with session.phase("eval"):
    total = sum(float(parameter.detach().sum()) for parameter in model.parameters())
seen = {
    "round": session.round,
    "rank": session.rank,
    "local_rank": session.local_rank,
    "world_size": session.world_size,
    "device": str(session.device),
    "restarts": session.restarts,
    "steps": session.steps,
    "should_stop": session.should_stop,
    "sum": total,
}
session.close()
sys.stdout.write(json.dumps({**seen, "left_group": not torch.distributed.is_initialized()}) + "\n")
