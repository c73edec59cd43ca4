"""Trains with a Session and an attached checkpoint, 30 ms a step, until it is killed. Files in WORK make it slow.

lag-RANK holds the seconds that each step of that rank takes longer, while it is there.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

import torch
from torch.nn.parallel import DistributedDataParallel

import elasticd

WORK = Path(os.environ["WORK"])


class Ballast:
    """Makes a checkpoint as large as a test wants it."""

    def __init__(self, size: int) -> None:
        self.content = torch.zeros(size, dtype=torch.uint8)

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {"content": self.content}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        self.content = state["content"]


def main(args: argparse.Namespace) -> None:
    session = elasticd.init()
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(16, 16))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    session.attach(model=model, optimizer=optimizer, ballast=Ballast(args.ballast))
    session.restore()
    session.checkpoint(every=args.every)
    lag = WORK / f"lag-{session.rank}"
    with (WORK / f"steps-{session.rank}").open("a", buffering=1) as steps:
        while not session.should_stop:
            model(torch.ones(4, 16)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            session.step()
            steps.write(f"{session.round} {session.steps}\n")
            time.sleep(0.03 + (float(lag.read_text()) if lag.exists() else 0.0))
    session.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--every", default="1s")
    parser.add_argument("--ballast", type=int, default=0)
    main(parser.parse_args())
