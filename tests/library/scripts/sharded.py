"""A model that is sharded in the way its argument says; prints digests of the whole state before and after training."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import elasticd
from elasticd.checkpointing.memory.writer_client import WriterClient

DEFAULTS: dict[str, Any] = {
    "kind": "fsdp",  # "hsdp", "fsdp and tp", "averaged", "zero", "ddp", "whole"
    "steps": 4,
    "directory": None,
    "every": 2,
    "saves": [],  # steps after which session.save() is called
    "mistake": "",
    "numbers": 0,  # so many more parameters, of one number each
    "ballast": 0,  # bytes of one more parameter
    "sleep": 0,  # seconds a step
    "two groups": True,
    "partner copies": True,
    "writer stops": None,  # [its pid, the step, the rank that has copied last]
    "writer dies": None,  # [its pid, the step whose copy it does not live to see, whether it has been told of it, rank]
}
options = {**DEFAULTS, **json.loads(sys.argv[1])}
torch.set_num_threads(1)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(6, 10), nn.BatchNorm1d(10), nn.Linear(10, 3)
        self.tied = nn.Linear(10, 3, bias=False)
        self.tied.weight = self.last.weight
        numbers = [nn.Parameter(torch.ones(1)) for _ in range(options["numbers"])]
        self.numbers = nn.ParameterList([*numbers, nn.Parameter(torch.ones(options["ballast"] // 4 + 1))])
        self.register_buffer("rank", torch.tensor(dist.get_rank()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(self.first(x)).relu()
        return self.last(y) + self.tied(y) + sum(each.sum() for each in self.numbers)


class Local(torch.optim.Optimizer):
    """Keeps a plain tensor for the part of a parameter that this rank has."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                own = parameter.grad.to_local()
                self.state[parameter].setdefault("m", torch.zeros_like(own)).add_(own + dist.get_rank())


class Whole(torch.optim.SGD):
    """Keeps something of all parameters together."""

    def step(self, closure: Any = None) -> None:
        super().step(closure)
        self.state["count"] = {"of": 1}


class Container(torch.optim.Optimizer):
    """Has another one inside, whose state it names by itself, as in torchtitan."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self.inner = torch.optim.AdamW(parameters, lr=0.01)
        super().__init__(parameters, {"lr": 0.01})

    def step(self, closure: Any = None) -> None:
        self.inner.step()

    def state_dict(self) -> dict[str, Any]:
        state = self.inner.state_dict()["state"]
        return {f"state.{at}.{key}": value for at, values in state.items() for key, value in values.items()}


def average(parameter: torch.Tensor) -> None:
    assert parameter.grad is not None
    dist.all_reduce(parameter.grad)


def build(session: elasticd.Session) -> tuple[Any, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model: Any = Net()
    size, mistake = session.world_size, options["mistake"]
    match options["kind"]:
        case "fsdp":
            mesh = init_device_mesh("cpu", (size,))
            if mistake == "mesh":
                mesh = DeviceMesh("cpu", [session.rank])
            if mistake == "order":
                mesh = DeviceMesh("cpu", list(reversed(range(size))) if session.rank else list(range(size)))
            fully_shard(model.first, mesh=mesh)
            if mistake != "plain":
                fully_shard(model, mesh=mesh)
        case "averaged":  # the script keeps what is not sharded equal
            fully_shard(model.first, mesh=init_device_mesh("cpu", (size,)))
            for parameter in model.parameters():
                if not isinstance(parameter, DTensor):
                    parameter.register_post_accumulate_grad_hook(average)
        case "hsdp":
            fully_shard(model, mesh=init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("a", "b")))
        case "fsdp and tp":
            both = init_device_mesh("cpu", (size // 2, 2), mesh_dim_names=("dp", "tp"))
            parallelize_module(model.first, both["tp"], ColwiseParallel(output_layouts=Replicate()))
            fully_shard(model, mesh=both["dp"])
        case "zero" | "ddp":
            model = DistributedDataParallel(model)
    trained = list(model.parameters())
    if options["kind"] == "zero" or mistake == "twice":
        zero = ZeroRedundancyOptimizer(trained, torch.optim.AdamW, lr=0.01)
        return model, zero
    groups: list[Any] = [{"params": trained[1:]}, {"params": trained[:1], "lr": 0.02}]
    if mistake == "optimizer" and session.rank == 1:
        return model, torch.optim.SGD(groups, lr=0.01)
    if mistake == "settings" and session.rank == 1:
        return model, torch.optim.AdamW(groups, lr=0.03)
    if mistake == "local":
        return model, Local(trained, {"lr": 0.01})
    if mistake == "whole":
        return model, Whole(trained, lr=0.01)
    if mistake == "container":
        return model, Container(trained)
    return model, torch.optim.AdamW(groups if options["two groups"] else trained, lr=0.01)


def digests(model: Any, optimizer: torch.optim.Optimizer) -> dict[str, str]:
    """Of every tensor, as a whole."""
    module = model.module if isinstance(model, DistributedDataParallel) else model
    found = {key: whole(value) for key, value in module.state_dict().items()}
    part = optimizer.optim if isinstance(optimizer, ZeroRedundancyOptimizer) else optimizer
    own = {}
    for key, parameter in module.named_parameters():
        for name, value in part.state.get(parameter, {}).items():
            own[f"{key} {name}"] = whole(value)
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, own)
    return {**found, **{key: value for each in every for key, value in each.items()}}


def whole(tensor: Any) -> str:
    tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return hashlib.sha256(tensor.detach().contiguous().view(-1).numpy().tobytes()).hexdigest()[:8]


def kill_writer(pid: int, step: int, is_unread: bool, rank: int = 0) -> None:
    """Before a rank tells it that its part is copied, or before it reads that."""

    def kill(tell: Callable[[], None]) -> None:
        if is_unread:
            os.kill(pid, signal.SIGSTOP)
            tell()
        os.kill(pid, signal.SIGKILL)
        while Path("/proc", str(pid)).exists():
            time.sleep(0.001)
        if not is_unread:
            tell()

    at_copied(step, rank, kill)


def stop_writer(pid: int, step: int, rank: int) -> None:
    """This rank copies longer than the others of its node; then its node's writer makes no progress for 4 s."""

    def stop(tell: Callable[[], None]) -> None:
        time.sleep(1)
        os.kill(pid, signal.SIGSTOP)
        tell()
        threading.Timer(4, os.kill, (pid, signal.SIGCONT)).start()

    at_copied(step, rank, stop)


