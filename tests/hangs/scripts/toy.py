"""The toy both scripts train, and the pace they do it at. Nothing here imports elasticd."""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Iterator
from datetime import timedelta

import mishaps
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

LAST = 1 << 30


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=LAST, help="until the file `enough` is there, but at most so many")
    parser.add_argument("--pause", type=float, default=0.02, help="what a step takes, by sleeping")
    parser.add_argument("--work", type=float, default=0.0, help="what a step takes, by computing")
    parser.add_argument("--growth", type=float, default=0.0, help="added to every step's pause, over the one before")
    parser.add_argument("--hiccup", type=float, default=0.0, help="so long takes every 100th step of rank 0")
    parser.add_argument("--lag", type=float, default=0.0, help="what a step takes rank 1 more than the others")
    parser.add_argument("--accumulate", type=int, default=1, help="micro-steps before each optimizer step")
    parser.add_argument("--loaders", type=int, default=0, help="DataLoader workers")
    parser.add_argument("--every", type=int, default=10, help="steps between checkpoints")
    parser.add_argument("--meet", type=float, default=0.0, help="every tenth step at a barrier of that timeout")
    parser.add_argument("--groups", action="store_true", help="two more process groups reduce in every step")
    parser.add_argument("--late", action="store_true", help="the metric is reduced after the step is done")
    parser.add_argument("--timeout", type=float, default=1800.0, help="the process group's")
    return parser.parse_args()


def model() -> torch.nn.Module:
    """With buffers: their broadcast at each forward is a collective of another kind than the reduction of gradients."""
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.BatchNorm1d(16), torch.nn.Linear(16, 1))


class Batches(Dataset[torch.Tensor]):
    """One batch for each step, from some step on."""

    def __init__(self, first: int) -> None:
        self.first = first

    def __len__(self) -> int:
        return LAST

    def __getitem__(self, index: int) -> torch.Tensor:
        mishaps.at("loader", self.first + index)
        return torch.ones(4, 16)


def batches(first: int, args: argparse.Namespace) -> Iterator[tuple[int, torch.Tensor]]:
    """(step, batch) from this step on, until all have had enough."""
    loaded = iter(DataLoader(Batches(first), batch_size=None, num_workers=args.loaders))
    for step in range(first, args.steps + 1):
        mishaps.at("data", step)
        batch = next(loaded) if args.loaders else torch.ones(4, 16)
        mishaps.at("step", step)
        pace(step, args)
        yield step, batch


def pace(step: int, args: argparse.Namespace) -> None:
    if args.work:
        mishaps.burn(str(args.work))
    if args.hiccup and mishaps.RANK == 0 and step % 100 == 0:
        mishaps.burn(str(args.hiccup))
    time.sleep(args.pause + args.growth * step + (args.lag if mishaps.RANK == 1 else 0.0))


def gradients(ddp: torch.nn.parallel.DistributedDataParallel, batch: torch.Tensor, args: argparse.Namespace) -> None:
    """All micro-steps of a step; only the last one reduces."""
    with ddp.no_sync():
        for _ in range(args.accumulate - 1):
            ddp(batch).square().mean().backward()
            time.sleep(args.pause)
    ddp(batch).square().mean().backward()


def metric(step: int) -> bool:
    """A reduction of some figure, once a step: whether all have had enough. Here ranks part, where they shall.

    Whoever skips it comes to a broadcast next, and gloo waits for ever. To reduce no elements at all returns at once,
    and then does the same; any other shape aborts a receiver ("abort").
    """
    figure = torch.tensor([float((mishaps.WORK / "enough").exists())])
    how = mishaps.collective(step)
    if how == "skip":
        return False
    if how == "other":
        dist.broadcast(figure, src=0)
    elif how == "shape":
        dist.all_reduce(torch.zeros(0))
    elif how == "abort":
        dist.all_reduce(torch.zeros(100))
    elif how == "recv":
        dist.recv(figure, src=0 if mishaps.RANK else 1)
    elif how == "barrier":
        dist.barrier()
    elif how == "sources":
        dist.broadcast(figure, src=1 if mishaps.RANK == 1 else 0)
    elif how == "unequal":
        exchange_unequal()
    elif how == "key":
        dist.distributed_c10d._get_default_store().wait(["never"], timedelta(days=1))
    elif how.startswith("first-"):
        use_first(how)
    elif _GROUPS:
        reduce_in_groups(figure, how)
    else:
        dist.all_reduce(figure)
    return bool(figure)


_GROUPS: list[dist.ProcessGroup] = []
_UNUSED: list[dist.ProcessGroup] = []


def make_groups(args: argparse.Namespace) -> None:
    """One of all ranks, one of ranks 0 and 1; and two of those that nobody uses."""
    if args.groups:
        _GROUPS[:] = dist.new_group(), dist.new_group([0, 1])
        _UNUSED[:] = dist.new_group([0, 1]), dist.new_group([0, 1])


def reduce_in_groups(figure: torch.Tensor, how: str) -> None:
    """In the default group and the two others. "crossed": not in that order; "subgroup": without the last one."""
    everyone, pair = _GROUPS
    for group in (everyone, None) if how == "crossed" else (None, everyone):
        dist.all_reduce(torch.zeros(1) if group else figure, group=group)
    if mishaps.RANK < 2 and how != "subgroup":
        dist.all_reduce(torch.zeros(1), group=pair)


def use_first(how: str) -> None:
    """Ranks 0 and 1 use two new groups in different orders, or rank 0 uses one alone."""
    order = reversed(_UNUSED) if mishaps.RANK else _UNUSED
    for group in order if how == "first-crossed" else _UNUSED[:1]:
        dist.all_reduce(torch.zeros(1), group=group)


def exchange_unequal() -> None:
    """Each rank has more for the next one; the last rank never comes to it."""
    size = dist.get_world_size()
    if size == mishaps.RANK + 1:
        mishaps.deadlock()
    inputs = [mishaps.RANK + 2 * to + 1 for to in range(size)]
    outputs = [source + 2 * mishaps.RANK + 1 for source in range(size)]
    dist.all_to_all_single(torch.empty(sum(outputs)), torch.ones(sum(inputs)), outputs, inputs)


def end() -> None:
    """Nothing is torn down: gloo's thread may want the GIL to drop the last collective, while DDP's reducer joins it
    under the GIL (pytorch/pytorch#56297). Exit handlers run where one of them shall hang."""
    if not mishaps.at("end", 0):
        os._exit(0)
