"""Trains a network in half precision with a GradScaler; argument: a model of torchvision, or "layers"."""

from __future__ import annotations

import os
import sys
from typing import Any

import faults
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import elasticd

PIXELS = 64
STEPS = 80


def network(name: str) -> nn.Module:
    if name == "layers":
        blocks = [nn.Sequential(nn.Linear(256, 256), nn.BatchNorm1d(256), nn.ReLU()) for _ in range(20)]
        return nn.Sequential(nn.Flatten(), nn.Linear(3 * PIXELS * PIXELS, 256), *blocks, nn.Linear(256, 1000))
    from torchvision import models  # type: ignore[import-not-found]

    sized: dict[str, Any] = {"image_size": PIXELS} if name.startswith("vit") else {}
    found: nn.Module = models.get_model(name, **sized)
    return found


def main(name: str) -> None:
    os.environ.setdefault("NCCL_HOSTID", f"rank-{faults.RANK}")
    faults.at(0)
    session = elasticd.init()
    torch.manual_seed(0)
    model = DistributedDataParallel(network(name).to(session.device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    scaler = torch.amp.GradScaler(session.device.type)
    session.attach(model=model, optimizer=optimizer, scaler=scaler)
    session.restore()
    session.checkpoint(every=1000)
    kind = torch.float16 if session.device.type == "cuda" else torch.bfloat16
    images = torch.randn(32, 3, PIXELS, PIXELS, device=session.device)
    labels = torch.arange(32, device=session.device)
    while session.steps < STEPS:
        faults.at(session.steps + 1)
        with torch.autocast(session.device.type, dtype=kind):
            loss = nn.functional.cross_entropy(model(images), labels)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        session.step()


if __name__ == "__main__":
    main(sys.argv[1])
