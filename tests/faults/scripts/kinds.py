"""Trains in one of many ways, notes a digest of all that is attached at every step, and what it has restored."""

from __future__ import annotations

import argparse
import copy
import math
import time
from collections.abc import Callable, Iterator
from typing import Any

import faults
import numpy
import torch
from donor import digest
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import elasticd
from elasticd.checkpointing.at_fault import donor

Step = Callable[[torch.Tensor, torch.Tensor], None]
KINDS: dict[str, Callable[[Kind], None]] = {}


class Kind:
    """A job: `setup` names what is attached; `train` is one step, `after` follows `session.step()`."""

    def __init__(self) -> None:
        donor.MAX_COMMIT_COPY_S = 1.0  # the machine may be busy
        self.session = elasticd.init()
        torch.manual_seed(self.session.rank)
        self.net: Any = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))
        self.attached: dict[str, Any] = {}
        self.train: Step = self.plain
        self.after: Callable[[], None] = lambda: None

    def ddp(self, **how: Any) -> None:
        self.model = DistributedDataParallel(self.net, **how)
        self.optimizer: torch.optim.Optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.attached |= {"model": self.model, "optimizer": self.optimizer}

    def loss(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.mse_loss(self.model(x), y)

    def plain(self, x: torch.Tensor, y: torch.Tensor) -> None:
        self.loss(x, y).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def first(self, more: Callable[[], None]) -> None:
        """Something before the forward pass."""
        before = self.train

        def train(x: torch.Tensor, y: torch.Tensor) -> None:
            more()
            before(x, y)

        self.train = train

    def then(self, more: Callable[[], None]) -> None:
        """Something between the optimizer's step and `session.step()`."""
        before = self.train

        def train(x: torch.Tensor, y: torch.Tensor) -> None:
            before(x, y)
            more()

        self.train = train


def kind(setup: Callable[[Kind], None]) -> Callable[[Kind], None]:
    KINDS[setup.__name__] = setup
    return setup


@kind
def gan_both(job: Kind) -> None:
    job.ddp()
    other = DistributedDataParallel(torch.nn.Linear(1, 1))
    second = torch.optim.SGD(other.parameters(), lr=0.01, momentum=0.9)
    job.attached |= {"critic": other, "critic_optimizer": second}

    def train(x: torch.Tensor, y: torch.Tensor) -> None:
        job.plain(x, y)
        torch.distributed.barrier()  # the other rank has made the optimizer's step, too
        faults.at(1000 + job.session.steps + 1)
        second.zero_grad()
        (other(job.model(x).detach()) - other(y)).mean().square().backward()
        second.step()

    job.train = train


class Divided(torch.optim.SGD):
    """Each rank updates a share of the parameters and keeps its momentum, as some code of Muon."""

    def step(self, closure: Any = None) -> None:
        every = self.param_groups[0]["params"]
        rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
        gradients = [each.grad for each in every]
        for number, each in enumerate(every):
            each.grad = each.grad if number % ranks == rank else None
        super().step(closure)
        for number, (each, gradient) in enumerate(zip(every, gradients, strict=True)):
            each.grad = gradient
            torch.distributed.broadcast(each.detach(), number % ranks)


@kind
def divided(job: Kind) -> None:
    job.ddp()
    job.optimizer = job.attached["optimizer"] = Divided(job.net.parameters(), lr=0.01, momentum=0.9)


@kind
def averaged_in_steps_left_out(job: Kind) -> None:
    """As where a GradScaler finds an overflow: the optimizer makes no step, and the averaged weights follow."""
    job.ddp()
    ema = torch.optim.swa_utils.AveragedModel(job.net)
    job.attached["ema"] = ema

    def train(x: torch.Tensor, y: torch.Tensor) -> None:
        job.loss(x, y).backward()
        if job.session.steps + 1 not in (3, 5, 9):
            job.optimizer.step()
        job.optimizer.zero_grad()
        ema.update_parameters(job.net)

    job.train = train


@kind
def averaged_on_rank_0(job: Kind) -> None:
    """And attached there alone."""
    job.ddp()
    if job.session.rank == 0:
        job.attached["ema"] = ema = torch.optim.swa_utils.AveragedModel(job.net)
        job.then(lambda: ema.update_parameters(job.net))


class Odd:
    """A number that it takes back from a save only, not from other steps."""

    rank_independent = True

    def __init__(self) -> None:
        self.count = 0

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state["count"] % 5:
            raise ValueError(f"there is no place for {state['count']}")
        self.count = state["count"]


@kind
def not_loadable_at_each_step(job: Kind) -> None:
    """As where the script has added a parameter group since the last save."""
    job.ddp()
    job.attached["odd"] = odd = Odd()
    job.then(lambda: setattr(odd, "count", odd.count + 1))


@kind
def sent(job: Kind) -> None:
    """Rank 0 sends its state to another process, for which torch moves it to shared memory."""
    job.net.insert(1, torch.nn.BatchNorm1d(32))
    job.ddp()

    def send() -> None:
        if (job.session.rank, job.session.steps) == (0, 9):
            for tensor in job.model.state_dict().values():
                tensor.share_memory_()

    job.after = send


@kind
def clamped_data(job: Kind) -> None:
    job.ddp()
    job.then(lambda: [p.data.clamp_(-0.2, 0.2) for p in job.net.parameters()] and None)


@kind
def overflown(job: Kind) -> None:
    """The scaler skips the optimizer's steps right before the faults, and the averaged weights follow."""
    job.ddp()
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    ema = torch.optim.swa_utils.AveragedModel(job.net)
    job.attached |= {"scaler": scaler, "ema": ema}

    def train(x: torch.Tensor, y: torch.Tensor) -> None:
        scaler.scale(job.loss(x, y) * (math.inf if job.session.steps + 1 in (12, 16) else 1.0)).backward()
        scaler.step(job.optimizer)
        scaler.update()
        job.optimizer.zero_grad()
        ema.update_parameters(job.net)

    job.train = train


@kind
def slowly_changed(job: Kind) -> None:
    """An optimizer's step of a large model takes long."""
    job.ddp()

    def wait() -> None:
        faults.at(1000 + job.session.steps + 1)
        if job.session.steps > 8:
            time.sleep(0.6)

    job.then(wait)


@kind
def convolved(job: Kind) -> None:
    layers = [torch.nn.Unflatten(1, (1, 4, 4)), torch.nn.Conv2d(1, 8, 3), torch.nn.BatchNorm2d(8), torch.nn.Flatten()]
    job.net = torch.nn.Sequential(*layers, torch.nn.Linear(32, 1)).to(memory_format=torch.channels_last)
    job.ddp()


@kind
def frozen(job: Kind) -> None:
    job.net[0].requires_grad_(False)
    job.ddp()


class Growing:
    """Numbers that grow and change their shape, in a list or a tensor, and a set that each rank fills in its order."""

    rank_independent = True

    def __init__(self, rank: int, kept: Callable[[list[int]], Any]) -> None:
        self._order, self._kept = 1 - 2 * rank, kept
        self._state: dict[str, Any] = {"values": None, "names": set()}

    def add(self, step: int) -> None:
        self._state["names"] |= {f"{number}-{step}" for number in range(9)[:: self._order]}
        self._state["values"] = self._kept([*range(step), *([step] if step % 3 else [])])

    def state_dict(self) -> dict[str, Any]:
        return dict(self._state)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._state = state


@kind
def growing(job: Kind) -> None:
    job.ddp()
    job.attached["growing"] = own = Growing(job.session.rank, lambda values: [values])
    job.then(lambda: own.add(job.session.steps + 1))


@kind
def growing_tensor(job: Kind) -> None:
    job.ddp()
    job.attached["growing"] = own = Growing(job.session.rank, lambda values: torch.tensor([values, values]))
    job.then(lambda: own.add(job.session.steps + 1))


@kind
def clamped_once(job: Kind) -> None:
    """Right before the fault, and at no step that is looked at in advance; one of many parameters."""
    job.net = torch.nn.Sequential(*(torch.nn.Linear(16, 16) for _ in range(60)), torch.nn.Linear(16, 1))
    job.ddp()

    def after() -> None:
        if job.session.steps == 12:
            with torch.no_grad():
                job.net[32].bias[3] += 1.0

    job.after = after


@kind
def replaced_optimizer(job: Kind) -> None:
    """The attached optimizer does not step any more."""
    job.ddp()
    other = torch.optim.SGD(job.model.parameters(), lr=0.01)

    def train(x: torch.Tensor, y: torch.Tensor) -> None:
        if job.session.steps < 11:
            job.plain(x, y)
        else:
            job.loss(x, y).backward()
            other.step()
            other.zero_grad()

    job.train = train


@kind
def hooked_optimizer(job: Kind) -> None:
    job.ddp()
    job.optimizer.register_state_dict_post_hook(lambda optimizer, found: {**found, "more": job.session.steps})


class Counted(torch.nn.Linear):
    """Each forward pass counts, and depends on the number; the state has it as that of an observer or a metric."""

    calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return super().forward(x) / self.calls

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "calls"] = self.calls

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        self.calls = state_dict.pop(prefix + "calls")
        super()._load_from_state_dict(state_dict, prefix, *args)


