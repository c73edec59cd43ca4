"""What a node learns of its job from looks: deadlines are the job's own, and nobody is judged who never trained."""

from __future__ import annotations

from dataclasses import replace

import pytest

from elasticd.heartbeat.record import JOINING, Beat, Phase, Source
from elasticd_agent.hangs.observer import Seen
from elasticd_agent.hangs.step_history import History
from elasticd_agent.model.job import Policy
from elasticd_agent.model.reports import RankSeen

POLICY = Policy(hang_floor_s=0.5, evidence_s=0.5, progress_ceiling_s=1800.0, startup_ceiling_s=600.0)
TRAINS = Beat(step=1, phase=Phase.STEP, source=Source.HOOK, first_step_ns=1, progress_ns=1)


def look(at: float, step: int, *, beat: Beat = TRAINS, phase: str = "step", barrier: str = "") -> Seen:
    ranks = (RankSeen(0, 0, phase=phase, step=step, barrier=barrier),)
    return Seen(1, (replace(beat, step=step),), (), 0.0, ranks, attentive_s=at)


def trained(history: History, steps: int, step_s: float, from_s: float = 0.0, first: int = 1) -> float:
    """Looks at every step; returns the deadline after the last one."""
    found = 0.0
    for i in range(steps):
        seen = look(from_s + i * step_s, first + i)
        history.high_water(seen)
        found = history.deadline_s(seen)
    return found


def test_the_deadline_is_a_multiple_of_the_steps() -> None:
    history = History(POLICY)
    assert trained(history, 300, 1.0) == pytest.approx(5.0, rel=0.1)


def test_many_steps_between_two_looks_are_steps_of_their_share() -> None:
    history = History(POLICY)
    history.deadline_s(look(0.0, 1))
    found = [history.deadline_s(look(0.25 * i, 1 + 12 * i)) for i in range(1, 60)]
    assert found[-1] == POLICY.hang_floor_s, "12 steps in 0.25 s: the floor decides"


def test_a_new_group_is_not_judged_by_the_step_it_has_not_made() -> None:
    history = History(POLICY)
    trained(history, 300, 0.01)
    history.begin()
    start = Beat(phase=Phase.STARTING)
    assert history.deadline_s(look(0.0, 0, beat=start, phase="starting")) == POLICY.startup_ceiling_s


@pytest.mark.parametrize(
    ("beat", "phase", "barrier", "expected"),
    [
        (Beat(), "starting", "", 0.0),
        (Beat(), "starting", JOINING, POLICY.startup_ceiling_s),
        (Beat(source=Source.SESSION), "starting", "", POLICY.startup_ceiling_s),
        (Beat(phase=Phase.EXIT), "exit", "", 0.0),
    ],
)
def test_who_is_judged_before_the_first_step(beat: Beat, phase: str, barrier: str, expected: float) -> None:
    assert History(POLICY).deadline_s(look(0.0, 0, beat=beat, phase=phase, barrier=barrier)) == expected


def test_checkpoints_that_nobody_saw_are_learned_from_what_is_noted() -> None:
    history = History(POLICY)
    trained(history, 300, 0.01)
    saving = look(3.0, 300, phase="checkpoint")
    assert history.deadline_s(saving) == POLICY.progress_ceiling_s
    history = History(POLICY)
    trained(history, 300, 0.01)
    history.saved(0.4)
    assert history.deadline_s(saving) == pytest.approx(2.0)


def test_the_longest_of_all_ranks_phases_counts() -> None:
    history = History(POLICY)
    trained(history, 300, 0.01)
    ranks = (RankSeen(0, 0, phase="step", step=300), RankSeen(1, 1, phase="eval", step=300))
    beats = (TRAINS, TRAINS)
    assert history.deadline_s(Seen(1, beats, (), 0.0, ranks, attentive_s=3.0)) == POLICY.progress_ceiling_s


def test_rounds_of_a_plain_script_add_up() -> None:
    history = History(POLICY)
    assert history.high_water(look(0.0, 40)) == 40
    history.begin()
    assert history.high_water(look(0.0, 5)) == 45
    assert history.high_water(look(0.0, 60, beat=Beat(source=Source.SESSION))) == 60
