"""What is found to have changed between `session.step()` and the next step, and what becomes of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from elasticd.checkpointing.at_fault.late_changes import STEPS_BEFORE_REFUSAL, BetweenSteps, LateChanges
from elasticd.errors import CheckpointRefused
from elasticd.sampler import ElasticBatchSampler

CPU = torch.device("cpu")


class Meter:
    def __init__(self) -> None:
        self.state: dict[str, Any] = {"count": 0, "mean": torch.zeros(2)}

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


def objects() -> dict[str, Any]:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1))
    optimizer = torch.optim.AdamW(model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5)
    chained = torch.optim.lr_scheduler.ChainedScheduler([torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0)])
    averaged = torch.optim.swa_utils.AveragedModel(model)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(()))
    sampler = ElasticBatchSampler(8, 4)
    return {
        "model": model,
        "optimizer": optimizer,
        "scheduler": scheduler,
        "chained": chained,
        "ema": averaged,
        "scaler": scaler,
        "sampler": sampler,
        "meter": Meter(),
    }


def change(attached: dict[str, Any]) -> None:
    with torch.no_grad():
        for parameter in attached["ema"].parameters():
            parameter.add_(1)


CHANGES: dict[str, tuple[Callable[[dict[str, Any]], Any], list[str]]] = {
    "nothing": (lambda each: None, []),
    "forward": (lambda each: each["model"](torch.ones(4, 4)), []),
    "gradients": (lambda each: each["model"](torch.ones(4, 4)).sum().backward(), []),
    "zero_grad": (lambda each: each["optimizer"].zero_grad(), []),
    "next epoch": (lambda each: each["sampler"].set_epoch(1), []),
    "scheduler": (lambda each: each["scheduler"].step(), ["scheduler"]),
    "chained": (lambda each: each["chained"].step(), ["chained"]),
    "lr": (lambda each: each["optimizer"].param_groups[0].update(lr=0.5), ["optimizer"]),
    "weight decay": (lambda each: each["optimizer"].param_groups[0].update(weight_decay=0.5), ["optimizer"]),
    "tensor": (lambda each: each["optimizer"].param_groups[0].update(lr=torch.ones(2)), ["optimizer"]),
    "weights": (lambda each: each["model"][0].weight.data.clamp_(0.0, 0.0), ["model"]),
    "one embedding": (lambda each: each["model"][0].weight.data[0].zero_(), ["model"]),
    "other memory": (lambda each: setattr(each["model"][0].weight, "data", torch.ones(4, 4)), ["model"]),
    "averaged": (change, ["ema"]),
    "count": (lambda each: each["meter"].state.update(count=1), ["meter"]),
    "mean": (lambda each: each["meter"].state["mean"].add_(1), ["meter"]),
}


@pytest.mark.filterwarnings("ignore:Detected call of")
@pytest.mark.parametrize("change", CHANGES)
def test_change_is_found_by_name(change: str) -> None:
    attached = objects()
    changes = LateChanges(attached)
    changes.commit()
    act, names = CHANGES[change]
    act(attached)
    assert changes.find_changed() == names


def add_to(tensor: torch.Tensor) -> None:
    with torch.no_grad():
        tensor.add_(1)


@pytest.mark.parametrize(
    ("what", "name"),
    [
        (lambda model, _: model[1].weight, "model"),
        (lambda model, _: model[1].running_mean, "a buffer of model"),
        (lambda model, optimizer: optimizer.state[model[1].weight]["exp_avg"], "optimizer"),
    ],
)
def test_change_of_any_tensor_is_found_where_all_are_looked_at(what: Callable[..., torch.Tensor], name: str) -> None:
    attached = objects()
    model, optimizer = attached["model"], attached["optimizer"]
    model(torch.ones(4, 4)).sum().backward()
    optimizer.step()
    changes = LateChanges(attached)
    for looks_at_all in (True, False):
        changes.commit(looks_at_all)
        assert changes.find_changed() == []
        add_to(what(model, optimizer))
        assert changes.find_changed() == [name] * looks_at_all


def test_memory_that_is_given_back_is_not_read() -> None:
    """As of parameters that a module has gathered from all ranks."""
    model = torch.nn.Linear(4, 4)
    model.bias.data = torch.zeros(1 << 20)[-4:]
    changes = LateChanges({"model": torch.nn.Sequential(torch.nn.Linear(4, 4), model, torch.nn.Linear(4, 4))})
    changes.commit(looks_at_all=True)
    model.bias.untyped_storage().resize_(0)
    assert changes.find_changed() == ["model"]


def test_wrapper_around_an_optimizer_needs_no_state() -> None:
    """It is one of torch's without having called its `__init__`."""
    attached = objects()
    wrapper: Any = object.__new__(type("Wrapper", (torch.optim.Optimizer,), {}))
    wrapper.param_groups = attached["optimizer"].param_groups
    changes = LateChanges({**attached, "optimizer": wrapper})
    changes.commit(looks_at_all=True)
    assert changes.find_changed() == []