@kind
def counted_in_the_module(job: Kind) -> None:
    job.net = Counted(16, 1)
    job.ddp()


class Chosen(torch.nn.Linear):
    """Its state is another function's, as where a script sets one that chooses what is trained."""

    def __init__(self) -> None:
        super().__init__(16, 1)
        self.calls = 0
        usual = self.state_dict
        self.state_dict = lambda **how: {**usual(**how), "calls": self.calls}  # type: ignore[method-assign]

    def load_state_dict(self, state_dict: Any, *args: Any, **how: Any) -> Any:
        self.calls = state_dict.pop("calls")
        return super().load_state_dict(state_dict, *args, **how)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return super().forward(x) / self.calls


@kind
def state_dict_of_the_object(job: Kind) -> None:
    job.net = Chosen()
    job.ddp()


@kind
def lr_in_a_tensor(job: Kind) -> None:
    job.ddp()
    job.optimizer.param_groups[0]["lr"] = torch.tensor(0.01)


@kind
def frozen_later(job: Kind) -> None:
    job.ddp(find_unused_parameters=True)
    job.first(lambda: job.net[0].requires_grad_(job.session.steps < 11) and None)


@kind
def extended(job: Kind) -> None:
    """From step 12 on the optimizer has another group."""
    job.ddp()
    job.optimizer = torch.optim.AdamW(job.net[2].parameters(), lr=0.01)
    job.attached["optimizer"] = job.optimizer

    def extend() -> None:
        if len(job.optimizer.param_groups) == 1 and (job.session.round > 1 or job.session.steps == 11):
            job.optimizer.add_param_group({"params": list(job.net[0].parameters()), "lr": 0.02})

    extend()
    job.after = extend


