"""A session for each fold of a cross-validation, one after the other: a JSON list of directories and numbers of steps.

{rank} in a directory is the rank. Prints from which step each was resumed, 0 for none, and the directories that count.
"""

from __future__ import annotations

import json
import sys

import torch

import elasticd

torch.set_num_threads(1)
resumed, used = [], []
for directory, steps in json.loads(sys.argv[1]):
    with elasticd.init() as session:
        torch.manual_seed(0)
        model = torch.nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        session.attach(model=model, optimizer=optimizer)
        own = directory.format(rank=session.rank)
        session.restore(own)
        session.checkpoint(every=2, directory=own)
        resumed.append(session.steps)
        used.append(str(session._context.chosen_directory))
        while session.steps < steps:
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            session.step()
sys.stdout.write(json.dumps({"resumed": resumed, "used": used}) + "\n")
sys.stdout.flush()
