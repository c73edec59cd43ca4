"""What a node learns of its job from looks: deadlines are the job's own, and nobody is judged who never trained."""

from __future__ import annotations

from dataclasses import replace

import pytest

from elasticd.heartbeat.record import INIT_PROCESS_GROUP, Heartbeat, Phase, Source
from elasticd_agent.hangs.observer import Observation
from elasticd_agent.hangs.step_history import StepHistory
from elasticd_agent.model.job import Policy
from elasticd_agent.model.reports import RankReport

POLICY = Policy(hang_floor_s=0.5, evidence_s=0.5, progress_ceiling_s=1800.0, startup_ceiling_s=600.0)
TRAINS = Heartbeat(step=1, phase=Phase.STEP, source=Source.HOOK, first_step_ns=1, progress_ns=1)


def observation(
    at: float, step: int, *, beat: Heartbeat = TRAINS, phase: str = "step", barrier: str = ""
) -> Observation:
    ranks = (RankReport(0, 0, phase=phase, step=step, barrier=barrier),)
    return Observation(1, (replace(beat, step=step),), (), 0.0, ranks, observed_s=at)


def trained(history: StepHistory, steps: int, step_s: float, from_s: float = 0.0, first: int = 1) -> float:
    """Looks at every step; returns the deadline after the last one."""
    found = 0.0
    for i in range(steps):
        seen = observation(from_s + i * step_s, first + i)
        history.high_water(seen)
        found = history.deadline_s(seen)
    return found


def test_the_deadline_is_a_multiple_of_the_steps() -> None:
    history = StepHistory(POLICY)
    assert trained(history, 300, 1.0) == pytest.approx(5.0, rel=0.1)


def test_many_steps_between_two_looks_are_steps_of_their_share() -> None:
    history = StepHistory(POLICY)
    history.deadline_s(observation(0.0, 1))
    found = [history.deadline_s(observation(0.25 * i, 1 + 12 * i)) for i in range(1, 60)]
    assert found[-1] == POLICY.hang_floor_s, "12 steps in 0.25 s: the floor decides"


def test_a_new_group_is_not_judged_by_the_step_it_has_not_made() -> None:
    history = StepHistory(POLICY)
    trained(history, 300, 0.01)
    history.begin()
    start = Heartbeat(phase=Phase.STARTING)
    assert history.deadline_s(observation(0.0, 0, beat=start, phase="starting")) == POLICY.startup_ceiling_s


@pytest.mark.parametrize(
    ("beat", "phase", "barrier", "expected"),
    [
        (Heartbeat(), "starting", "", 0.0),
        (Heartbeat(), "starting", INIT_PROCESS_GROUP, POLICY.startup_ceiling_s),
        (Heartbeat(source=Source.SESSION), "starting", "", POLICY.startup_ceiling_s),
        (Heartbeat(phase=Phase.EXIT), "exit", "", 0.0),
    ],
)
def test_who_is_judged_before_the_first_step(beat: Heartbeat, phase: str, barrier: str, expected: float) -> None:
    assert StepHistory(POLICY).deadline_s(observation(0.0, 0, beat=beat, phase=phase, barrier=barrier)) == expected


def test_checkpoints_that_nobody_saw_are_learned_from_what_is_noted() -> None:
    history = StepHistory(POLICY)
    trained(history, 300, 0.01)
    saving = observation(3.0, 300, phase="checkpoint")
    assert history.deadline_s(saving) == POLICY.progress_ceiling_s
    history = StepHistory(POLICY)
    trained(history, 300, 0.01)
    history.checkpoint_saved(0.4)
    assert history.deadline_s(saving) == pytest.approx(2.0)


def test_the_longest_of_all_ranks_phases_counts() -> None:
    history = StepHistory(POLICY)
    trained(history, 300, 0.01)
    ranks = (RankReport(0, 0, phase="step", step=300), RankReport(1, 1, phase="eval", step=300))
    beats = (TRAINS, TRAINS)
    assert history.deadline_s(Observation(1, beats, (), 0.0, ranks, observed_s=3.0)) == POLICY.progress_ceiling_s


def test_rounds_of_a_plain_script_add_up() -> None:
    history = StepHistory(POLICY)
    assert history.high_water(observation(0.0, 40)) == 40
    history.begin()
    assert history.high_water(observation(0.0, 5)) == 45
    assert history.high_water(observation(0.0, 60, beat=Heartbeat(source=Source.SESSION))) == 60
