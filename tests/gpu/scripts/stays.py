"""Trains by `session.run` on one device that all ranks share: `stays.py STEPS [--compile] [--abort]`.

`--abort` takes the groups of a GPU for ones that can be left, which elasticd does not. `steps-RANK` has a line for each
step: round, step, facts in JSON. Times are of CLOCK_MONOTONIC, as the launcher's.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import time
from pathlib import Path
from typing import Any

os.environ["NCCL_HOSTID"] = f"rank-{os.environ['RANK']}"  # or NCCL would refuse two ranks on one device

import torch
import torch.distributed as dist
from torch._dynamo.utils import counters
from torch.nn.parallel import DistributedDataParallel

import elasticd
from elasticd.rejoin import transport

WORK = Path(os.environ["WORK"])


class Abortable(transport.Nccl):
    def reason_against(self) -> str:
        return ""


def main(args: argparse.Namespace) -> None:
    if args.abort:
        transport.Nccl = Abortable  # type: ignore[misc]
    session: Any = elasticd.init()
    device = session.device
    torch.manual_seed(0)
    layers = (torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Dropout(0.1), torch.nn.Linear(256, 1))
    net = torch.nn.Sequential(*layers).to(device)
    model = DistributedDataParallel(net)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3, fused=device.type == "cuda")
    called: Any = torch.compile(model) if args.compile else model
    session.attach(model=model, optimizer=optimizer)
    session.checkpoint(every=5)

    def train() -> None:
        kind = type(dist.group.WORLD._get_backend(device)).__name__
        try:
            while session.steps < args.steps:
                began = time.monotonic()
                loss = called(torch.randn(32, 64, device=device)).square().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                loss.item()
                session.step()
                found = digest(net.state_dict(), optimizer)
                frames = counters["frames"]["ok"]
                about = {"pid": os.getpid(), "began": began, "digest": found, "frames": frames, "kind": kind}
                note("steps", f"{session.round} {session.steps} {json.dumps(about, separators=(',', ':'))}")
                time.sleep(args.pace)
        except BaseException as error:
            note("left", f"{time.monotonic()} {error!r:.200}")
            raise

    def note(name: str, line: str) -> None:
        with (WORK / f"{name}-{session.rank}").open("a") as file:
            file.write(line + "\n")

    session.run(train)
    session.close()


def digest(state: dict[str, torch.Tensor], optimizer: torch.optim.Optimizer) -> str:
    tensors = [*state.values(), *(each for values in optimizer.state.values() for each in values.values())]
    return hashlib.sha256(b"".join(each.detach().cpu().numpy().tobytes() for each in tensors)).hexdigest()[:16]


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("steps", type=int)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--abort", action="store_true")
    parser.add_argument("--pace", type=float, default=0.02)
    main(parser.parse_args())