@kind
def reloaded(job: Kind) -> None:
    """As a script does that goes back to an earlier state, or exchanges it: from step 12 on other tensors."""
    job.net.insert(1, torch.nn.BatchNorm1d(32))
    job.ddp()

    def reload() -> None:
        if job.session.steps == 11:
            job.optimizer.load_state_dict(copy.deepcopy(job.optimizer.state_dict()))
            job.model.load_state_dict(copy.deepcopy(job.model.state_dict()))

    job.after = reload


class Average(torch.nn.Module):
    """Its buffer is another tensor after each forward pass."""

    mean: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(dim=0)
        return x - self.mean


@kind
def replaced_buffer(job: Kind) -> None:
    job.net.insert(1, Average())
    job.ddp()


@kind
def reshaped_buffer(job: Kind) -> None:
    """From step 12 on it has more elements."""
    job.net.insert(1, Average())
    job.net.register_buffer("history", torch.zeros(4 + 4 * (job.session.round > 1)))
    job.ddp()

    def extend() -> None:
        if job.session.steps == 11 and job.session.round == 1:
            job.net.history = torch.zeros(8)

    job.after = extend


@kind
def unfrozen_apart(job: Kind) -> None:
    """DistributedDataParallel does not know the layer: each rank trains it for itself."""
    job.net[0].requires_grad_(False)
    job.ddp()
    job.after = lambda: job.net[0].requires_grad_(job.session.steps >= 10) and None


@kind
def never_stepped(job: Kind) -> None:
    """The attached optimizer is not what trains."""
    job.ddp()

    def train(x: torch.Tensor, y: torch.Tensor) -> None:
        job.loss(x, y).backward()
        with torch.no_grad():
            for parameter in job.net.parameters():
                parameter -= 0.01 * parameter.grad
                parameter.grad = None

    job.train = train


@kind
def unpicklable(job: Kind) -> None:
    """After steps 11 to 14 the scheduler's state holds a function."""
    job.ddp()

    class Own(torch.optim.lr_scheduler.StepLR):
        def state_dict(self) -> dict[str, Any]:
            own = {"function": lambda: 0} if 11 <= job.session.steps <= 14 else {}
            return {**super().state_dict(), **own}

    job.attached["scheduler"] = Own(job.optimizer, 5)


