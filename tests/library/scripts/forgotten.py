"""A loop with one mistake, or with something that looks like one; prints the steps it has made, and its warnings.

Arguments: the case, the checkpoint directory.
"""

from __future__ import annotations

import copy
import itertools
import json
import logging
import queue
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.utils.data import BatchSampler, DataLoader, TensorDataset

import elasticd

CASES: dict[str, Callable[[Any], None]] = {}
data = TensorDataset(torch.randn(48, 4, generator=torch.Generator().manual_seed(0)))
torch.set_num_threads(1)


def case(function: Callable[[Any], None]) -> Callable[[Any], None]:
    CASES[function.__name__] = function
    return function


class Loop:
    def __init__(self, directory: str) -> None:
        self.session = elasticd.init()
        self.directory = directory
        torch.manual_seed(0)
        self.model = nn.Linear(4, 1)
        self.optimizer: torch.optim.Optimizer = torch.optim.AdamW(self.model.parameters())
        self.sampler = elasticd.ElasticBatchSampler(data, 4, rank=0, world_size=1)
        self.loader: Any = DataLoader(data, batch_sampler=self.sampler)

    def attach(self, without: str = "", restore: bool = True, every: Any = 4, **more: Any) -> None:
        """All objects but one, and more; restore and save as usual."""
        usual = {"model": self.model, "optimizer": self.optimizer, "sampler": self.sampler}
        self.session.attach(**{name: obj for name, obj in usual.items() if name != without}, **more)
        if restore:
            self.session.restore(self.directory)
        self.session.checkpoint(every, self.directory)

    def learn(self, batch: Any, optimizer: torch.optim.Optimizer | None = None) -> None:
        optimizer = optimizer or self.optimizer
        optimizer.zero_grad()
        self.model(batch[0]).square().mean().backward()
        optimizer.step()

    def evaluate(self, loader: Any) -> None:
        for (x,) in loader:
            with torch.no_grad():
                self.model(x)

    def train(self, epochs: int = 2, then: Callable[[], None] = lambda: None) -> None:
        for epoch in range(self.sampler.epoch, epochs):
            self.sampler.set_epoch(epoch)
            for batch in self.loader:
                self.learn(batch)
                self.session.step()
                then()


def usual(name: str, before: Callable[[Loop], object] = lambda loop: None, **attach: Any) -> None:
    """A case that trains as usual, after `before`, which changes the loop."""

    def run(loop: Loop) -> None:
        before(loop)
        loop.attach(**attach)
        loop.train()

    CASES[name] = run


def batches(**how: Any) -> Callable[[Loop], None]:
    """Another DataLoader."""
    return lambda loop: setattr(loop, "loader", DataLoader(data, **{"batch_sampler": loop.sampler, **how}))


def of_sampler(batch_size: int | None) -> Callable[[Loop], None]:
    """A DataLoader that takes the sampler's batches for samples."""
    return lambda loop: setattr(loop, "loader", DataLoader(data, sampler=loop.sampler, batch_size=batch_size))


def optimizer(make: Callable[..., torch.optim.Optimizer], **how: Any) -> Callable[[Loop], None]:
    return lambda loop: setattr(loop, "optimizer", make(loop.model.parameters(), **how))


def of_two(loop: Loop) -> None:
    loop.loader = DataLoader(data, batch_sampler=BatchSampler(loop.sampler, 2, drop_last=False))  # type: ignore[arg-type]


usual("usual")
usual("workers", batches(num_workers=2))
usual("unattached_sampler", without="sampler")
usual("unattached_sampler_with_workers", batches(num_workers=2), without="sampler")
usual("no_optimizer_attached", without="optimizer")
usual("no_optimizer_attached_and_no_state", optimizer(torch.optim.SGD, lr=0.01), without="optimizer")
usual("no_restore", restore=False)
usual("batch_of_batches", of_sampler(16))
usual("batch_sampler_of_batches", of_two)
usual("whole_batches_from_the_dataset", of_sampler(None))


# --- an ElasticBatchSampler that is not attached ----------------------------------------------------------------------


