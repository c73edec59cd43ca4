"""Ways to train, with a fault: the next round has, bit for bit, the state of a step, or an older save.

The usual ways are in `test_exact.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.faults.conftest import StartJob
from tests.faults.job import Fault
from tests.faults.nodes import Nodes
from tests.faults.test_save_at_failure import assert_undisturbed, digests

pytestmark = pytest.mark.system
FLAGS = ["--checkpoint-dir", "checkpoints"]
DIFFERS = "the parameters of model on rank 1 differ from rank 0's, which alone are saved. Train it in Distributed"


KINDS = """averaged_in_steps_left_out sent clamped_data overflown convolved frozen growing frozen_later extended
reloaded replaced_buffer reshaped_buffer plateau_averaged"""


@pytest.mark.parametrize(
    ("kind", "kills", "resumes"),
    [
        *((kind, (13, 17), [12, 16]) for kind in KINDS.split()),
        ("noisy", (1013, 1017), [13, 17]),  # between the backward pass and `session.step()`
    ],
)
def test_way_to_train_repeats_no_step_and_loses_no_bit(
    job: StartJob, kind: str, kills: tuple[int, int], resumes: list[int]
) -> None:
    """Each rank dies once."""
    whole = job("kinds.py", kind, flags=FLAGS)
    assert whole.wait() == 0
    run = job("kinds.py", kind, faults=[Fault(rank, step, "SIGKILL") for rank, step in enumerate(kills)], flags=FLAGS)
    assert run.wait() == 0
    assert [event["step"] for event in run.events("resumed")] == resumes, run.err
    for rank in (0, 1):
        assert_undisturbed(run, whole, rank)


def test_rank_without_an_object_of_rank_0_saves_nothing(job: StartJob) -> None:
    """No later round could restore what it saves."""
    run = job("kinds.py", "averaged_on_rank_0", faults=[Fault(0, 13, "SIGKILL")], flags=FLAGS)
    assert run.wait() == 0, run.err
    assert [event["step"] for event in run.events("resumed")] == [10]
    assert "it attaches model, optimizer, sampler, and rank 0 model, optimizer, ema, sampler: attach" in run.err


def test_state_that_cannot_be_loaded_is_not_tried_again(job: StartJob) -> None:
    run = job("kinds.py", "not_loadable_at_each_step", faults=[Fault(1, 13, "SIGKILL")], flags=FLAGS)
    assert run.wait() == 0, run.err
    assert [(event["round"], event["step"]) for event in run.events("resumed")] == [(3, 10)]
    assert (
        "the state of step 12, which was saved at the fault, is not used again: rank 0: ValueError: there is" in run.err
    )


def test_step_that_the_survivor_is_about_to_end_is_waited_for(job: StartJob) -> None:
    run = job("kinds.py", "slowly_changed", faults=[Fault(1, 1013, "SIGKILL")], flags=FLAGS)
    assert run.wait() == 0
    assert [event["step"] for event in run.events("resumed")] == [13], run.err


@pytest.mark.parametrize(("kind", "resumes"), [("noisy", 13), ("sampled", 10)])
def test_rank_on_another_node_than_the_one_that_saves(
    job: StartJob, nodes: Callable[[str], Nodes], tmp_path: Path, kind: str, resumes: int
) -> None:
    """It dies between the backward pass and `session.step()`. Where it has drawn as the donor until then, it does so in
    that step; where it may have drawn anything, an older save is resumed from.
    """
    env = {"OMP_NUM_THREADS": "1"}
    whole = job("kinds.py", kind, flags=FLAGS, env=env)
    assert whole.wait() == 0
    both = nodes("2:2")
    how: dict[str, Any] = {"flags": ["--checkpoint-dir", str(tmp_path / "checkpoints")], "warm": True, "env": env}
    agents = [both.agent("a", "kinds.py", kind, **how)]
    agents[0].event("waiting")  # it has rank 0 then
    agents.append(both.agent("b", "kinds.py", kind, **how, faults=[Fault(1, 1013, "SIGKILL")]))
    assert [agent.wait(within=300) for agent in agents] == [0, 0]
    (resumed,) = agents[0].events("resumed")
    assert resumed["step"] == resumes, agents[0].err
    assert "draws other numbers" not in resumed["reason"]
    assert (kind == "sampled") == ("rank 1 had not finished step 13, and draws random numbers" in agents[0].err)
    for rank, agent in enumerate(agents):
        assert_undisturbed(agent, whole, rank)


def test_optimizer_that_divides_its_state_among_the_ranks(job: StartJob) -> None:
    """No rank has all of it: neither is it saved at the fault, nor as rank 0's."""
    run = job("kinds.py", "divided", faults=[Fault(1, 5, "SIGKILL")], flags=FLAGS)
    assert run.wait() == 1
    assert not run.events("resumed"), run.err
    assert "Divided keeps a state for a part of its parameters: other ranks may have the rest" in run.err
    assert "StateDiffers: momentum_buffer in the state of optimizer on rank 1 differs from rank 0's, which" in run.err


