"""Of what one recovery was made: the marks it passed, and the seconds between them.

It exists so that "it took 6 s" can be answered with "5.1 s until the hang was seen, 0.5 s for its evidence, …". Marks
come in the order in which things happened; each part lasts from the mark before it, so that the parts add up.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class RecoveryTimer:
    """From a fault to the first step of the round after it. Times are monotonic seconds."""

    fault_at: float | None = None
    _last: float = 0.0
    _parts: dict[str, float] = field(default_factory=dict)
    _started: bool = False  # a round was since the last fault

    def start(self, at: float) -> None:
        """The first sign of it, looking back; what is said of the same recovery later changes nothing.

        But where a round that was started came to no step, that is what the time until then went into.
        """
        if self.fault_at is None:
            self.fault_at = self._last = at
            self._parts = {}
        elif self._started:
            self.mark("first_step", at)
        self._started = False

    def mark(self, part: str, at: float) -> None:
        """`part` ended at `at`. Ignored without a fault."""
        if self.fault_at is not None:
            self._parts[part] = self._parts.get(part, 0.0) + max(0.0, at - self._last)
            self._last = max(self._last, at)
            self._started = self._started or part == "start"

    def finish(self, at: float) -> tuple[float, dict[str, float]] | None:
        """The first step was made at `at`: seconds in all, and by part. None if nothing was to be recovered from."""
        if self.fault_at is None:
            return None
        self.mark("first_step", at)
        seconds, parts = at - self.fault_at, self._parts
        self.fault_at, self._parts, self._started = None, {}, False
        return seconds, parts
