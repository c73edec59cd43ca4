"""A GradScaler skips the last step, whose gradients stay; prints what `session.save()` returns. Argument: where."""

from __future__ import annotations

import json
import sys

import torch

import elasticd

session = elasticd.init()
model = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
session.attach(model=model, optimizer=optimizer, scaler=scaler)
session.restore(sys.argv[1])
for number in (1.0, 1.0, float("inf")):
    optimizer.zero_grad()
    scaler.scale(model(torch.full((1, 2), number)).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    session.step()
saved = session.save()
sys.stdout.write(json.dumps({"saved": saved, "step": session.saved_step}) + "\n")
sys.stdout.flush()
session.close()
