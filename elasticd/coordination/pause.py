"""A pause: all ranks wait at one step, right after its checkpoint, so that the next round loses nothing. Where all of
them stay in their processes, which have the state, there is no checkpoint.

The agent requests it through rank 0's heartbeat when it expects another round soon, and as a rule ends this group
during it. Otherwise rank 0 ends the pause when the request changes, when the job stops, or after the timeout, and all
ranks continue. After a timeout or a refusal the same request is ignored until the heartbeat has held another value.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from elasticd.coordination.decisions import Action
from elasticd.errors import Reason, UsageError
from elasticd.heartbeat.record import ALL_STAY_FLAG, PAUSE, REQUEST_KIND_MASK, HeartbeatWriter
from elasticd.heartbeat.worker_events import WorkerEventWriter

DEFAULT_TIMEOUT_S = 30.0
"""The default of the agent's policy; a script without an agent never gets a request."""
POLL_S = 0.02
"""A poll is a read of memory: fifty a second cost nothing, and 20 ms more at the end of a pause do not matter."""


def timeout_from_environment(environment: Mapping[str, str] = os.environ) -> float:
    """The longest pause in seconds, ELASTICD_HOLD_TIMEOUT_S. Raises UsageError unless it is a number of seconds."""
    text = environment.get("ELASTICD_HOLD_TIMEOUT_S") or str(DEFAULT_TIMEOUT_S)
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 <= seconds < math.inf:
        raise UsageError(f"ELASTICD_HOLD_TIMEOUT_S={text!r} in the environment must be seconds, 0 or more")
    return seconds


@dataclass
class PauseController:
    """Rank 0's state of pauses: whether they are possible, which request is open, when a pause is over."""

    heartbeat: HeartbeatWriter
    events: WorkerEventWriter
    timeout_s: float
    _ability_announced: bool = False
    _open_request: int = 0
    _answered_request: int = 0

    def take_request(self, step: int, can_pause: bool) -> bool:
        """True if the ranks should pause at this step. `can_pause`: objects are attached and there is a directory."""
        if can_pause and not self._ability_announced:
            self._ability_announced = True
            self.events.write("can_pause", "can pause at the end of a step, right after a checkpoint", step)
        request = self.heartbeat.request
        if request & REQUEST_KIND_MASK != PAUSE:
            self._answered_request = 0
            return False
        if request == self._answered_request:
            return False
        self._open_request = request
        if not can_pause:
            self._refuse(step, "nothing is attached, or the script uses no checkpoint directory")
        return can_pause

    @property
    def all_stay(self) -> bool:
        """No node leaves in the pause that is requested."""
        return bool(self._open_request & ALL_STAY_FLAG)

    def wait(self, step: int, saved: bool, stop_reason: Callable[[], Reason]) -> tuple[Action, str]:
        """Wait until the pause is over; what all ranks do next, and why. `stop_reason`: why they should stop, or ""."""
        if not saved:
            return "continue", self._refuse(step, "its checkpoint could not be saved")
        self.events.write("paused", f"paused at step {step} for the next round, up to {self.timeout_s:g} s", step)
        start = time.monotonic()
        action, why = self._wait_until_over(start + self.timeout_s, stop_reason)
        reason = f"the pause at step {step} is over: {why}"
        self.events.write("pause_ended", reason, step, seconds=time.monotonic() - start)
        return action, reason

    def _wait_until_over(self, deadline: float, stop_reason: Callable[[], Reason]) -> tuple[Action, str]:
        while True:
            if why := stop_reason():
                return "stop", why
            if self.heartbeat.request != self._open_request:
                return "continue", "the agent withdrew its request"
            left = deadline - time.monotonic()
            if left <= 0:
                self._answered_request = self._open_request
                return "continue", f"no new round started within {self.timeout_s:g} s"
            time.sleep(min(POLL_S, left))

    def _refuse(self, step: int, why: str) -> str:
        self._answered_request = self._open_request
        reason = f"no pause at step {step}: {why}"
        self.events.write("cannot_pause", reason, step)
        return reason
