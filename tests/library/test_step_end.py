"""Where a step ends: nothing is saved inside one, and nothing counts after a stop."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from elasticd.checkpointing.at_fault.late_changes import RestoredModules
from elasticd.checkpointing.storage.lineage import lineage
from elasticd.heartbeat.record import STOP
from tests.library import checkpoints

SCRIPT = "step_end.py"


def newest(directory: Path) -> dict[str, Any]:
    return checkpoints.load(lineage(directory)[0][0])


@pytest.mark.parametrize("breaks", [True, False])
def test_outer_loop_that_goes_on_after_a_stop_loses_nothing(
    start: Any, tmp_path: Path, wait_for: Any, breaks: bool
) -> None:
    """One `break` leaves one loop. The other one still runs, with a scheduler and `save()` in each epoch."""
    options = {"epochs": 10, "tail": "scheduler, save", "directory": str(tmp_path / "cut")}
    job = start(SCRIPT, {**options, "sleep": 0.02, "breaks": breaks})
    wait_for(lambda: all(rank.read_heartbeat().step >= 6 for rank in job.ranks), "6 steps")
    job.ranks[0].request(STOP)
    first, second = job.results()
    assert first["stopped"] and first["steps"] == second["steps"] == first["trained"] < 40
    assert first["saved"] == first["steps"]
    held = newest(tmp_path / "cut")
    assert held["elasticd"]["step"] == first["steps"]
    assert held["sampler"]["epoch"] == held["scheduler"]["last_epoch"] == (first["steps"] - 1) // 4
    again = start(SCRIPT, options, round=2).results()[0]
    whole = start(SCRIPT, {**options, "directory": str(tmp_path / "whole")}).results()[0]
    assert again["resumed"] == first["steps"]
    assert [again[key] for key in ("steps", "lr", "digest")] == [whole[key] for key in ("steps", "lr", "digest")]


def test_step_after_a_stop_says_so_once(start: Any, tmp_path: Path, wait_for: Any) -> None:
    """A script without the sampler, which yields nothing any more."""
    job = start("toy.py", {"steps": 10**9, "every": None, "restore": False, "deaf": 30, "sleep": 0.002})
    wait_for(lambda: all(rank.read_heartbeat().step >= 6 for rank in job.ranks), "6 steps")
    job.ranks[0].request(STOP)
    first, _ = job.results()
    for rank in job.ranks:
        assert rank.read_heartbeat().step == first["steps"]
        assert rank.errors().count(f"session.step() after the stop at step {first['steps']} has no effect") == 1


def test_save_between_the_optimizers_step_and_the_end_of_the_step_waits_for_it(start: Any, tmp_path: Path) -> None:
    options = {"epochs": 2, "directory": str(tmp_path / "cut"), "every": None}
    cut = start(SCRIPT, {**options, "save_at": ["optimizer", 4], "die": 5})
    assert cut.codes()[0] == 3
    assert "session.save() inside step 5: " in cut.ranks[0].errors()
    assert newest(tmp_path / "cut")["elasticd"]["step"] == 5
    again = start(SCRIPT, options, round=2).results()[0]
    whole = start(SCRIPT, {**options, "directory": str(tmp_path / "whole")}).results()[0]
    assert again["resumed"] == 5
    assert again["digest"] == whole["digest"]


@pytest.mark.parametrize(("every", "save_at"), [(3, None), (None, ["micro", 3])])
def test_save_waits_for_a_step_without_accumulated_gradients(
    start: Any, tmp_path: Path, every: int | None, save_at: list[Any] | None
) -> None:
    """`session.step()` is called after each of two micro-batches."""
    options = {"epochs": 2, "micro": 2, "directory": str(tmp_path / "cut"), "every": every}
    cut = start(SCRIPT, {**options, "save_at": save_at, "die": 5})
    assert cut.codes()[0] == 3
    assert newest(tmp_path / "cut")["elasticd"]["step"] == 4
    again = start(SCRIPT, {**options, "every": 1000}, round=2).results()[0]
    whole = start(SCRIPT, {**options, "every": 1000, "directory": str(tmp_path / "whole")}).results()[0]
    assert again["resumed"] == 4
    assert again["digest"] == whole["digest"]


def test_save_waits_for_a_step_of_hundreds_of_micro_batches(start: Any, tmp_path: Path) -> None:
    options = {"epochs": 1, "samples": 1280, "micro": 320, "directory": str(tmp_path), "every": 330, "die": 639}
    assert start(SCRIPT, options).codes()[0] == 3
    assert lineage(tmp_path)[0] == []


@pytest.mark.parametrize("per_rank", [False, True])
def test_epochs_tail_before_a_save_is_not_repeated(start: Any, tmp_path: Path, per_rank: bool) -> None:
    options = {"tail": "scheduler, save", "per_rank": per_rank, "directory": str(tmp_path / "cut")}
    assert start(SCRIPT, {**options, "epochs": 2}).results()[0]["saves"] == [True, True]
    if not per_rank:
        held = newest(tmp_path / "cut")["sampler"]
        assert (held["epoch"], held["offset"]) == (2, 0)
    again = start(SCRIPT, {**options, "epochs": 4}, round=2).results()[0]
    whole = start(SCRIPT, {**options, "epochs": 4, "directory": str(tmp_path / "whole")}).results()[0]
    assert again["resumed"] == 8
    assert [again[key] for key in ("steps", "lr", "digest")] == [whole[key] for key in ("steps", "lr", "digest")]


def test_samplers_that_take_turns_continue_as_one_does(start: Any, tmp_path: Path) -> None:
    """In the middle of an epoch no seed is drawn again, and an epoch's tail before a save is not repeated."""
    options = {"turns": True, "tail": "scheduler, save", "every": 3, "directory": str(tmp_path / "cut"), "epochs": 2}
    assert start(SCRIPT, {**options, "die": 3}, world_size=1).codes() == [3]
    job = start(SCRIPT, options, world_size=1, round=2)
    assert job.results()[0]["resumed"] == 3
    assert "changed after" not in job.ranks[0].errors()
    saved = newest(tmp_path / "cut")["turns"]["samplers"][0]
    assert (saved["epoch"], saved["offset"]) == (2, 0)
    again = start(SCRIPT, {**options, "epochs": 4}, world_size=1, round=3).results()[0]
    whole = start(SCRIPT, {**options, "epochs": 4, "directory": str(tmp_path / "whole")}, world_size=1).results()[0]
    assert {**again, "resumed": None, "trained": 16, "saves": [True] * 4} == whole


