"""What a deadline is after some history of steps; above all, that no job which only changes its pace is suspected."""

from __future__ import annotations

import random
from collections.abc import Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elasticd_agent.hangs import deadlines as learning
from elasticd_agent.hangs.deadlines import LearnedDurations
from elasticd_agent.model.job import Policy

SHARP = Policy(hang_floor_s=0.5, evidence_s=0.5)


NOTHING = LearnedDurations()


def after(steps: Iterable[float], learned: LearnedDurations = NOTHING) -> LearnedDurations:
    for seconds in steps:
        learned = learning.record_duration(learned, "step", seconds)
    return learned


def after_visits(learned: LearnedDurations, seconds: float, times: int) -> LearnedDurations:
    for _ in range(times):
        learned = learning.record_duration(learned, "checkpoint", seconds)
    return learned


def deadline(learned: LearnedDurations, phase: str = "step", policy: Policy = SHARP, *, stepped: bool = True) -> float:
    return learning.deadline_s(learned, phase, stepped, has_checkpoint=True, policy=policy)


def margins(steps: Iterable[float], policy: Policy = SHARP) -> list[float]:
    """By how much each step stayed below the deadline it was under, as a part of that."""
    learned, found = LearnedDurations(), []
    for seconds in steps:
        found.append(1 - seconds / deadline(learned, policy=policy, stepped=learned.steps > 0))
        learned = learning.record_duration(learned, "step", seconds)
    return found


def test_before_anything_is_learned_ceilings_count() -> None:
    policy = Policy(startup_ceiling_s=11, first_step_ceiling_s=22, progress_ceiling_s=33)
    assert deadline(LearnedDurations(), "starting", policy, stepped=False) == 11
    assert deadline(LearnedDurations(), "step", policy, stepped=False) == 22
    assert deadline(LearnedDurations(), "checkpoint", policy, stepped=False) == 22
    assert {deadline(after([60, 60]), phase, policy) for phase in ("step", "barrier", "checkpoint", "eval")} == {33}


def test_a_job_of_equal_steps() -> None:
    assert deadline(after([60, 9] + [0.02] * 500)) == 0.5, "the floor"
    assert deadline(after([60, 9] + [0.2] * 500)) == pytest.approx(1.0), "five times a step"
    assert deadline(after([0.2] * 500), policy=Policy()) == 5
    assert learning.deadline_s(after([0.2] * 500), "step", True, has_checkpoint=False, policy=Policy()) == 60


def test_a_young_job_has_not_shown_its_slow_steps() -> None:
    assert deadline(after([1] * 100)) == pytest.approx(25)
    assert deadline(after([1] * (learning.YOUNG_STEPS + learning.EXCLUDED_STEPS))) == pytest.approx(5)
    assert deadline(after([0.02] * 100)) == pytest.approx(0.5), "the floor decides where steps are short"
    assert deadline(after([0.02] * 100 + [0.3])) < 2, "one that took long is no usual one"


def test_a_new_round_excludes_its_first_steps_and_forgets_nothing() -> None:
    learned = after([0.2] * 500)
    again = after([90, 40], learning.begin_round(learned))
    assert deadline(again) == deadline(learned)
    assert deadline(after([90, 40], learned)) > 100


def test_the_longest_is_forgotten_by_half() -> None:
    learned = after([0.001] * 300 + [8])
    assert deadline(learned) == 40
    assert deadline(after([0.001] * learning.HALF_LIFE_STEPS, learned)) == pytest.approx(20)


def test_a_ceiling_bounds_what_is_learned_unless_steps_themselves_take_that_long() -> None:
    policy = Policy(progress_ceiling_s=100)
    assert deadline(after([1] * 300 + [30]), policy=policy) == 100
    assert deadline(after([1] * 300 + [90]), policy=policy) == 180


def test_evaluations_and_checkpoints_have_deadlines_of_their_own() -> None:
    learned = learning.record_duration(after([0.02] * 300), "checkpoint", 20)
    assert deadline(learned, "checkpoint") == 100
    assert deadline(learned, "eval") == SHARP.progress_ceiling_s
    assert deadline(learned) == 0.5
    small = after_visits(learned, 1.0, 10)
    assert deadline(small, "checkpoint") == pytest.approx(50), "the longest one is forgotten by half in ten"
    quick = learning.record_duration(learned, "eval", 0.1)
    assert deadline(quick, "eval", Policy()) == 60, "a disk may pause, where nobody has said that it does not"
    assert deadline(quick, "eval") == pytest.approx(0.5)


def test_exit_handlers_have_the_floor_but_no_less_than_some_seconds() -> None:
    assert deadline(LearnedDurations(), "exit", stepped=False) == 5
    assert deadline(LearnedDurations(), "exit", Policy(), stepped=False) == 60, (
        "a checkpoint does not bring back what they do"
    )
    assert deadline(LearnedDurations(), "exit", Policy(hang_floor_s=9)) == 9


_DRAWS = random.Random(7)
SLOW = {
    "steps that grow by ten": [0.1 * 10 ** (n / 400) for n in range(400)],
    "steps that grow by ten in a line": [0.1 + 0.9 * n / 120 for n in range(120)],
    "one in a hundred 20 times slower": [4.0 if n % 100 == 99 else 0.2 for n in range(1000)],
    "one in a hundred 20 times slower, at random": [4.0 if _DRAWS.random() < 0.01 else 0.2 for _ in range(2000)],
    "one of four seconds in many of a hundredth": [4.0 if n in (150, 400) else 0.01 for n in range(500)],
    "twice as long from one to the next": [0.1 if n % 50 < 25 else 0.4 for n in range(500)],
    "a first epoch that was slow": [*[5.0] * 100, *[0.1] * 2000, *[0.4] * 100],
}


@pytest.mark.parametrize("name", SLOW)
def test_what_is_only_slow_stays_below_its_deadline(name: str) -> None:
    policy = Policy() if "hundredth" in name else SHARP
    assert min(margins(SLOW[name], policy)) > 0


@settings(deadline=None)
@given(st.lists(st.floats(0.001, 100), max_size=60), st.floats(0.001, 100))
def test_a_longer_step_never_makes_a_deadline_shorter(steps: list[float], last: float) -> None:
    old = [1.0] * 300
    assert deadline(after([*old, *steps, last])) <= deadline(after([*old, *steps, last * 2]))


@settings(deadline=None)
@given(st.lists(st.floats(0, 1e6), max_size=60), st.booleans(), st.sampled_from(["step", "eval", "exit", "barrier"]))
def test_a_deadline_is_between_the_floor_and_what_twice_the_longest_step_needs(
    steps: list[float], attached: bool, phase: str
) -> None:
    learned, policy = after(steps), Policy()
    found = learning.deadline_s(learned, phase, True, attached, policy)
    assert policy.effective_hang_floor_s(attached) <= found <= max(policy.progress_ceiling_s, 2 * max(steps, default=0))