@pytest.mark.parametrize(
    ("kind", "step", "why"),
    [
        ("sampled", 1013, "rank 1 had not finished step 13, and draws random numbers between its backward pass and"),
        ("gan_both", 1013, "it was between the optimizer's step and session.step()"),
        ("clamped_once", 13, "what is attached was changed after session.step()"),
        ("replaced_optimizer", 13, "what is attached was changed after session.step()"),
        ("diverging", 13, "a communication hook"),
        ("hooked_optimizer", 13, "an optimizer has hooks for its state_dict"),
        ("counted_in_the_module", 13, "model holds Counted, which has a state_dict of its own"),
        ("state_dict_of_the_object", 13, "model holds Chosen, which has a state_dict of its own"),
        ("lr_in_a_tensor", 13, "values that can change in place"),
        ("unfrozen_apart", 13, "a parameter whose gradient DistributedDataParallel does not average"),
        ("unpicklable", 13, "the state cannot be copied at a step: "),
        ("growing_tensor", 13, "growing keeps tensors and is neither a module nor an optimizer"),
        ("never_stepped", 13, "no attached optimizer has made a step"),
    ],
)
def test_state_that_is_not_that_of_a_step_is_never_saved(job: StartJob, kind: str, step: int, why: str) -> None:
    run = job("kinds.py", kind, faults=[Fault(1, step, "SIGKILL")], flags=FLAGS)
    assert run.wait() == 0
    (resumed,) = run.events("resumed")
    assert resumed["step"] == 10
    last = 13 if kind == "sampled" else 12  # rank 0 is done with that step
    assert f"steps 11 to {last} are trained again" in resumed["reason"]
    assert why in run.err
    noted = {step: found for round_, step, found in digests(run, "steps") if round_ == 1}
    assert all(noted[step] == found for _, step, found in digests(run, "restored"))


def test_rank_that_trains_a_layer_by_itself_is_named_at_the_save_at_which_it_first_does(job: StartJob) -> None:
    """It ends no job: a fault costs the steps since the last state of all ranks, and later ones are rank 0's."""
    run = job("kinds.py", "unfrozen_apart", faults=[Fault(1, 17, "SIGKILL")], flags=FLAGS)
    assert run.wait() == 0
    log, ranks = run.err.count(f"] {DIFFERS}"), run.err.count(f"\n{DIFFERS}")
    assert (log, ranks) == (2, 3), run.err  # at step 15 in both rounds, in the second one the first save: on every rank
    assert [event["step"] for event in run.events("resumed")] == [10]
    saved = [(event["round"], event["step"]) for event in run.events("checkpoint_saved")]
    assert (2, 20) in saved


@pytest.mark.parametrize("kind", ["plateau_on_rank_0", "plateau_apart"])
@pytest.mark.parametrize(
    ("dies", "why"),
    [
        (0, "rank 1 has not saved step 12 at the fault: scheduler may differ from rank 0's"),
        (1, "rank 0 has not saved step 12 at the fault: the parameters are not the same on every rank"),
    ],
)
def test_scheduler_that_follows_each_ranks_own_loss(job: StartJob, kind: str, dies: int, why: str) -> None:
    """It is no state of all ranks. The next round's first save names the scheduler and gives the remedy."""
    run = job("kinds.py", kind, faults=[Fault(dies, 13, "SIGKILL")], flags=FLAGS)
    assert run.wait() == 0
    assert [event["step"] for event in run.events("resumed")] == [10]
    assert why in run.err
    assert "the state of scheduler on rank 1 differs from rank 0's" in run.err
    noted = {step: found for _, step, found in digests(run, "steps")}
    assert noted[10] == digests(run, "restored")[0][2]
