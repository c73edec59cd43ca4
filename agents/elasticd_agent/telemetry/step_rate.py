"""How many steps a second a group makes, lately: what the live line, `status` and the metrics show.

It exists so that only steps that were made are counted: a group's number of the step jumps, from nothing to where its
checkpoint was, when it resumes. It reads no clock and no process.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

WINDOW_S = 10.0
MIN_WINDOW_S = 0.5


@dataclass(slots=True)
class StepRate:
    """One group's. `now` is monotonic seconds."""

    _samples: deque[tuple[float, int]] = field(default_factory=deque)

    def reset(self) -> None:
        """A new group starts."""
        self._samples.clear()

    def observe(self, step: int, now: float, *, stepped: bool) -> float | None:
        """None before there is enough to tell. `stepped`: the group has made its first step."""
        if not stepped:
            self._samples.clear()
            return None
        self._samples.append((now, step))
        while self._samples[0][0] < now - WINDOW_S:
            self._samples.popleft()
        then, first = self._samples[0]
        return (step - first) / (now - then) if now - then > MIN_WINDOW_S else None
