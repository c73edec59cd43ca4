"""Natural mistakes with the library: one sentence each, on every rank; what only looks like one is left alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

ERRORS = {
    "unattached_sampler": "an ElasticBatchSampler gives batches for each step and is not attached",
    "unattached_sampler_with_workers": "an ElasticBatchSampler gives batches for each step and is not attached",
    "no_step": "an epoch of the attached sampler has ended, with 200 optimizer steps, and session.step() was not",
    "optimizer_made_again": "AdamW trains model and is not attached: at each restart its state (exp_avg, exp_avg_sq, ",
    "second_optimizer_unattached": "Adam trains model and is not attached",
    "optimizer_inside_another_one": "SGD trains model and is not attached: at each restart its state (momentum_buffer)",
    "parameter_of_nothing_attached": "optimizer trains a parameter of shape (1,) of nothing that is attached",
    "model_of_an_optimizer_unattached": "critic_optimizer trains 2 parameters, the first of shape (1, 4), of nothing",
    "all_made_again": "SGD trains nothing that is attached, and nothing that is attached has been trained",
    "steps_in_wrong_order": "session.step() is called before optimizer.step()",
    "steps_in_wrong_order_with_clipping": "session.step() is called before optimizer.step()",
    "steps_in_wrong_order_without_sampler": "session.step() is called before optimizer.step()",
    "without_ddp": "the parameters of model on rank 1 differ from rank 0's",
    "noise_of_each_rank": "the parameters of model on rank 1 differ from rank 0's",
    "batch_of_batches": "this DataLoader makes one batch of 16 batches",
    "batch_sampler_of_batches": "this DataLoader makes one batch of 2 batches",
}
WARNINGS = {
    "unattached_second_sampler": "an ElasticBatchSampler gives batches for each step and is not attached",
    "batch_left_out": "1 batch of the attached sampler without session.step(): a restart in this epoch trains again",
    "batch_left_out_with_workers": "1 batch of the attached sampler without session.step()",
    "batches_in_chunks": "1 batch of the attached sampler without session.step()",
    "parameter_beside_an_own_object": "optimizer trains a parameter of shape (1,) of nothing that is attached",
    "groups_added_later": "optimizer has other parameter groups than before: the next restore() fails unless",
    "scheduler_unattached": "StepLR schedules optimizer and is not attached: after a restart it, and so the",
    "second_scheduler_unattached": "LinearLR schedules optimizer and is not attached: after a restart it, and so the",
    "moments_beside_the_state": "optimizer keeps tensors in moments, which its state_dict() lacks: after a restart",
    "scaler_unattached": "a GradScaler scales the loss and is not attached: after a restart its scale would begin anew",
    "no_step_in_one_epoch": "the script has ended after 12 optimizer steps without session.step()",
    "no_step_for_long": "1000 optimizer steps without session.step(): nothing is saved before it is called",
    "optimizer_made_again_late": "AdamW trains model and is not attached",
    "buffers_of_each_rank": "attach(model=...): with broadcast_buffers=False each rank has buffers of its own",
    "no_optimizer_attached_but_its_scheduler": "AdamW trains model and is not attached",
    "sampler_of_an_earlier_training": "sampler is where an earlier training of this process has left it, at epoch 1",
    "joined": "model trains in torch's Join: where a rank has more batches than another one, session.step() waits",
    "no_optimizer_attached": "AdamW trains model and is not attached",
}
HEALTHY = {
    "usual": 24,
    "workers": 24,
    "evaluation_sampler": 36,
    "evaluation_at_every_step": 24,
    "evaluation_in_turn": 12,
    "evaluation_that_is_left_early": 24,
    "sampler_that_commits_by_itself": 24,
    "sampler_without_checkpoint": 24,
    "no_step_as_nothing_is_saved": 0,
    "nothing_left_to_train": 0,
    "many_optimizer_steps_for_each_step": 4,
    "warm_up_without_steps": 24,
    "evaluation_before_training": 24,
    "no_optimizer_attached_and_no_state": 24,
    "probe": 24,
    "trained_on_after_close": 5,
    "probe_that_counts": 24,
    "parameter_of_an_own_object": 24,
    "parameter_that_an_own_object_copies": 24,
    "frozen_parameter_of_nothing_attached": 24,
    "first_steps_of_another_model": 12,
    "scheduler_made_after_restore": 12,
    "scheduler_of_two": 12,
    "scheduler_in_a_wrapper": 12,
    "scaler_attached": 12,
    "scaler_in_an_own_object": 12,
    "scaler_disabled": 12,
    "no_batch_left_out_with_workers": 48,
    "no_batch_left_out_in_chunks": 48,
    "no_batch_left_out_in_a_thread": 48,
    "search_of_a_learning_rate": 24,
    "search_on_the_attached_sampler": 24,
    "wrapper_around_an_optimizer": 24,
    "wrapper_that_saves_copies": 24,
    "moments_in_the_state": 24,
    "both_optimizers_attached": 24,
    "gradients_in_place": 12,
    "closure": 12,
    "accumulation": 12,
    "whole_batches_from_the_dataset": 24,
    "no_restore": 24,
}


@pytest.mark.parametrize("case", ERRORS)
def test_mistake_that_loses_work_is_an_error_on_every_rank(start: Any, tmp_path: Path, case: str) -> None:
    job = start("forgotten.py", case, str(tmp_path / "shared"))
    assert job.codes() == [1, 1]
    said = [rank.errors() for rank in job.ranks]
    assert ERRORS[case] in said[0] or ERRORS[case] in said[1]
    # Here rank 0 serves the store, and may be gone before the other one has come so far.
    assert all(ERRORS[case] in each or "torch.distributed.Dist" in each for each in said)


@pytest.mark.parametrize("case", WARNINGS)
def test_mistake_that_may_be_meant_is_one_warning_on_every_rank(start: Any, tmp_path: Path, case: str) -> None:
    job = start("forgotten.py", case, str(tmp_path / "shared"))
    for seen in job.results():
        (last, *others) = reversed(seen["warnings"])
        assert WARNINGS[case] in last if case != "no_step_for_long" else WARNINGS[case] in others[0]
        assert len(others) == (case == "no_step_for_long")


def test_scripts_without_mistakes_are_left_alone(start: Any, tmp_path: Path) -> None:
    jobs = {case: start("forgotten.py", case, str(tmp_path / case), world_size=1) for case in HEALTHY}
    found = {case: job.results()[0] for case, job in jobs.items()}
    assert found == {case: {"steps": steps, "warnings": []} for case, steps in HEALTHY.items()}


@pytest.mark.parametrize("case", ["averages_on_rank_0_alone", "gradients_averaged_by_hand"])
def test_ranks_that_only_seem_to_train_apart_are_left_alone(start: Any, tmp_path: Path, case: str) -> None:
    found = start("forgotten.py", case, str(tmp_path / "shared")).results()
    assert found == [{"steps": 12, "warnings": []}] * 2


def test_restart_without_restore_is_an_error(start: Any, tmp_path: Path) -> None:
    directory = str(tmp_path / "shared")
    start("forgotten.py", "no_restore", directory).results()
    job = start("forgotten.py", "no_restore", directory, round=2)
    assert job.codes() == [1, 1]
    for rank in job.ranks:
        assert "has a checkpoint of step 24 from before the restart, and session.restore() was not" in rank.errors()


def test_other_run_without_restore_is_a_warning(start: Any, tmp_path: Path) -> None:
    """It may begin anew on purpose."""
    directory = str(tmp_path / "shared")
    start("forgotten.py", "no_restore", directory, world_size=1).results()
    (seen,) = start("forgotten.py", "no_restore", directory, world_size=1, round=2, ELASTICD_RUN="run-2").results()
    assert seen["steps"] == 24
    (warning,) = seen["warnings"]
    assert "has a checkpoint of step 24, and session.restore() was not called: training begins anew" in warning


def test_loop_that_skips_batches_by_itself_is_told(start: Any, tmp_path: Path) -> None:
    start("forgotten.py", "skips_batches_after_a_restore", str(tmp_path / "shared")).results()
    for seen in start("forgotten.py", "skips_batches_after_a_restore", str(tmp_path / "shared"), round=2).results():
        (warning,) = seen["warnings"]
        assert warning.startswith("the loop has left out the first 8 steps after restore(), but the attached sampler")


def test_second_stage_can_be_resumed(start: Any, tmp_path: Path) -> None:
    """What was a warning when it began is no error at the restart."""
    for round, steps in (1, 24), (2, 36):
        job = start("forgotten.py", "optimizer_of_a_second_stage", str(tmp_path), world_size=1, round=round)
        (seen,) = job.results()
        assert seen["steps"] == steps
        (warning,) = seen["warnings"]
        assert "AdamW trains model and is not attached" in warning
        (told,) = [event for event in job.ranks[0].read_events() if event.reason == warning]
        assert told.extra["once"], "each round would repeat it"


@pytest.mark.parametrize(("case", "error"), [("another_class", "and has no dampening, momentum"), ("alike_class", "")])
def test_resume_with_another_class_of_optimizer(start: Any, tmp_path: Path, case: str, error: str) -> None:
    directory = str(tmp_path / "shared")
    start("forgotten.py", case, directory).results()
    job = start("forgotten.py", case, directory, round=2)
    assert job.codes() == ([1, 1] if error else [0, 0])
    for rank in job.ranks:
        assert error in rank.errors()
        assert "KeyError" not in rank.errors()


def test_attached_generator_continues(start: Any, tmp_path: Path) -> None:
    def drawn(job: Any) -> list[list[float]]:
        return [json.loads(seen["warnings"][0]) for seen in job.results()]

    first = drawn(start("forgotten.py", "generator", str(tmp_path / "broken"), world_size=1))
    second = drawn(start("forgotten.py", "generator", str(tmp_path / "broken"), world_size=1, round=2))
    whole = drawn(start("forgotten.py", "generator", str(tmp_path / "whole"), world_size=1, round=2))
    assert [before + after for before, after in zip(first, second, strict=True)] == whole
