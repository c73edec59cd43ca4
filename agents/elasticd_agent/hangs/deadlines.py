"""Pure: how long steps and phases of one job take, as one node has seen it, and after how long quiet is suspicious.

It exists so that a deadline is the job's own and not a number somebody guessed: a factor over the longest of late, with
a floor, and a generous ceiling before anything is learned. It reads no clock and decides nothing: who looks is not who
judges. The longest is forgotten by half in `HALF_LIFE` steps, so that one slow step in a hundred is remembered, and a
job whose first epoch was slow is not judged by it for ever.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from elasticd_agent.model.job import HANG_FLOOR_S, Policy

EXCLUDED_STEPS = 2
"""The first steps of a round compile, allocate and fill caches: they say nothing of the others."""
HALF_LIFE_STEPS = 200
"""Steps in which the longest one is forgotten by half: one slow step in a hundred is still known to 70 %."""
HALF_LIFE_VISITS = 10
"""The same for evaluations and checkpoints, of which there are few."""
YOUNG_STEPS, YOUNG_FACTOR = 200, 5.0
"""A job that has made fewer steps may not have shown its slow ones yet, one in a hundred, twenty times as slow: until
then a step may take the factor times so many times the usual one."""
EXIT_FLOOR_S = 5.0
"""Exit handlers have no past to learn from: they are given at least so long."""


@dataclass(frozen=True, slots=True)
class LearnedDurations:
    """The decaying maximum of each phase's seconds ("step": of one step); steps of this round; of all that counted, how
    many they were and how long they took."""

    longest_s: Mapping[str, float] = field(default_factory=dict)
    steps: int = 0
    counted: int = 0
    total_s: float = 0.0


def begin_round(learned: LearnedDurations) -> LearnedDurations:
    """A new round starts: its first steps are excluded again; what is known of the job stays."""
    return replace(learned, steps=0)


def record_duration(learned: LearnedDurations, phase: str, seconds: float) -> LearnedDurations:
    """One more step ("step"), or one more visit to another phase, took so long."""
    step = phase == "step"
    if step and learned.steps < EXCLUDED_STEPS:
        return replace(learned, steps=learned.steps + 1)
    decay = 0.5 ** (1 / (HALF_LIFE_STEPS if step else HALF_LIFE_VISITS))
    longest = max(seconds, learned.longest_s.get(phase, 0.0) * decay)
    longest_s = {**learned.longest_s, phase: longest}
    if not step:
        return replace(learned, longest_s=longest_s)
    return LearnedDurations(longest_s, learned.steps + 1, learned.counted + 1, learned.total_s + seconds)


def deadline_s(learned: LearnedDurations, phase: str, has_stepped: bool, has_checkpoint: bool, policy: Policy) -> float:
    """Seconds without progress after which the group is suspicious in `phase`.

    `stepped`: this round has made a step. `attached`: a checkpoint is.
    """
    if phase == "exit":  # what a script does last, no checkpoint brings back
        return max(policy.effective_hang_floor_s(attached=False), EXIT_FLOOR_S)
    floor = policy.effective_hang_floor_s(has_checkpoint)
    if not has_stepped:
        return policy.startup_ceiling_s if phase == "starting" else policy.first_step_ceiling_s
    if phase in ("checkpoint", "eval"):
        if policy.hang_floor_s is None:  # disks and other people's storage pause for longer than steps do
            floor = max(floor, min(HANG_FLOOR_S, policy.progress_ceiling_s))
    else:
        phase = "step"
    longest = learned.longest_s.get(phase)
    if longest is None:
        return max(floor, policy.progress_ceiling_s)
    usual_s = learned.total_s / learned.counted if phase == "step" and learned.counted < YOUNG_STEPS else 0.0
    long_s = policy.hang_factor * max(longest, YOUNG_FACTOR * usual_s)
    return max(floor, min(long_s, max(policy.progress_ceiling_s, 2 * longest)))
