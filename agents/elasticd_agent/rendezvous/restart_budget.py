"""Pure: the restart budget, the backoff and the no-progress stop.

`--max-restarts` is a hard total, as under torchrun. Without it, restarts without progress between them are limited, and
restarts an hour: a token bucket that elapsed monotonic time refills, so that no Round holds a wall clock. Only failures
count; lost nodes, joins and drains do not.
"""

from __future__ import annotations

from dataclasses import replace

from elasticd_agent.model.job import Policy
from elasticd_agent.model.phrases import count
from elasticd_agent.model.records import BudgetState, Failure, Round

HOUR_S = 3600.0


def round_progressed(
    round_: Round, failures: tuple[Failure, ...], high_water: int, cause: Failure | None = None
) -> bool:
    """True if `round_` committed a step that no round had, or saved a checkpoint beyond the one it resumed from.

    `high_water` is the highest step seen by now. A resumed round's copy of its parent has the parent's step. Every step
    of a plain script is new, since only the script knows where it resumed, unless `cause` has ended the round before,
    too, after the same step.
    """
    before = round_.budget
    key, step = _repeat_marks(cause)
    repeated = key != "" and step is not None and (key, step) == (before.repeat_key, before.step)
    return any(
        is_progress(round_, at, 0 if repeated else high_water) for at in (None, *(f.checkpoint for f in failures))
    )


def _repeat_marks(cause: Failure | None) -> tuple[str, int | None]:
    """The marks that two rounds have in common which end by the same cause: its key, and the step as the script counts.

    Hangs, and errors of ranks that have lost a peer, have no key of their own; after the same step they are the
    script's, as where one rank ends early with code 0. What somebody has killed has none: a schedule may kill twice
    after the same step.
    """
    if cause is None or cause.repeat_key:
        return (cause.repeat_key, cause.step) if cause is not None else ("", None)
    if cause.kind == "hung" or (cause.error and not cause.culprits):
        return f"{cause.kind}: {cause.cause or cause.error}", cause.hang_step or cause.step
    return "", cause.step


def is_progress(round_: Round, checkpoint: tuple[int, int] | None, high_water: int) -> bool:
    """The same where `checkpoint` is the newest one, as (round, step)."""
    start = round_.last_checkpoint[1] if round_.last_checkpoint else 0
    # A copy of what was saved at the fault has the step at which the round before ended.
    copied = checkpoint is not None and checkpoint[1] == round_.budget.high_water
    saved = checkpoint is not None and checkpoint[0] >= round_.number and checkpoint[1] > start and not copied
    return saved or high_water > round_.budget.high_water


def spend(
    state: BudgetState,
    policy: Policy,
    *,
    progress: bool,
    high_water: int,
    elapsed_s: float,
    forgiven: bool = False,
    failure: Failure | None = None,
) -> tuple[BudgetState, float] | str:
    """Take one restart from the budget: (the next Round's state, seconds after the failure), or why none is left.

    `elapsed_s` is the time since `state` was published. A `forgiven` failure (its slot is quarantined, so the next
    round differs) does not lengthen the streak without progress; it counts in every other way.
    """
    streak = 0 if progress else state.streak
    key, step = _repeat_marks(failure)
    tokens = _refilled_tokens(state, policy, elapsed_s)
    high_water = max(high_water, state.high_water)
    if policy.max_restarts is not None:
        if state.counted >= policy.max_restarts:
            return f"{state.counted} of {policy.max_restarts} restarts used (--max-restarts)"
    elif streak >= policy.no_progress_limit and not forgiven:
        last = (step if step == state.step else None) or high_water
        beyond = f"beyond step {last}" if last else "before any step was done"
        return f"{count(streak, 'restart')} without progress {beyond}"
    elif tokens < 1:
        most = policy.max_restarts_per_hour
        return f"more than {count(most, 'restart')} an hour, {state.counted} in all (--max-restarts-per-hour)"
    delay = policy.backoff_s[min(streak, len(policy.backoff_s) - 1)]
    streak += not forgiven
    return replace(
        state,
        counted=state.counted + 1,
        streak=streak,
        tokens=max(0.0, tokens - 1),
        high_water=high_water,
        step=step,
        repeat_key=key,
    ), delay


def carry_over(state: BudgetState, *, progress: bool, high_water: int) -> BudgetState:
    """The state for a restart that does not count: a lost node, a join, a drain."""
    if progress:
        state = replace(
            state, streak=0, step=None, repeat_key=state.repeat_key if is_missed_call(state.repeat_key) else ""
        )
    return replace(state, high_water=max(high_water, state.high_water))


def is_missed_call(repeat_key: str) -> bool:
    """True for a session call that one rank makes and another one never will: progress between two changes nothing."""
    return repeat_key.rpartition(".")[2] == "MissedCall"


def is_refused_state(repeat_key: str) -> bool:
    """True if a save has refused the state, for what it holds or because it differs between ranks."""
    return repeat_key.rpartition(".")[2] in ("CheckpointRefused", "StateDiffers")


def restarts_left(state: BudgetState, policy: Policy, *, progress: bool, elapsed_s: float) -> int:
    """The number of restarts that `spend` would grant now, without progress between them."""
    if policy.max_restarts is not None:
        return max(0, policy.max_restarts - state.counted)
    in_a_row = policy.no_progress_limit - (0 if progress else state.streak)
    return max(0, min(in_a_row, int(_refilled_tokens(state, policy, elapsed_s))))


def _refilled_tokens(state: BudgetState, policy: Policy, elapsed_s: float) -> float:
    most = float(policy.max_restarts_per_hour)
    if state.tokens is None:
        return most
    return min(most, state.tokens + max(0.0, elapsed_s) * most / HOUR_S)
