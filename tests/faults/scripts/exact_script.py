"""The loop's parts that each kind of `exact.py` may change, and the list of kinds."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import faults
import torch
from kinds import own_part
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Dataset

import elasticd

STEPS_PER_EPOCH = 6
PLACES = ("forward", "backward", "optimizer", "step", "tail")
"""Before the forward pass, after the backward pass, the optimizer's step, `session.step()`, and the end of an epoch."""
Hook = Callable[[], Any]
KINDS: dict[str, Callable[[Script], None]] = {}


class Samples(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    def __init__(self, augment: Callable[[], Any] = lambda: 0.0, count: int = 8 * STEPS_PER_EPOCH) -> None:
        self._x = torch.randn(count, 16, generator=torch.Generator().manual_seed(1))
        self._augment = augment

    def __len__(self) -> int:
        return len(self._x)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        x = self._x[index]
        return x + float(self._augment()), x.square().sum(dim=0, keepdim=True)


class Stream:
    """Samples without numbers: each rank takes its share of what comes next."""

    def __init__(self, rank: int) -> None:
        self._x = Samples()
        self._rank = rank
        self.epoch = self.position = 0

    @property
    def offset(self) -> int:
        return self.position

    def set_epoch(self, epoch: int) -> None:
        if epoch != self.epoch:
            self.epoch, self.position = epoch, 0

    def __iter__(self) -> Iterator[list[torch.Tensor]]:
        while self.position < len(self._x):
            first = self.position + 4 * self._rank
            self.position += 8
            yield [torch.stack(each) for each in zip(*map(self._x.__getitem__, range(first, first + 4)), strict=True)]

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch, "position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.epoch, self.position = state["epoch"], state["position"]


class Script:
    """`train` is one step without `session.step()`; the others are called around it."""

    def __init__(self, session: elasticd.Session) -> None:
        self.session = session
        self.rank = session.rank
        self.net: Any = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1))
        self.attached: dict[str, Any] = {}
        self.per_rank: dict[str, Any] = {}
        self.dataset: Any = Samples()
        self.stream: Stream | None = None
        """In place of the dataset and the sampler."""
        self.accumulate = self.micro = 1
        self.loader: dict[str, Any] = {"generator": torch.Generator()}
        self.train: Callable[[torch.Tensor, torch.Tensor], None] = self.plain
        self.zero_at_top = False
        self.to_none = True
        self.start: list[Hook] = []
        """Once, in a run that resumes from nothing."""
        self.top: list[Hook] = []
        self.before: list[Hook] = []
        """Between the optimizer's step and `session.step()`."""
        self.after: list[Hook] = []
        self.tail: list[Hook] = []
        self.most = 0
        """Steps after which the loop leaves an epoch."""
        self.number = 0
        self.place: Any = None
        """The sampler, or the stream."""
        self.noted: Hook = lambda: [*own_part(self.attached, self.rank)]
        """What is compared; the cursor beside."""

    def ddp(self, make: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW, **how: Any) -> None:
        self.model: Any = DistributedDataParallel(self.net, **how)
        self.optimizer = make(self.model.parameters(), lr=0.01)
        self.attached |= {"model": self.model, "optimizer": self.optimizer}

    def scheduler(self, make: Callable[..., Any], *args: Any, **how: Any) -> Any:
        self.attached["scheduler"] = found = make(self.optimizer, *args, **how)
        return found

    def loss(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return nn.functional.mse_loss(self.model(x), y)

    def zero(self) -> None:
        self.optimizer.zero_grad(set_to_none=self.to_none)

    def plain(self, x: torch.Tensor, y: torch.Tensor) -> None:
        if self.zero_at_top:
            self.zero()
        self.loss(x, y).backward()
        self.at("backward")
        self.optimizer.step()
        if not self.zero_at_top:
            self.zero()

    def at(self, place: str) -> None:
        """Ends this rank, or all of them, if that is due."""
        step = self.session.steps + (place not in ("step", "tail"))
        for number, (where, when, who) in enumerate(self.faults):
            if (where, when) == (place, step) and who in (self.rank, -1) and (who >= 0 or self.rank == 0):
                fired = faults.WORK / f"fired-{number}"
                with contextlib.suppress(FileExistsError):
                    os.close(os.open(fired, os.O_CREAT | os.O_EXCL))
                    if who < 0:
                        for rank in range(1, self.session.world_size):
                            os.kill(int((faults.WORK / f"pid-{rank}").read_text()), signal.SIGKILL)
                    os.kill(os.getpid(), signal.SIGKILL)
                    time.sleep(60)

    faults: ClassVar[list[tuple[str, int, int]]] = []


def kind(setup: Callable[[Script], None]) -> Callable[[Script], None]:
    KINDS[setup.__name__] = setup
    return setup


def evaluate(job: Script) -> None:
    if job.rank == 0:
        job.model.module.eval()
        with torch.no_grad():
            job.model.module(torch.ones(4, 16))
        job.model.module.train()
    torch.distributed.barrier()