@case
def unattached_second_sampler(loop: Loop) -> None:
    """Beside one that is attached, it may be for something else."""
    other = elasticd.ElasticBatchSampler(data, 4, seed=1, rank=0, world_size=1)
    batches = iter(DataLoader(data, batch_sampler=other))
    loop.attach()
    loop.train(1, lambda: loop.learn(next(batches)) if other.epoch == 0 and loop.session.steps < 12 else None)


@case
def evaluation_sampler(loop: Loop) -> None:
    other = elasticd.ElasticBatchSampler(data, 4, shuffle=False, rank=0, world_size=1)
    loader = DataLoader(data, batch_sampler=other)
    loop.attach(without="sampler")
    loader_of_own = DataLoader(data, batch_size=4)
    for _ in range(3):
        for batch in loader_of_own:
            loop.learn(batch)
            loop.session.step()
        loop.evaluate(loader)


@case
def evaluation_at_every_step(loop: Loop) -> None:
    other = elasticd.ElasticBatchSampler(data, 16, shuffle=False, rank=0, world_size=1)
    loader = DataLoader(data, batch_sampler=other)
    loop.attach()
    loop.train(2, lambda: loop.evaluate(loader))


@case
def evaluation_in_turn(loop: Loop) -> None:
    """One batch of an evaluation after each step."""
    other = elasticd.ElasticBatchSampler(data, 4, shuffle=False, rank=0, world_size=1)
    loader_of_own = DataLoader(data, batch_size=4)
    loop.attach(without="sampler")
    batches = iter(DataLoader(data, batch_sampler=other))
    for batch in loader_of_own:
        loop.learn(batch)
        loop.session.step()
        with torch.no_grad():
            loop.model(next(batches)[0])


@case
def evaluation_that_is_left_early(loop: Loop) -> None:
    other = elasticd.ElasticBatchSampler(data, 4, shuffle=False, rank=0, world_size=1)
    loader = DataLoader(data, batch_sampler=other, num_workers=1, persistent_workers=True)
    loop.attach(without="sampler")
    for _ in range(2):
        for batch in DataLoader(data, batch_size=4):
            loop.learn(batch)
            loop.session.step()
        for number, (x,) in enumerate(loader):
            loop.model(x)
            if number == 3:
                break


@case
def sampler_that_commits_by_itself(loop: Loop) -> None:
    class Position:
        def state_dict(self) -> dict[str, Any]:
            return dict(loop.sampler.state_dict())

        def load_state_dict(self, state: dict[str, Any]) -> None:
            loop.sampler.load_state_dict(state)

        def commit(self) -> None:
            loop.sampler.commit()

    loop.attach(without="sampler", sampler=Position())
    loop.train()


@case
def sampler_without_checkpoint(loop: Loop) -> None:
    loop.session.attach(model=loop.model, optimizer=loop.optimizer)
    loop.train()


# --- a sampler that is behind the loop --------------------------------------------------------------------------------


def leaves_out(name: str, wrap: Callable[[Any], Any] = lambda loader: loader, **how: Any) -> None:
    """One batch of an epoch, as where the loss is not finite."""

    def run(loop: Loop) -> None:
        loop.sampler = elasticd.ElasticBatchSampler(data, 1, rank=0, world_size=1)
        loop.attach()
        for number, batch in enumerate(wrap(DataLoader(data, batch_sampler=loop.sampler, **how))):
            if number == 16 and name.startswith("batch"):
                continue
            loop.learn(batch)
            loop.session.step()

    CASES[name] = run


def in_chunks(loader: Any) -> Any:
    """Of several batches, which are fetched at once."""
    batches = iter(loader)
    while chunk := list(itertools.islice(batches, 6)):
        yield from chunk


def in_thread(loader: Any) -> Any:
    """Which is slow at first, and then ahead of the loop."""
    fetched: queue.Queue[Any] = queue.Queue(8)

    def fetch() -> None:
        for number, batch in enumerate(loader):
            fetched.put(batch)
            time.sleep(0.01 * (number < 20))
        fetched.put(None)

    threading.Thread(target=fetch).start()
    while (batch := fetched.get()) is not None:
        time.sleep(0.002)
        yield batch


