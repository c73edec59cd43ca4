"""Decisions that all ranks take at the same step: continue, save now, pause, stop.

Every K steps is a decision point. Rank 0 writes its decision for that step into the round's store, with the step of the
next decision point in it; the others wait for it. A decision that does not arrive in time raises: a rank never
continues alone, because ranks at different steps dead-lock each other. K follows what a decision costs and how long
steps take.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Literal

from elasticd.coordination.store_channel import StoreChannel
from elasticd.errors import WireError

Action = Literal["continue", "save", "stop", "pause"]

MAX_COST_SHARE = 0.001
"""Share of the training time that decisions may cost: the price of stopping and saving at one step on every rank."""
MAX_INTERVAL_S = 10.0
"""A stop should be noticed soon even where the store is slow; where both limits conflict, the cost gives way."""
PAUSE_LOOK_INTERVAL_S = 0.25
"""Between two looks for the end of a pause, on each rank."""
MAX_STORED_DECISIONS = 1024
"""Rank 0 may be this many decisions ahead of a rank that is in no collective with it before that rank misses one."""
_MAX_INTERVAL_STEPS = 100_000


@dataclass(frozen=True, slots=True)
class Decision:
    """The thing that all ranks do at the end of `step`, why, and the step at which they decide again."""

    step: int
    next: int
    action: Action
    reason: str


def next_interval_steps(interval: int, step_s: float, cost_s: float) -> int:
    """Steps to the next decision point, at most twice the last interval: decisions cost at most MAX_COST_SHARE."""
    # Only doubling: if slow first steps are followed by slow ones again, a stop must not wait for very many of them.
    target_s = min(cost_s / MAX_COST_SHARE, MAX_INTERVAL_S)
    steps = int(target_s / step_s) if step_s > 0 else _MAX_INTERVAL_STEPS
    return max(1, min(steps, 2 * interval, _MAX_INTERVAL_STEPS))


class DecisionPoints:
    """The decision points of one session. `propose` runs on rank 0 only: what all ranks should do now, and why; "wait"
    if they should continue and decide again at the next step.
    """

    def __init__(
        self,
        channel: StoreChannel,
        propose: Callable[[], tuple[Action | Literal["wait"], str]],
        max_stored: int = MAX_STORED_DECISIONS,
    ) -> None:
        self._channel = channel
        self._propose = propose
        self._max_stored = max_stored
        self._interval = 1
        self._cost_s = 0.0
        self._stored: list[str] = []
        self.reset(0)

    def reset(self, step: int) -> None:
        """The step count is `step` now, on every rank; the end of the next step is a decision point."""
        self.next = step + 1
        self._last_step = step
        self._last_at = time.monotonic()

    def decide_at(self, step: int, due_on_all_ranks: bool = False) -> Decision | None:
        """The decision for this step, if it is a decision point; `due_on_all_ranks`: it is one, as every rank
        knows.

        Raises DecisionTimeout when rank 0's does not arrive.
        """
        if step < self.next and not due_on_all_ranks:
            return None
        if self._channel.rank == 0:
            decision = self._decide_on_rank0(step)
        else:
            decision = self._read_decision(f"decision/{step}", step, self._channel.timeout_s)
        self.next = decision.next
        return decision

    def decide_again(
        self,
        step: int,
        decide: Callable[[], tuple[Action, str]],
        longest_s: float,
        rest: Callable[[float], object] = time.sleep,
    ) -> Decision:
        """A second decision for a step, after a pause: what rank 0's `decide` returns, at most `longest_s` later.

        The other ranks `rest` for some seconds between two looks: few pauses end by a decision. A wait within torch
        would have to be broken off by the end of its connection, for which torch prints a C++ trace.
        """
        key = f"decision/{step}/again"
        if self._channel.rank == 0:
            decision = Decision(step, self.next, *decide())
            if self._channel.world_size > 1:
                self._put_decision(key, decision)
                self._delete_oldest()
        else:
            deadline = time.monotonic() + longest_s
            while not self._channel.exists(key) and time.monotonic() < deadline:
                rest(PAUSE_LOOK_INTERVAL_S)
            decision = self._read_decision(key, step, self._channel.timeout_s)
        # The duration of a pause is not the duration of a step.
        self._last_step = step
        self._last_at = time.monotonic()
        return decision

    def _read_decision(self, key: str, step: int, timeout_s: float) -> Decision:
        data = self._channel.read_from_rank0(key, f"the decision at step {step}", timeout_s=timeout_s)
        try:
            return Decision(**json.loads(data))
        except (ValueError, TypeError) as error:
            raise WireError(f"rank 0's decision at step {step} cannot be decoded: {data[:80]!r}") from error

    def _decide_on_rank0(self, step: int) -> Decision:
        now = time.monotonic()
        proposed, reason = self._propose()
        action: Action = "continue" if proposed == "wait" else proposed
        step_s = (now - self._last_at) / max(step - self._last_step, 1)
        self._interval = next_interval_steps(self._interval, step_s, self._cost_s)
        self._last_step = step
        self._last_at = now
        decision = Decision(step, step + (1 if proposed == "wait" else self._interval), action, reason)
        cost = self._publish_timed(decision) if self._channel.world_size > 1 else time.monotonic() - now
        # One hiccup of the machine must not move the next decision far away.
        self._cost_s = cost if not self._cost_s else self._cost_s + 0.2 * (min(cost, 4 * self._cost_s) - self._cost_s)
        return decision

    def _publish_timed(self, decision: Decision) -> float:
        """Write it; returns what the decision costs a rank, in seconds."""
        start = time.perf_counter()
        key = f"decision/{decision.step}"
        self._put_decision(key, decision)
        written = time.perf_counter()
        # One round trip to the store, to measure its cost: the other ranks need two (wait, get).
        if not self._delete_oldest():
            self._channel.exists(key)
        return written - start + 3 * (time.perf_counter() - written)

    def _put_decision(self, key: str, decision: Decision) -> None:
        self._channel.put(key, json.dumps(asdict(decision)).encode())
        self._stored.append(key)

    def _delete_oldest(self) -> bool:
        if len(self._stored) <= self._max_stored:
            return False
        self._channel.delete(self._stored.pop(0))
        return True