def test_end_of_a_second_samplers_epoch_is_no_end_of_an_epoch(start: Any, tmp_path: Path) -> None:
    """Its epochs have three steps, those of the loop four: a change after step 3 belongs to that step."""
    options = {"second": 24, "directory": str(tmp_path / "cut"), "epochs": 2}
    job = start(SCRIPT, {**options, "late": "scheduler", "late_every": 3}, world_size=1)
    job.results()
    assert "scheduler changed after session.step() of step 3 " in job.ranks[0].errors()
    job = start(SCRIPT, {**options, "tail": "scheduler, save", "directory": str(tmp_path / "tail")}, world_size=1)
    assert job.results()[0]["saves"] == [True, True]
    assert job.ranks[0].errors() == ""
    held = newest(tmp_path / "tail")
    assert (held["sampler"]["epoch"], held["second"]["epoch"], held["second"]["offset"]) == (2, 2, 16)


def test_second_samplers_iteration_draws_nothing_in_the_middle_of_its_epoch(start: Any, tmp_path: Path) -> None:
    """Its DataLoader draws a seed when a resumed run takes the first batch."""
    options = {"second": 24, "epochs": 2, "every": 5, "directory": str(tmp_path / "cut")}
    assert start(SCRIPT, {**options, "die": 5}, world_size=1).codes() == [3]
    again = start(SCRIPT, options, world_size=1, round=2).results()[0]
    whole = start(SCRIPT, {**options, "directory": str(tmp_path / "whole")}, world_size=1).results()[0]
    assert again["resumed"] == 5
    assert again["random"] == whole["random"]