leaves_out("batch_left_out")
leaves_out("batch_left_out_with_workers", num_workers=2)
leaves_out("batches_in_chunks", in_chunks)
leaves_out("no_batch_left_out_with_workers", num_workers=2)
leaves_out("no_batch_left_out_in_chunks", in_chunks)
leaves_out("no_batch_left_out_in_a_thread", in_thread)


@case
def skips_batches_after_a_restore(loop: Loop) -> None:
    loop.sampler = elasticd.ElasticBatchSampler(data, 2, rank=0, world_size=1)
    loop.attach()
    done = loop.session.steps
    batches = iter(DataLoader(data, batch_sampler=loop.sampler))
    for batch in itertools.islice(batches, done, done + 8):
        loop.learn(batch)
        loop.session.step()


# --- session.step() ---------------------------------------------------------------------------------------------------


@case
def no_step(loop: Loop) -> None:
    loop.attach()
    for epoch in range(20):
        loop.sampler.set_epoch(epoch)
        for batch in loop.loader:
            loop.learn(batch)


@case
def no_step_in_one_epoch(loop: Loop) -> None:
    loop.attach()
    for batch in loop.loader:
        loop.learn(batch)


@case
def no_step_for_long(loop: Loop) -> None:
    loop.attach(without="sampler")
    for number in range(1100):
        loop.learn(data[number % 48 : number % 48 + 1])


@case
def no_step_as_nothing_is_saved(loop: Loop) -> None:
    for batch in loop.loader:
        loop.learn(batch)


@case
def nothing_left_to_train(loop: Loop) -> None:
    loop.attach()
    loop.evaluate(loop.loader)


@case
def many_optimizer_steps_for_each_step(loop: Loop) -> None:
    """As in reinforcement learning."""
    loop.attach(without="sampler")
    for _ in range(4):
        for batch in DataLoader(data, batch_size=4):
            loop.learn(batch)
        loop.session.step()


@case
def warm_up_without_steps(loop: Loop) -> None:
    loop.attach()
    for number, batch in enumerate(loop.loader):
        loop.learn(batch)
        if number == 5:
            break
    loop.train()


@case
def evaluation_before_training(loop: Loop) -> None:
    loop.attach()
    loop.evaluate(loop.loader)
    loop.train()


# --- optimizers -------------------------------------------------------------------------------------------------------


@case
def optimizer_made_again(loop: Loop) -> None:
    loop.attach()
    loop.optimizer = torch.optim.AdamW(loop.model.parameters())
    loop.train()


@case
def optimizer_made_again_late(loop: Loop) -> None:
    loop.attach()

    def renew() -> None:
        if loop.session.steps == 8:
            loop.optimizer = torch.optim.AdamW(loop.model.parameters())

    loop.train(2, renew)


@case
def optimizer_of_a_second_stage(loop: Loop) -> None:
    loop.attach()
    first = loop.optimizer

    def renew() -> None:
        if loop.session.steps >= 20 and loop.optimizer is first:
            loop.optimizer = torch.optim.AdamW(loop.model.parameters())

    renew()
    loop.train(3 if loop.session.steps else 2, renew)


@case
def second_optimizer_unattached(loop: Loop) -> None:
    loop.optimizer = torch.optim.AdamW([loop.model.weight])
    other = torch.optim.Adam([loop.model.bias])
    loop.attach()
    for batch in loop.loader:
        loop.learn(batch)
        other.step()
        loop.session.step()


@case
def no_optimizer_attached_but_its_scheduler(loop: Loop) -> None:
    loop.attach(without="optimizer", scheduler=torch.optim.lr_scheduler.StepLR(loop.optimizer, 10))
    loop.train()


@case
def all_made_again(loop: Loop) -> None:
    """After they had been attached, as for the next fold, and by a function that makes a model to quantize of it."""
    loop.attach()
    loop.model = copy.deepcopy(loop.model)
    loop.optimizer = torch.optim.SGD(loop.model.parameters(), lr=0.01)
    loop.train()


@case
def first_steps_of_another_model(loop: Loop) -> None:
    """One that is not attached."""
    loop.attach()
    model, other = loop.model, nn.Linear(4, 1)
    both = loop.optimizer, torch.optim.SGD(other.parameters(), lr=0.01)
    for number, batch in enumerate(loop.loader):
        loop.model, loop.optimizer = (model, both[0]) if number >= 4 else (other, both[1])
        loop.learn(batch)
        loop.session.step()


