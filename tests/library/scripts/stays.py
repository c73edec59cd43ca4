"""Trains by `session.run`; argument: a JSON object of options. A line of JSON a step goes to stdout.

The launcher's channel is a connection to the socket in OWNER, which the test serves. `faults` has, by round, the step
after which a rank dies, that rank, and what the others do then: see `fault`.
"""

from __future__ import annotations

import hashlib
import json
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._dynamo.utils import counters
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

import elasticd

options: dict[str, Any] = json.loads(sys.argv[1])
if "OWNER" in os.environ:
    owner = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    owner.connect(os.environ["OWNER"])
    owner.send(os.environ["SLOT"].encode())
    os.environ["ELASTICD_LAUNCH"] = str(owner.detach())


class Counter:
    """Attached, with a state of its own on every rank; its `commit()` is a place within `session.step()`."""

    def __init__(self) -> None:
        self.count = 100 * session.rank

    def commit(self) -> None:
        fault("step")
        self.count += 1

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]

    def load_state_dicts(self, states: list[dict[str, Any]], rank: int, world_size: int) -> str:
        if rank < len(states):
            self.load_state_dict(states[rank])
        return ""


torch.set_num_threads(1)
if "from" in options:
    os.chdir(options["from"])
session = elasticd.init()
if options.get("early"):
    session.checkpoint(every=1)
torch.manual_seed(7 + session.rank)
net = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 1))
backend = options.get("backend", "eager")
if options.get("compile") == "inside":
    model = DistributedDataParallel(torch.compile(net, backend=backend))
else:
    model = DistributedDataParallel(module=net, **options.get("ddp", {}))
if options.get("freezes"):
    net[0].requires_grad_(False)
passes = {"inside": 0, "outside": 0, "optimizer": 0}


def count(name: str) -> Any:
    def add(*_: Any) -> None:
        passes[name] += 1

    return add


if options.get("hooks"):
    model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    net.register_forward_hook(count("inside"))
    model.register_forward_pre_hook(count("outside"))
called = torch.compile(model, backend=backend) if options.get("compile") == "outside" else model
optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
data = torch.utils.data.TensorDataset(torch.arange(48 * 8.0).view(48, 8).sin(), torch.arange(48.0).view(48, 1).cos())
own_rank = {"rank": session.rank, "world_size": session.world_size} if options.get("preamble") == "rank" else {}
sampler = elasticd.ElasticBatchSampler(data, 12, seed=3, **own_rank)
optimizer.register_step_post_hook(count("optimizer"))
scaler = torch.amp.GradScaler("cpu", init_scale=2.0, growth_interval=3)
counter = Counter()
loader = torch.utils.data.DataLoader(data, batch_sampler=sampler, num_workers=options.get("workers", 0))
session.attach(
    model=model, optimizer=optimizer, scheduler=scheduler, sampler=sampler, scaler=scaler, per_rank={"counter": counter}
)
session.checkpoint(every=1, directory=options.get("directory"))
if options.get("preamble") == "collective":
    dist.barrier()
if options.get("preamble") == "group":
    dist.new_group()
if options.get("preamble") == "restore":
    session.restore()
    other = DistributedDataParallel(nn.Linear(2, 2))
if options.get("preamble") == "module":
    DistributedDataParallel(nn.Linear(2, 2))
if options.get("preamble") == "share":
    share = torch.utils.data.DistributedSampler(data)
if options.get("preamble") == "mesh":
    mesh = dist.init_device_mesh("cpu", (session.world_size,))
batches: Any = iter(loader) if options.get("iterator") else None
entries = 0
server = socket.create_server(("127.0.0.1", 0))
client = socket.create_connection(server.getsockname())
accepted, _ = server.accept()
poll = select.epoll()
poll.register(server)
poll.register(accepted)


def fault(place: str) -> bool:
    """At the place of the round's fault its rank dies; True for the others."""
    step, dead, where = options.get("faults", {}).get(str(session.round), (None, None, None))
    if (step, where) != (session.steps, place):
        return False
    if session.rank == dead:
        os.kill(os.getpid(), signal.SIGKILL)
    return True


def digest(tensors: Iterable[torch.Tensor]) -> str:
    state = hashlib.sha256()
    for tensor in tensors:
        state.update(tensor.detach().numpy().tobytes())
    for values in optimizer.state.values():
        for value in values.values():
            state.update(torch.as_tensor(value).numpy().tobytes())
    state.update(repr(([group["lr"] for group in optimizer.param_groups], scaler.get_scale(), counter.count)).encode())
    return state.hexdigest()[:12]


def say(**what: Any) -> None:
    print(json.dumps({"round": session.round, "rank": session.rank, "world": session.world_size, **what}), flush=True)


def train() -> str:
    global entries
    entries += 1
    if "from" in options:
        os.makedirs("/".join([options["from"], "elsewhere"]), exist_ok=True)
        os.chdir("/".join([options["from"], "elsewhere"]))
    say(entry=entries, at=session.steps, pid=os.getpid())
    client.send(b"x")
    assert accepted.recv(1) == b"x", "the script's own connection is as it was"
    if options.get("nested"):
        session.run(train)
    group = dist.new_group()
    for epoch in range(sampler.epoch, options.get("epochs", 5)):
        sampler.set_epoch(epoch)
        model.train()
        for x, y in loader if batches is None else batches:
            if fault("barrier"):
                session.barrier("all")
            if fault("save"):
                session.save()
            if fault("group"):
                dist.all_reduce(torch.ones(1), group=group)
            if fault("next batch"):
                while not session._launch.changed.is_set():
                    time.sleep(0.001)
                continue
            if fault("computing"):
                time.sleep(0.5)
            if fault("exit"):
                say(exiting=True)
                time.sleep(0.5)
                sys.exit(3)
            if fault("doubt"):
                raise RuntimeError("the rank's own service: Connection refused")
            if fault("error"):
                raise ValueError("the rank's own error")
            while fault("passes"):
                try:
                    called(x).sum().backward()
                except Exception:  # noqa: BLE001
                    time.sleep(0.001)
            if fault("device"):
                say(device=True)
                try:
                    dist.all_reduce(torch.ones(1))
                except RuntimeError:
                    if session.rank == 1:
                        raise
                    raise RuntimeError("CUDA error: an illegal memory access was encountered") from None
            if fault("swallowed"):
                try:
                    dist.all_reduce(torch.ones(1))
                except RuntimeError:
                    say(swallowed=True)
                session.save()
            if options.get("freezes"):
                net[0].requires_grad_(session.steps >= 10)
            loss = ((called(x) - y) ** 2).mean() * sampler.loss_scale()
            optimizer.zero_grad()
            fault("backward")
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            fault("optimizer")
            scaler.step(optimizer)
            scaler.update()
            scheduler.step()
            draw = float(torch.rand(1))
            session.step()
            say(step=session.steps, digest=digest(net.state_dict().values()), draw=draw)
            time.sleep(options.get("pace", 0.0))
    return digest(net.state_dict().values())


def train_and_close() -> str:
    try:
        return train()
    finally:
        session.close()


result = session.run(train_and_close if options.get("closes") else train)
say(compiled=counters["frames"]["ok"])
say(result=result, parameters=digest(net.parameters()), entries=entries, steps=session.steps, passes=passes)
session.close()
