"""A newcomer before `session.run`: DDP can be built, and each collective is refused; prints the types of the errors."""

from __future__ import annotations

import json
import os
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from elasticd import process_group
from elasticd.rejoin import newcomer

group = newcomer.join(process_group.read_environment())
net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
before = {name: value.clone() for name, value in net.state_dict().items()}
model = DistributedDataParallel(net)
assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
one, three = torch.ones(1), torch.ones(3)


class Trains(torch.nn.Module):
    """Its constructor is not DDP's."""

    def __init__(self) -> None:
        super().__init__()
        dist.broadcast(one, 0)


def train() -> None:
    model(torch.ones(3, 4)).sum().backward()


tried: dict[str, Callable[[], object]] = {
    "barrier": dist.barrier,
    "broadcast": lambda: dist.broadcast(one, 0),
    "all_reduce": lambda: dist.all_reduce(one),
    "reduce": lambda: dist.reduce(one, 0),
    "all_gather": lambda: dist.all_gather([one, one, one], one),
    "all_gather_object": lambda: dist.all_gather_object([None] * 3, 1),
    "broadcast_object_list": lambda: dist.broadcast_object_list([1], 0),
    "scatter": lambda: dist.scatter(one, None, 0),
    "gather": lambda: dist.gather(one, None, 0),
    "reduce_scatter": lambda: dist.reduce_scatter(one, [one, one, one]),
    "all_to_all_single": lambda: dist.all_to_all_single(three, three),
    "send": lambda: dist.send(one, 0),
    "recv": lambda: dist.recv(one, 0),
    "irecv": lambda: dist.irecv(one),
    "a constructor": Trains,
    "a step": train,
}
refused: dict[str, str] = {}
for name, call in tried.items():
    try:
        call()
    except Exception as error:  # noqa: BLE001 each is printed
        refused[name] = f"{type(error).__name__}: {error}"
sizes = [group.rank, group.world_size, group.created_by_join, dist.get_rank(), dist.get_world_size()]
process_group.leave(group)
is_left = not dist.is_initialized()
print(json.dumps({"refused": refused, "passed": sorted(tried.keys() - refused), "sizes": sizes, "is_left": is_left}))
os._exit(0)
