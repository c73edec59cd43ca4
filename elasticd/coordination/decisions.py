"""Decisions that all ranks take at the same step: go on, save now, hold, stop.

Every K steps is a decision point. Rank 0 writes its verdict for that step into the round's store, with the step of the
next decision in it; the others wait for it. A verdict that does not come in time raises: nobody ever "goes on" alone,
because then ranks would part and dead-lock each other. K follows what a decision costs and how long steps take.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Literal

from elasticd.coordination.store_channel import StoreChannel
from elasticd.errors import WireError

Action = Literal["go", "save", "stop", "hold"]

# Of the training time; what a person loses to being able to stop and save at the same step on every rank.
COST_SHARE = 0.001
# A stop should be seen soon even where the store is slow; where both cannot be had the cost gives way.
LONGEST_S = 10.0
# Rank 0 may be this many decisions ahead of a rank that is in no collective with it before that rank misses one.
MAX_STORED = 1024
_MOST_STEPS = 100_000


@dataclass(frozen=True, slots=True)
class Decision:
    """What all ranks do at the end of `step`, why, and when they decide again."""

    step: int
    next: int
    action: Action
    reason: str


def next_interval(interval: int, step_s: float, cost_s: float) -> int:
    """Steps to the next decision point, so that decisions cost no more than COST; at most twice the last interval.

    Only doubling: the first steps of a job are slower than what follows, but should the next ones be slow again, a
    stop must not wait for a great number of them.
    """
    wanted_s = min(cost_s / COST_SHARE, LONGEST_S)
    steps = int(wanted_s / step_s) if step_s > 0 else _MOST_STEPS
    return max(1, min(steps, 2 * interval, _MOST_STEPS))


class DecisionPoints:
    """The decision points of one session. `wish` is asked on rank 0 only: what it wants to happen now, and why."""

    def __init__(self, channel: StoreChannel, wish: Callable[[], tuple[Action, str]], kept: int = MAX_STORED) -> None:
        self._channel, self._wish, self._kept = channel, wish, kept
        self._interval, self._cost_s = 1, 0.0
        self._given: list[str] = []
        self.reset(0)

    def reset(self, step: int) -> None:
        """The step count is `step` now, on every rank; the next step's end is a decision point."""
        self.next = step + 1
        self._last_step, self._last_at = step, time.monotonic()

    def at(self, step: int) -> Decision | None:
        """The verdict for this step, if it is a decision point.

        Raises DecisionTimeout when rank 0's does not come.
        """
        if step < self.next:
            return None
        if self._channel.rank == 0:
            verdict = self._give(step)
        else:
            verdict = self._take(f"verdict/{step}", step, self._channel.timeout_s)
        self.next = verdict.next
        return verdict

    def decide_again(self, step: int, decide: Callable[[], tuple[Action, str]], longest_s: float) -> Decision:
        """A second verdict for a step, where the first was "hold": what rank 0's `decide` returns when it does.

        Raises DecisionTimeout on the others when it does not come, after `longest_s` and the channel's own time.
        """
        key = f"verdict/{step}/again"
        if self._channel.rank == 0:
            verdict = Decision(step, self.next, *decide())
            if self._channel.world_size > 1:
                self._put(key, verdict)
                self._drop_oldest()
        else:
            verdict = self._take(key, step, self._channel.timeout_s + longest_s)
        # A hold is not what a step takes.
        self._last_step, self._last_at = step, time.monotonic()
        return verdict

    def _take(self, key: str, step: int, timeout_s: float) -> Decision:
        word = self._channel.read(key, f"the verdict at step {step}", timeout_s=timeout_s)
        try:
            return Decision(**json.loads(word))
        except (ValueError, TypeError) as error:
            raise WireError(f"rank 0's verdict at step {step} cannot be understood: {word[:80]!r}") from error

    def _give(self, step: int) -> Decision:
        now = time.monotonic()
        action, reason = self._wish()
        step_s = (now - self._last_at) / max(step - self._last_step, 1)
        self._interval = next_interval(self._interval, step_s, self._cost_s)
        self._last_step, self._last_at = step, now
        verdict = Decision(step, step + self._interval, action, reason)
        cost = self._publish(verdict) if self._channel.world_size > 1 else time.monotonic() - now
        # One hiccup of the machine must not push the next decision far away.
        self._cost_s = cost if not self._cost_s else self._cost_s + 0.2 * (min(cost, 4 * self._cost_s) - self._cost_s)
        return verdict

    def _publish(self, verdict: Decision) -> float:
        """Write it; returns what the decision costs a rank, in seconds."""
        start = time.perf_counter()
        key = f"verdict/{verdict.step}"
        self._put(key, verdict)
        written = time.perf_counter()
        # One round trip to the store, used to learn what it costs: the others need two (wait, get).
        if not self._drop_oldest():
            self._channel.exists(key)
        return written - start + 3 * (time.perf_counter() - written)

    def _put(self, key: str, verdict: Decision) -> None:
        self._channel.put(key, json.dumps(asdict(verdict)).encode())
        self._given.append(key)

    def _drop_oldest(self) -> bool:
        """True if there were so many verdicts that one had to go."""
        if len(self._given) <= self._kept:
            return False
        self._channel.delete(self._given.pop(0))
        return True
