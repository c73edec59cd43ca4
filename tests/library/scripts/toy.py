"""A toy that shows whether a resumed run is the uninterrupted one: dropout, batch norm, momentum, Adam's moments, a
scheduler, and data drawn from each rank's own random streams. Its argument is a JSON object that overrides DEFAULTS; it
prints one when it ends.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import resource
import signal
import sys
import time
from typing import Any

import numpy
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import elasticd

DEFAULTS: dict[str, Any] = {
    "steps": 12,
    "directory": None,
    "every": 3,  # None: no checkpoint() at all
    "keep": 3,
    "keep_every": 0,
    "restore": True,
    "back_to": None,  # restore(step=...)
    "or_newest": False,  # restore() where that is refused
    "counter": None,  # attach a counter of rank + 1: "per_rank", "per_rank with hook", "everywhere", "rank 0", "rank 1"
    "large": None,  # from this count on, the counter's state has 9 MB
    "averaged": False,  # attach averaged weights of 9 MB
    "extra": None,  # attach one more object, "optional" or "needed"
    "save": False,  # save() at the end
    "optimizer": "adam",  # or "sgd", or "wrapped": it, by a wrapper
    "wrap": "ddp",  # "bare", "compiled" (and DDP), "inner": a submodule is compiled by itself
    "sleep": 0,  # seconds a step
    "deaf": 0,  # steps after a stop
    "close": True,  # close() at the end
    "die": 0,  # every rank kills itself after this step
    "raise": None,  # [rank, step]: that rank raises after that step
    "full": None,  # [from, to]: between these steps no checkpoint fits, as on a full disk
    "apart": None,  # where rank 1 looks for checkpoints: a directory that is not shared
    "wider": None,  # the rank whose model has another shape
    "poison": None,  # from this step on, an attached object has what torch.load(weights_only=True) would refuse
}
options = {**DEFAULTS, **json.loads(sys.argv[1])}
torch.set_num_threads(1)


class Poison:
    steps = 0

    def commit(self) -> None:
        self.steps += 1

    def state_dict(self) -> dict[str, Any]:
        return {"secret": {"lambda": Poison if self.steps >= options["poison"] else None}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


class Counter:
    """Counts in steps of its own on every rank."""

    def __init__(self, by: int) -> None:
        self.count, self.by = 0, by

    def commit(self) -> None:
        self.count += self.by

    def state_dict(self) -> dict[str, Any]:
        is_large = options["large"] is not None and self.count >= options["large"]
        return {"count": self.count, "padding": torch.zeros(9 << 20 if is_large else 0, dtype=torch.uint8)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]


class SharedCounter(Counter):
    def load_state_dicts(self, states: list[dict[str, Any]], rank: int, world_size: int) -> None:
        self.count = sum(state["count"] for state in states)


class Wrapped(torch.optim.Optimizer):
    """As torchlars' LARS is around another optimizer: one of torch's, of which no `__init__` was called."""

    param_groups = property(lambda self: self.optimizer.param_groups)  # type: ignore[assignment]
    state = property(lambda self: self.optimizer.state)  # type: ignore[assignment]

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    def state_dict(self) -> dict[str, Any]:
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(state_dict)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)

    def step(self, closure: Any = None) -> Any:
        return self.optimizer.step(closure)


def build(rank: int) -> nn.Module:
    torch.manual_seed(0)
    inner: Any = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU())
    if options["wrap"] == "inner":
        inner = torch.compile(inner, backend="eager")
    model: Any = nn.Sequential(inner, nn.Dropout(0.3), nn.Linear(16, 2 if rank == options["wider"] else 1))
    if options["wrap"] == "compiled":
        model = torch.compile(model, backend="eager")
    return model if options["wrap"] == "bare" else DistributedDataParallel(model)


def limit_files(step: int) -> None:
    start, end = options["full"] or (0, 0)
    if step in (start, end):
        limit = 20_000 if step == start else resource.RLIM_INFINITY
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))


def restore(session: Any, directory: str) -> Any:
    try:
        return session.restore(directory, step=options["back_to"])
    except elasticd.CheckpointError:
        if not options["or_newest"]:
            raise
        return session.restore(directory)


def main() -> None:
    session = elasticd.init()
    model = build(session.rank)
    for seed in (torch.manual_seed, random.seed, numpy.random.seed):
        seed(100 + session.rank)
    adam, sgd = torch.optim.AdamW, torch.optim.SGD
    parameters = model.parameters()
    optimizer = adam(parameters, lr=0.01) if options["optimizer"] == "adam" else sgd(parameters, lr=0.01, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 12)
    optimizer = Wrapped(optimizer) if options["optimizer"] == "wrapped" else optimizer
    directory = options["apart"] if options["apart"] and session.rank == 1 else options["directory"]
    session.attach(model=model, optimizer=optimizer, scheduler=scheduler)
    if options["poison"] is not None:
        session.attach(poison=Poison())
    counter = (SharedCounter if options["counter"] == "per_rank with hook" else Counter)(session.rank + 1)
    if options["counter"] == "everywhere":
        session.attach(counter=counter)
    elif options["counter"] not in (None, f"rank {1 - session.rank}"):
        session.attach(per_rank={"counter": counter})
    if options["averaged"]:
        session.attach(averaged=torch.optim.swa_utils.AveragedModel(nn.Linear(1500, 1600)))
    if options["extra"]:
        session.attach(extra=nn.Linear(2, 2), optional=options["extra"] == "optional")
    resumed = restore(session, directory) if options["restore"] else None
    if options["every"]:
        keeping = {"keep": options["keep"], "keep_every": options["keep_every"]}
        session.checkpoint(every=options["every"], directory=directory, **keeping)
    while session.steps < options["steps"] and (not session.should_stop or options["deaf"]):
        options["deaf"] -= session.should_stop
        x = torch.randn(16, 8) * (1 + random.random()) + float(numpy.random.rand())
        nn.functional.mse_loss(model(x)[:, 0], x.sum(1)).backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        time.sleep(options["sleep"])
        session.step()
        if session.steps == options["die"]:
            os.kill(os.getpid(), signal.SIGKILL)
        if options["raise"] == [session.rank, session.steps]:
            raise RuntimeError("the script's own mistake")
        limit_files(session.steps)
    if options["save"]:
        session.save()
    digest = hashlib.sha256()
    for tensor in [*model.parameters(), *model.buffers()]:
        digest.update(tensor.detach().numpy().tobytes())
    result = {
        "digest": digest.hexdigest(),
        "steps": session.steps,
        "round": session.round,
        "stopped": session.should_stop,
        "resumed": resumed and [resumed.round, resumed.step, resumed.world_size],
        "notes": list(resumed.notes) if resumed else [],
        "count": counter.count,
        "lr": scheduler.get_last_lr(),
        "draw": [random.random(), float(numpy.random.rand()), float(torch.rand(()))],
    }
    if options["close"]:
        session.close()
    sys.stdout.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