@case
def parameter_of_nothing_attached(loop: Loop) -> None:
    """As the temperature of soft actor-critic."""
    loop.own = torch.zeros(1, requires_grad=True)  # type: ignore[attr-defined]
    loop.optimizer = torch.optim.AdamW([*loop.model.parameters(), loop.own])  # type: ignore[attr-defined]
    loop.attach()
    loop.train()


@case
def model_of_an_optimizer_unattached(loop: Loop) -> None:
    critic = nn.Linear(4, 1)
    loop.attach(critic_optimizer=torch.optim.SGD(critic.parameters(), lr=0.01))
    loop.train()


class Held:
    """An object that saves a parameter of its own, or a copy of it."""

    def __init__(self, parameter: torch.Tensor, saved: Callable[[torch.Tensor], Any]) -> None:
        self._of, self._saved = {"own": parameter}, saved

    def state_dict(self) -> dict[str, Any]:
        return {"own": self._saved(self._of["own"])}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._of["own"].data.copy_(torch.as_tensor(state["own"]))


def held(name: str, saved: Callable[[torch.Tensor], Any]) -> None:
    def run(loop: Loop) -> None:
        own = torch.zeros(1, requires_grad=True)
        loop.optimizer = torch.optim.AdamW([*loop.model.parameters(), own])
        loop.attach(own=Held(own, saved))
        loop.train()

    CASES[name] = run


held("parameter_of_an_own_object", lambda own: own.detach())
held("parameter_that_an_own_object_copies", lambda own: own.item())


@case
def parameter_beside_an_own_object(loop: Loop) -> None:
    """Which may save it in a way that is not seen."""
    loop.optimizer = torch.optim.AdamW([*loop.model.parameters(), torch.zeros(1, requires_grad=True)])
    loop.attach(other=Held(torch.zeros(2), lambda own: own.tolist()))
    loop.train()


@case
def frozen_parameter_of_nothing_attached(loop: Loop) -> None:
    other = nn.Linear(1, 1).requires_grad_(False)
    loop.optimizer = torch.optim.AdamW([*loop.model.parameters(), *other.parameters()])
    loop.attach()
    loop.train()


@case
def groups_added_later(loop: Loop) -> None:
    """As where layers are trained that were frozen at first."""
    loop.optimizer = torch.optim.AdamW([loop.model.weight])
    loop.attach()
    for epoch in range(4):
        loop.sampler.set_epoch(epoch)
        for batch in loop.loader:
            if loop.session.steps == 3:
                loop.optimizer.add_param_group({"params": [loop.model.bias]})
            loop.learn(batch)
            loop.session.step()


class Counting(torch.optim.SGD):
    """It keeps a number that belongs to no parameter."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        self.state["calls"] = self.state.get("calls", 0) + 1  # type: ignore[index,call-overload]


@case
def probe_that_counts(loop: Loop) -> None:
    head = nn.Linear(1, 1)
    own = Counting(head.parameters(), lr=0.01)
    loop.attach()

    def look() -> None:
        head(loop.model(data[:4][0]).detach()).sum().backward()
        own.step()

    loop.train(2, look)


def scheduled(name: str, make: Callable[[Loop], tuple[Any, dict[str, Any]]]) -> None:
    def run(loop: Loop) -> None:
        scheduler, more = make(loop)
        loop.attach(**more)
        scheduler = scheduler or torch.optim.lr_scheduler.StepLR(loop.optimizer, 10)
        for batch in loop.loader:
            loop.learn(batch)
            scheduler.step()
            loop.session.step()

    CASES[name] = run


def one_after_another(loop: Loop) -> Any:
    schedulers = torch.optim.lr_scheduler
    parts = [schedulers.LinearLR(loop.optimizer, 0.1), schedulers.ExponentialLR(loop.optimizer, 0.9)]
    return schedulers.SequentialLR(loop.optimizer, parts, milestones=[5])


def two_schedulers(loop: Loop) -> tuple[Any, dict[str, Any]]:
    schedulers = torch.optim.lr_scheduler
    warmup = schedulers.LinearLR(loop.optimizer, 0.1)
    return warmup, {"scheduler": schedulers.ExponentialLR(loop.optimizer, 0.9)}


class Schedule:
    """As of timm: no scheduler of torch's, but it has some."""

    def __init__(self, *of: Any) -> None:
        self._of = of

    def step(self) -> None:
        self._of[0].step()

    def state_dict(self) -> dict[str, Any]:
        return dict(self._of[0].state_dict())

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._of[0].load_state_dict(state)


