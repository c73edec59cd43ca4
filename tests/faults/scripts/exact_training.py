"""Kinds of `exact.py`: how a step trains: optimizers, schedules, weights, scaled and accumulated gradients."""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Callable
from typing import Any

import torch
from exact_script import KINDS, Hook, Script, evaluate, kind
from torch import nn
from torch.optim import swa_utils

from elasticd.checkpointing.state.training_state import tensors


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
def batch_norm_with_gradients_averaged_by_hand(job: Script) -> None:
    """Each rank's statistics are of its own batches."""
    job.net = nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 1))
    gradients_averaged_by_hand(job)
    job.noted = lambda: [job.net.state_dict(), job.optimizer.state_dict()]


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


def by_closure(job: Script, of_all: bool) -> None:
    job.ddp(lambda p, lr: torch.optim.LBFGS(p, lr=lr, max_iter=3))

    def train(x: torch.Tensor, y: torch.Tensor) -> None:
        def closure() -> torch.Tensor:
            job.zero()
            loss = job.loss(x, y)
            loss.backward()
            job.at("backward")
            if of_all:
                loss = loss.detach().clone()
                torch.distributed.all_reduce(loss, torch.distributed.ReduceOp.AVG)
            return loss

        job.optimizer.step(closure)

    job.train = train


@kind
def lbfgs(job: Script) -> None:
    """It keeps the loss, and may end by it: all ranks return the same."""
    by_closure(job, of_all=True)


@kind
def lbfgs_of_each_ranks_loss(job: Script) -> None:
    by_closure(job, of_all=False)


# --- schedules --------------------------------------------------------------------------------------------------------

LR = torch.optim.lr_scheduler


def scheduled(name: str, make: Callable[..., Any], *args: Any, **how: Any) -> None:
    def setup(job: Script) -> None:
        job.ddp()
        job.before.append(job.scheduler(make, *args, **how).step)

    KINDS[name] = setup


scheduled("cosine", LR.CosineAnnealingLR, 40)
scheduled("one_cycle", LR.OneCycleLR, 0.05, total_steps=120)
scheduled("warm_restarts", LR.CosineAnnealingWarmRestarts, 5)
scheduled("warmup", LR.LambdaLR, lambda step: min(1.0, (step + 1) / 10))
scheduled("sequential", lambda o: LR.SequentialLR(o, [LR.LinearLR(o, 0.1), LR.ExponentialLR(o, 0.9)], milestones=[7]))
scheduled("chained", lambda o: LR.ChainedScheduler([LR.ConstantLR(o, 0.5, 9), LR.ExponentialLR(o, 0.95)]))
scheduled("cyclic", LR.CyclicLR, 0.001, 0.02, step_size_up=5, cycle_momentum=False)


@kind
def scheduler_after_step(job: Script) -> None:
    job.ddp()
    job.after.append(job.scheduler(LR.CosineAnnealingLR, 40).step)


@kind
def scheduler_by_epoch(job: Script) -> None:
    job.ddp()
    job.tail.append(job.scheduler(LR.StepLR, 1, gamma=0.7).step)


@kind
def scheduler_every_fourth_step(job: Script) -> None:
    job.ddp()
    scheduler = job.scheduler(LR.ExponentialLR, 0.8)
    job.before.append(lambda: (job.session.steps + 1) % 4 == 0 and scheduler.step())


@kind
def scheduler_every_fourth_step_late(job: Script) -> None:
    job.ddp()
    scheduler = job.scheduler(LR.ExponentialLR, 0.8)
    job.after.append(lambda: job.session.steps % 4 == 0 and scheduler.step())


@kind
def plateau_by_epoch(job: Script) -> None:
    job.ddp()
    scheduler = job.scheduler(LR.ReduceLROnPlateau, patience=0, factor=0.5)
    job.tail.append(lambda: scheduler.step(1.0 + 0.1 * (job.place.epoch % 2)))


@kind
def plateau_in_an_epoch(job: Script) -> None:
    job.ddp()
    scheduler = job.scheduler(LR.ReduceLROnPlateau, patience=0, factor=0.5)
    job.after.append(lambda: job.session.steps % 4 == 3 and scheduler.step(1.0))


@kind
def lr_by_hand(job: Script) -> None:
    job.ddp()
    job.top.append(lambda: job.optimizer.param_groups[0].update(lr=0.01 / (1 + job.session.steps)))


@kind
def lr_by_hand_late(job: Script) -> None:
    job.ddp()
    job.after.append(lambda: job.optimizer.param_groups[0].update(lr=0.01 / (1 + job.session.steps)))


@kind
def weight_decay_by_hand_late(job: Script) -> None:
    job.ddp()
    job.after.append(lambda: job.optimizer.param_groups[0].update(weight_decay=0.1 * (1 + job.session.steps)))


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
def layer_clamped_late_now_and_then(job: Script) -> None:
    """Neither the first nor the last parameter."""
    job.ddp()

    def clamp_layer() -> None:
        if job.session.steps % 4 == 0:
            with torch.no_grad():
                job.net[0].bias.mul_(0.5)

    job.after.append(clamp_layer)


@kind
def moments_late_now_and_then(job: Script) -> None:
    """As of an optimizer that estimates a second moment by a backward pass of its own."""
    job.ddp()

    def estimate() -> None:
        if job.session.steps % 4 == 0:
            for each in job.net.parameters():
                job.optimizer.state[each]["exp_avg_sq"].mul_(0.5)

    job.after.append(estimate)


@kind
def moments_reset_in_a_saved_tail(job: Script) -> None:
    """As where low-rank factors are added to the weights and begin anew: ReLoRA."""
    job.ddp()

    def begin_anew() -> None:
        with torch.no_grad():
            job.net[2].weight.mul_(1.1)
        job.optimizer.state[job.net[2].weight] = {}
        job.session.save()

    job.tail.append(begin_anew)


class Tempered(nn.Linear):
    temperature: torch.Tensor

    def __init__(self) -> None:
        super().__init__(16, 1)
        self.register_buffer("temperature", torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.temperature

    def cool(self) -> None:
        self.temperature.mul_(0.97)


@kind
def buffer_after_step(job: Script) -> None:
    job.net = Tempered()
    job.ddp()
    job.after.append(job.net.cool)


@kind
def buffer_in_a_saved_tail(job: Script) -> None:
    job.net = Tempered()
    job.ddp()
    job.tail += [job.net.cool, job.session.save]


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
