"""A job whose start takes time of its own, with a state of a given size; for `benchmarks.in_place`.

Each process appends "STEP MONOTONIC RANK WORLD ROUND HASH SAMPLES" to DIRECTORY/steps-PID.log at the end of each step:
a hash of the parameters and the optimizer's state (0 without --hashes), and this rank's samples, separated by commas.
With --hashes it appends "STEP RANK WORLD ROUND HASH" to entries-PID.log when a round begins, the hash with buffers.
Each call of `train` is a line "entered MONOTONIC" in calls-PID.log, and the end of one a line "left MONOTONIC".
With --late the model and its optimizer are made, and attached, in `train`.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import os
import time
from collections.abc import Iterable
from pathlib import Path

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

import elasticd

LAYERS = 8
WIDTH = 16
SAMPLES, BATCH, SEED = 4080, 12, 3
Objects = tuple[DistributedDataParallel, torch.optim.Optimizer, elasticd.ElasticBatchSampler]


class Samples(Dataset[tuple[torch.Tensor, int]]):
    """Numbers that follow from the sample's index."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        generator = torch.Generator().manual_seed(index)
        return torch.randn(WIDTH, generator=generator), index


class Net(torch.nn.Module):
    """Parameters of the given size, of which a step uses all."""

    def __init__(self, megabytes: float) -> None:
        super().__init__()
        self.input = torch.nn.Linear(WIDTH, WIDTH)
        self.norm = torch.nn.BatchNorm1d(WIDTH)
        rows = max(int(megabytes * 1e6 / 4 / 3 / LAYERS / WIDTH), 1)  # Adam keeps twice the parameters' size
        self.large = torch.nn.ParameterList(torch.randn(rows, WIDTH) / WIDTH for _ in range(LAYERS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(self.input(x))
        loss: torch.Tensor = hidden.square().mean()
        for rows in self.large:
            loss = loss + (hidden.mean(0) * rows).square().mean()
        return loss


def digest(optimizer: torch.optim.Optimizer, buffers: Iterable[torch.Tensor] = ()) -> str:
    """A hash of parameters and Adam's moments, which all ranks have alike. Buffers are alike only at an entry."""
    total = hashlib.sha256()
    for buffer in buffers:
        total.update(buffer.detach().contiguous().numpy().tobytes())
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            moments = optimizer.state.get(parameter, {})  # none before the first step
            for tensor in (parameter, *(moments[name] for name in ("exp_avg", "exp_avg_sq") if name in moments)):
                total.update(tensor.detach().contiguous().numpy().tobytes())
    return total.hexdigest()[:16]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--directory", type=Path, required=True)
    parser.add_argument("--megabytes", type=float, default=1.0)
    parser.add_argument("--startup", type=float, default=0.0, help="seconds that the script needs before it trains")
    parser.add_argument("--step", type=float, default=0.02, help="seconds that a step takes beside its computation")
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--samples", type=int, default=SAMPLES)
    parser.add_argument("--way", choices=("in place", "restart"), default="in place")
    parser.add_argument("--hashes", action="store_true")
    parser.add_argument("--late", action="store_true")
    args = parser.parse_args()
    session = elasticd.init()
    torch.manual_seed(1)
    time.sleep(args.startup)
    data = Samples(args.samples)
    log = (args.directory / f"steps-{os.getpid()}.log").open("a", buffering=1)
    calls = (args.directory / f"calls-{os.getpid()}.log").open("a", buffering=1)

    def build() -> Objects:
        model = DistributedDataParallel(Net(args.megabytes).to(session.device))
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
        sampler = elasticd.ElasticBatchSampler(data, global_batch=BATCH, seed=SEED)
        session.attach(model=model, optimizer=optimizer, sampler=sampler)
        session.checkpoint(every="60s")
        if args.late:
            session.restore()
        return model, optimizer, sampler

    built = None if args.late else build()

    def call() -> None:
        calls.write(f"entered {time.monotonic():.6f}\n")
        try:
            train(*(built or build()))
        finally:
            calls.write(f"left {time.monotonic():.6f}\n")

    def train(
        model: DistributedDataParallel, optimizer: torch.optim.Optimizer, sampler: elasticd.ElasticBatchSampler
    ) -> None:
        if args.hashes:
            state = digest(optimizer, model.buffers())
            with (args.directory / f"entries-{os.getpid()}.log").open("a") as entries:
                entries.write(f"{session.steps} {session.rank} {session.world_size} {session.round} {state}\n")
        loader = DataLoader(data, batch_sampler=sampler)
        for epoch in itertools.count(sampler.epoch):
            sampler.set_epoch(epoch)
            for x, samples in loader:
                scale = sampler.loss_scale()
                loss = model(x.to(session.device)) * scale
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                time.sleep(args.step)
                session.step()
                state = digest(optimizer) if args.hashes else "0"
                trained = ",".join(map(str, samples.tolist())) if scale else "-"
                log.write(
                    f"{session.steps} {time.monotonic():.6f} {session.rank} {session.world_size} {session.round} "
                    f"{state} {trained}\n"
                )
                if session.should_stop or session.steps >= args.steps:
                    return

    if args.way == "in place":
        session.run(call)
    else:
        if not args.late:
            session.restore()
        call()
    session.close()


if __name__ == "__main__":
    main()
