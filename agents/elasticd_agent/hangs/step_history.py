"""What one job has done so far, as this node saw it: its highest step, and how long its steps and phases take.

It exists so that the deadline after which a quiet group becomes suspicious is the job's own. It counts attentive time,
reads no clock, and judges nothing: `learning` says what a deadline is, `hang` what follows from it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from elasticd.heartbeat.record import INIT_PROCESS_GROUP, Source
from elasticd_agent.hangs import deadlines as learning
from elasticd_agent.hangs.observer import Observation
from elasticd_agent.model.job import Policy

MOST_STEPS_PER_LOOK = 64
"""As many steps between two looks are learned one by one; of more, what they took on average is known by then."""


@dataclass(slots=True)
class StepHistory:
    """One job's history on this node. `high_water` is the job's step; a plain script's rounds are added up."""

    policy: Policy
    has_checkpoint: bool = False
    _durations: learning.LearnedDurations = field(default_factory=learning.LearnedDurations)
    _steps_before: int = 0
    _high_water: int = 0
    _ever_stepped: bool = False
    _step: int = 0
    _step_at: float = 0.0
    _looked_at: float = 0.0
    _phases: dict[int, tuple[str, float]] = field(default_factory=dict)

    def begin(self) -> None:
        """A new group starts: what the last one did counts as done."""
        self._steps_before = self._high_water
        self._durations = learning.begin_round(self._durations)
        self._step, self._step_at, self._looked_at, self._phases = 0, 0.0, 0.0, {}

    def high_water(self, seen: Observation) -> int:
        """The highest step seen so far.

        A Session counts the job's steps. The optimizer hook counts those of a process, which begins at 0 in each round:
        there every step is taken for progress, since only the script knows where it resumed.
        """
        if any(beat.source == Source.SESSION for beat in seen.heartbeats):
            self._high_water = max(self._high_water, seen.step)
        else:
            self._high_water = max(self._high_water, self._steps_before + seen.step)
        self._ever_stepped = self._ever_stepped or seen.step > 0
        return self._high_water

    def deadline_s(self, seen: Observation) -> float:
        """After how long without progress this group becomes suspicious; 0 while it is never judged by that.

        A program that takes no optimizer step and makes no process group, or is no Python at all, is not suspicious for
        being quiet.
        """
        self._record(seen)
        stepped = seen.first_step_at is not None
        joining = any(rank.phase == "starting" and rank.barrier == INIT_PROCESS_GROUP for rank in seen.ranks)
        if not (stepped or self._ever_stepped or joining or seen.has_session):
            return 0.0
        phases = {rank.phase for rank in seen.ranks if not rank.exited} or {"starting"}
        return max(
            learning.deadline_s(self._durations, phase, stepped, self.has_checkpoint, self.policy) for phase in phases
        )

    def checkpoint_saved(self, seconds: float) -> None:
        """A checkpoint was saved, and training stood still for so long: most are over before anybody looks."""
        self._durations = learning.record_duration(self._durations, "checkpoint", seconds)

    def _record(self, seen: Observation) -> None:
        now = seen.observed_s
        for rank in seen.ranks:
            phase, since = self._phases.get(rank.rank, ("", now))
            if rank.phase != phase:
                if phase == "eval":
                    self._durations = learning.record_duration(self._durations, phase, now - since)
                self._phases[rank.rank] = rank.phase, now
        if any(rank.phase in ("checkpoint", "eval") for rank in seen.ranks):
            self._step_at += now - self._looked_at  # a phase with a deadline of its own is no part of a step
        steps = max((rank.step for rank in seen.ranks), default=0) - self._step
        if steps > 0:
            # One that was seen to last must not be averaged away by those that ran after it, before this look.
            seconds = max((now - self._step_at) / steps, self._looked_at - self._step_at)
            for _ in range(min(steps, MOST_STEPS_PER_LOOK) if self._step else 1):
                self._durations = learning.record_duration(self._durations, "step", seconds)
            self._step, self._step_at = self._step + steps, now
        self._looked_at = now
