"""Pure: may the job start once more, and how soon. The restart budget, the backoff and the no-progress stop.

It exists so that a job that cannot work ends with a sentence instead of restarting for ever. `--max-restarts` given:
a hard total, as torchrun counts. Absent: so many restarts without progress between them, and so many an hour, kept as
a token bucket that the caller's elapsed monotonic time refills, so that no wall clock rides in a Round. Only failures
are counted here; lost nodes, joins and drains never reach this module.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from elasticd_agent.model.job import Policy
from elasticd_agent.model.phrases import count
from elasticd_agent.model.records import BudgetState, Failure, Round

HOUR_S = 3600.0


@dataclass(frozen=True, slots=True)
class RestartGranted:
    """One more restart, `delay_s` after the failure. `state` goes into the Round that makes it."""

    state: BudgetState
    delay_s: float


@dataclass(frozen=True, slots=True)
class RestartRefused:
    """No restart is left; `why` does the arithmetic."""

    why: str


def round_progressed(round_: Round, failures: tuple[Failure, ...], high_water: int) -> bool:
    """True if `round_` committed a step no round had, or saved a checkpoint beyond the one it resumed from.

    `high_water` is the highest step seen by now. The copy a resumed round makes of its parent has the parent's step,
    and so is no progress.
    """
    return any(is_progress(round_, at, high_water) for at in (None, *(f.checkpoint for f in failures)))


def is_progress(round_: Round, checkpoint: tuple[int, int] | None, high_water: int) -> bool:
    """The same where `checkpoint` is the newest one, as (round, step)."""
    start = round_.last_checkpoint[1] if round_.last_checkpoint else 0
    saved = checkpoint is not None and checkpoint[0] >= round_.number and checkpoint[1] > start
    return saved or high_water > round_.budget.high_water


def spend(
    state: BudgetState, policy: Policy, *, progress: bool, high_water: int, elapsed_s: float, forgiven: bool = False
) -> RestartGranted | RestartRefused:
    """Take one restart from the budget.

    `elapsed_s` is the time since `state` was published. A `forgiven` failure does not lengthen the row without
    progress, because what runs next is not what failed (a slot was set aside); it counts in every other way.
    """
    streak = 0 if progress else state.streak
    tokens = _tokens(state, policy, elapsed_s)
    high_water = max(high_water, state.high_water)
    if policy.max_restarts is not None:
        if state.counted >= policy.max_restarts:
            return RestartRefused(f"{state.counted} of {policy.max_restarts} restarts used (--max-restarts)")
    elif streak >= policy.no_progress_limit and not forgiven:
        beyond = f"beyond step {high_water}" if high_water else "before any step was done"
        return RestartRefused(f"{count(streak, 'restart')} without progress {beyond}")
    elif tokens < 1:
        most = policy.max_restarts_per_hour
        return RestartRefused(
            f"more than {count(most, 'restart')} an hour, {state.counted} in all (--max-restarts-per-hour)"
        )
    delay = policy.backoff_s[min(streak, len(policy.backoff_s) - 1)]
    return RestartGranted(
        replace(
            state,
            counted=state.counted + 1,
            streak=streak if forgiven else streak + 1,
            tokens=max(0.0, tokens - 1),
            high_water=high_water,
        ),
        delay,
    )


def carry_over(state: BudgetState, *, progress: bool, high_water: int) -> BudgetState:
    """The state for a restart that does not count: a lost node, a join, a drain."""
    return replace(state, streak=0 if progress else state.streak, high_water=max(high_water, state.high_water))


def restarts_left(state: BudgetState, policy: Policy, *, progress: bool, elapsed_s: float) -> int:
    """How many restarts `spend` would grant now, one right after the other and without progress between them."""
    if policy.max_restarts is not None:
        return max(0, policy.max_restarts - state.counted)
    in_a_row = policy.no_progress_limit - (0 if progress else state.streak)
    return max(0, min(in_a_row, int(_tokens(state, policy, elapsed_s))))


def _tokens(state: BudgetState, policy: Policy, elapsed_s: float) -> float:
    most = float(policy.max_restarts_per_hour)
    if state.tokens is None:
        return most
    return min(most, state.tokens + max(0.0, elapsed_s) * most / HOUR_S)
