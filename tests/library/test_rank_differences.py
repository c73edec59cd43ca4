"""What differs between ranks is found at the save at which it first shows; what only seems to differ is left alone."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import distributed, nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from elasticd.checkpointing.state import training_state
from elasticd.checkpointing.state.rank_differences import (
    DIGEST_TRIALS,
    MAX_DIGEST_S,
    MAX_SAMPLED_PARAMETERS,
    ComparedState,
    Difference,
    find_differences,
)

DDP = "Train it in DistributedDataParallel"
Attached = dict[str, Any]


class Ranks:
    """Two ranks with equal state, each of which an optimizer has trained."""

    def __init__(
        self, module: nn.Module, make: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW, **more: Any
    ) -> None:
        self.attached: list[Attached] = []
        self._states = [ComparedState(), ComparedState()]
        for each in self._states:
            model = copy.deepcopy(module)
            optimizer = make(model.parameters(), lr=0.01)
            self.attached.append({"model": model, "optimizer": optimizer, **copy.deepcopy(more)})
            each.stepped.add(id(optimizer))
            for parameter in model.parameters():
                parameter.grad = torch.ones_like(parameter)
            optimizer.step(lambda: torch.tensor(1.0))
        self._is_first = True

    def save(self, step: int = 10, in_shards: list[Attached] | None = None) -> list[Difference]:
        every = zip(self._states, self.attached, in_shards or [{}, {}], strict=True)
        found = [mine.describe(attached, shards, 2, step, self._is_first) for mine, attached, shards in every]
        self._is_first = False
        return list(find_differences([training_state.from_bytes(training_state.to_bytes(each)) for each in found]))


class Small:
    """An object of the script's."""

    def __init__(self, **values: Any) -> None:
        self.values, self.calls, self.takes_s = values, 0, 0.0

    def state_dict(self) -> dict[str, Any]:
        self.calls += 1
        time.sleep(self.takes_s)
        return self.values


@pytest.mark.parametrize("saves", [0, 1, 7], ids="at save {}".format)
def test_parameters_that_differ(saves: int) -> None:
    ranks = Ranks(nn.Linear(4, 4))
    for _ in range(saves):
        assert not ranks.save()
    with torch.no_grad():
        ranks.attached[1]["model"].weight[1] += 0.01
    (found,) = ranks.save()
    assert (found.name, found.is_error) == ("model", True)
    assert found.sentence.startswith("the parameters of model on rank 1 differ from rank 0's, which alone are saved.")
    assert DDP in found.sentence