def wrapped_schedule(loop: Loop) -> tuple[Any, dict[str, Any]]:
    schedule = Schedule(torch.optim.lr_scheduler.StepLR(loop.optimizer, 10))
    return schedule, {"schedule": schedule}


scheduled("scheduler_unattached", lambda loop: (torch.optim.lr_scheduler.StepLR(loop.optimizer, 10), {}))
scheduled("second_scheduler_unattached", two_schedulers)
scheduled("scheduler_made_after_restore", lambda loop: (None, {}))
scheduled("scheduler_of_two", lambda loop: (both := one_after_another(loop), {"scheduler": both}))
scheduled("scheduler_in_a_wrapper", wrapped_schedule)


def scaled(name: str, attach: Callable[[Any], dict[str, Any]], **how: Any) -> None:
    """A case that trains with a GradScaler, and with what `attach` makes of it."""

    def run(loop: Loop) -> None:
        scaler = torch.amp.GradScaler("cpu", **how)
        loop.attach(**attach(scaler))
        for (x,) in loop.loader:
            loop.optimizer.zero_grad()
            scaler.scale(loop.model(x).square().mean()).backward()
            scaler.step(loop.optimizer)
            scaler.update()
            loop.session.step()

    CASES[name] = run


scaled("scaler_unattached", lambda scaler: {})
scaled("scaler_attached", lambda scaler: {"scaler": scaler})
scaled("scaler_in_an_own_object", lambda scaler: {"precision": Schedule(scaler)})
scaled("scaler_disabled", lambda scaler: {}, enabled=False)


@case
def probe(loop: Loop) -> None:
    """A second optimizer, of what is thrown away."""
    loop.attach()

    def look() -> None:
        head = nn.Linear(1, 1)
        own = torch.optim.Adam(head.parameters())
        head(loop.model(data[:4][0]).detach()).sum().backward()
        own.step()

    loop.train(2, look)


@case
def search_of_a_learning_rate(loop: Loop) -> None:
    loop.attach()
    before = copy.deepcopy(loop.model.state_dict())
    searching = torch.optim.AdamW(loop.model.parameters())
    for _ in range(5):
        loop.learn(data[:4], searching)
    loop.model.load_state_dict(before)
    loop.train()


@case
def search_on_the_attached_sampler(loop: Loop) -> None:
    """Over the end of an epoch, with the optimizer that trains afterwards."""
    loop.attach()
    before = copy.deepcopy((loop.model.state_dict(), loop.optimizer.state_dict()))
    batches = itertools.chain.from_iterable(itertools.repeat(loop.loader))
    for batch in itertools.islice(batches, 100):
        loop.learn(batch)
    loop.model.load_state_dict(before[0])
    loop.optimizer.load_state_dict(before[1])
    loop.train()


@case
def wrapper_around_an_optimizer(loop: Loop) -> None:
    class Wrapper:
        def __init__(self, inner: torch.optim.Optimizer) -> None:
            self.of, self.param_groups = [inner], inner.param_groups

        def step(self) -> None:
            self.of[0].step()

        def zero_grad(self) -> None:
            self.of[0].zero_grad()

        def state_dict(self) -> dict[str, Any]:
            return {"inner": self.of[0].state_dict()}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.of[0].load_state_dict(state["inner"])

    loop.optimizer = Wrapper(loop.optimizer)  # type: ignore[assignment]
    loop.attach()
    loop.train()


