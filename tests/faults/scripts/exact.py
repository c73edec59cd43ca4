"""Trains in one of many ways, and notes a digest of everything at the beginning of each step: `benchmarks.exact`.

Each rank ends at places in a step that the test names: see PLACES in `exact_script.py`. In a job without faults nothing
else is different. The kinds are in `exact_training.py` and `exact_data.py`.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import random
from typing import Any

import faults
import torch
from donor import digest
from exact_data import KINDS
from exact_script import Script
from torch.utils.data import DataLoader

import elasticd
from elasticd.checkpointing.at_fault import donor


def main(args: argparse.Namespace) -> None:
    donor.MAX_COMMIT_COPY_S = 1.0  # the machine may be busy
    session = elasticd.init()
    (faults.WORK / f"pid-{session.rank}").write_text(str(os.getpid()))
    torch.manual_seed(100 + session.rank)
    random.seed(100 + session.rank)
    with contextlib.suppress(ImportError):
        import numpy

        numpy.random.seed(100 + session.rank)
    Script.faults = json.loads((faults.WORK / "places.json").read_text())
    job = Script(session)
    KINDS[args.kind](job)
    place: Any
    if job.stream is not None:
        loader = place = job.stream
    else:
        batch = 8 // job.micro
        place = elasticd.ElasticBatchSampler(job.dataset, global_batch=batch, accumulate=job.accumulate)
        job.attached["sampler"] = place
        loader = DataLoader(job.dataset, batch_sampler=place, **job.loader)
    job.place = place
    session.attach(**job.attached, per_rank=job.per_rank)
    session.checkpoint(every=args.every)

    def note() -> None:
        held = [job.noted(), place.state_dict(), *(each.state_dict() for each in job.per_rank.values())]
        drawn = [torch.get_rng_state(), random.getstate()]
        faults.write(f"steps-{session.rank}", f"{session.round} {session.steps + 1} {digest([held, drawn])}\n")

    def train() -> None:
        if session.steps == 0:
            for hook in job.start:
                hook()
        for epoch in itertools.count(place.epoch):
            if session.steps >= args.steps:
                break
            place.set_epoch(epoch)
            for number, (x, y) in enumerate(loader):
                if job.most and place.offset >= 8 * job.most:  # a run may resume there
                    break
                if number % job.accumulate == 0:
                    note()
                for hook in job.top:
                    hook()
                job.at("forward")
                job.train(x, y)
                if (number + 1) % job.accumulate:
                    continue
                for hook in job.before:
                    hook()
                job.at("optimizer")
                session.step()
                job.at("step")
                for hook in job.after:
                    hook()
            for hook in job.tail:
                hook()
            job.at("tail")
        note()

    if args.in_place:
        session.run(train)
    else:
        session.restore()
        train()
    session.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("kind", choices=sorted(KINDS))
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--every", type=int, default=4)
    parser.add_argument("--in-place", action="store_true", help="survivors stay in their processes")
    main(parser.parse_args())
