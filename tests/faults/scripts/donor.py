"""Trains with all that a state holds: dropout, BatchNorm, momentum, a scheduler, a GradScaler; notes a digest of it at
every step.

On a GPU all ranks share one, and each says that it is a machine of its own, or NCCL would refuse them.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

import faults
import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import elasticd
from elasticd.checkpointing.at_fault import donor
from elasticd.checkpointing.state import layout
from elasticd.checkpointing.state.layout import Layout
from elasticd.process_group import host_bytes


def digest(value: Any) -> str:
    """Of every tensor's bytes and every number in nested containers."""
    found = hashlib.sha256()

    def add(item: Any) -> None:
        if isinstance(item, torch.Tensor):
            found.update(host_bytes(item))
        elif isinstance(item, dict):
            for key, each in item.items():
                found.update(repr(key).encode())
                add(each)
        elif isinstance(item, (list, tuple, set)):
            for each in sorted(item) if isinstance(item, set) else item:
                add(each)
        else:
            found.update(repr(item).encode())

    add(value)
    return found.hexdigest()[:16]


def in_copy(act: Callable[[], None], due: Callable[[], bool]) -> None:
    """What a rank does once, when it has copied a piece of its state and more are to come."""
    copy_shared, write_at = Layout.copy_shared, layout.write_at

    def acting(write: Callable[..., None]) -> Callable[..., None]:
        def write_and_act(*what: Any) -> None:
            write(*what)
            if due() and not (faults.WORK / "in_copy").exists():
                faults.write("in_copy", f"{faults.RANK}\n")
                act()

        return write_and_act

    layout.write_at = acting(write_at)
    Layout.copy_shared = lambda self, write, *share: copy_shared(self, acting(write), *share)  # type: ignore[method-assign]


def die_behind(step: int, others: set[int]) -> None:
    """Once the others have finished the step."""
    for rank in others:
        deadline = time.monotonic() + 10
        while f" {step} " not in (faults.WORK / f"steps-{rank}").read_text():
            assert time.monotonic() < deadline, f"rank {rank} has not finished step {step}"
            time.sleep(0.001)
    faults.happen("SIGKILL")


def main(args: argparse.Namespace) -> None:
    os.environ.setdefault("NCCL_HOSTID", f"rank-{faults.RANK}")
    if not args.limited:
        donor.MAX_COMMIT_COPY_S = 1.0  # the machine may be busy
    faults.at(0)
    session = elasticd.init()
    if args.ends == "with":
        with session:
            train(session, args)
        return
    try:
        train(session, args)
    except Exception:
        if args.ends != "sys.exit":
            raise
        traceback.print_exc()
        sys.exit(1)
    finally:
        if args.ends == "close":
            session.close()


def train(session: elasticd.Session, args: argparse.Namespace) -> None:
    if args.die_in_copy and args.die_in_copy[0] in (session.rank, -1):
        in_copy(lambda: faults.happen("SIGKILL"), lambda: session.steps == args.die_in_copy[1])
    if args.slow_copy and args.slow_copy[0] == session.rank:
        in_copy(lambda: time.sleep(1), lambda: session.steps == args.slow_copy[1])
    torch.manual_seed(session.rank)
    layers: list[torch.nn.Module] = [torch.nn.Linear(16, 64), torch.nn.BatchNorm1d(64), torch.nn.ReLU()]
    layers += [torch.nn.Dropout(0.3), torch.nn.Linear(64, args.width), torch.nn.Linear(args.width, 1)]
    # With unused parameters DDP keeps its buckets' order, in which more than two ranks' gradients are added.
    module: torch.nn.Module = torch.nn.Sequential(*layers).to(session.device)
    if not args.plain:
        module = DistributedDataParallel(module, find_unused_parameters=session.world_size > 2)
    model = module
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=100)
    inputs = torch.randn(512, 16, generator=torch.Generator().manual_seed(1))
    dataset = TensorDataset(inputs, inputs.square().sum(dim=1, keepdim=True))
    sampler = elasticd.ElasticBatchSampler(dataset, global_batch=16)
    scaler = torch.amp.GradScaler(session.device.type, init_scale=2.0**10, enabled=not args.ahead)
    attached = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "sampler": sampler, "scaler": scaler}
    session.attach(**attached)
    on_gpu = session.device.type == "cuda"

    def note(what: str) -> None:
        if args.ahead:
            return
        if on_gpu:  # as item() waits; other copies to the host wait in a way that lets no thread copy
            torch.cuda.synchronize()
        held = {name: obj.state_dict() for name, obj in attached.items()}
        if session.rank != 0:
            held["model"] = dict(model.named_parameters())  # each rank's BatchNorm has seen its own batches
        found = digest([held, torch.get_rng_state(), *(torch.cuda.get_rng_state_all() if on_gpu else ())])
        faults.write(f"{what}-{session.rank}", f"{session.round} {session.steps} {found}\n")

    resumed = session.restore()
    session.checkpoint(every=args.every)
    if resumed is not None:
        note("restored")
        if resumed.step == args.poisoned:
            raise RuntimeError("the loss is NaN")
    for epoch in range(sampler.epoch, sampler.epoch + 1000):
        sampler.set_epoch(epoch)
        for x, y in DataLoader(dataset, batch_sampler=sampler, generator=torch.Generator()):
            faults.at(session.steps + 1)
            x, y = x.to(session.device), y.to(session.device)
            loss = torch.nn.functional.mse_loss(model(x), y) * sampler.loss_scale()
            if args.fail_at == (session.round, session.rank, session.steps + 1):
                raise RuntimeError("the loss is strange")
            scaler.scale(loss).backward()
            if (session.rank, session.steps + 1) in args.die_behind:
                die_behind(session.steps + 1, {*range(session.world_size)} - {session.rank})
            if (session.rank, session.steps + 1) in args.lag:
                time.sleep(0.1)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            scheduler.step()
            session.step()
            note("steps")
            time.sleep(0.002)
            if session.steps >= args.steps:
                return


def numbers(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(",")))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--every", type=int, default=1000)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument(
        "--ahead", action="store_true", help="no notes and no GradScaler: a processor does not wait for its GPU"
    )
    parser.add_argument("--plain", action="store_true", help="no DistributedDataParallel: of a rank alone")
    parser.add_argument("--limited", action="store_true", help="gives up where recording a step takes too long")
    parser.add_argument("--die-in-copy", type=numbers, help="RANK,STEP: while it copies; -1: any rank")
    parser.add_argument("--slow-copy", type=numbers, help="RANK,STEP: this copy takes longer than ranks are waited for")
    parser.add_argument("--poisoned", type=int, help="a state of this step makes every resumed round fail")
    parser.add_argument("--fail-at", type=numbers)
    parser.add_argument("--ends", choices=["with", "close", "sys.exit"], help="how it ends after an exception")
    parser.add_argument("--die-behind", type=numbers, nargs="*", default=[], help="RANK,STEP after the backward pass")
    parser.add_argument("--lag", type=numbers, nargs="*", default=[], help="RANK,STEP before the optimizer's step")
    main(parser.parse_args())