class Outer(torch.optim.Optimizer):
    """Whose inner optimizer keeps a state of its own, as in public code of SAM."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.01, "momentum": 0.9})
        self.inner = torch.optim.SGD(self.param_groups, lr=0.01, momentum=0.9)  # type: ignore[arg-type]

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for each in group["params"]:
                self.state[each]["old"] = each.detach().clone()
        self.inner.step()


usual("optimizer_inside_another_one", optimizer(Outer))


class Curved(torch.optim.SGD):
    """Keeps a moment of each layer's gradients by the layer, or by the parameter in its state."""

    def __init__(self, model: nn.Module, in_state: bool) -> None:
        super().__init__(model.parameters(), lr=0.01)
        self.layers, self.in_state, self.moments = {model: model.weight}, in_state, dict[Any, Any]()

    def step(self, closure: Any = None) -> Any:
        for layer in self.layers:
            moment: Any = layer.weight.grad.square()  # type: ignore[operator,union-attr]
            if self.in_state:
                self.state[layer.weight]["moment"] = moment
            else:
                self.moments[layer] = moment
        return super().step(closure)


usual("moments_beside_the_state", lambda loop: setattr(loop, "optimizer", Curved(loop.model, in_state=False)))
usual("moments_in_the_state", lambda loop: setattr(loop, "optimizer", Curved(loop.model, in_state=True)))


@case
def both_optimizers_attached(loop: Loop) -> None:
    loop.optimizer = outer = Outer(loop.model.parameters())
    loop.attach(inner=outer.inner)
    loop.train()


@case
def wrapper_that_saves_copies(loop: Loop) -> None:
    class Wrapper:
        def __init__(self, inner: torch.optim.Optimizer) -> None:
            self.inner = inner

        def state_dict(self) -> dict[str, Any]:
            return {"inner": copy.deepcopy(self.inner.state_dict())}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.inner.load_state_dict(state["inner"])

    loop.attach(without="optimizer", wrapper=Wrapper(loop.optimizer))
    loop.train()


# --- the order of the two steps ---------------------------------------------------------------------------------------


def in_wrong_order(name: str, clips: bool = False, **attach: Any) -> None:
    def run(loop: Loop) -> None:
        loop.attach(**attach)
        for batch in DataLoader(data, batch_size=4) if attach else loop.loader:
            loop.optimizer.zero_grad()
            loop.model(batch[0]).square().mean().backward()
            loop.session.step()
            if clips:
                nn.utils.clip_grad_norm_(loop.model.parameters(), 0.1)
            loop.optimizer.step()

    CASES[name] = run


in_wrong_order("steps_in_wrong_order")
in_wrong_order("steps_in_wrong_order_with_clipping", clips=True)
in_wrong_order("steps_in_wrong_order_without_sampler", without="sampler")


@case
def gradients_in_place(loop: Loop) -> None:
    loop.attach(without="sampler")
    for batch in DataLoader(data, batch_size=4):
        loop.optimizer.zero_grad(set_to_none=False)
        loop.model(batch[0]).square().mean().backward()
        loop.optimizer.step()
        loop.session.step()


@case
def closure(loop: Loop) -> None:
    loop.optimizer = torch.optim.LBFGS(loop.model.parameters(), max_iter=3)
    loop.attach()
    for (x,) in loop.loader:

        def evaluate(x: torch.Tensor = x) -> torch.Tensor:
            loop.optimizer.zero_grad(set_to_none=False)
            loss = loop.model(x).square().mean()
            loss.backward()
            return loss

        loop.optimizer.step(evaluate)  # type: ignore[arg-type]
        loop.session.step()


@case
def accumulation(loop: Loop) -> None:
    loop.attach(without="sampler")
    for number, batch in enumerate(DataLoader(data, batch_size=4), 1):
        loop.model(batch[0]).square().mean().backward()
        if number % 4 == 0:
            loop.optimizer.step()
            loop.optimizer.zero_grad()
        loop.session.step()


# --- the rest ---------------------------------------------------------------------------------------------------------


@case
def attached_after_restore(loop: Loop) -> None:
    loop.attach()
    loop.session.attach(ema=copy.deepcopy(loop.model))


@case
def attached_in_a_second_phase(loop: Loop) -> None:
    loop.attach()
    loop.train()
    loop.session.attach(ema=copy.deepcopy(loop.model))


@case
def trained_on_after_close(loop: Loop) -> None:
    """What a session has been given is the script's own once it is closed."""
    scheduler = torch.optim.lr_scheduler.StepLR(loop.optimizer, 10)
    loop.attach(scheduler=scheduler)
    for batch in itertools.islice(loop.loader, 5):
        loop.learn(batch)
        loop.session.step()
    loop.session.close()
    scheduler.step()
    loop.learn(data[:4])