def test_optimizer_that_has_begun_anew_is_changed() -> None:
    attached = objects()
    attached["model"](torch.ones(4, 4)).sum().backward()
    attached["optimizer"].step()
    changes = LateChanges(attached)
    changes.commit(looks_at_all=True)
    attached["optimizer"].state.clear()
    assert changes.find_changed() == ["optimizer"]


def test_forward_pass_may_change_buffers() -> None:
    """Where the next batch is asked for only after it."""
    attached = objects()
    end, _ = step_end(attached)
    for step in range(1, 9):
        end.commit(step, is_saved=True, ends_epoch=False)
        attached["model"](torch.ones(4, 4))
        assert end.on_step_begin(is_certain=True) == ""


def test_late_change_of_some_tensors_is_saved_again_once() -> None:
    """Each save is like that: saving twice each time would help nobody."""
    attached = objects()
    end, _ = step_end(attached, first_step=9)
    again = []
    for step in range(10, 60):
        is_saved = step % 10 == 0 or step - 1 in again
        end.commit(step, is_saved=is_saved, ends_epoch=False)
        add_to(attached["model"][1].bias)
        end.on_step_begin(is_certain=True)
        again += [step] * bool(end.why_save_again())
    assert again == [10]


def test_weights_that_were_averages_during_an_evaluation_are_not_changed() -> None:
    """The donor has to know, since their counters have moved."""
    attached = objects()
    end, donor = step_end(attached)
    for step in range(1, STEPS_BEFORE_REFUSAL + 1):
        end.commit(step, is_saved=True, ends_epoch=False)
        with torch.no_grad():
            for parameter in attached["model"].parameters():
                own = parameter.clone()
                parameter.zero_()
                parameter.copy_(own)
        assert not end.is_changed()
        assert end.on_step_begin(is_certain=True) == ""
    assert donor.calls == [True] * STEPS_BEFORE_REFUSAL


def test_object_that_copies_its_tensors_into_each_state_is_not_changed_by_that() -> None:
    own = Meter()
    own.state_dict = lambda: {"mean": own.state["mean"].clone()}  # type: ignore[method-assign]
    changes = LateChanges({"meter": own})
    changes.commit()
    kept = [own.state_dict() for _ in range(3)]
    assert changes.find_changed() == []
    assert len(kept) == 3


def test_state_of_a_frameworks_loop_is_not_looked_at() -> None:
    """The integration does again what a fault has kept the loop from doing."""
    own = type("State", (Meter,), {"__module__": "elasticd.integrations.transformers"})()
    attached = {**objects(), "trainer": own}
    changes = LateChanges(attached)
    changes.commit()
    own.state["count"] = 1
    attached["optimizer"].param_groups[0]["lr"] = 0.5
    assert changes.find_changed() == []


class Donor:
    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.has_drawn = False

    def commit_late_changes(self, is_changed: bool, is_epoch_tail: bool) -> bool:
        self.calls.append("tail" if is_epoch_tail else is_changed)
        return self.has_drawn

    def is_in_step(self) -> bool:
        return False

    def close(self) -> None:
        self.calls.append("closed")


def step_end(attached: dict[str, Any], first_step: int = 0) -> tuple[BetweenSteps, Donor]:
    donor: Any = Donor()
    return BetweenSteps(attached, donor, CPU, first_step), donor


