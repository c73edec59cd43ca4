"""Deadlines after some history of steps; above all, a job that only changes its pace is never suspected."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elasticd.heartbeat.record import INIT_PROCESS_GROUP_BARRIER, Heartbeat, Phase, StepSource
from elasticd_agent.hangs import deadlines as learning
from elasticd_agent.hangs.deadlines import LearnedDurations, StepHistory
from elasticd_agent.hangs.observer import Observation
from elasticd_agent.model.job import Policy
from elasticd_agent.model.reports import RankReport

SHARP = Policy(hang_floor_s=0.5, evidence_timeout_s=0.5)


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
    return learning.deadline_s(learned, phase, stepped, policy)


def margins(steps: Iterable[float], policy: Policy = SHARP) -> list[float]:
    """The distance of each step to its deadline, as a part of that."""
    learned, found = LearnedDurations(), []
    for seconds in steps:
        found.append(1 - seconds / deadline(learned, policy=policy, stepped=learned.round_steps > 0))
        learned = learning.record_duration(learned, "step", seconds)
    return found


def test_ceilings_before_anything_is_learned() -> None:
    policy = Policy(startup_ceiling_s=11, first_step_ceiling_s=22, progress_ceiling_s=33)
    assert deadline(LearnedDurations(), "starting", policy, stepped=False) == 11
    assert deadline(LearnedDurations(), "step", policy, stepped=False) == 22
    assert deadline(LearnedDurations(), "checkpoint", policy, stepped=False) == 22
    assert {deadline(after([60, 60]), phase, policy) for phase in ("step", "barrier", "checkpoint", "eval")} == {33}


def test_deadline_of_equal_steps() -> None:
    assert deadline(after([60, 9] + [0.02] * 500)) == 0.5, "the floor"
    assert deadline(after([60, 9] + [0.2] * 500)) == pytest.approx(1.0), "five times a step"
    assert deadline(after([0.2] * 500), policy=Policy()) == 5


def test_young_job_gets_more_time() -> None:
    assert deadline(after([1] * 100)) == pytest.approx(25)
    assert deadline(after([1] * (learning.YOUNG_STEPS + learning.EXCLUDED_STEPS))) == pytest.approx(5)
    assert deadline(after([0.02] * 100)) == pytest.approx(0.5), "the floor decides where steps are short"
    assert deadline(after([0.02] * 100 + [0.3])) < 2, "a single long step is not the usual one"


@pytest.mark.parametrize(("startup_s", "expected"), [(None, 600.0), (0.5, 600.0), (20.0, 600.0), (300.0, 1500.0)])
def test_startup_is_learned(startup_s: float | None, expected: float) -> None:
    learned = LearnedDurations(longest_startup_s=startup_s)
    assert deadline(learned, "starting", Policy(), stepped=False) == expected


def test_floor_replaces_the_least_deadline_of_a_learned_start() -> None:
    policy = Policy(hang_floor_s=5)
    assert deadline(NOTHING, "starting", policy, stepped=False) == 600
    assert deadline(LearnedDurations(longest_startup_s=0.5), "starting", policy, stepped=False) == 5
    assert deadline(LearnedDurations(longest_startup_s=4.0), "starting", policy, stepped=False) == 20


def test_new_round_excludes_its_first_steps() -> None:
    learned = after([0.2] * 500)
    again = after([90, 40], replace(learned, round_steps=0))
    assert deadline(again) == deadline(learned)
    assert deadline(after([90, 40], learned)) > 100


def test_longest_step_decays_by_half() -> None:
    learned = after([0.001] * 300 + [8])
    assert deadline(learned) == 40
    assert deadline(after([0.001] * learning.HALF_LIFE_STEPS, learned)) == pytest.approx(20)


def test_progress_ceiling_bounds_deadline() -> None:
    policy = Policy(progress_ceiling_s=100)
    assert deadline(after([1] * 300 + [30]), policy=policy) == 100
    assert deadline(after([1] * 300 + [90]), policy=policy) == 180


def test_phases_have_their_own_deadlines() -> None:
    learned = learning.record_duration(after([0.02] * 300), "checkpoint", 20)
    assert deadline(learned, "checkpoint") == 100
    assert deadline(learned, "eval") == SHARP.progress_ceiling_s
    assert deadline(learned) == 0.5
    small = after_visits(learned, 1.0, 10)
    assert deadline(small, "checkpoint") == pytest.approx(50), "the longest one is forgotten by half in ten"
    quick = learning.record_duration(learned, "eval", 0.1)
    assert deadline(quick, "eval") == pytest.approx(0.5)


def test_exit_deadline_floor() -> None:
    assert deadline(LearnedDurations(), "exit", stepped=False) == 5
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
def test_slow_jobs_stay_below_their_deadline(name: str) -> None:
    policy = Policy() if "hundredth" in name else SHARP
    assert min(margins(SLOW[name], policy)) > 0


@settings(deadline=None)
@given(st.lists(st.floats(0.001, 100), max_size=60), st.floats(0.001, 100))
def test_longer_step_never_shortens_deadline(steps: list[float], last: float) -> None:
    old = [1.0] * 300
    assert deadline(after([*old, *steps, last])) <= deadline(after([*old, *steps, last * 2]))


@settings(deadline=None)
@given(st.lists(st.floats(0, 1e6), max_size=60), st.sampled_from(["step", "eval", "exit", "barrier"]))
def test_deadline_bounds(steps: list[float], phase: str) -> None:
    learned, policy = after(steps), Policy()
    found = learning.deadline_s(learned, phase, True, policy)
    assert policy.least_deadline_s <= found <= max(policy.progress_ceiling_s, 2 * max(steps, default=0))


# ---- StepHistory

POLICY = Policy(hang_floor_s=0.5, evidence_timeout_s=0.5, progress_ceiling_s=1800.0, startup_ceiling_s=600.0)
TRAINS = Heartbeat(step=1, phase=Phase.STEP, source=StepSource.HOOK, first_step_ns=1, progress_ns=1)


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
        history.update_high_water(seen)
        found = history.learn_deadline_s(seen)
    return found


def test_history_deadline_is_a_multiple_of_steps() -> None:
    history = StepHistory(POLICY)
    assert trained(history, 300, 1.0) == pytest.approx(5.0, rel=0.1)


def test_history_averages_steps_between_looks() -> None:
    history = StepHistory(POLICY)
    history.learn_deadline_s(observation(0.0, 1))
    found = [history.learn_deadline_s(observation(0.25 * i, 1 + 12 * i)) for i in range(1, 60)]
    assert found[-1] == POLICY.hang_floor_s, "12 steps in 0.25 s: the floor decides"


def test_history_new_group_gets_learned_startup() -> None:
    history = StepHistory(POLICY)
    start = Heartbeat(phase=Phase.STARTING)
    assert history.learn_deadline_s(observation(0.0, 0, beat=start, phase="starting")) == 0.0
    history.learn_deadline_s(replace(observation(9.0, 0, beat=start, phase="starting"), idle_s=8.0))
    trained(history, 300, 0.01, from_s=10.0)
    history.group_started()
    assert history.learn_deadline_s(observation(0.0, 0, beat=start, phase="starting")) == 40.0


@pytest.mark.parametrize(
    ("steps", "changes", "expected"),
    [
        (learning.EXCLUDED_STEPS + 1, {}, 21.0),
        (learning.EXCLUDED_STEPS, {}, 0.0),
        (10, {"cpu_s": 2.0}, 0.0),
        (10, {"phase": "eval"}, 0.0),
        (10, {"quiet_s": 1.0}, 0.0),
    ],
)
def test_history_learns_idle_pauses(steps: int, changes: dict[str, object], expected: float) -> None:
    """Once they are over."""
    history = StepHistory(POLICY)
    trained(history, steps, 0.1)
    rank = replace(RankReport(0, 0, phase="step", step=steps, idle_s=21.0, window_s=3.0), **changes)  # type: ignore[arg-type]
    for idle_s, step, pause_s in ((21.0, steps, 0.0), (21.0, steps, 0.0), (0.0, steps + 1, expected)):
        history.learn_deadline_s(replace(observation(22.0, step), idle_s=idle_s, ranks=(replace(rank, step=step),)))
        assert history.longest_pause_s == pause_s


@pytest.mark.parametrize(
    ("beat", "phase", "barrier", "expected"),
    [
        (Heartbeat(), "starting", "", 0.0),
        (Heartbeat(), "starting", INIT_PROCESS_GROUP_BARRIER, POLICY.startup_ceiling_s),
        (Heartbeat(source=StepSource.SESSION), "starting", "", POLICY.startup_ceiling_s),
        (Heartbeat(phase=Phase.EXIT), "exit", "", 0.0),
    ],
)
def test_history_before_first_step(beat: Heartbeat, phase: str, barrier: str, expected: float) -> None:
    assert (
        StepHistory(POLICY).learn_deadline_s(observation(0.0, 0, beat=beat, phase=phase, barrier=barrier)) == expected
    )


def test_rank_with_a_process_group_has_the_time_of_a_first_step() -> None:
    """It loads, compiles, and waits for the data of a first epoch: none of that changes its phase."""
    starts = RankReport(0, 0, phase="starting")
    loads = replace(starts, rank=1, collectives=0)
    for ranks, expected in (((starts,), POLICY.startup_ceiling_s), ((starts, loads), POLICY.first_step_ceiling_s)):
        beats = (Heartbeat(source=StepSource.SESSION),) * len(ranks)
        seen = Observation(1, beats, (), 0.0, ranks, observed_s=1.0)
        assert StepHistory(POLICY).learn_deadline_s(seen) == expected


def test_history_learns_reported_checkpoints() -> None:
    history = StepHistory(POLICY)
    trained(history, 300, 0.01)
    saving = observation(3.0, 300, phase="checkpoint")
    assert history.learn_deadline_s(saving) == POLICY.progress_ceiling_s
    history = StepHistory(POLICY)
    trained(history, 300, 0.01)
    history.checkpoint_saved(0.4)
    assert history.learn_deadline_s(saving) == pytest.approx(2.0)


def test_history_longest_phase_counts() -> None:
    history = StepHistory(POLICY)
    trained(history, 300, 0.01)
    ranks = (RankReport(0, 0, phase="step", step=300), RankReport(1, 1, phase="eval", step=300))
    beats = (TRAINS, TRAINS)
    assert history.learn_deadline_s(Observation(1, beats, (), 0.0, ranks, observed_s=3.0)) == POLICY.progress_ceiling_s


def test_history_learns_how_long_an_evaluation_takes() -> None:
    """From its first observation to the first one after it, however many there are between."""
    history = StepHistory(POLICY)
    trained(history, 300, 0.01)
    for at in (3.0, 3.1, 3.2, 3.3):
        history.learn_deadline_s(observation(at, 300, phase="eval"))
    history.learn_deadline_s(observation(3.4, 300))
    assert history.learn_deadline_s(observation(3.5, 300, phase="eval")) == pytest.approx(2.0)


@pytest.mark.parametrize("phase", ["eval", "checkpoint"])
def test_history_learns_a_step_without_the_phases_in_it(phase: str) -> None:
    history = StepHistory(POLICY)
    trained(history, 300, 0.01)
    for at, seen in ((3.1, phase), (33.1, phase), (33.2, "step"), (38.2, "step")):
        history.learn_deadline_s(observation(at, 300, phase=seen))
    assert history.learn_deadline_s(observation(43.2, 301)) == pytest.approx(10.0 * POLICY.hang_factor, rel=0.05)


def test_history_adds_up_rounds_of_plain_script() -> None:
    history = StepHistory(POLICY)
    assert history.update_high_water(observation(0.0, 40)) == 40
    history.group_started()
    assert history.update_high_water(observation(0.0, 5)) == 45
    assert history.update_high_water(observation(0.0, 60, beat=Heartbeat(source=StepSource.SESSION))) == 60


def test_cost_of_a_restart_is_the_training_since_the_last_save() -> None:
    """Of the session's node; without a session nothing is known, and with a donor nothing is repeated."""
    history = StepHistory(Policy())
    seen = Observation(1, (Heartbeat(step=5, progress_ns=int(100e9)),), (), 30.0)
    assert history.lost_by_restart_s(seen) == -1
    history.state_saved(40.0)
    assert history.lost_by_restart_s(seen) == 60
    history.state_saved(90.0)
    history.state_saved(70.0)
    assert history.lost_by_restart_s(seen) == 10
    history.set_saves_at_faults(1, True)
    assert history.lost_by_restart_s(seen) == 0
    history.set_saves_at_faults(1, False)
    assert history.lost_by_restart_s(seen) == 10
    history.group_started()
    assert history.lost_by_restart_s(seen) == -1