def test_batch_that_is_looked_at_before_training_draws_nothing(start: Any, tmp_path: Path) -> None:
    options = {"looks": True, "epochs": 2, "every": 5, "directory": str(tmp_path / "cut")}
    assert start(SCRIPT, {**options, "die": 5}, world_size=1).codes() == [3]
    again = start(SCRIPT, options, world_size=1, round=2).results()[0]
    whole = start(SCRIPT, {**options, "directory": str(tmp_path / "whole")}, world_size=1).results()[0]
    assert again["resumed"] == 5
    assert again["random"] == whole["random"]


@pytest.mark.parametrize("late", ["scheduler", "model"])
def test_change_after_each_of_the_first_steps_is_refused(start: Any, tmp_path: Path, late: str) -> None:
    """Nothing is saved from which a restart could continue."""
    job = start(SCRIPT, {"late": late, "directory": str(tmp_path / "cut"), "every": 2})
    assert 0 not in job.codes()
    assert lineage(tmp_path / "cut")[0] == []
    refused = rf"CheckpointRefused: .*{late} changed after session.step\(\) of step 3"
    assert any(re.search(refused, rank.errors()) for rank in job.ranks)  # the first one may end the store


@pytest.mark.parametrize("changed", ["scheduler", "model"])
def test_weights_replaced_after_restore_are_named(start: Any, tmp_path: Path, changed: str) -> None:
    """Such as a copy of the model that is begun anew as the average of its weights. A scheduler may step before each
    epoch.
    """
    options = {"after_restore": changed, "epochs": 1, "directory": str(tmp_path), "every": 2}
    job = start(SCRIPT, options, world_size=1)
    job.results()
    assert job.ranks[0].errors() == "", "nothing was restored"
    job = start(SCRIPT, {**options, "epochs": 2}, world_size=1, round=2)
    job.results()
    named = job.ranks[0].errors().count("model changed between restore() and the first batch: the state ")
    assert named == (changed == "model"), job.ranks[0].errors()


@pytest.mark.parametrize(
    ("change", "names"),
    [
        (lambda model: model.bfloat16(), []),
        (lambda model: model.to(memory_format=torch.channels_last), []),
        (lambda model: model.requires_grad_(False).eval(), []),
        (lambda model: model.load_state_dict(torch.nn.Conv2d(3, 4, 3).state_dict()), ["model"]),
        (lambda model: model.weight.data.mul_(2), ["model"]),
    ],
)
def test_another_type_of_numbers_is_no_replaced_state(change: Any, names: list[str]) -> None:
    model = torch.nn.Conv2d(3, 4, 3)
    restored = RestoredModules({"model": model, "scale": torch.nn.ParameterList([torch.tensor(1.0), torch.empty(0)])})
    change(model)
    assert restored.find_replaced() == names


def test_change_after_some_steps_is_said_once_and_saved_again(start: Any, tmp_path: Path) -> None:
    job = start(
        SCRIPT, {"late": "scheduler", "late_every": 6, "every": 6, "directory": str(tmp_path / "cut"), "epochs": 5}
    )
    job.results()
    reasons = [note.reason for note in job.ranks[0].read_events()]
    said = [each for each in reasons if "changed after session.step()" in each]
    assert len(said) == 1 and said[0].startswith("optimizer and scheduler changed after session.step() of step 6 ")
    assert any("saved (step 6 was saved before a change)" in each for each in reasons)


def test_stop_waits_for_a_step_without_accumulated_gradients(start: Any, tmp_path: Path, wait_for: Any) -> None:
    options = {"epochs": 50, "micro": 2, "directory": str(tmp_path / "cut")}
    job = start(SCRIPT, {**options, "sleep": 0.02})
    wait_for(lambda: all(rank.read_heartbeat().step >= 5 for rank in job.ranks), "5 steps")
    job.ranks[0].request(STOP)
    first, _ = job.results()
    assert first["stopped"] and first["steps"] % 2 == 0
