"""The restart budget's arithmetic."""

from __future__ import annotations

from dataclasses import replace

import pytest

from elasticd_agent.model.job import Policy
from elasticd_agent.model.records import BudgetState, Failure, Member, Round
from elasticd_agent.rendezvous import restart_budget as budget
from elasticd_agent.rendezvous.restart_budget import carry_over, round_progressed, spend


def take(
    state: BudgetState, policy: Policy, *, progress: bool = False, elapsed_s: float = 0.0
) -> tuple[BudgetState, float]:
    granted = spend(state, policy, progress=progress, high_water=state.high_water, elapsed_s=elapsed_s)
    assert isinstance(granted, tuple), granted
    return granted


def test_backoff_grows_without_progress() -> None:
    policy = Policy(max_restarts=20)
    state, delays = BudgetState(), []
    for _ in range(10):
        granted = take(state, policy)
        state = granted[0]
        delays.append(granted[1])
    assert delays == [0, 1, 2, 4, 8, 16, 32, 60, 60, 60]
    granted = take(state, policy, progress=True)
    assert granted[1] == 0
    assert (granted[0].counted, granted[0].streak) == (11, 1)


@pytest.mark.parametrize(
    ("state", "policy", "why"),
    [
        (BudgetState(streak=3), Policy(), "3 restarts without progress before any step was done"),
        (BudgetState(streak=3, high_water=7), Policy(), "3 restarts without progress beyond step 7"),
        (BudgetState(streak=2), Policy(no_progress_limit=2), "2 restarts without progress before any step was done"),
        (BudgetState(), Policy(max_restarts=0), "0 of 0 restarts used (--max-restarts)"),
        (BudgetState(counted=2), Policy(max_restarts=2), "2 of 2 restarts used (--max-restarts)"),
        (
            BudgetState(counted=99, tokens=0.5),
            Policy(),
            "more than 60 restarts an hour, 99 in all (--max-restarts-per-hour)",
        ),
    ],
)
def test_refused_restart_has_the_arithmetic(state: BudgetState, policy: Policy, why: str) -> None:
    assert spend(state, policy, progress=False, high_water=0, elapsed_s=0.0) == why


def test_max_restarts_is_the_only_limit_if_given() -> None:
    state = BudgetState(counted=99, streak=50, tokens=0.0)
    assert take(state, Policy(max_restarts=100))[0].counted == 100


@pytest.mark.parametrize(
    ("state", "policy", "left"),
    [
        (BudgetState(), Policy(), 3),
        (BudgetState(streak=2, tokens=58.0), Policy(), 1),
        (BudgetState(streak=7), Policy(), 0),
        (BudgetState(tokens=1.9), Policy(), 1),
        (BudgetState(streak=2, tokens=0.5), Policy(), 0),
        (BudgetState(counted=1, streak=9, tokens=0.0), Policy(max_restarts=3), 2),
        (BudgetState(counted=9), Policy(max_restarts=3), 0),
    ],
)
def test_restarts_left_equals_what_is_granted(state: BudgetState, policy: Policy, left: int) -> None:
    assert budget.restarts_left(state, policy, progress=False, elapsed_s=0.0) == left
    for _ in range(left):
        state = take(state, policy)[0]
    assert isinstance(spend(state, policy, progress=False, high_water=0, elapsed_s=0.0), str)


def test_progress_resets_the_streak_and_time_refills_the_hour() -> None:
    state = BudgetState(streak=3, tokens=0.0)
    assert budget.restarts_left(state, Policy(), progress=True, elapsed_s=59.0) == 0
    assert budget.restarts_left(state, Policy(), progress=True, elapsed_s=61.0) == 1
    assert budget.restarts_left(state, Policy(), progress=True, elapsed_s=3600.0) == 3
    assert budget.restarts_left(state, Policy(), progress=False, elapsed_s=3600.0) == 0
    given = Policy(max_restarts=3)
    assert budget.restarts_left(BudgetState(counted=3), given, progress=True, elapsed_s=1e9) == 0, "a total is a total"


def test_progress_does_not_refill_the_hour() -> None:
    """Progress ends the streak, and leaves the hourly allowance as it is."""
    state = take(BudgetState(streak=3, tokens=1.0), Policy(), progress=True)[0]
    assert (state.streak, state.tokens) == (1, 0.0)
    assert isinstance(spend(state, Policy(), progress=True, high_water=1, elapsed_s=59.0), str)
    assert take(state, Policy(), progress=True, elapsed_s=60.0)[0].tokens == 0.0  # 60 an hour: one a minute


def test_allowance_is_at_most_an_hours() -> None:
    assert take(BudgetState(), Policy())[0].tokens == 59.0
    assert take(BudgetState(tokens=10.0), Policy(), elapsed_s=1e9)[0].tokens == 59.0


