"""When a group has made no progress for so long that it is ended: the ceilings, nothing finer.

Pure but for what it has seen: the job's history of steps. It judges only scripts whose steps it can see. A program that
never takes an optimizer step, or is no Python at all, is never killed for being quiet.
"""

from __future__ import annotations

from dataclasses import dataclass

from elasticd.beat import Source
from elasticd_agent.config import Policy
from elasticd_agent.watch import Seen


@dataclass(slots=True)
class Stall:
    """One job's history on this node. `high_water` is the job's step; a plain script's rounds are added up."""

    policy: Policy
    _before: int = 0
    _high: int = 0
    _ever_stepped: bool = False

    def begin(self, number: int) -> None:
        """A new group starts: what the last one did counts as done."""
        self._before = self._high

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

    def judge(self, seen: Seen) -> str | None:
        """The sentence that says why the group is ended, or None."""
        policy = self.policy
        if seen.first_step_at is not None:
            what, ceiling = f"no progress after step {seen.step}", policy.progress_ceiling_s
        elif not (self._ever_stepped or seen.has_session):
            return None
        elif seen.progress_at is None:
            what, ceiling = "the script has not begun to train", policy.startup_ceiling_s
        else:
            what, ceiling = "no first step", policy.first_step_ceiling_s
        if seen.idle_s < ceiling:
            return None
        return f"{what} on any rank for {seen.idle_s:.0f} s; the ceiling is {ceiling:g} s"
