"""Trains with a Session until the test that shares its directory has seen enough: it can be held, and it goes back to
checkpoints. Every rank writes down which samples it trained on in which step of which round, for benchmarks/checker.py.

A step is written down when it has been taken and before it is committed: whatever a checkpoint holds is in the record.
The ledger is a state that says which samples it was made of, in which order, and no others: it is exact, whatever the
number of ranks, and goes through the checkpoints as the model does.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import socket
import time
from typing import Any

import faults
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

import elasticd


def main(args: argparse.Namespace) -> None:
    faults.at(0)
    session = elasticd.init()
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(16, 16))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    sampler = elasticd.ElasticBatchSampler(args.samples, global_batch=args.batch)
    ledger = Ledger()
    session.attach(model=model, optimizer=optimizer, sampler=sampler, ledger=ledger)
    came: list[elasticd.Resumed | None] = []
    restore = session.restore

    def restore_and_tell(*where: Any) -> elasticd.Resumed | None:
        came[:] = [restore(*where)]
        return came[0]

    session.restore = restore_and_tell  # type: ignore[method-assign]  # run() tells nobody what it has restored
    session.checkpoint(every=args.every)
    enough = torch.zeros(1)

    def train() -> None:
        note(session, begins=[came[0].round, came[0].step] if came[0] else None)
        if session.steps >= args.steps:
            end(session, ledger)
        while True:
            sampler.set_epoch(sampler.epoch)
            for samples in DataLoader(range(args.samples), batch_sampler=sampler):  # type: ignore[arg-type]
                step = session.steps + 1
                faults.at(step)
                loss = model(torch.ones(len(samples), 16)).square().mean() * sampler.loss_scale()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                trained = samples.tolist()[: sampler.samples()]  # a stand-in is no sample
                note(session, step=step, epoch=sampler.epoch, samples=trained, state=digest(model))
                ledger.enter(trained)
                session.step()
                faults.finished(step)
                time.sleep(args.pause)
                enough[0] = (faults.WORK / "enough").exists()
                dist.all_reduce(enough)
                if enough or session.should_stop or session.steps >= args.steps:
                    end(session, ledger)
            sampler.set_epoch(sampler.epoch + 1)

    if args.stay:
        session.run(train)
    else:
        session.restore()
        train()


def digest(model: torch.nn.Module) -> str:
    """A hash of the parameters, which all ranks have alike."""
    values = (parameter.detach().numpy().tobytes() for parameter in model.parameters())
    return hashlib.sha256(b"".join(values)).hexdigest()[:16]


class Ledger:
    """Folds each step's samples, of all ranks, into one number; benchmarks/checker.py does the same from the record."""

    def __init__(self) -> None:
        self.sum = 0

    def enter(self, samples: list[int]) -> None:
        total = torch.tensor([sum((sample + 1) ** 2 for sample in samples)], dtype=torch.int64)
        dist.all_reduce(total)
        self.sum = (self.sum * 1_000_003 + int(total)) % (2**61 - 1)

    def state_dict(self) -> dict[str, int]:
        return {"sum": self.sum}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.sum = state["sum"]


def end(session: elasticd.Session, ledger: Ledger) -> None:
    note(session, ends=session.steps, ledger=ledger.sum)
    os._exit(0)  # as in train.py: gloo may dead-lock in its own tear-down


def note(session: elasticd.Session, **what: Any) -> None:
    who = {"node": os.environ.get("LINEAGE_NODE") or socket.gethostname(), "pid": os.getpid(), "mono": time.monotonic()}
    where = {"round": session.round, "rank": session.rank, "world": session.world_size}
    faults.write("record", json.dumps({**who, **where, **what}) + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--every", type=int, default=20)
    parser.add_argument("--steps", type=int, default=2**62)
    parser.add_argument("--samples", type=int, default=1000)
    parser.add_argument("--batch", type=int, default=12)
    parser.add_argument("--pause", type=float, default=0.01)
    parser.add_argument("--stay", action="store_true", help="with session.run: healthy ranks keep their processes")
    main(parser.parse_args())
