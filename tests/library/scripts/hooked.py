"""What the optimizer hook counts in scripts that never heard of us: every case below; prints their beats' steps."""

from __future__ import annotations

import copy
import json
import os
import pickle
import sys
import tempfile
from collections.abc import Callable
from typing import Any

os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # compilers of torch 2.6 outlive the script for a moment

import torch
from torch import nn

from elasticd.heartbeat import optimizer_hook
from elasticd.heartbeat import record as heartbeat

torch.set_num_threads(1)


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))


def loss_of(net: nn.Module) -> torch.Tensor:
    return net(torch.ones(2, 4)).pow(2).mean()


def train(make: Callable[..., torch.optim.Optimizer], steps: int = 5, **options: Any) -> torch.optim.Optimizer:
    net = model()
    optimizer = make(net.parameters(), lr=0.01, **options)
    for _ in range(steps):
        optimizer.zero_grad()
        loss_of(net).backward()
        optimizer.step()
    return optimizer


def closure() -> None:
    net = model()
    optimizer = torch.optim.LBFGS(net.parameters(), max_iter=3)

    def again() -> torch.Tensor:
        optimizer.zero_grad()
        loss = loss_of(net)
        loss.backward()
        return loss

    for _ in range(5):
        optimizer.step(again)


def scaled() -> None:
    """AMP: step 3's gradient is infinite, so the scaler skips that optimizer step."""
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for step in range(6):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = loss_of(net)
        scaler.scale(loss * (float("inf") if step == 3 else 1)).backward()
        scaler.step(optimizer)
        scaler.update()


def accumulated() -> None:
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    for micro in range(20):
        loss_of(net).backward()
        if micro % 4 == 3:
            optimizer.step()
            optimizer.zero_grad()


def adversarial() -> None:
    """Two discriminator steps for each generator step: five iterations are ten steps of the one that steps most."""
    generator, discriminator = model(), model()
    one = torch.optim.Adam(generator.parameters(), lr=0.01)
    other = torch.optim.Adam(discriminator.parameters(), lr=0.01)
    for _ in range(5):
        for _ in range(2):
            loss_of(discriminator).backward()
            other.step()
        loss_of(generator).backward()
        one.step()


def one_after_another() -> None:
    kept = train(torch.optim.SGD, steps=2, foreach=True)  # or the second one may have its id
    train(torch.optim.AdamW, steps=3, fused=True)
    del kept


def own_optimizer() -> None:
    class Own(torch.optim.Optimizer):
        def step(self, closure: Any = None) -> None:
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter.data.add_(parameter.grad, alpha=-0.01)

    train(lambda parameters, lr: Own(parameters, {"lr": lr}))


def compiled_step() -> None:
    """As PyTorch's own recipe compiles the optimizer: torch breaks the graph inside step() itself."""
    net = model()
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    step = torch.compile(lambda: optimizer.step(), backend="eager")
    for _ in range(5):
        optimizer.zero_grad()
        loss_of(net).backward()
        step()


def compiled_train_step() -> None:
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)

    @torch.compile(backend="eager")
    def step() -> torch.Tensor:
        optimizer.zero_grad()
        loss = loss_of(net)
        loss.backward()
        optimizer.step()
        return loss

    for _ in range(5):
        step()


def copied() -> None:
    """The hook is torch's, not the optimizer's: copies and pickles of an optimizer know nothing of it."""
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    assert not optimizer._optimizer_step_post_hooks
    pickle.loads(pickle.dumps(optimizer))
    copy.deepcopy(optimizer)
    train(torch.optim.SGD)


def taken_over(path: str) -> None:
    """A session counts from its first step on; the hook no more."""
    session = heartbeat.HeartbeatWriter(path)
    train(torch.optim.SGD, steps=3)
    session.step(100)
    train(torch.optim.SGD, steps=3)


CASES = {
    "closure": closure,
    "scaled": scaled,
    "accumulated": accumulated,
    "adversarial": adversarial,
    "one_after_another": one_after_another,
    "own_optimizer": own_optimizer,
    "compiled_step": compiled_step,
    "compiled_train_step": compiled_train_step,
    "copied": copied,
}


def main() -> None:
    seen = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in [*CASES, "taken_over"]:
            path = f"{folder}/{name}"
            heartbeat.create(path)
            remove = optimizer_hook.install_optimizer_hook(heartbeat.HeartbeatWriter(path))
            if name == "taken_over":
                taken_over(path)
            else:
                CASES[name]()
            remove()
            with heartbeat.HeartbeatReader(path) as reader:
                found = reader.read()
            seen[name] = [found.step, found.source.name]
    sys.stdout.write(json.dumps(seen) + "\n")


if __name__ == "__main__":
    main()
