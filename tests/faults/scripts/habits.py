"""Training loops as people write them, in `session.run`: `habits.py KIND`. Each step writes its samples before it is
summed, and its number when it has been committed.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import faults
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

import elasticd

SAMPLES, BATCH, EPOCHS = 240, 12, 3
kind = sys.argv[1]


class Numbers(Dataset[Any]):
    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, at: int) -> tuple[torch.Tensor, int]:
        return torch.full((4,), at / SAMPLES), at


def make_net() -> torch.nn.Module:
    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.Dropout(0.1), torch.nn.Linear(16, 1))


session = elasticd.init()
if kind == "group before run":
    dist.new_group()
net = make_net()
model: Any = DistributedDataParallel(torch.compile(net, backend="eager") if kind == "compiled" else net)
if kind == "compiled outside":
    model = torch.compile(model, backend="eager")
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
second = DistributedDataParallel(make_net())
second_optimizer = torch.optim.SGD(second.parameters(), lr=0.01)
data = Numbers()
accumulate = 3 if kind == "accumulates" else 1
sampler = elasticd.ElasticBatchSampler(data, BATCH, seed=3, accumulate=accumulate)
attached: dict[str, Any] = {"model": model, "optimizer": optimizer, "sampler": sampler}
if kind == "two optimizers":
    attached.update(second=second, second_optimizer=second_optimizer)
if kind == "forgets the model":
    del attached["model"], attached["optimizer"]
workers: dict[str, Any] = {"num_workers": 2, "persistent_workers": True} if "loader" in kind else {}
outer = DataLoader(data, batch_sampler=sampler, **workers)
outer_batches = iter(outer)


class State:
    """The progress of a trainer."""

    def __init__(self) -> None:
        self.step, self.losses = 0, 0.0

    def state_dict(self) -> dict[str, Any]:
        return dict(vars(self))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        vars(self).update(state)


class Trainer:
    """A loop with callbacks, which knows its progress by a state of its own."""

    def __init__(self, callbacks: list[Callable[[State], None]]) -> None:
        self.state, self.callbacks = State(), callbacks

    def training_step(self, batch: Any) -> torch.Tensor:
        model.train()
        loss = loss_of(*batch)
        loss.backward()
        return loss.detach()

    def train(self) -> State:
        for batch in batches():
            self.state.losses += float(self.training_step(batch))
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            self.state.step += 1
            committed()
            for call in self.callbacks:
                call(self.state)
        return self.state


def check_progress(state: State) -> None:
    assert state.step == session.steps, (state.step, session.steps)


trainer = Trainer([check_progress])
if kind == "trainer":
    attached["state"] = trainer.state
session.attach(**attached)
session.checkpoint(every=1000)


def use(which: torch.Tensor) -> None:
    """Before the gradients are summed: a rank that is killed after that has taken part in the step."""
    used = {"step": session.steps + 1, "round": session.round, "samples": which.tolist(), "epoch": sampler.epoch}
    faults.write("samples", f"{json.dumps(used)}\n")


def committed() -> None:
    step = session.steps + 1
    faults.write(f"steps-{session.rank}", f"{session.round} {step}\n")
    session.step()


def loss_of(x: torch.Tensor, which: torch.Tensor) -> torch.Tensor:
    use(which)
    result: torch.Tensor = model(x).square().mean() * sampler.loss_scale()
    return result


def batches() -> Iterator[Any]:
    for epoch in range(0 if kind == "begins anew" else sampler.epoch, EPOCHS):
        sampler.set_epoch(epoch)
        loader = outer if "outer" in kind else DataLoader(data, batch_sampler=sampler, **workers)
        for batch in outer_batches if "iterator" in kind else loader:
            faults.at(session.steps + 1)
            yield batch
            time.sleep(0.01)
            if session.should_stop:
                return


def step(batch: Any) -> None:
    loss_of(*batch).backward()
    optimizer.step()
    optimizer.zero_grad()
    committed()


def simple() -> str:
    for batch in batches():
        step(batch)
    return "trained"


def accumulates() -> str:
    for micro, (x, which) in enumerate(batches(), start=1):
        with contextlib.nullcontext() if micro % accumulate == 0 else model.no_sync():
            loss_of(x, which).backward()
        if micro % accumulate == 0:
            optimizer.step()
            optimizer.zero_grad()
            committed()
    return "trained"


def evaluates() -> str:
    """20 seconds of every rank's module alone, without a call of the session. A fault there is at step -1."""
    for batch in batches():
        step(batch)
        if session.steps == 12:
            model.eval()
            end, generator = time.monotonic() + 20, torch.Generator().manual_seed(session.steps)
            with torch.no_grad():
                while time.monotonic() < end:
                    model.module(torch.rand(64, 4, generator=generator))
                    time.sleep(0.001)
                    if time.monotonic() > end - 15:
                        faults.at(-1)
            model.train()
    return "trained"


def two_optimizers() -> str:
    for x, which in batches():
        second_optimizer.zero_grad()
        second(x).square().mean().backward()
        second_optimizer.step()
        loss_of(x, which).backward()
        optimizer.step()
        optimizer.zero_grad()
        committed()
    return "trained"


def returns_early() -> str:
    for batch in batches():
        step(batch)
        if session.steps >= 30:
            return "good enough"
    return "trained"


def closures(model: Any) -> Callable[[], str]:
    """Nested functions over the model, with a counter of theirs."""
    best = float("inf")

    def forward(x: torch.Tensor) -> Any:
        return model(x)

    def train() -> str:
        nonlocal best

        def one(x: torch.Tensor, which: torch.Tensor) -> float:
            use(which)
            loss = forward(x).square().mean() * sampler.loss_scale()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return float(loss)

        for batch in batches():
            best = min(best, one(*batch))
            committed()
        return "trained"

    return train


def swallows(error: type[BaseException]) -> Callable[[], str]:
    def train() -> str:
        for batch in batches():
            with contextlib.suppress(error):
                step(batch)
        return "trained"

    return train


def ends_the_process_in_finally() -> str:
    try:
        return simple()
    finally:
        if session.steps < 30:
            os._exit(3)


class Logger:
    """A thread that sends what it is given, as experiment trackers have one."""

    def __init__(self) -> None:
        self._lines: queue.Queue[str | None] = queue.Queue()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def log(self, line: str) -> None:
        self._lines.put(line)

    def _run(self) -> None:
        while (line := self._lines.get()) is not None:
            faults.write(f"logged-{os.getpid()}", f"{line}\n")

    def finish(self) -> None:
        self._lines.put(None)
        self._thread.join()
        faults.write("finished", f"{os.getpid()}\n")


def logs() -> str:
    for batch in batches():
        step(batch)
        tracker.log(f"{session.steps}")
    return "trained"


LOOPS: dict[str, Callable[[], Any]] = {
    "accumulates": accumulates,
    "evaluates": evaluates,
    "two optimizers": two_optimizers,
    "returns early": returns_early,
    "closures": closures(model),
    "trainer": lambda: trainer.train() and "trained",
    "swallows errors": swallows(Exception),
    "swallows everything": swallows(BaseException),
    "exits in finally": ends_the_process_in_finally,
    "tracker": logs,
}
loop = LOOPS.get(kind, simple)
if kind == "steps before run":
    session.step()
if kind == "tracker":
    tracker = Logger()
    try:
        result = session.run(loop)
    finally:
        tracker.finish()
else:
    result = session.run(loop)
if kind == "runs twice":
    result = session.run(loop)
faults.write(f"result-{session.rank}", f"{result}\n")
session.close()
