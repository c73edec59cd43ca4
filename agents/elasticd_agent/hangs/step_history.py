"""What one job has done so far, as this node saw it: its highest step, and how long its steps and phases take.

It exists so that the deadline after which a quiet group becomes suspicious is the job's own. It counts attentive time,
reads no clock, and judges nothing: `learning` says what a deadline is, `hang` what follows from it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from elasticd.heartbeat.record import JOINING, Source
from elasticd_agent.hangs import deadlines as learning
from elasticd_agent.hangs.observer import Seen
from elasticd_agent.model.job import Policy

AT_ONCE = 64
"""As many steps between two looks are learned one by one; of more, what they took on average is known by then."""


@dataclass(slots=True)
class History:
    """One job's history on this node. `high_water` is the job's step; a plain script's rounds are added up."""

    policy: Policy
    attached: bool = False
    _learned: learning.Learned = field(default_factory=learning.Learned)
    _before: int = 0
    _high: int = 0
    _ever_stepped: bool = False
    _step: int = 0
    _step_at: float = 0.0
    _looked_at: float = 0.0
    _phases: dict[int, tuple[str, float]] = field(default_factory=dict)

    def begin(self) -> None:
        """A new group starts: what the last one did counts as done."""
        self._before = self._high
        self._learned = learning.begin(self._learned)
        self._step, self._step_at, self._looked_at, self._phases = 0, 0.0, 0.0, {}

    def high_water(self, seen: Seen) -> int:
        """The highest step seen so far.

        A Session counts the job's steps. The optimizer hook counts those of a process, which begins at 0 in each round:
        there every step is taken for progress, since only the script knows where it resumed.
        """
        if any(beat.source == Source.SESSION for beat in seen.beats):
            self._high = max(self._high, seen.step)
        else:
            self._high = max(self._high, self._before + seen.step)
        self._ever_stepped = self._ever_stepped or seen.step > 0
        return self._high

    def deadline_s(self, seen: Seen) -> float:
        """After how long without progress this group becomes suspicious; 0 while it is never judged by that.

        A program that takes no optimizer step and makes no process group, or is no Python at all, is not suspicious for
        being quiet.
        """
        self._learn(seen)
        stepped = seen.first_step_at is not None
        joining = any(rank.phase == "starting" and rank.barrier == JOINING for rank in seen.ranks)
        if not (stepped or self._ever_stepped or joining or seen.has_session):
            return 0.0
        phases = {rank.phase for rank in seen.ranks if not rank.exited} or {"starting"}
        return max(learning.deadline(self._learned, phase, stepped, self.attached, self.policy) for phase in phases)

    def saved(self, seconds: float) -> None:
        """A checkpoint was saved, and training stood still for so long: most are over before anybody looks."""
        self._learned = learning.learn(self._learned, "checkpoint", seconds)

    def _learn(self, seen: Seen) -> None:
        now = seen.attentive_s
        for rank in seen.ranks:
            phase, since = self._phases.get(rank.rank, ("", now))
            if rank.phase != phase:
                if phase == "eval":
                    self._learned = learning.learn(self._learned, phase, now - since)
                self._phases[rank.rank] = rank.phase, now
        if any(rank.phase in ("checkpoint", "eval") for rank in seen.ranks):
            self._step_at += now - self._looked_at  # a phase with a deadline of its own is no part of a step
        steps = max((rank.step for rank in seen.ranks), default=0) - self._step
        if steps > 0:
            # One that was seen to last must not be averaged away by those that ran after it, before this look.
            seconds = max((now - self._step_at) / steps, self._looked_at - self._step_at)
            for _ in range(min(steps, AT_ONCE) if self._step else 1):
                self._learned = learning.learn(self._learned, "step", seconds)
            self._step, self._step_at = self._step + steps, now
        self._looked_at = now
