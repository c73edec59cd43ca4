"""Trains with a Session: resumes, saves every few steps, and at the end tells its parameters to the last bit."""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import subprocess
import time

import faults
import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import elasticd


def main(args: argparse.Namespace) -> None:
    faults.at(0)
    session = elasticd.init()
    torch.manual_seed(0)
    model = DistributedDataParallel(
        torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    inputs = torch.randn(512, 16, generator=torch.Generator().manual_seed(1))
    dataset = TensorDataset(inputs, inputs.square().sum(dim=1, keepdim=True))
    sampler = elasticd.ElasticBatchSampler(dataset, global_batch=16)
    session.attach(model=model, optimizer=optimizer, sampler=sampler, ballast=Ballast(args.ballast))
    session.restore()
    # On a disk that changes at certain steps each checkpoint is waited for.
    session.checkpoint(every=10**9 if args.disk else args.every, keep=args.keep)
    with contextlib.ExitStack() as at_end:
        if args.save_at_end:
            at_end.callback(session.save)
        train(args, session, model, optimizer, sampler, dataset)


def train(
    args: argparse.Namespace,
    session: elasticd.Session,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    sampler: elasticd.ElasticBatchSampler,
    dataset: TensorDataset,
) -> None:
    grown = torch.empty(0)
    for epoch in range(sampler.epoch, sampler.epoch + 1000):
        sampler.set_epoch(epoch)
        for x, y in DataLoader(dataset, batch_sampler=sampler):
            step = session.steps + 1
            faults.at(step)
            disk(args, step)
            grown = torch.ones(args.grow, dtype=torch.uint8) if step == 22 else grown
            loss = torch.nn.functional.mse_loss(model(x), y) * sampler.loss_scale()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            session.step()
            if args.disk and session.steps % args.every == 0:
                session.save()
            total = loss.detach().clone()
            torch.distributed.all_reduce(total)
            mean = float(total) / session.world_size
            faults.write(f"steps-{session.rank}", f"{session.round} {step} {mean:.9g} {time.monotonic():.6f}\n")
            time.sleep(0.005)
            if session.should_stop or session.steps >= args.steps:
                return end(session, model)


def end(session: elasticd.Session, model: torch.nn.Module) -> None:
    if session.rank == 0 and not session.should_stop:
        digest = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters()))
        faults.write("digest", f"{session.steps} {digest.hexdigest()}\n")


class Ballast:
    """Makes a checkpoint as large as a test wants it."""

    def __init__(self, size: int) -> None:
        self.content = torch.ones(size, dtype=torch.uint8)

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {"content": self.content}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        self.content = state["content"]


def disk(args: argparse.Namespace, step: int) -> None:
    """Rank 0's hand on the disk that checkpoints go to: full up to a step, read-only for a while."""
    if faults.RANK == 0 and step in args.remount:
        # A disk with a locked file on it cannot be made read-only; another one is put in its place for a while.
        over = ["umount"] if args.remount.index(step) % 2 else ["mount", "-t", "tmpfs", "-o", "ro", "none"]
        subprocess.run([*over, args.disk], check=True)
        faults.write("remounted", f"{step}\n")
    if faults.RANK == 0 and step == args.free_at:
        subprocess.run(["rm", f"{args.disk}/filler"], check=True)
        faults.write("freed", f"{step}\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--every", type=lambda text: int(text) if text.isdigit() else text, default=5)
    parser.add_argument("--keep", type=int, default=3)
    parser.add_argument("--ballast", type=int, default=0)
    parser.add_argument("--grow", type=int, default=0, help="so many bytes are in use from step 22 on")
    parser.add_argument("--save-at-end", action="store_true", help="in a `finally`")
    parser.add_argument("--disk")
    parser.add_argument("--remount", type=int, nargs="*", default=[])
    parser.add_argument("--free-at", type=int)
    main(parser.parse_args())
