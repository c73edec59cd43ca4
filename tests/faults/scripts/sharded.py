"""Trains a sharded model with a Session; tells which samples each step had, and at the end all parameters."""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

import faults
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import elasticd

SAMPLES, BATCH = 240, 12


def main(args: argparse.Namespace) -> None:
    faults.at(0)
    session = elasticd.init()
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(7, 13), torch.nn.BatchNorm1d(13), torch.nn.Tanh(), torch.nn.Linear(13, 5)
    )
    model[1].eval()  # each rank's statistics would be those of its own samples
    model, optimizer = shard(model, args.kind, session)
    inputs = torch.randn(SAMPLES, 7, generator=torch.Generator().manual_seed(1))
    dataset = TensorDataset(inputs, torch.arange(SAMPLES))
    sampler = elasticd.ElasticBatchSampler(dataset, global_batch=BATCH)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10, gamma=0.9)
    ballast = torch.nn.Embedding(args.ballast // 4 + 1, 1)
    if args.kind == "fsdp":
        fully_shard(ballast)
    session.attach(model=model, optimizer=optimizer, scheduler=scheduler, sampler=sampler, ballast=ballast)
    session.restore()
    session.checkpoint(every=args.every)
    for epoch in range(sampler.epoch, sampler.epoch + 1000):
        sampler.set_epoch(epoch)
        for x, numbers in DataLoader(dataset, batch_sampler=sampler):
            step = session.steps + 1
            faults.at(step)
            loss = (model(x) - x.sum(1, keepdim=True)).square().mean() * sampler.loss_scale()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            told = {"round": session.round, "step": step, "epoch": epoch, "samples": numbers.tolist()}
            faults.write(f"samples-{session.rank}", json.dumps(told) + "\n")
            session.step()
            faults.write(f"steps-{session.rank}", f"{session.round} {step} {session.world_size}\n")
            waits = session.world_size < args.ranks and session.steps > 100
            time.sleep(1.0 if waits else args.pause)
            if session.should_stop or session.steps >= args.steps:
                if not session.should_stop:
                    end(session, model)
                return


def shard(model: Any, kind: str, session: elasticd.Session) -> tuple[Any, torch.optim.Optimizer]:
    size = session.world_size
    if kind == "zero":
        model = DistributedDataParallel(model)
        return model, ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=0.01)
    if kind != "whole":
        shape = (2, size // 2) if kind == "hsdp" and size % 2 == 0 else (1, size)
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
        for layer in (model[0], model[3], model):
            fully_shard(layer, mesh=mesh if kind == "hsdp" else mesh["shard"])
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def end(session: elasticd.Session, model: Any) -> None:
    parameters = [each.full_tensor() if hasattr(each, "full_tensor") else each for each in model.parameters()]
    if session.rank == 0:
        faults.write("parameters", json.dumps([value for each in parameters for value in each.flatten().tolist()]))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--kind", default="fsdp", choices=("fsdp", "hsdp", "zero", "whole"))
    parser.add_argument("--every", type=lambda text: int(text) if text.isdigit() else text, default=5)
    parser.add_argument("--ballast", type=int, default=0)
    parser.add_argument("--pause", type=float, default=0.005)
    parser.add_argument("--ranks", type=int, default=0, help="fewer train slowly after step 100: others are to join")
    main(parser.parse_args())
