"""A hold: all ranks stand still at one step, right after its checkpoint, so that the next round loses nothing.

The agent asks for it through rank 0's beat, when it expects another round soon: a node came, or one is to leave. As a
rule it ends this group during the hold. Else rank 0 ends the hold, when the request changes, when a stop is wanted, or
when its time is over, and all ranks go on from the same step. A request gets one answer: one that ran out, or that
could not be met, counts again only after another word was in the beat. Here is rank 0's side of it and the clock;
how the ranks agree is in decisions.py. Nothing here saves, and no wait is without its end.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Mapping

from elasticd.coordination.decisions import Action
from elasticd.errors import UsageError
from elasticd.heartbeat.record import PAUSE, REQUEST_KIND, HeartbeatWriter
from elasticd.heartbeat.worker_events import WorkerEventWriter

# As the agent's own policy has it; a script by itself never gets a request.
TIMEOUT_S = 30.0
# A look is a read of memory: fifty a second cost nothing, and nobody sees 20 ms when a hold ends.
POLL_S = 0.02


def timeout_from_environment(environment: Mapping[str, str] = os.environ) -> float:
    """Seconds a hold may last: ELASTICD_HOLD_TIMEOUT_S. Raises UsageError for what is no such number."""
    text = environment.get("ELASTICD_HOLD_TIMEOUT_S") or str(TIMEOUT_S)
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 <= seconds < math.inf:
        raise UsageError(f"ELASTICD_HOLD_TIMEOUT_S={text!r} in the environment must be seconds, 0 or more")
    return seconds


class PauseController:
    """What rank 0 knows of holds: whether they are possible, which request is open, when one is over."""

    def __init__(self, beat: HeartbeatWriter, notes: WorkerEventWriter, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self._beat, self._notes = beat, notes
        self._said = False
        self._open = self._answered = 0

    def should_pause(self, step: int, able: bool) -> bool:
        """True if the ranks should hold at this step. `able`: there is something to save and a place for it."""
        if able and not self._said:
            self._said = True
            self._notes.write("can_hold", "can hold at a step's end, right after a checkpoint", step)
        word = self._beat.request
        if word & REQUEST_KIND != PAUSE:
            self._answered = 0
            return False
        if word == self._answered:
            return False
        self._open = word
        if not able:
            self._refuse(step, "nothing is attached, or the script uses no checkpoint directory")
        return able

    def wait(self, step: int, saved: bool, stop: Callable[[], str]) -> tuple[Action, str]:
        """Stand still until the hold is over; then what all ranks do next, and why.

        `saved`: the checkpoint of this step is on the disk; without it there is no hold. `stop` answers why the ranks
        should stop, "" while they should not.
        """
        if not saved:
            return "go", self._refuse(step, "its checkpoint could not be saved")
        self._notes.write("holding", f"holding at step {step} for the next round, up to {self.timeout_s:g} s", step)
        start = time.monotonic()
        action, why = self._until_over(start + self.timeout_s, stop)
        reason = f"the hold at step {step} is over: {why}"
        self._notes.write("hold_over", reason, step, seconds=time.monotonic() - start)
        return action, reason

    def _until_over(self, deadline: float, stop: Callable[[], str]) -> tuple[Action, str]:
        while True:
            if why := stop():
                return "stop", why
            if self._beat.request != self._open:
                return "go", "the agent withdrew its request"
            left = deadline - time.monotonic()
            if left <= 0:
                self._answered = self._open
                return "go", f"no other round came within {self.timeout_s:g} s"
            time.sleep(min(POLL_S, left))

    def _refuse(self, step: int, why: str) -> str:
        self._answered = self._open
        reason = f"no hold at step {step}: {why}"
        self._notes.write("cannot_hold", reason, step)
        return reason
