"""Durations of steps and phases of one job on this node, and the deadline learned from them.

A deadline is a factor over the longest recent duration, with a floor, and with a ceiling before anything is learned.
The longest one is forgotten by half in HALF_LIFE_STEPS steps, so that one slow step in a hundred is remembered and a
slow first epoch is not. All times are observed time; no clock is read here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from elasticd.heartbeat.record import INIT_PROCESS_GROUP_BARRIER, StepSource
from elasticd_agent.hangs.observer import Observation
from elasticd_agent.hangs.rank import RankState
from elasticd_agent.model.job import Policy
from elasticd_agent.model.reports import RankReport

EXCLUDED_STEPS = 2
"""The first steps of a round compile, allocate and fill caches: the others take less."""
HALF_LIFE_STEPS = 200
"""Steps in which the longest one is forgotten by half: one slow step in a hundred is still remembered to 70 %."""
HALF_LIFE_PHASE_VISITS = 10
"""The same for evaluations and checkpoints, which are few."""
YOUNG_STEPS, YOUNG_FACTOR = 200, 5.0
"""A job with fewer steps may not have shown its slow ones, one in a hundred, twenty times as slow: until then a step
may take the hang factor times this many usual ones."""
EXIT_FLOOR_S = 5.0
"""Exit handlers have no past to learn from: this is their least deadline."""
STARTUP_FLOOR_S = 600.0
"""A start-up that was quick once may be slower in another round: by a restore, or by a wait at each start."""
MAX_STEPS_PER_LOOK = 64
"""At most this many of the steps between two observations are learned: their average is settled by then."""


@dataclass(frozen=True, slots=True)
class LearnedDurations:
    longest_s: Mapping[str, float] = field(default_factory=dict)  #: the decaying maximum by phase; "step": of one step
    round_steps: int = 0  #: the steps of this round
    counted_steps: int = 0  #: all steps that counted, which took `counted_steps_s`
    counted_steps_s: float = 0.0
    longest_startup_s: float | None = None
    """The longest time without progress before the first step of a group that has made one."""
    longest_pause_s: float = 0.0
    """The longest pause without any sign of work that the job has survived, after the first steps of a round and
    outside of declared phases."""


def record_duration(learned: LearnedDurations, phase: str, seconds: float) -> LearnedDurations:
    """Add the duration of one step ("step"), or of one visit to another phase."""
    step = phase == "step"
    if step and learned.round_steps < EXCLUDED_STEPS:
        return replace(learned, round_steps=learned.round_steps + 1)
    decay = 0.5 ** (1 / (HALF_LIFE_STEPS if step else HALF_LIFE_PHASE_VISITS))
    longest = max(seconds, learned.longest_s.get(phase, 0.0) * decay)
    learned = replace(learned, longest_s={**learned.longest_s, phase: longest})
    if not step:
        return learned
    return replace(
        learned,
        round_steps=learned.round_steps + 1,
        counted_steps=learned.counted_steps + 1,
        counted_steps_s=learned.counted_steps_s + seconds,
    )


def deadline_s(learned: LearnedDurations, phase: str, has_stepped: bool, policy: Policy) -> float:
    """Seconds without progress after which the group is suspicious in `phase`. `has_stepped`: in this round."""
    floor = policy.least_deadline_s
    if phase == "exit":
        return max(floor, EXIT_FLOOR_S)
    if not has_stepped:
        ceiling_s = policy.startup_ceiling_s if phase == "starting" else policy.first_step_ceiling_s
        if learned.longest_startup_s is None:
            return ceiling_s
        least_s = min(ceiling_s, STARTUP_FLOOR_S) if policy.hang_floor_s is None else policy.hang_floor_s
        return max(least_s, policy.hang_factor * learned.longest_startup_s)
    phase = phase if phase in ("checkpoint", "eval") else "step"
    longest = learned.longest_s.get(phase)
    if longest is None:
        return max(floor, policy.progress_ceiling_s)
    usual_s = (
        learned.counted_steps_s / learned.counted_steps
        if phase == "step" and learned.counted_steps < YOUNG_STEPS
        else 0.0
    )
    long_s = policy.hang_factor * max(longest, YOUNG_FACTOR * usual_s)
    return max(floor, min(long_s, max(policy.progress_ceiling_s, 2 * longest)))


def _deadline_phase(rank: RankReport) -> str:
    """A rank starts until it has a process group; what it does then may be its first step, which compiles and loads."""
    return "step" if rank.phase == "starting" and rank.collectives >= 0 else rank.phase


@dataclass(slots=True)
class StepHistory:
    """One job's steps and phases on this node. The high water of a plain script is the sum over its rounds."""

    policy: Policy
    _durations: LearnedDurations = field(default_factory=LearnedDurations)
    _steps_of_earlier_rounds: int = 0
    _high_water: int = 0
    _ever_stepped: bool = False
    _step: int = 0
    _step_at: float = 0.0
    _looked_at: float = 0.0
    _idle_s: float = 0.0
    _startup_s: float = 0.0
    _phases: dict[int, tuple[str, float]] = field(default_factory=dict)
    _newest_save_at: float | None = None
    _donors: set[int] = field(default_factory=set)

    @property
    def longest_pause_s(self) -> float:
        """The longest idle pause that this job has survived here."""
        return self._durations.longest_pause_s

    def group_started(self) -> None:
        """A new group starts; the steps of the last one count as done."""
        self._steps_of_earlier_rounds = self._high_water
        self._durations = replace(self._durations, round_steps=0)  # the first ones are excluded again
        self._step = 0
        self._step_at = 0.0
        self._looked_at = self._idle_s = self._startup_s = 0.0
        self._phases = {}
        self._newest_save_at = None
        self._donors = set()

    def update_high_water(self, seen: Observation) -> int:
        """The highest step seen so far.

        A Session counts the job's steps. The optimizer hook counts those of a process, which begins at 0 in each round:
        there every step counts as progress, since only the script has the step it resumed from.
        """
        if any(beat.source == StepSource.SESSION for beat in seen.heartbeats):
            self._high_water = max(self._high_water, seen.step)
        else:
            self._high_water = max(self._high_water, self._steps_of_earlier_rounds + seen.step)
        self._ever_stepped = self._ever_stepped or seen.step > 0
        return self._high_water

    def learn_deadline_s(self, seen: Observation) -> float:
        """After how long without progress this group is suspicious.

        0, never, for a program that takes no optimizer step and makes no process group, or is no Python at all.
        """
        self._record(seen)
        stepped = seen.first_step_at is not None
        joining = any(rank.phase == "starting" and rank.barrier == INIT_PROCESS_GROUP_BARRIER for rank in seen.ranks)
        if not (stepped or self._ever_stepped or joining or seen.has_session):
            return 0.0
        phases = {_deadline_phase(rank) for rank in seen.ranks if not rank.exited} or {"starting"}
        return max(deadline_s(self._durations, phase, stepped, self.policy) for phase in phases)

    def checkpoint_saved(self, seconds: float) -> None:
        """A checkpoint was on the disk after so long, as far as training may wait for it: most pauses are not seen."""
        self._durations = record_duration(self._durations, "checkpoint", seconds)

    def state_saved(self, mono: float) -> None:
        """The state of this CLOCK_MONOTONIC time is saved or, of a session with attached objects, the first one."""
        self._newest_save_at = max(mono, self._newest_save_at or mono)

    def set_saves_at_faults(self, rank: int, saves: bool) -> None:
        """Note that `rank` saves its state at a fault, or does not. If one rank does, a restart repeats nothing."""
        self._donors = self._donors | {rank} if saves else self._donors - {rank}

    def lost_by_restart_s(self, seen: Observation) -> float:
        """The training that a restart would repeat, as far as this node knows; -1: the script saves by itself."""
        if self._newest_save_at is None:
            return -1.0
        return 0.0 if self._donors else max(0.0, (seen.last_progress_at or self._newest_save_at) - self._newest_save_at)

    def _record(self, seen: Observation) -> None:
        now = seen.observed_s
        if not self._step:
            self._startup_s = max(seen.idle_s, self._startup_s)
            if seen.step > 0:
                longest_s = max(self._startup_s, self._durations.longest_startup_s or 0.0)
                self._durations = replace(self._durations, longest_startup_s=longest_s)
        self._record_pause(seen)
        for rank in seen.ranks:
            phase, since = self._phases.get(rank.rank, ("", now))
            if rank.phase != phase:
                if phase == "eval":
                    self._durations = record_duration(self._durations, phase, now - since)
                self._phases[rank.rank] = rank.phase, now
        if any(rank.phase in ("checkpoint", "eval") for rank in seen.ranks):
            self._step_at += now - self._looked_at  # a phase with a deadline of its own is no part of a step
        steps = max((rank.step for rank in seen.ranks), default=0) - self._step
        if steps > 0:
            # A step seen to take long must not be averaged away by quick ones after it, before this look.
            seconds = max((now - self._step_at) / steps, self._looked_at - self._step_at)
            for _ in range(min(steps, MAX_STEPS_PER_LOOK) if self._step else 1):
                self._durations = record_duration(self._durations, "step", seconds)
            self._step, self._step_at = self._step + steps, now
        self._looked_at = now

    def _record_pause(self, seen: Observation) -> None:
        """A pause is over when there is progress again; it was an idle one if no rank worked in it."""
        if seen.idle_s < self._idle_s and self._durations.round_steps > EXCLUDED_STEPS:
            self._durations = replace(
                self._durations, longest_pause_s=max(self._idle_s, self._durations.longest_pause_s)
            )
        live = [RankState("", rank) for rank in seen.ranks if not rank.exited]
        declared = any(rank.report.phase in ("checkpoint", "eval", "barrier") for rank in live)
        self._idle_s = 0.0 if declared or any(rank.is_busy for rank in live) else seen.idle_s
