"""The script every launcher is measured with: plain DDP steps of about a millisecond, each one recorded with its time.

It imports nothing of elasticd, so all launchers start the same bytes. Each rank appends one line for a committed step
to its own file, `rank<R>.steps` in the folder given by --log: restart count, pid, step, time.monotonic() seconds. On
Linux that clock is one for the whole machine, so the measuring process compares these times with its own.
"""

from __future__ import annotations

import argparse
import gc
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--notes", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=0, help="0: until killed")
    parser.add_argument("--pause", type=float, default=0.0, help="seconds that each step sleeps")
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--snapshot-every", type=int, default=0, help="steps between rank 0's snapshots; 0: none")
    args = parser.parse_args()

    dist.init_process_group("gloo")
    rank, pid, restart = dist.get_rank(), os.getpid(), os.environ["TORCHELASTIC_RESTART_COUNT"]
    torch.manual_seed(rank)
    layers = nn.Sequential(nn.Linear(args.width, args.width), nn.ReLU(), nn.Linear(args.width, 1))
    model = DistributedDataParallel(layers)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    batch = torch.randn(16, args.width)
    snapshot = args.notes / "snapshot.pt"
    step = 0
    if args.snapshot_every and snapshot.exists():
        saved = torch.load(snapshot, weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        step = saved["step"]

    out = os.open(args.notes / f"rank{rank}.steps", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    while not args.steps or step < args.steps:
        model(batch).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if args.pause:
            time.sleep(args.pause)
        step += 1
        os.write(out, f"{restart} {pid} {step} {time.monotonic():.6f}\n".encode())
        if args.snapshot_every and step % args.snapshot_every == 0 and rank == 0:
            new = snapshot.with_suffix(".new")
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, new)
            os.replace(new, snapshot)

    # DDP's reducer must not be the last to hold the process group: it would join gloo's thread under the GIL, which
    # that thread may be waiting for (pytorch/pytorch#56297). One in five short runs hung here, under any launcher.
    del model
    gc.collect()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
