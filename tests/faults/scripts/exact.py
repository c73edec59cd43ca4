"""Trains in one of many ways, and notes a digest of everything at the beginning of each step: `benchmarks.exact`.

Each rank ends at places in a step that the test names: see PLACES. In a job without faults nothing else is different.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import itertools
import json
import math
import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import faults
import torch
from donor import digest
from kinds import own_part
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import swa_utils
from torch.utils.data import DataLoader, Dataset

import elasticd
from elasticd.checkpointing import donor
from elasticd.checkpointing.state import GeneratorState, tensors

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


def optimizer_kind(name: str, make: Callable[..., torch.optim.Optimizer]) -> None:
    KINDS[name] = lambda job: job.ddp(make)


optimizer_kind("adamw", torch.optim.AdamW)
optimizer_kind("adamw_loop", lambda p, lr: torch.optim.AdamW(p, lr=lr, foreach=False))
optimizer_kind("adam_amsgrad", lambda p, lr: torch.optim.Adam(p, lr=lr, amsgrad=True))
optimizer_kind("sgd_momentum", lambda p, lr: torch.optim.SGD(p, lr=lr, momentum=0.9, nesterov=True))
optimizer_kind("sgd", lambda p, lr: torch.optim.SGD(p, lr=lr))
optimizer_kind("rmsprop", torch.optim.RMSprop)
optimizer_kind("adagrad", torch.optim.Adagrad)
optimizer_kind("radam", torch.optim.RAdam)


optimizer_kind("adamw_fused", lambda p, lr: torch.optim.AdamW(p, lr=lr, fused=True))


class Embedded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(32, 8, sparse=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.table((x * 8).long() % 32).mean(dim=(1, 2)).unsqueeze(1)
        return result


@kind
def sparse_adam(job: Script) -> None:
    job.net = Embedded()
    job.ddp(torch.optim.SparseAdam)


class Wrapper:
    """As of FP16_Optimizer or Lookahead: no `Optimizer`, but it has one."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self.param_groups = optimizer.param_groups

    def step(self) -> None:
        self.optimizer.step()

    def zero_grad(self, **how: Any) -> None:
        self.optimizer.zero_grad(**how)

    def state_dict(self) -> dict[str, Any]:
        return {"optimizer": self.optimizer.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(state["optimizer"])


@kind
def wrapped_optimizer(job: Script) -> None:
    job.ddp()
    job.optimizer = job.attached["optimizer"] = Wrapper(job.optimizer)


class SharpnessAware(torch.optim.Optimizer):
    """SAM as its public code has it: `state_dict()` lacks what the inner optimizer keeps."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})
        self.inner = torch.optim.AdamW(self.param_groups, lr=lr)
        self.param_groups = self.inner.param_groups

    @torch.no_grad()
    def first_step(self) -> None:
        for each in self.param_groups[0]["params"]:
            self.state[each]["old"] = each.data.clone()
            each.add_(0.05 * each.grad)
        self.zero_grad()

    @torch.no_grad()
    def second_step(self) -> None:
        for each in self.param_groups[0]["params"]:
            each.data = self.state[each]["old"]
        self.inner.step()
        self.zero_grad()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.inner.param_groups = self.param_groups


def sharpness(job: Script) -> None:
    job.ddp(SharpnessAware)

    def train(x: torch.Tensor, y: torch.Tensor) -> None:
        with job.model.no_sync():
            job.loss(x, y).backward()
        job.optimizer.first_step()
        job.loss(x, y).backward()
        job.at("backward")
        job.optimizer.second_step()

    job.train = train


@kind
def sharpness_aware(job: Script) -> None:
    sharpness(job)


@kind
def sharpness_aware_whole(job: Script) -> None:
    sharpness(job)
    job.attached["inner"] = job.optimizer.inner


@kind
def stepped_in_backward(job: Script) -> None:
    """By an optimizer for each parameter, whose gradient is averaged by hand and never kept."""
    without_ddp(job)
    every = {each: torch.optim.AdamW([each], lr=0.01) for each in job.net.parameters()}
    job.attached |= {f"optimizer_{number}": each for number, each in enumerate(every.values())}

    def step(parameter: torch.Tensor) -> None:
        torch.distributed.all_reduce(parameter.grad)
        every[parameter].step()
        every[parameter].zero_grad()

    for each in every:
        each.register_post_accumulate_grad_hook(step)

    def train(x: torch.Tensor, y: torch.Tensor) -> None:
        (job.loss(x, y) / job.session.world_size).backward()
        job.at("backward")

    job.train = train


def without_ddp(job: Script) -> None:
    job.model = job.net
    for each in job.net.parameters():
        torch.distributed.broadcast(each.detach(), 0)
    job.attached["model"] = job.net


@kind
def gradients_averaged_by_hand(job: Script) -> None:
    without_ddp(job)
    job.optimizer = job.attached["optimizer"] = torch.optim.AdamW(job.net.parameters(), lr=0.01)

    def train(x: torch.Tensor, y: torch.Tensor) -> None:
        (job.loss(x, y) / job.session.world_size).backward()
        job.at("backward")
        for each in job.net.parameters():
            torch.distributed.all_reduce(each.grad)
        job.optimizer.step()
        job.zero()

    job.train = train


@kind
def zero_redundancy(job: Script) -> None:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    job.ddp(lambda p, lr: ZeroRedundancyOptimizer(p, torch.optim.AdamW, lr=lr))
    job.noted = lambda: [dict(job.net.named_parameters()), job.optimizer.optim.state_dict()]


@kind
def fully_sharded(job: Script) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    job.model = fully_shard(job.net, mesh=init_device_mesh("cpu", (job.session.world_size,)))
    job.optimizer = torch.optim.AdamW(job.net.parameters(), lr=0.01)
    job.attached |= {"model": job.net, "optimizer": job.optimizer}

    def noted() -> list[Any]:
        kept = [job.optimizer.state[each] for each in job.net.parameters()]
        return [getattr(each, "to_local", lambda each=each: each)() for each in [*job.net.parameters(), *tensors(kept)]]

    job.noted = noted


@kind
def lbfgs(job: Script) -> None:
    job.ddp(lambda p, lr: torch.optim.LBFGS(p, lr=lr, max_iter=3))

    def train(x: torch.Tensor, y: torch.Tensor) -> None:
        def closure() -> torch.Tensor:
            job.zero()
            loss = job.loss(x, y)
            loss.backward()
            return loss

        job.optimizer.step(closure)

    job.train = train


# --- schedules --------------------------------------------------------------------------------------------------------

_LR = torch.optim.lr_scheduler


def scheduled(name: str, make: Callable[..., Any], *args: Any, **how: Any) -> None:
    def setup(job: Script) -> None:
        job.ddp()
        job.before.append(job.scheduler(make, *args, **how).step)

    KINDS[name] = setup


scheduled("cosine", _LR.CosineAnnealingLR, 40)
scheduled("one_cycle", _LR.OneCycleLR, 0.05, total_steps=120)
scheduled("warm_restarts", _LR.CosineAnnealingWarmRestarts, 5)
scheduled("warmup", _LR.LambdaLR, lambda step: min(1.0, (step + 1) / 10))
scheduled(
    "sequential", lambda o: _LR.SequentialLR(o, [_LR.LinearLR(o, 0.1), _LR.ExponentialLR(o, 0.9)], milestones=[7])
)
scheduled("chained", lambda o: _LR.ChainedScheduler([_LR.ConstantLR(o, 0.5, 9), _LR.ExponentialLR(o, 0.95)]))
scheduled("cyclic", _LR.CyclicLR, 0.001, 0.02, step_size_up=5, cycle_momentum=False)


@kind
def scheduler_after_step(job: Script) -> None:
    job.ddp()
    job.after.append(job.scheduler(_LR.CosineAnnealingLR, 40).step)


@kind
def scheduler_by_epoch(job: Script) -> None:
    job.ddp()
    job.tail.append(job.scheduler(_LR.StepLR, 1, gamma=0.7).step)


@kind
def scheduler_every_fourth_step(job: Script) -> None:
    job.ddp()
    scheduler = job.scheduler(_LR.ExponentialLR, 0.8)
    job.before.append(lambda: (job.session.steps + 1) % 4 == 0 and scheduler.step())


@kind
def scheduler_every_fourth_step_late(job: Script) -> None:
    job.ddp()
    scheduler = job.scheduler(_LR.ExponentialLR, 0.8)
    job.after.append(lambda: job.session.steps % 4 == 0 and scheduler.step())


@kind
def plateau_by_epoch(job: Script) -> None:
    job.ddp()
    scheduler = job.scheduler(_LR.ReduceLROnPlateau, patience=0, factor=0.5)
    job.tail.append(lambda: scheduler.step(1.0 + 0.1 * (job.place.epoch % 2)))


@kind
def plateau_in_an_epoch(job: Script) -> None:
    job.ddp()
    scheduler = job.scheduler(_LR.ReduceLROnPlateau, patience=0, factor=0.5)
    job.after.append(lambda: job.session.steps % 4 == 3 and scheduler.step(1.0))


@kind
def lr_by_hand(job: Script) -> None:
    job.ddp()
    job.top.append(lambda: job.optimizer.param_groups[0].update(lr=0.01 / (1 + job.session.steps)))


@kind
def lr_by_hand_late(job: Script) -> None:
    job.ddp()
    job.after.append(lambda: job.optimizer.param_groups[0].update(lr=0.01 / (1 + job.session.steps)))


# --- averaged, clipped and other weights ------------------------------------------------------------------------------


def averages(job: Script, when: list[Hook], due: Callable[[], bool] = lambda: True) -> None:
    job.ddp()
    ema = swa_utils.AveragedModel(job.net, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.9))
    job.attached["ema"] = ema
    when.append(lambda: due() and ema.update_parameters(job.net))


@kind
def ema(job: Script) -> None:
    averages(job, job.before)


@kind
def ema_after_step(job: Script) -> None:
    averages(job, job.after)


@kind
def ema_after_step_from_step_10(job: Script) -> None:
    averages(job, job.after, lambda: job.session.steps >= 10)


@kind
def swa_by_epoch(job: Script) -> None:
    averages(job, job.tail)


@kind
def evaluated_with_averaged_weights(job: Script) -> None:
    """Between two steps, in which the model has those."""
    averages(job, job.before)

    def exchanged() -> None:
        kept = [each.detach().clone() for each in job.net.parameters()]
        with torch.no_grad():
            for each, other in zip(job.net.parameters(), job.attached["ema"].module.parameters(), strict=True):
                each.copy_(other)
            evaluate(job)
            for each, other in zip(job.net.parameters(), kept, strict=True):
                each.copy_(other)

    job.after.append(lambda: job.session.steps % 5 == 0 and exchanged())


class Best:
    """Of several epochs."""

    def __init__(self) -> None:
        self.states: list[Any] = []

    def state_dict(self) -> dict[str, Any]:
        return {"states": self.states}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.states = state["states"]


@kind
def rolled_back(job: Script) -> None:
    """After every other epoch to what was kept after the one before."""
    job.ddp()
    job.attached["best"] = best = Best()

    def after_epoch() -> None:
        both = (job.model, job.optimizer)
        if job.place.epoch % 2 == 0:
            best.states = [copy.deepcopy(each.state_dict()) for each in both]
        else:
            for each, state in zip(both, best.states, strict=True):
                each.load_state_dict(copy.deepcopy(state))

    job.tail.append(after_epoch)


class Contrast(nn.Module):
    """MoCo: a forward pass changes an encoder that no optimizer trains, and a queue."""

    queue: torch.Tensor
    place: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.head = nn.Linear(16, 8), nn.Linear(8, 1)
        self.follower = copy.deepcopy(self.encoder).requires_grad_(False)
        self.register_buffer("queue", torch.zeros(12, 8))
        self.register_buffer("place", torch.zeros((), dtype=torch.long))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            for each, own in zip(self.follower.parameters(), self.encoder.parameters(), strict=True):
                each.lerp_(own, 0.1)
            first = int(self.place)
            self.queue[first : first + 4] = self.follower(x)
            self.place.fill_((first + 4) % 12)
        found = self.encoder(x)
        result: torch.Tensor = self.head(found) + (found @ self.queue.clone().T).mean(dim=1, keepdim=True)
        return result


@kind
def momentum_encoder(job: Script) -> None:
    job.net = Contrast()
    job.ddp()


@kind
def swa_with_batch_norm(job: Script) -> None:
    job.net.insert(1, nn.BatchNorm1d(32))
    averages(job, job.tail)
    averaged = job.attached["ema"]
    batches = [(torch.ones(4, 16), None), (torch.arange(64.0).view(4, 16), None)]
    job.tail.append(lambda: swa_utils.update_bn(batches, averaged))


class Shadow:
    """Averaged weights as many scripts have them."""

    def __init__(self, net: nn.Module) -> None:
        self._net = net
        self.shadow = {name: each.detach().clone() for name, each in net.named_parameters()}

    def update(self) -> None:
        for name, each in self._net.named_parameters():
            self.shadow[name] = 0.9 * self.shadow[name] + 0.1 * each.detach()

    def state_dict(self) -> dict[str, Any]:
        return self.shadow

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.shadow = {name: each.clone() for name, each in state.items()}


@kind
def shadow(job: Script) -> None:
    job.ddp()
    job.attached["shadow"] = own = Shadow(job.net)
    job.before.append(own.update)


@kind
def shadow_after_step(job: Script) -> None:
    job.ddp()
    job.attached["shadow"] = own = Shadow(job.net)
    job.after.append(own.update)


def clamp(net: nn.Module) -> None:
    with torch.no_grad():
        for each in net.parameters():
            each.clamp_(-0.2, 0.2)


@kind
def clamped(job: Script) -> None:
    job.ddp()
    job.before.append(lambda: clamp(job.net))


@kind
def clamped_after_step(job: Script) -> None:
    job.ddp()
    job.after.append(lambda: [each.data.mul_(0.99) for each in job.net.parameters()])


@kind
def norm_clipped(job: Script) -> None:
    job.ddp()

    def train(x: torch.Tensor, y: torch.Tensor) -> None:
        job.loss(x, y).backward()
        job.at("backward")
        nn.utils.clip_grad_norm_(job.model.parameters(), 0.1)
        job.optimizer.step()
        job.zero()

    job.train = train


@kind
def zeroed_at_top(job: Script) -> None:
    job.ddp()
    job.zero_at_top = True


@kind
def zeroed_in_place(job: Script) -> None:
    job.ddp()
    job.zero_at_top, job.to_none = True, False


@kind
def lookahead(job: Script) -> None:
    """Every fifth step the weights go half of the way back."""
    job.ddp()
    slow = copy.deepcopy(job.net)
    job.attached["slow"] = slow

    def follow() -> None:
        if (job.session.steps + 1) % 5 == 0:
            with torch.no_grad():
                for fast, each in zip(job.net.parameters(), slow.parameters(), strict=True):
                    each.lerp_(fast, 0.5)
                    fast.copy_(each)

    job.before.append(follow)


# --- scaled, accumulated ----------------------------------------------------------------------------------------------


def scaled_by(job: Script, scaler: Any, update: list[Hook] | None = None, overflow: tuple[int, ...] = ()) -> None:
    job.ddp()
    job.attached["scaler"] = scaler

    def train(x: torch.Tensor, y: torch.Tensor) -> None:
        loss = job.loss(x, y) * (math.inf if (job.session.steps + 1) % 36 in overflow else 1.0)
        scaler.scale(loss).backward()
        job.at("backward")
        scaler.step(job.optimizer)
        if update is None:
            scaler.update()
        job.zero()

    if update is not None:
        update.append(scaler.update)
    job.train = train


@kind
def scaled(job: Script) -> None:
    scaled_by(job, torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=3))


@kind
def scaled_with_overflows(job: Script) -> None:
    scaled_by(job, torch.amp.GradScaler("cpu", init_scale=64.0), overflow=(4, 9, 14, 20, 30))


@kind
def scaler_updated_after_step(job: Script) -> None:
    scaled_by(job, torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=3), job.after)


@kind
def autocast(job: Script) -> None:
    job.ddp()

    def train(x: torch.Tensor, y: torch.Tensor) -> None:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = job.loss(x, y)
        loss.backward()
        job.at("backward")
        job.optimizer.step()
        job.zero()

    job.train = train


def accumulates(job: Script) -> None:
    def train(x: torch.Tensor, y: torch.Tensor) -> None:
        job.number += 1
        last = job.number % 2 == 0
        with contextlib.nullcontext() if last else job.model.no_sync():
            job.loss(x, y).backward()
        job.at("backward")
        if last:
            job.optimizer.step()
            job.zero()

    job.train = train


@kind
def accumulated(job: Script) -> None:
    job.ddp()
    job.accumulate = 2
    accumulates(job)


@kind
def accumulated_step_by_step(job: Script) -> None:
    """`session.step()` for each micro-batch."""
    job.ddp()
    job.micro = 2
    accumulates(job)


@kind
def accumulated_by_amount(job: Script) -> None:
    """Of micro-batches that differ in size, and so in number."""
    job.ddp()
    job.micro = 2
    held = 0

    def train(x: torch.Tensor, y: torch.Tensor) -> None:
        nonlocal held
        held += 1 + job.session.steps % 3
        with contextlib.nullcontext() if held >= 4 else job.model.no_sync():
            job.loss(x, y).backward()
        job.at("backward")
        if held >= 4:
            held = 0
            job.optimizer.step()
            job.zero()

    job.train = train


@kind
def steps_left_out(job: Script) -> None:
    """As where the loss is not finite: the script makes no optimizer's step, and counts one."""
    job.ddp()

    def train(x: torch.Tensor, y: torch.Tensor) -> None:
        job.loss(x, y).backward()
        job.at("backward")
        if (job.session.steps + 1) % 4 != 3:
            job.optimizer.step()
        job.zero()

    job.train = train


@kind
def learning_rate_searched(job: Script) -> None:
    """Before training, which begins with the weights from before."""
    job.ddp()

    def search() -> None:
        both = (job.model, job.optimizer)
        kept = copy.deepcopy([each.state_dict() for each in both])
        for lr in (0.001, 0.01, 0.1):
            job.optimizer.param_groups[0]["lr"] = lr
            job.plain(torch.ones(4, 16), torch.ones(4, 1))
        for each, state in zip(both, kept, strict=True):
            each.load_state_dict(state)

    job.start.append(search)


# --- random numbers ---------------------------------------------------------------------------------------------------


@kind
def dropout(job: Script) -> None:
    job.net.insert(1, nn.Dropout(0.3))
    job.ddp()


@kind
def dropout_with_the_usual_loader(job: Script) -> None:
    """Whose iterations draw a seed each."""
    job.net.insert(1, nn.Dropout(0.3))
    job.loader = {}
    job.ddp()


@kind
def batch_norm(job: Script) -> None:
    job.net.insert(1, nn.BatchNorm1d(32))
    job.ddp()


@kind
def group_norm_and_rrelu(job: Script) -> None:
    job.net = nn.Sequential(nn.Linear(16, 32), nn.GroupNorm(4, 32), nn.RReLU(), nn.Linear(32, 1))
    job.ddp()


def augmented(name: str, augment: Callable[[], Any]) -> None:
    def setup(job: Script) -> None:
        job.dataset = Samples(augment)
        job.loader = {}
        job.ddp()

    KINDS[name] = setup


def numpy_normal() -> float:
    import numpy

    return float(numpy.random.randn())


augmented("augmented_by_python", lambda: random.gauss(0, 0.1))
augmented("augmented_by_numpy", numpy_normal)
augmented("augmented_by_torch", lambda: torch.randn(()) * 0.1)


@kind
def input_noise(job: Script) -> None:
    job.ddp()
    job.train = lambda x, y: job.plain(x + 0.1 * torch.randn_like(x), y)


@kind
def langevin(job: Script) -> None:
    """SGLD: all ranks draw the same noise after the optimizer's step."""
    job.ddp()
    torch.manual_seed(7)

    def noise() -> None:
        with torch.no_grad():
            for each in job.net.parameters():
                each.add_(0.001 * torch.randn_like(each))

    job.before.append(noise)


@kind
def sampled_before_step(job: Script) -> None:
    """Rank 0 draws between its backward pass and `session.step()`, for its log."""
    job.net.insert(1, nn.Dropout(0.3))
    job.ddp()
    job.before.append(lambda: job.rank == 0 and torch.randn(3))


@kind
def sampled_after_step(job: Script) -> None:
    job.net.insert(1, nn.Dropout(0.3))
    job.ddp()
    job.after.append(lambda: job.rank == 0 and torch.randn(3))


@kind
def sampled_in_the_tail(job: Script) -> None:
    job.net.insert(1, nn.Dropout(0.3))
    job.ddp()
    job.tail.append(lambda: torch.randn(3))


@kind
def own_generator(job: Script) -> None:
    job.ddp()
    own = torch.Generator().manual_seed(3)
    job.attached["noise"] = GeneratorState(own)
    job.train = lambda x, y: job.plain(x + 0.1 * torch.randn(x.shape, generator=own), y)


# --- what ranks do together -------------------------------------------------------------------------------------------


@kind
def loss_averaged_before_step(job: Script) -> None:
    """So that a rank waits there for one that has died."""
    job.ddp()
    job.before.append(lambda: torch.distributed.all_reduce(torch.ones(1)))


class Average(nn.Module):
    mean: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.mean.lerp_(x.detach().mean(dim=0), 0.1)
        return x - self.mean.clone()


@kind
def buffers_of_rank_0(job: Script) -> None:
    """That a forward pass uses, not only an evaluation."""
    job.net.insert(1, Average())
    job.ddp()


@kind
def buffers_apart(job: Script) -> None:
    job.net.insert(1, Average())
    job.ddp(broadcast_buffers=False)


@kind
def power_sgd(job: Script) -> None:
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as power

    job.ddp()
    job.model.register_comm_hook(power.PowerSGDState(None, 1, start_powerSGD_iter=2), power.powerSGD_hook)


@kind
def compressed(job: Script) -> None:
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    job.ddp()
    job.model.register_comm_hook(None, default_hooks.fp16_compress_hook)


@kind
def trained_apart(job: Script) -> None:
    """Local SGD: ranks are averaged every fourth step, at which the state is saved, too."""
    job.ddp()

    def train(x: torch.Tensor, y: torch.Tensor) -> None:
        with job.model.no_sync():
            job.loss(x, y).backward()
        job.at("backward")
        job.optimizer.step()
        job.zero()
        if (job.session.steps + 1) % 4 == 0:
            for each in job.net.parameters():
                torch.distributed.all_reduce(each.detach(), torch.distributed.ReduceOp.AVG)

    job.train = train


# --- several models ---------------------------------------------------------------------------------------------------


def adversaries(job: Script) -> tuple[Any, torch.optim.Optimizer]:
    job.net.insert(1, nn.Dropout(0.2))
    job.ddp()
    critic = DistributedDataParallel(nn.Sequential(nn.Linear(1, 8), nn.Dropout(0.2), nn.Linear(8, 1)))
    second = torch.optim.Adam(critic.parameters(), lr=0.01)
    job.attached |= {"critic": critic, "critic_optimizer": second}
    return critic, second


def play(job: Script, toggles: bool, both: bool, after_critic: Hook = lambda: None) -> None:
    critic, second = adversaries(job)

    def needs(net: Any, value: bool) -> None:
        if toggles:
            net.requires_grad_(value)

    def train(x: torch.Tensor, y: torch.Tensor) -> None:
        if both or job.session.steps % 2:
            needs(job.net, False)
            needs(critic, True)
            with torch.no_grad():
                made = job.model.module(x)
            (critic(torch.cat([made, y])).mean() ** 2).backward()
            if not both:
                job.at("backward")
            second.step()
            second.zero_grad()
            after_critic()
        if both or job.session.steps % 2 == 0:
            needs(job.net, True)
            needs(critic, False)
            (critic.module(job.model(x)).mean() ** 2).backward()
            job.at("backward")
            job.optimizer.step()
            job.optimizer.zero_grad()
            second.zero_grad()

    job.train = train


@kind
def gan(job: Script) -> None:
    play(job, toggles=False, both=True)


@kind
def gan_with_frozen_parts(job: Script) -> None:
    play(job, toggles=True, both=True)


@kind
def gan_in_turn(job: Script) -> None:
    play(job, toggles=False, both=False)


@kind
def gan_in_turn_with_frozen_parts(job: Script) -> None:
    play(job, toggles=True, both=False)


@kind
def wasserstein(job: Script) -> None:
    play(job, toggles=True, both=True, after_critic=lambda: clamp(job.attached["critic"]))


@kind
def two_optimizers(job: Script) -> None:
    job.ddp()
    first = torch.optim.SGD(job.net[0].parameters(), lr=0.01, momentum=0.9)
    second = torch.optim.AdamW(job.net[2].parameters(), lr=0.01)
    job.optimizer = first
    job.attached |= {"optimizer": first, "second": second}

    def train(x: torch.Tensor, y: torch.Tensor) -> None:
        job.loss(x, y).backward()
        job.at("backward")
        first.step()
        second.step()
        job.model.zero_grad()

    job.train = train


# --- evaluations and saves --------------------------------------------------------------------------------------------


def evaluate(job: Script) -> None:
    if job.rank == 0:
        job.model.module.eval()
        with torch.no_grad():
            job.model.module(torch.ones(4, 16))
        job.model.module.train()
    torch.distributed.barrier()


@kind
def evaluated(job: Script) -> None:
    """By rank 0, while the others wait in a barrier."""
    job.net.insert(1, nn.Dropout(0.3))
    job.ddp()
    job.after.append(lambda: job.session.steps % 3 == 0 and evaluate(job))


@kind
def evaluated_in_the_tail(job: Script) -> None:
    job.net.insert(1, nn.BatchNorm1d(32))
    job.ddp()
    scheduler = job.scheduler(_LR.StepLR, 1, gamma=0.7)
    job.tail += [lambda: evaluate(job), scheduler.step]


def saves(job: Script, hooks: list[Hook], due: Callable[[], bool] = lambda: True) -> None:
    hooks.append(lambda: due() and job.session.save())


@kind
def saved_after_step(job: Script) -> None:
    job.ddp()
    saves(job, job.after, lambda: job.session.steps % 5 == 0)


@kind
def saved_before_step(job: Script) -> None:
    job.ddp()
    saves(job, job.before, lambda: job.session.steps % 5 == 0)


@kind
def saved_at_top(job: Script) -> None:
    job.ddp()
    saves(job, job.top, lambda: job.session.steps % 5 == 0)


@kind
def saved_after_the_tail(job: Script) -> None:
    job.ddp()
    job.tail.append(job.scheduler(_LR.StepLR, 1, gamma=0.7).step)
    saves(job, job.tail)


@kind
def saved_before_the_tail(job: Script) -> None:
    job.ddp()
    saves(job, job.tail)
    job.tail.append(job.scheduler(_LR.StepLR, 1, gamma=0.7).step)


@kind
def saved_after_a_tail_that_draws(job: Script) -> None:
    job.net.insert(1, nn.Dropout(0.3))
    job.ddp()
    job.tail.append(lambda: torch.randn(3))
    saves(job, job.tail)


@kind
def saved_between_parts_of_a_tail(job: Script) -> None:
    """One change before, one after it."""
    averages(job, job.tail)
    saves(job, job.tail)
    job.tail.append(job.scheduler(_LR.StepLR, 1, gamma=0.7).step)


# --- loaders ----------------------------------------------------------------------------------------------------------


@kind
def worker_processes(job: Script) -> None:
    job.net.insert(1, nn.Dropout(0.3))
    job.loader = {"num_workers": 2}
    job.ddp()


@kind
def persistent_worker_processes(job: Script) -> None:
    job.net.insert(1, nn.Dropout(0.3))
    job.loader = {"num_workers": 1, "persistent_workers": True}
    job.ddp()


@kind
def ragged_epochs(job: Script) -> None:
    """The last step of each epoch has fewer samples."""
    job.dataset = Samples(count=8 * STEPS_PER_EPOCH - 3)
    job.ddp()


def two_loaders(job: Script) -> None:
    """The second one's epochs have five steps."""
    job.ddp()
    more = Samples(count=40)
    job.attached["second"] = second = elasticd.ElasticBatchSampler(more, global_batch=8, seed=1)

    def batches() -> Iterator[list[torch.Tensor]]:
        while True:
            yield from DataLoader(more, batch_sampler=second, **job.loader)
            second.set_epoch(second.epoch + 1)

    every = batches()
    job.train = lambda x, y: job.plain(*map(torch.cat, zip((x, y), next(every), strict=True)))


@kind
def labelled_and_unlabelled(job: Script) -> None:
    two_loaders(job)


@kind
def labelled_and_unlabelled_with_usual_loaders(job: Script) -> None:
    """Each iteration of both draws a seed."""
    job.net.insert(1, nn.Dropout(0.3))
    job.loader = {}
    two_loaders(job)


@kind
def labelled_and_unlabelled_late(job: Script) -> None:
    """A change after `session.step()` at the end of the second one's epoch is not at the end of an epoch."""
    two_loaders(job)
    scheduler = job.scheduler(_LR.ExponentialLR, 0.8)
    job.after.append(lambda: job.session.steps % 5 == 0 and scheduler.step())


@kind
def streamed(job: Script) -> None:
    """At the same place on each rank."""
    job.ddp()
    job.stream = job.attached["stream"] = Stream(job.rank)


@kind
def streamed_by_rank(job: Script) -> None:
    job.ddp()
    job.stream = job.per_rank["stream"] = Stream(job.rank)


class Replay:
    """Of reinforcement learning: what this rank has seen, from which it draws."""

    def __init__(self) -> None:
        self.seen: list[list[torch.Tensor]] = []

    def exchange(self, x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
        self.seen = [*self.seen, [x, y]][-10:]
        return random.choice(self.seen)

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen = state["seen"]


@kind
def replayed(job: Script) -> None:
    job.ddp()
    job.per_rank["replay"] = replay = Replay()
    job.train = lambda x, y: job.plain(*replay.exchange(x, y))


class Carried:
    """What a recurrent model is at, at the end of a batch."""

    def __init__(self) -> None:
        self.hidden: tuple[torch.Tensor, ...] = (torch.zeros(1, 4, 8), torch.zeros(1, 4, 8))

    def state_dict(self) -> dict[str, Any]:
        return {"hidden": list(self.hidden)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.hidden = tuple(state["hidden"])


class Continued(nn.Module):
    def __init__(self, carried: Carried) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(4, 8, batch_first=True), nn.Linear(8, 1)
        self._carried = carried

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        every, hidden = self.lstm(x.view(-1, 4, 4), self._carried.hidden)
        self._carried.hidden = tuple(each.detach() for each in hidden)
        result: torch.Tensor = self.head(every[:, -1])
        return result


@kind
def carried_over(job: Script) -> None:
    """From one batch to the next, by each rank."""
    job.per_rank["carried"] = carried = Carried()
    job.net = Continued(carried)
    job.ddp()


@kind
def short_epochs(job: Script) -> None:
    """The loop leaves each epoch early."""
    job.ddp()
    job.most = 4
    job.tail.append(job.scheduler(_LR.StepLR, 1, gamma=0.7).step)


# --- models -----------------------------------------------------------------------------------------------------------


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)
        self.second.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.second(self.first(x).relu()).mean(dim=1, keepdim=True)
        return result


@kind
def tied(job: Script) -> None:
    job.net = Tied()
    job.ddp()


@kind
def spectral_norm(job: Script) -> None:
    job.net[0] = nn.utils.parametrizations.spectral_norm(job.net[0])
    job.ddp()


@kind
def weight_norm(job: Script) -> None:
    job.net[0] = nn.utils.parametrizations.weight_norm(job.net[0])
    job.ddp()


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(4, 8, num_layers=2, dropout=0.2, batch_first=True), nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.head(self.lstm(x.view(-1, 4, 4))[0][:, -1])
        return result


@kind
def recurrent(job: Script) -> None:
    job.net = Recurrent()
    job.ddp()


class Checkpointed(nn.Sequential):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        from torch.utils.checkpoint import checkpoint

        result: torch.Tensor = self[-1](checkpoint(nn.Sequential(*list(self)[:3]), x, use_reentrant=False))
        return result


@kind
def recomputed(job: Script) -> None:
    job.net = Checkpointed(nn.Linear(16, 32), nn.Dropout(0.3), nn.ReLU(), nn.Linear(32, 1))
    job.ddp()


class CheckpointedTwice(nn.Module):
    """Parameters that are used twice need a static graph."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.3)), nn.Linear(16, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        from torch.utils.checkpoint import checkpoint

        for _ in range(2):
            x = checkpoint(self.inner, x if x.grad_fn else x.clone().requires_grad_(), use_reentrant=True)
        result: torch.Tensor = self.head(x)
        return result


@kind
def static_graph(job: Script) -> None:
    job.net = CheckpointedTwice()
    job.ddp(static_graph=True)


@kind
def compiled(job: Script) -> None:
    job.net.insert(1, nn.Dropout(0.3))
    job.ddp()
    job.model = torch.compile(job.model, backend="eager")
    job.attached["model"] = job.model


@kind
def unfrozen_late(job: Script) -> None:
    job.ddp(find_unused_parameters=True)
    job.top.append(lambda: job.net[0].requires_grad_(job.session.steps >= 8))


class ScheduleFree(torch.optim.Optimizer):
    """As Defazio's: the weights are between those that are averaged and those that move."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr, "k": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["k"] += 1
            for each in group["params"]:
                state = self.state[each]
                if not state:
                    state["z"], state["x"] = each.detach().clone(), each.detach().clone()
                state["z"].sub_(each.grad, alpha=group["lr"])
                state["x"].lerp_(state["z"], 1 / group["k"])
                each.copy_(0.9 * state["x"] + 0.1 * state["z"])


@kind
def schedule_free(job: Script) -> None:
    job.ddp(ScheduleFree)


class Meter:
    """A number of the script's own."""

    def __init__(self) -> None:
        self.count = 0

    def add(self) -> None:
        self.count += 1

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]


@kind
def counted(job: Script) -> None:
    job.ddp()
    job.attached["meter"] = meter = Meter()
    job.before.append(meter.add)


@kind
def counted_after_step(job: Script) -> None:
    job.ddp()
    job.attached["meter"] = meter = Meter()
    job.after.append(meter.add)


@kind
def counted_in_the_tail(job: Script) -> None:
    job.ddp()
    job.attached["meter"] = meter = Meter()
    job.tail.append(meter.add)


@kind
def gradient_noise(job: Script) -> None:
    """Each rank's own, before its gradients are averaged."""
    job.ddp()
    for each in job.net.parameters():
        each.register_hook(lambda gradient: gradient + 0.01 * torch.randn_like(gradient))


def main(args: argparse.Namespace) -> None:
    donor.LONGEST_COPY_S = 1.0  # the machine may be busy
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
    if session.restore() is None:
        for hook in job.start:
            hook()
    session.checkpoint(every=args.every)

    def note() -> None:
        held = [job.noted(), place.state_dict(), *(each.state_dict() for each in job.per_rank.values())]
        drawn = [torch.get_rng_state(), random.getstate()]
        faults.write(f"steps-{session.rank}", f"{session.round} {session.steps + 1} {digest([held, drawn])}\n")

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
    session.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("kind", choices=sorted(KINDS))
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--every", type=int, default=4)
    main(parser.parse_args())