def test_each_parameter_of_a_large_module_is_seen() -> None:
    count = 3 * MAX_SAMPLED_PARAMETERS
    ranks = Ranks(nn.ParameterList(torch.ones(3) for _ in range(count)), torch.optim.SGD)
    for number in (0, 100, count - 1):
        with torch.no_grad():
            ranks.attached[1]["model"][number] += 0.1
        found = [ranks.save() for _ in range(count // MAX_SAMPLED_PARAMETERS + 1)]
        assert sum(map(len, found)) == 1
        with torch.no_grad():
            ranks.attached[1]["model"][number] -= 0.1


@pytest.mark.parametrize(
    "module",
    [nn.Conv2d(4, 8, 3).to(memory_format=torch.channels_last), nn.Linear(64, 64).bfloat16(), nn.Embedding(9, 3)],
    ids=["channels_last", "bfloat16", "embedding"],
)
def test_layouts_and_types(module: nn.Module) -> None:
    ranks = Ranks(module)
    assert not ranks.save()
    with torch.no_grad():
        ranks.attached[1]["model"].weight += 0.5
    assert [each.name for each in ranks.save()] == ["model"]


@pytest.mark.parametrize("size", [0, 3])
def test_no_numbers_and_zeros_are_equal(size: int) -> None:
    ranks = Ranks(nn.ParameterList([torch.zeros(size)]), torch.optim.SGD)
    for attached in ranks.attached:
        attached["model"][0].data.zero_()
    assert not ranks.save()


def test_rounding_of_gpus_of_two_kinds_grows_with_the_steps() -> None:
    ranks = Ranks(nn.Linear(4, 4))
    with torch.no_grad():
        ranks.attached[1]["model"].weight *= 1 + 5e-5
    assert ranks.save(step=1000)
    assert not ranks.save(step=100_000)


def test_slice_of_another_tensor() -> None:
    """What lies between its numbers in memory is not a part of it."""
    ranks = Ranks(nn.Linear(4, 4), torch.optim.SGD)
    for rank, attached in enumerate(ranks.attached):
        whole = torch.full((8, 8), float(rank))
        whole[:, ::2] = 1.0
        attached["model"].weight.data = whole[:, ::2]
    assert not ranks.save()


def test_rank_that_does_not_train_a_module_has_none_that_differs() -> None:
    ranks = Ranks(nn.Linear(4, 4))
    del ranks.attached[1]["optimizer"]
    with torch.no_grad():
        ranks.attached[1]["model"].weight.zero_()
    assert not ranks.save()


def test_module_that_all_ranks_but_rank_0_train_differs() -> None:
    """Only rank 0's parameters are saved, and they are not the trained ones."""
    ranks = Ranks(nn.Linear(4, 4))
    del ranks.attached[0]["optimizer"]
    assert any("the parameters of model on rank 1 differ from rank 0's" in str(each) for each in ranks.save())


def test_frozen_parameters_are_not_compared_without_distributed_data_parallel() -> None:
    ranks = Ranks(nn.Linear(4, 4))
    for rank, attached in enumerate(ranks.attached):
        attached["model"].weight.requires_grad_(False).fill_(rank)
    assert not ranks.save()


def test_frozen_parameters_in_distributed_data_parallel_are_compared_at_later_saves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Some are a rank's own by design, such as a codebook that follows its batches."""
    ranks = Ranks(nn.Linear(4, 4))
    wrappers = {
        id(each["model"]): SimpleNamespace(module=each["model"], parameters_to_ignore=()) for each in ranks.attached
    }
    monkeypatch.setattr(training_state, "find_ddp", lambda obj: wrappers[id(obj)])
    for rank, attached in enumerate(ranks.attached):
        attached["model"].weight.requires_grad_(False).fill_(rank)
    assert not ranks.save()
    assert [each.name for each in ranks.save()] == ["model"]


@pytest.mark.parametrize("left", [{"parameters_to_ignore": ["weight"]}, {"_comm_hooks": [(print, None)]}], ids=str)
def test_parameters_that_may_differ_by_design_are_no_error(
    left: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = Ranks(nn.Linear(4, 4))
    wrappers = {
        id(each["model"]): SimpleNamespace(**{"module": each["model"], "parameters_to_ignore": (), **left})
        for each in ranks.attached
    }
    monkeypatch.setattr(training_state, "find_ddp", lambda obj: wrappers[id(obj)])
    with torch.no_grad():
        ranks.attached[1]["model"].weight += 1.0
    assert [each.is_error for each in ranks.save()] == [False]


def test_objects_of_which_any_ranks_state_will_do() -> None:
    ranks = Ranks(nn.Linear(4, 4), counter=Small())
    for rank, attached in enumerate(ranks.attached):
        attached["model"].rank_independent = attached["counter"].rank_independent = True
        attached["model"].weight.data.fill_(rank)
        attached["counter"].values["value"] = rank
    assert not ranks.save()


def test_number_in_the_state_of_an_optimizer() -> None:
    """LBFGS keeps the loss of the last step, which each rank has of its own batch."""
    ranks = Ranks(nn.Linear(4, 4), torch.optim.LBFGS)
    assert not ranks.save()
    (kept,) = ranks.attached[1]["optimizer"].state.values()
    kept["prev_loss"] = 2.0
    (found,) = ranks.save()
    assert not found.is_error
    assert found.sentence.startswith("prev_loss in the state of optimizer on rank 1 differs from rank 0's")


@pytest.mark.parametrize("divided", ["parameters", "each tensor"])
def test_state_that_an_optimizer_divides_among_the_ranks(divided: str) -> None:
    """As some code of Muon: a momentum for some parameters only, or for a part of each."""
    ranks = Ranks(nn.Linear(4, 4), lambda p, lr: torch.optim.SGD(p, lr, momentum=0.9))
    for rank, attached in enumerate(ranks.attached):
        model, state = attached["model"], attached["optimizer"].state
        if divided == "parameters":
            del state[model.bias if rank else model.weight]
        else:
            state[model.weight]["momentum_buffer"] = torch.full((2, 4), 1.0 + rank)
    (found,) = ranks.save()
    assert (found.name, found.is_error) == ("optimizer", True)
    assert found.sentence.startswith("momentum_buffer in the state of optimizer on rank 1 differs from rank 0's, which")
    for attached in ranks.attached:
        attached["optimizer"].rank_independent = True
    assert not ranks.save()


def test_division_of_many_parameters_shows_at_the_first_save() -> None:
    """Whatever the interval would be at which they are compared later."""
    count = MAX_SAMPLED_PARAMETERS
    ranks = Ranks(nn.ParameterList(torch.ones(1) for _ in range(count)), lambda p, lr: torch.optim.SGD(p, lr, 0.9))
    for rank, attached in enumerate(ranks.attached):
        for each in list(attached["model"])[rank::2]:
            del attached["optimizer"].state[each]
            attached["optimizer"].state[each] = {}
        for number, each in enumerate(attached["model"]):
            if number % 2 != rank:
                attached["optimizer"].state[each]["momentum_buffer"] += rank
    assert [each.is_error for each in ranks.save()] == [True]


def test_small_moments_are_not_compared_with_a_large_count() -> None:
    ranks = Ranks(nn.Linear(4, 4))
    for rank, attached in enumerate(ranks.attached):
        kept = attached["optimizer"].state[attached["model"].weight]
        kept["step"].fill_(1e6)
        kept["exp_avg"].fill_(0.1 * (1 + rank))
    (found,) = ranks.save()
    assert found.sentence.startswith("exp_avg in the state of optimizer")
    assert not found.is_error, "each rank keeps all of it: such as errors that it feeds back"


def test_counts_and_other_values_of_an_optimizer() -> None:
    ranks = Ranks(nn.Linear(4, 4))
    optimizer = ranks.attached[1]["optimizer"]
    optimizer.state[ranks.attached[1]["model"].bias]["count"] = 3
    optimizer.state["trust"] = 0.5
    (found,) = ranks.save()
    assert found.sentence.startswith("trust, count in the state of optimizer on rank 1 differs")


@pytest.mark.parametrize("how", ["", "not persistent", "inside", "inside, not broadcast"])
def test_buffers_that_each_rank_has_of_its_own(how: str) -> None:
    """As where a script averages gradients by itself, or shards the model. Accelerate attaches what is inside."""
    module = nn.Linear(4, 4)
    module.register_buffer("mean", torch.ones(4), persistent=how != "not persistent")
    ranks = Ranks(module)
    own = ranks.attached[1]["model"]
    own.mean += 0.5
    distributed.init_process_group("fake", store=FakeStore(), rank=1, world_size=2)
    try:
        wrappers = [nn.parallel.DistributedDataParallel(each["model"]) for each in ranks.attached if "inside" in how]
        for wrapper in wrappers:
            wrapper.broadcast_buffers = how == "inside"
        found = ranks.save()
    finally:
        distributed.destroy_process_group()
    assert [each.is_error for each in found] == [False] * (how in ("", "inside, not broadcast"))
    assert all("the buffers of model on rank 1 differ from rank 0's" in each.sentence for each in found)


def test_order_in_which_an_optimizer_has_come_to_its_parameters_does_not_count() -> None:
    ranks = Ranks(nn.Linear(4, 4), torch.optim.SGD)
    for attached in ranks.attached:
        optimizer, model = attached["optimizer"], attached["model"]
        optimizer.state["whole"] = {"norm": 1.0}
        parameters = [model.weight, model.bias]
        for each in parameters if attached is ranks.attached[0] else reversed(parameters):
            optimizer.state[each]["shape"] = list(each.shape)
    assert not ranks.save()


def test_small_object_that_differs_from_some_save_on() -> None:
    ranks = Ranks(nn.Linear(4, 4), counter=Small(value=1))
    assert not any(ranks.save() for _ in range(DIGEST_TRIALS + 1))
    ranks.attached[1]["counter"].values["value"] = 2
    (found,) = ranks.save()
    assert (found.name, found.is_error) == ("counter", True)
    assert "per_rank={'counter': ...}" in found.sentence


def test_object_that_rank_0_alone_has() -> None:
    ranks = Ranks(nn.Linear(4, 4))
    ranks.attached[0]["counter"] = Small(value=1)
    assert [each.name for each in ranks.save()] == ["counter"]


def test_object_with_hooks_is_asked_at_the_first_save_only_and_a_slow_one_at_few() -> None:
    ranks = Ranks(nn.Linear(4, 4), slow=Small(value=1), hooked=Small(value=1))
    ranks.attached[1]["slow"].takes_s = 2 * MAX_DIGEST_S
    for attached in ranks.attached:
        attached["hooked"].only_at_saves = True
    for _ in range(DIGEST_TRIALS):
        assert not ranks.save()
    ranks.attached[1]["slow"].values["value"] = ranks.attached[1]["hooked"].values["value"] = 2
    assert not ranks.save()
    calls = [[attached[name].calls for name in ("slow", "hooked")] for attached in ranks.attached]
    assert [calls[0][1], *calls[1]] == [1, DIGEST_TRIALS, 1]  # on rank 0 the machine may have been slow, too


def test_unsharded_parameters_of_a_sharded_module_at_later_saves() -> None:
    ranks = Ranks(nn.Linear(4, 4))
    shards = [{name: attached.pop(name) for name in ("model", "optimizer")} for attached in ranks.attached]
    for weight in (1.0, 1.0, 2.0):
        with torch.no_grad():
            shards[1]["model"].weight.copy_(shards[0]["model"].weight * weight)
        found = ranks.save(in_shards=shards)
        assert [each.name for each in found] == (["model"] if weight > 1.0 else [])
