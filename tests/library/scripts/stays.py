"""Trains by `session.run`; argument: a JSON object of options. A line of JSON a step goes to stdout.

The launcher's channel is a connection to the socket in OWNER, which the test serves. `die` is [round, rank, step,
place]: there this process kills itself, or does what else the place says.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import socket
import sys
import threading
import time
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import elasticd

options: dict[str, Any] = json.loads(sys.argv[1])
if "OWNER" in os.environ:
    owner = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    owner.connect(os.environ["OWNER"])
    owner.send(os.environ["SLOT"].encode())
    os.environ["ELASTICD_LAUNCH"] = str(owner.detach())

torch.set_num_threads(1)
session = elasticd.init()
torch.manual_seed(7 + session.rank)
net = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 1))
model = DistributedDataParallel(net)
optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
data = torch.utils.data.TensorDataset(torch.arange(48 * 8.0).view(48, 8).sin(), torch.arange(48.0).view(48, 1).cos())
sampler = elasticd.ElasticBatchSampler(data, 12, seed=3)
loader = torch.utils.data.DataLoader(data, batch_sampler=sampler, num_workers=options.get("workers", 0))
session.attach(model=model, optimizer=optimizer, scheduler=scheduler, sampler=sampler)
session.checkpoint(every=1)
entries = 0


def fault(place: str) -> None:
    for round, rank, step, where in options.get("die", []):
        if (session.round, session.rank, session.steps, where) == (round, rank, step, place):
            os.kill(os.getpid(), signal.SIGKILL)


def digest() -> str:
    state = hashlib.sha256()
    for tensor in net.state_dict().values():
        state.update(tensor.numpy().tobytes())
    for values in optimizer.state.values():
        for value in values.values():
            state.update(torch.as_tensor(value).numpy().tobytes())
    state.update(repr([group["lr"] for group in optimizer.param_groups]).encode())
    return state.hexdigest()[:12]


def say(**what: Any) -> None:
    print(json.dumps({"round": session.round, "rank": session.rank, "world": session.world_size, **what}), flush=True)


def train() -> str:
    global entries
    entries += 1
    say(entry=entries, at=session.steps, pid=os.getpid())
    for epoch in range(sampler.epoch, options.get("epochs", 3)):
        sampler.set_epoch(epoch)
        model.train()
        for x, y in loader:
            fault("before")
            loss = ((model(x) - y) ** 2).mean() * sampler.loss_scale()
            optimizer.zero_grad()
            fault("backward")
            loss.backward()
            fault("optimizer")
            optimizer.step()
            scheduler.step()
            draw = float(torch.rand(1))
            session.step()
            say(step=session.steps, digest=digest(), draw=draw)
            time.sleep(options.get("pace", 0.0))
    return digest()


result = session.run(train)
descriptors = len(os.listdir("/proc/self/fd"))
say(result=result, entries=entries, steps=session.steps, descriptors=descriptors, threads=threading.active_count())
session.close()