def test_forgiven_failure_does_not_lengthen_the_streak() -> None:
    granted = spend(BudgetState(streak=3), Policy(), progress=False, high_water=0, elapsed_s=0.0, forgiven=True)
    assert granted == (BudgetState(counted=1, streak=3, tokens=59.0), 4)
    hard = spend(
        BudgetState(counted=1), Policy(max_restarts=1), progress=False, high_water=0, elapsed_s=0, forgiven=True
    )
    assert isinstance(hard, str)


def test_progress() -> None:
    fresh = Round(2, (Member("a", "i", (0,)),), budget=BudgetState(high_water=10))
    resumed = Round(2, fresh.members, last_checkpoint=(1, 10), budget=BudgetState(high_water=15))

    def saved(step: int, number: int = 2) -> tuple[Failure, ...]:
        return (Failure(2, "a", "crash", (), "why", checkpoint=(number, step)),)

    assert not round_progressed(fresh, (), 10)
    assert round_progressed(fresh, (), 11)
    assert round_progressed(fresh, saved(1), 10)
    assert not round_progressed(resumed, saved(10), 15), "the copy of the parent is no progress"
    assert round_progressed(resumed, saved(11), 15)
    assert not round_progressed(resumed, saved(11, number=1), 15), "an older round's is no progress of this one"


@pytest.mark.parametrize(
    ("before", "step", "progressed"),
    [(40, 40, False), (40, 41, True), (40, 39, True), (None, 40, True), (40, None, True)],
)
def test_crash_after_the_same_step_is_no_progress(before: int | None, step: int | None, progressed: bool) -> None:
    """The steps of a plain script all count as new, so its high water grows in any case."""
    plain = Round(2, (Member("a", "i", (0,)),), budget=BudgetState(high_water=40, step=before, repeat_key="a"))
    failures = (Failure(2, "a", "crash", ((0, 0),), "why", high_water=80, step=step, repeat_key="a"),)
    assert round_progressed(plain, failures, 80, failures[0]) is progressed
    for key in ("", "b"):
        assert round_progressed(plain, failures, 80, replace(failures[0], repeat_key=key)), "not the same error"
    saved = (replace(failures[0], checkpoint=(2, 1)),)
    assert round_progressed(plain, saved, 80, saved[0]), "but it has saved a checkpoint"


HUNG = Failure(1, "a", "hung", ((0, 0),), "rank 0 is stuck", cause="deadlock", hang_step=40)
LOST_ITS_PEERS = Failure(1, "a", "crash", (), "rank 0 lost its peers", error="RuntimeError", step=40)
KILLED = Failure(1, "a", "crash", ((0, 0),), "rank 0 was killed by SIGKILL", step=40)


@pytest.mark.parametrize(
    ("first", "others", "ends"),
    [
        (HUNG, HUNG, True),
        (replace(HUNG, hang_step=39), HUNG, False),
        (replace(HUNG, cause="store"), HUNG, False),
        (replace(HUNG, hang_step=0), replace(HUNG, hang_step=0), False),  # an earlier version's
        (LOST_ITS_PEERS, HUNG, False),
        (LOST_ITS_PEERS, LOST_ITS_PEERS, True),
        (replace(LOST_ITS_PEERS, step=39), LOST_ITS_PEERS, False),
        (KILLED, KILLED, False),
        (replace(KILLED, culprits=()), replace(KILLED, culprits=()), False),
    ],
)
def test_four_rounds_with_a_cause_that_has_no_key(first: Failure, others: Failure, ends: bool) -> None:
    """Of a plain script, of which each step counts as new."""
    state, high_water = BudgetState(), 0
    granted: object = None
    for number, failure in enumerate((first, others, others, others), start=1):
        round_ = Round(number, (Member("a", "i", (0,)),), budget=state)
        high_water += 40
        progress = round_progressed(round_, (failure,), high_water, failure)
        granted = spend(state, Policy(), progress=progress, high_water=high_water, elapsed_s=99.0, failure=failure)
        state = granted[0] if isinstance(granted, tuple) else state
    assert isinstance(granted, str) is ends, granted


def test_uncounted_restart_keeps_the_high_water() -> None:
    state = BudgetState(counted=2, streak=2, high_water=5)
    assert carry_over(state, progress=True, high_water=9) == BudgetState(counted=2, streak=0, high_water=9)
    assert carry_over(state, progress=False, high_water=5) == state
    failed = replace(state, step=4, repeat_key="ValueError: x")
    assert carry_over(failed, progress=False, high_water=5) == failed
    assert carry_over(failed, progress=True, high_water=5) == replace(state, streak=0)
    misused = replace(failed, repeat_key="elasticd.errors.MissedCall")
    assert carry_over(misused, progress=True, high_water=5) == replace(misused, streak=0, step=None)