@case
def sampler_of_an_earlier_training(loop: Loop) -> None:
    loop.attach()
    loop.train()
    loop.session.close()
    again = Loop(f"{loop.directory}-2")
    again.sampler, again.loader = loop.sampler, loop.loader
    again.attach()
    again.train()
    again.session.close()


@case
def another_class(loop: Loop) -> None:
    if loop.session.round > 1:
        loop.optimizer = torch.optim.SGD(loop.model.parameters(), lr=0.01, momentum=0.9)
    loop.attach()
    loop.train(loop.session.round)


@case
def alike_class(loop: Loop) -> None:
    if loop.session.round > 1:
        loop.optimizer = torch.optim.Adam(loop.model.parameters())
    loop.attach()
    loop.train(loop.session.round)


@case
def generator(loop: Loop) -> None:
    """A generator of the script's own goes on where it was."""
    drawn, own = [], torch.Generator().manual_seed(3)
    loop.attach(gen=own)
    for epoch in range(loop.sampler.epoch, loop.session.round):
        loop.sampler.set_epoch(epoch)
        for batch in loop.loader:
            drawn.append(float(torch.rand((), generator=own)))
            loop.learn(batch)
            loop.session.step()
    warnings.append(json.dumps(drawn))


# --- ranks that train apart -------------------------------------------------------------------------------------------


@case
def without_ddp(loop: Loop) -> None:
    loop.attach()
    torch.manual_seed(loop.session.rank)
    for batch in loop.loader:
        loop.learn((batch[0] + torch.randn(4),))
        loop.session.step()


@case
def noise_of_each_rank(loop: Loop) -> None:
    loop.model = nn.parallel.DistributedDataParallel(loop.model)  # type: ignore[assignment]
    loop.optimizer = torch.optim.SGD(loop.model.parameters(), lr=0.01)
    loop.attach()
    torch.manual_seed(loop.session.rank)

    def shake() -> None:
        with torch.no_grad():
            for parameter in loop.model.parameters():
                parameter += 0.01 * torch.randn_like(parameter)

    for batch in loop.loader:
        loop.learn(batch)
        shake()
        loop.session.step()


@case
def buffers_of_each_rank(loop: Loop) -> None:
    normed = nn.Sequential(loop.model, nn.BatchNorm1d(1))
    loop.model = nn.parallel.DistributedDataParallel(normed, broadcast_buffers=False)  # type: ignore[assignment]
    loop.optimizer = torch.optim.SGD(loop.model.parameters(), lr=0.01)
    loop.attach()
    loop.train()


@case
def joined(loop: Loop) -> None:
    """Here the ranks have equally many batches."""
    model = nn.parallel.DistributedDataParallel(loop.model)
    loop.model = model  # type: ignore[assignment]
    loop.loader = DataLoader(data, batch_size=4)
    loop.attach(without="sampler")
    with Join([model]):
        loop.train()


@case
def averages_on_rank_0_alone(loop: Loop) -> None:
    averaged = torch.optim.swa_utils.AveragedModel(loop.model)
    loop.attach(averaged=averaged)
    for batch in loop.loader:
        loop.learn(batch)
        if loop.session.rank == 0:
            averaged.update_parameters(loop.model)
        loop.session.step()


@case
def gradients_averaged_by_hand(loop: Loop) -> None:
    loop.attach()
    torch.manual_seed(loop.session.rank)
    for batch in loop.loader:
        loop.optimizer.zero_grad()
        loop.model(batch[0] + torch.randn(4)).square().mean().backward()
        for parameter in loop.model.parameters():
            torch.distributed.all_reduce(parameter.grad)
        loop.optimizer.step()
        loop.session.step()


class Kept(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        warnings.append(record.getMessage())


warnings: list[str] = []
logging.getLogger("elasticd").addHandler(Kept())
loop = Loop(sys.argv[2])
CASES[sys.argv[1]](loop)
loop.session.close()
sys.stdout.write(json.dumps({"steps": loop.session.steps, "warnings": warnings}) + "\n")
