"""Which step a job was at when, as its runner saw it: the whole run coarsely, the last minutes finely.

It exists so that whoever looks at a job sees how it went and not only how it goes, whatever has become of the agent
meanwhile: a runner outlives it. It keeps a bounded number of points however long the job runs, and writes no file.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

FINE_S = 2.0
FINE_POINTS = 300
"""The last ten minutes, a point every two seconds."""
COARSE_POINTS = 256
"""When there are so many, every second one goes, and the next ones come as far apart as those that are left."""

Point = tuple[float, int, int]
"""Unix seconds, round, step."""
_NumberedPoint = tuple[int, Point]
"""With its place among all that ever came."""


@dataclass(slots=True)
class StepTrack:
    """Fed by one thread, read by others."""

    _fine: deque[_NumberedPoint] = field(default_factory=lambda: deque(maxlen=FINE_POINTS))
    _coarse: list[_NumberedPoint] = field(default_factory=list)
    _count: int = 0
    _every_s: float = FINE_S
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, wall: float, round: int, step: int) -> None:
        """A round's first point is always kept, others only if the one before is long enough ago."""
        with self._lock:
            self._count += 1
            kept = (self._count, (wall, round, step))
            if _due(self._fine, kept, FINE_S):
                self._fine.append(kept)
            if _due(self._coarse, kept, self._every_s):
                self._coarse.append(kept)
                if len(self._coarse) >= COARSE_POINTS:
                    # The newest stays: what comes next is measured from it.
                    self._coarse = self._coarse[-1::-2][::-1]
                    span = self._coarse[-1][1][0] - self._coarse[0][1][0]
                    self._every_s = max(FINE_S, span / len(self._coarse))

    def points(self) -> list[Point]:
        """As they came; none twice."""
        with self._lock:
            fine, coarse = list(self._fine), list(self._coarse)
        return [point for count, point in coarse if not fine or count < fine[0][0]] + [point for _, point in fine]


def _due(before: Sequence[_NumberedPoint], kept: _NumberedPoint, every_s: float) -> bool:
    if not before:
        return True
    (then, number, _), (now, round, _) = before[-1][1], kept[1]
    # A clock that was set back must not stop the record until it has caught up.
    return round != number or not 0 <= now - then < every_s