def at_copied(step: int, rank: int, act: Callable[[Callable[[], None]], None]) -> None:
    """`act` gets what tells the writer that the rank has copied its part, at the first save from `step` on: a save
    waits for the one before.
    """
    copied = WriterClient.report_copied

    def acting(self: WriterClient, draft: Any, *rest: Any) -> None:
        if draft.step >= step and dist.get_rank() == rank:
            WriterClient.report_copied = copied  # type: ignore[method-assign]
            act(lambda: copied(self, draft, *rest))
        else:
            copied(self, draft, *rest)

    WriterClient.report_copied = acting  # type: ignore[method-assign]


def main() -> None:
    session = elasticd.init()
    if options["writer dies"]:
        kill_writer(*options["writer dies"])
    if options["writer stops"]:
        stop_writer(*options["writer stops"])
    model, optimizer = build(session)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.9)
    if options["mistake"] == "fsdp 1":
        model = FullyShardedDataParallel(Net(), device_id=torch.device("cpu"))
    if options["mistake"] == "stranger":
        session.attach(optimizer=optimizer)
    else:
        session.attach(model=model, optimizer=optimizer, scheduler=scheduler)
    resumed = session.restore(options["directory"])
    copies = options["partner copies"]
    session.checkpoint(every=options["every"], directory=options["directory"], partner_copies=copies)
    before = digests(model, optimizer)
    rates = [group["lr"] for group in optimizer.param_groups]
    while session.steps < options["steps"]:
        torch.manual_seed(session.steps * 100 + session.rank // (2 if options["kind"] == "fsdp and tp" else 1))
        model(torch.randn(4, 6)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        session.step()
        if session.steps in options["saves"]:
            session.save()
        time.sleep(options["sleep"])
    after = digests(model, optimizer)
    own = {"step": resumed.step, "world_size": resumed.world_size, "notes": resumed.notes} if resumed else None
    saved = session.saved_step
    session.close()
    print(json.dumps({"resumed": own, "before": before, "after": after, "rates": rates, "saved": saved}))


if __name__ == "__main__":
    main()
