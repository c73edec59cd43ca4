"""Kinds of `exact.py`: random numbers, what ranks do together, models, evaluations and saves, loaders."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import torch
from exact_script import KINDS, STEPS_PER_EPOCH, Hook, Samples, Script, Stream, evaluate, kind
from exact_training import LR, averages, clamp
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

import elasticd
from elasticd.checkpointing.state.training_state import GeneratorState

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
    scheduler = job.scheduler(LR.StepLR, 1, gamma=0.7)
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
    job.tail.append(job.scheduler(LR.StepLR, 1, gamma=0.7).step)
    saves(job, job.tail)


@kind
def saved_before_the_tail(job: Script) -> None:
    job.ddp()
    saves(job, job.tail)
    job.tail.append(job.scheduler(LR.StepLR, 1, gamma=0.7).step)


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
    job.tail.append(job.scheduler(LR.StepLR, 1, gamma=0.7).step)


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
    scheduler = job.scheduler(LR.ExponentialLR, 0.8)
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
    job.tail.append(job.scheduler(LR.StepLR, 1, gamma=0.7).step)


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
