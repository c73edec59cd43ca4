"""Calls the session at an odd place, or goes on after a stop. Its argument is a JSON object that overrides DEFAULTS; it
prints one when it ends.
"""

from __future__ import annotations

import hashlib
import json
import sys
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import elasticd
from elasticd.coordination import decisions

DEFAULTS: dict[str, Any] = {
    "directory": None,
    "epochs": 50,
    "every": 1000,  # None: no checkpoint()
    "samples": 32,
    "micro": 1,  # session.step() after each of so many micro-batches of a step
    "breaks": True,  # the inner loop is left at a stop
    "turns": False,  # the sampler is one of two that take turns
    "per_rank": False,  # the sampler is attached as each rank's own
    "second": 0,  # samples of which each step takes a batch as well, in epochs of their own
    "sleep": 0.0,
    "save_at": None,  # [place, step]: "optimizer", "micro" or "tail"; save() there
    "tail": "",  # what ends an epoch: "scheduler", "scheduler, save"
    "late": "",  # what changes after session.step(): "scheduler" or "model"
    "late_every": 1,  # steps between two such changes
    "after_restore": "",  # what changes before the first batch: "scheduler" or "model"
    "looks": False,  # at a batch before training
    "die": 0,  # every rank ends after this step
}
options = {**DEFAULTS, **json.loads(sys.argv[1])}
torch.set_num_threads(1)
decisions.MAX_INTERVAL_S = 0.0  # all ranks decide at each step


class Turns:
    """Samplers of which one is in use, here the first."""

    def __init__(self, *samplers: elasticd.ElasticBatchSampler) -> None:
        self.samplers = samplers

    def commit(self) -> None:
        self.samplers[0].commit()

    def state_dict(self) -> dict[str, Any]:
        return {"samplers": [sampler.state_dict() for sampler in self.samplers]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for sampler, saved in zip(self.samplers, state["samplers"], strict=True):
            sampler.load_state_dict(saved)


def main() -> None:
    session = elasticd.init()
    torch.manual_seed(0)
    inputs = torch.randn(options["samples"], 8, generator=torch.Generator().manual_seed(1))
    dataset = TensorDataset(inputs, inputs.sum(1, keepdim=True))
    batch = max(2, 8 // options["micro"])
    sampler = elasticd.ElasticBatchSampler(dataset, global_batch=batch)
    model = DistributedDataParallel(nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.9)
    session.attach(model=model, optimizer=optimizer, scheduler=scheduler)
    if options["turns"]:
        session.attach(turns=Turns(sampler, elasticd.ElasticBatchSampler(4, 4)))
    elif options["per_rank"]:
        session.attach(per_rank={"sampler": sampler})
    else:
        session.attach(sampler=sampler)
    more: Iterator[torch.Tensor] = iter(())
    if options["second"]:
        more_inputs = inputs[: options["second"]]
        second = elasticd.ElasticBatchSampler(more_inputs, global_batch=8)
        session.attach(second=second)
        more = batches(more_inputs, second)
    resumed = session.restore(options["directory"])
    if options["after_restore"] == "scheduler":
        scheduler.last_epoch += 1
    elif options["after_restore"] == "model":
        nn.init.zeros_(model.module.weight)
    if options["every"]:
        session.checkpoint(every=options["every"], directory=options["directory"])
    if options["looks"]:
        next(iter(DataLoader(dataset, batch_sampler=sampler)))
    saves, trained = [], 0

    def save_at(place: str) -> None:
        if options["save_at"] == [place, session.steps]:
            saves.append(session.save())

    for epoch in range(sampler.epoch, options["epochs"]):
        sampler.set_epoch(epoch)
        for number, (x, y) in enumerate(DataLoader(dataset, batch_sampler=sampler)):
            next(more, None)
            nn.functional.mse_loss(model(x), y).backward()
            trained += 1
            if (number + 1) % options["micro"] == 0:
                optimizer.step()
                save_at("optimizer")
                optimizer.zero_grad()
            time.sleep(options["sleep"])
            session.step()
            save_at("micro")
            if options["late"] and session.steps % options["late_every"] == 0:
                change(options["late"], model, scheduler)
            if session.steps == options["die"]:
                sys.exit(3)
            if session.should_stop and options["breaks"]:
                break
        if "scheduler" in options["tail"]:
            scheduler.step()
        if "save" in options["tail"]:
            saves.append(session.save())
        save_at("tail")
    digest = hashlib.sha256(b"".join(each.detach().numpy().tobytes() for each in model.parameters()))
    result = {
        "resumed": resumed and resumed.step,
        "steps": session.steps,
        "trained": trained,
        "saves": saves,
        "saved": session.saved_step,
        "stopped": session.should_stop,
        "lr": scheduler.get_last_lr(),
        "epoch": sampler.epoch,
        "digest": digest.hexdigest(),
        "random": torch.rand(()).item(),
    }
    session.close()
    sys.stdout.write(json.dumps(result) + "\n")


def batches(inputs: torch.Tensor, sampler: elasticd.ElasticBatchSampler) -> Iterator[torch.Tensor]:
    while True:
        yield from DataLoader(inputs, batch_sampler=sampler)  # type: ignore[arg-type]
        sampler.set_epoch(sampler.epoch + 1)


def change(what: str, model: nn.Module, scheduler: Any) -> None:
    if what == "scheduler":
        scheduler.step()
    for parameter in model.parameters() if what == "model" else ():
        parameter.data.mul_(0.9)


if __name__ == "__main__":
    main()
