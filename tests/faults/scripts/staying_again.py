"""Trains by `session.run` as staying.py does; ranks get a second fault while they change their round.

The argument is JSON: the number of steps, and faults [place, rank, round]. A place is one of "unwound", in `train` once
it has to be left; "joining", before the process group is made; "restoring", between two tensors that are sent.

`lie`: [kind, rank], what a rank does that is not what it says of itself at the first change. It "goes on" and says that
it waits, it "changes its state" while it waits, it says that it holds "another state", what it holds has "another
shape", or it "fails to load" the state and has changed its own by then.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

import faults
import torch
from donor import digest
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import elasticd
from elasticd import process_group
from elasticd.checkpointing import process_state
from elasticd.checkpointing.at_fault.held_commit import HeldCommit
from elasticd.checkpointing.state.layout import Layout

options = json.loads(sys.argv[1])
faults.at(0)


def harm(place: str, round: int) -> None:
    for number, (where, rank, of_round) in enumerate(options["again"]):
        if (where, rank, of_round) == (place, int(os.environ["RANK"]), round):
            with contextlib.suppress(FileExistsError):
                os.close(os.open(faults.WORK / f"again-{number}", os.O_CREAT | os.O_EXCL))
                os.kill(os.getpid(), signal.SIGKILL)


def before(module: Any, name: str, place: str) -> None:
    call: Callable[..., Any] = getattr(module, name)

    def harmed(*args: Any, **kwargs: Any) -> Any:
        harm(place, int(os.environ["ELASTICD_ROUND"]))
        return call(*args, **kwargs)

    setattr(module, name, harmed)


before(process_group, "join", "joining")
before(process_state, "_send_or_receive", "restoring")
session = elasticd.init()
torch.manual_seed(session.rank)
layers: list[torch.nn.Module] = [torch.nn.Linear(16, 2048), torch.nn.BatchNorm1d(2048), torch.nn.ReLU()]
net = torch.nn.Sequential(*layers, torch.nn.Dropout(0.3), torch.nn.Linear(2048, 1))
model = DistributedDataParallel(net, find_unused_parameters=True)  # buckets stay in one order, and so do sums of three
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)
inputs = torch.randn(512, 16, generator=torch.Generator().manual_seed(1))
dataset = TensorDataset(inputs, inputs.square().sum(dim=1, keepdim=True))
sampler = elasticd.ElasticBatchSampler(dataset, global_batch=12)
session.attach(model=model, optimizer=optimizer, scheduler=scheduler, sampler=sampler)
session.checkpoint(every=1000)


def train() -> None:
    faults.RANK, faults.ROUND = session.rank, session.round
    for epoch in range(sampler.epoch, sampler.epoch + 1000):
        sampler.set_epoch(epoch)
        for x, y in DataLoader(dataset, batch_sampler=sampler, generator=torch.Generator()):
            step = session.steps + 1
            faults.at(step)
            loss = torch.nn.functional.mse_loss(model(x), y) * sampler.loss_scale()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
            parts = [model.module[0].weight, optimizer.state_dict(), scheduler.state_dict(), torch.get_rng_state()]
            found = digest([*parts, model.module[1].state_dict() if session.rank == 0 else 0])
            faults.write(f"steps-{session.rank}", f"{session.round} {step} {found} {os.getpid()}\n")
            session.step()
            time.sleep(0.002)
            if step >= options["steps"]:
                return


def lie(kind: str) -> None:
    launch, describe = session._launch, HeldCommit.to_message
    changes: dict[str, tuple[Any, str, Any]] = {
        "goes on": (launch, "_unwind", lambda _: launch.report_entry(12, 12)),
        "changes its state": (launch, "wait_for_release", lambda: change() or type(launch).wait_for_release(launch)),
        "another state": (HeldCommit, "to_message", lambda held: {"process": [*describe(held)["process"][:2], "0"]}),
        "fails to load": (net, "load_state_dict", lambda _: change() or raise_error()),
        "another shape": (HeldCommit, "to_message", lambda held: widen(held.layout) or describe(held)),
    }
    setattr(*changes[kind])


def widen(layout: Layout) -> None:
    offset, storage = layout.shared_storages[0]
    layout.shared_storages[0] = offset, torch.UntypedStorage(storage.nbytes() + 4096)


def raise_error() -> None:
    raise ValueError("a load that has failed")


def change() -> None:
    net[0].weight.data.add_(1.0)


if [session.rank, session.round] == [*options["lie"][1:], 1]:
    lie(options["lie"][0])


def train_until_unwound() -> None:
    try:
        train()
    except BaseException:
        harm("unwound", session.round)
        raise


session.run(train_until_unwound)
session.close()