@pytest.mark.parametrize("first_step", [0, 1])
def test_change_after_each_of_the_first_steps_is_an_error(first_step: int) -> None:
    """Also in the run after it, which continues from the step that was saved before the first look at a change."""
    attached = objects()
    end, donor = step_end(attached, first_step)
    for step in range(1, STEPS_BEFORE_REFUSAL):
        assert end.may_be_refused == (step > 1 or first_step == 1)
        end.commit(step, is_saved=False, ends_epoch=False)
        change(attached)
        assert f"ema changed after session.step() of step {step} and before" in end.on_step_begin(is_certain=True)
    end.commit(STEPS_BEFORE_REFUSAL, is_saved=False, ends_epoch=False)
    change(attached)
    with pytest.raises(CheckpointRefused, match=r"Move session\.step\(\) below"):
        end.on_step_begin(is_certain=True)
    assert donor.calls == [True] * STEPS_BEFORE_REFUSAL + ["closed"]


@pytest.mark.parametrize(
    ("first_step", "clean", "is_certain"),
    [(2, (), True), (0, (1,), True), (0, (), False)],
    ids=["resumed", "begins-later", "batch-is-not-asked-for"],
)
def test_other_changes_end_no_job(first_step: int, clean: tuple[int, ...], is_certain: bool) -> None:
    attached = objects()
    end, _ = step_end(attached, first_step)
    for step in range(1, 50):
        end.commit(step, is_saved=step == 7, ends_epoch=False)
        if step not in clean:
            change(attached)
        assert bool(end.on_step_begin(is_certain)) == (step not in clean)
        assert end.why_save_again() == ""  # each save is like that


def test_saved_step_that_changes_afterwards_is_saved_again() -> None:
    attached = objects()
    end, _ = step_end(attached)
    for step in (1, 2):
        end.commit(step, is_saved=True, ends_epoch=False)
        if step == 2:
            change(attached)
        end.on_step_begin(is_certain=True)
    assert end.why_save_again() == "step 2 was saved before a change"


def test_evaluation_of_a_frameworks_loop_is_no_mistake() -> None:
    """It draws the seed of its loader."""
    own = type("State", (Meter,), {"__module__": "elasticd.integrations.transformers"})()
    end, donor = step_end({**objects(), "trainer": own})
    donor.has_drawn = True
    end.commit(4, is_saved=True, ends_epoch=False)
    assert end.on_step_begin(is_certain=True) == ""
    assert donor.calls == [False]


def end_epoch(sampler: ElasticBatchSampler) -> None:
    for _ in sampler:
        sampler.commit()


def test_end_of_an_epoch_may_change_anything() -> None:
    attached = objects()
    end, donor = step_end(attached)
    for step in range(1, 8):
        end.commit(step, is_saved=True, ends_epoch=True)
        change(attached)
        assert end.on_step_begin(is_certain=True) == ""
    assert donor.calls == ["tail"] * 7


def test_change_after_a_save_as_of_the_next_epoch_is_said() -> None:
    attached = objects()
    end, _ = step_end(attached)
    end.commit(4, is_saved=False, ends_epoch=True)
    change(attached)
    assert end.is_changed()
    end.on_save(is_next_epoch=True)
    assert not end.is_changed()
    change(attached)
    assert "ema changed after session.step() of step 4" in end.on_step_begin(is_certain=True)


def test_random_numbers_are_named() -> None:
    end, donor = step_end(objects())
    donor.has_drawn = True
    end.commit(1, is_saved=False, ends_epoch=False)
    assert end.on_step_begin(is_certain=True).startswith("the random state changed after session.step() of step 1")


def test_sampler_state_of_the_next_epoch() -> None:
    sampler = ElasticBatchSampler(8, 4)
    end_epoch(sampler)
    with sampler.in_next_epoch():
        saved = sampler.state_dict()
    assert (saved["epoch"], saved["offset"]) == (1, 0)
    assert (sampler.state_dict()["epoch"], sampler.state_dict()["offset"]) == (0, 8)
