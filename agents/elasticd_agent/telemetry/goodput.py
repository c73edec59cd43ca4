"""Pure: what became of a node's time in a job, and counters of it that only ever grow.

    useful  steps beyond the highest step so far
    lost    from the last step before a fault until a step is beyond the highest one again: to see the fault, to agree
            on the next round, to stop, to start, and to train again what no checkpoint had
    idle    before the job's first step, waiting for nodes, holds and rounds that no fault has caused

`Spent` is one node's ledger; every method gives the next one. What came after the last step is useful until a fault
shows that it was not. A counter cannot take anything back: `grown` lets it catch up, so that at every moment the three
add up to the time that has passed, and as soon as that can be each is what the ledger says.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

State = Literal["useful", "lost", "idle"]
NEVER = float("inf")


@dataclass(frozen=True, slots=True)
class TimeSplit:
    """Seconds."""

    useful: float = 0.0
    lost: float = 0.0
    idle: float = 0.0

    @property
    def total(self) -> float:
        return self.useful + self.lost + self.idle

    @property
    def goodput(self) -> float:
        """The useful part; 0 before any time has passed."""
        return self.useful / self.total if self.total > 0 else 0.0


@dataclass(frozen=True, slots=True)
class GoodputLedger:
    """All before `since` is decided; since then it is `state`, and idle from `waiting_from` on if that is lost.

    Moments are seconds of one clock. One that lies before `since` counts as `since`.
    """

    since: float
    state: State = "idle"
    high_water: int = 0
    totals: TimeSplit = TimeSplit()
    waiting_from: float = NEVER

    def totals_at(self, now: float) -> TimeSplit:
        """What became of the time until `now`."""
        return self._advanced_to(now).totals

    def on_step(self, step: int, at: float) -> GoodputLedger:
        """Step `step` of the job was finished."""
        if step > self.high_water:
            return replace(self._advanced_to(at), state="useful", high_water=step, waiting_from=NEVER)
        if self.state == "idle":  # trained again, though no fault had been heard of
            return replace(self._advanced_to(at), state="lost")
        return self

    def on_progress(self, at: float) -> GoodputLedger:
        """Whatever was done until `at` belongs to the step being made: a checkpoint, an evaluation, an orderly end."""
        return self._advanced_to(at) if self.state == "useful" else self

    def on_late_step(self, step: int, at: float) -> GoodputLedger:
        """Step `step` had been finished at `at`, before the fault that was heard of first."""
        if step <= self.high_water:
            return self
        kept = replace(self, state="useful")._advanced_to(at) if self.state == "lost" else self
        return replace(kept, state=self.state, high_water=step)

    def on_fault(self, at: float) -> GoodputLedger:
        """A fault was heard of at `at`: what came after the last step is lost. Before the first step it is idle."""
        if self.state == "useful":
            return replace(self, state="lost")
        if self.state == "idle" and self.high_water:
            return replace(self._advanced_to(at), state="lost")
        return self

    def on_pause(self) -> GoodputLedger:
        """No steps are made for a while, and no fault is why: nothing since the last step was of use."""
        return replace(self, state="idle") if self.state == "useful" else self

    def on_wait(self, at: float) -> GoodputLedger:
        """From `at` on, what is not useful waits for nodes."""
        return replace(self, waiting_from=min(self.waiting_from, at))

    def on_resume(self, at: float) -> GoodputLedger:
        """Nothing is waited for any more."""
        return replace(self._advanced_to(at), waiting_from=NEVER)

    def _advanced_to(self, at: float) -> GoodputLedger:
        seconds = max(0.0, at - self.since)
        waited = min(seconds, max(0.0, at - self.waiting_from)) if self.state == "lost" else 0.0
        times = self.totals
        match self.state:
            case "useful":
                times = replace(times, useful=times.useful + seconds)
            case "lost":
                times = replace(times, lost=times.lost + seconds - waited, idle=times.idle + waited)
            case "idle":
                times = replace(times, idle=times.idle + seconds)
        return replace(self, since=max(self.since, at), totals=times)


def monotonic_counters(told: TimeSplit, found: TimeSplit) -> TimeSplit:
    """As near to `found` as counters that stand at `told` can get, and as much in all. What was told too much of one is
    told too little of the others for a while, and made good first where it hurts: lost, then idle, then useful."""
    left = found.total - told.total
    more = []
    for before, after in ((told.lost, found.lost), (told.idle, found.idle), (told.useful, found.useful)):
        more.append(min(max(0.0, left), max(0.0, after - before)))
        left -= more[-1]
    return TimeSplit(told.useful + more[2], told.lost + more[0], told.idle + more[1])