class Own:
    """An object of the script's."""

    def __init__(self, value: Callable[[], Any]) -> None:
        self._value = value

    def state_dict(self) -> dict[str, Any]:
        return {"value": self._value()}

    def load_state_dict(self, found: dict[str, Any]) -> None:
        pass


@kind
def unloadable(job: Kind) -> None:
    job.ddp()
    job.attached["own"] = Own(lambda: numpy.float32(1.0))


@kind
def apart(job: Kind) -> None:
    job.ddp()
    job.attached["own"] = Own(lambda: job.session.rank)


def plateau(job: Kind, metric: Callable[[], float | None]) -> None:
    job.ddp()
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(job.optimizer, factor=0.5, patience=0)
    job.attached["scheduler"] = scheduler

    def step() -> None:
        found = metric() if job.session.steps >= 10 else 1.0 / (1 + job.session.steps)
        if found is not None:
            scheduler.step(found)

    job.then(step)


@kind
def plateau_averaged(job: Kind) -> None:
    plateau(job, lambda: float(job.session.steps))


@kind
def plateau_on_rank_0(job: Kind) -> None:
    plateau(job, lambda: None if job.session.rank else float(job.session.steps))


@kind
def plateau_apart(job: Kind) -> None:
    """By each rank's own loss."""
    plateau(job, lambda: float(job.session.steps) * (-1) ** job.session.rank)


@kind
def noisy(job: Kind) -> None:
    """All ranks draw the same noise after the backward pass, where some die."""
    torch.manual_seed(0)
    job.ddp()

    def train(x: torch.Tensor, y: torch.Tensor) -> None:
        job.loss(x, y).backward()
        faults.at(1000 + job.session.steps + 1)
        job.optimizer.step()
        job.optimizer.zero_grad()
        with torch.no_grad():
            for parameter in job.net.parameters():
                parameter += 0.01 * torch.randn_like(parameter)

    job.train = train


@kind
def sampled(job: Kind) -> None:
    """Each rank draws numbers of its own there."""
    noisy(job)
    torch.manual_seed(job.session.rank)

    def train(x: torch.Tensor, y: torch.Tensor) -> None:
        job.loss(x, y).backward()
        faults.at(1000 + job.session.steps + 1)
        job.optimizer.step()
        job.optimizer.zero_grad()
        torch.rand(3)

    job.train = train


@kind
def diverging(job: Kind) -> None:
    """Each rank trains for itself between averages."""
    job.ddp()

    def unchanged(gradients: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
        done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        done.set_result(gradients)
        return done

    job.model.register_comm_hook(None, lambda _, bucket: unchanged(bucket.buffer()))

    def train(x: torch.Tensor, y: torch.Tensor) -> None:
        job.plain(x, y)
        torch.distributed.barrier()  # so that no rank is several steps ahead

    job.train = train


def main(args: argparse.Namespace) -> None:
    faults.at(0)
    job = Kind()
    KINDS[args.kind](job)
    session = job.session
    inputs = torch.randn(64, 16, generator=torch.Generator().manual_seed(1))
    dataset = TensorDataset(inputs, inputs.square().sum(dim=1, keepdim=True))
    sampler = elasticd.ElasticBatchSampler(dataset, global_batch=8)
    job.attached["sampler"] = sampler
    session.attach(**job.attached)

    def note(what: str) -> None:
        found = digest([*own_part(job.attached, session.rank), torch.get_rng_state()])
        faults.write(f"{what}-{session.rank}", f"{session.round} {session.steps} {found}\n")

    session.checkpoint(every=args.every)
    if session.restore() is not None:
        note("restored")
    for epoch in range(sampler.epoch, sampler.epoch + 1000):
        sampler.set_epoch(epoch)
        loader = DataLoader(dataset, batch_sampler=sampler, generator=torch.Generator())
        for x, y in loader:
            faults.at(session.steps + 1)
            job.train(x, y)
            session.step()
            note("steps")
            job.after()
            if session.steps >= args.steps:
                return


def own_part(attached: dict[str, Any], rank: int) -> Iterator[Any]:
    """On ranks other than 0 without the modules' buffers: each rank's BatchNorm has seen its own batches."""
    for obj in attached.values():
        is_module = isinstance(obj, torch.nn.Module)
        yield dict(obj.named_parameters()) if is_module and rank != 0 else obj.state_dict()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("kind")
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--every", type=int, default=5)
    main(parser.parse_args())
