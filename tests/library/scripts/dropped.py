"""A session for each fold, in a function that keeps none of them, where the garbage collector runs only if it is asked.

Prints the number of models of earlier folds at the beginning of each fold.
"""

from __future__ import annotations

import gc
import json
import sys
import weakref
from typing import Any

import torch

import elasticd

torch.set_num_threads(1)
gc.disable()
models: weakref.WeakSet[Any] = weakref.WeakSet()
alive = []


def train(directory: str) -> None:
    with elasticd.init() as session:
        alive.append(len(models))
        torch.manual_seed(0)
        model = torch.nn.Linear(2, 2)
        models.add(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        session.attach(model=model, optimizer=optimizer).restore(directory)
        session.checkpoint(every=2, directory=directory)
        while session.steps < 3:
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            session.step()


for directory in sys.argv[1:]:
    train(directory)
sys.stdout.write(json.dumps({"alive": alive}) + "\n")
sys.stdout.flush()
