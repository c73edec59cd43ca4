"""Which step a job was at when, as its runner saw it: the whole run coarsely, the last minutes finely.

It exists so that whoever looks at a job sees how it went and not only how it goes, whatever has become of the agent
meanwhile: a runner outlives it. It keeps a bounded number of points however long the job runs, and writes no file.
"""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass, field

FINE_S = 2.0
FINE = 300
"""The last ten minutes, a point every two seconds."""
COARSE = 256
"""When there are so many, every second one goes, and the next ones come as far apart as those that are left."""

Point = tuple[float, int, int]
"""Unix seconds, round, step."""


@dataclass(slots=True)
class Track:
    """Fed by one thread, read by others."""

    _fine: deque[Point] = field(default_factory=lambda: deque(maxlen=FINE))
    _coarse: list[Point] = field(default_factory=list)
    _every_s: float = FINE_S
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def at(self, wall: float, round: int, step: int) -> None:
        """A round's first point is always kept, others only if the one before is long enough ago."""
        point = (wall, round, step)
        with self._lock:
            if _due(self._fine[-1] if self._fine else None, point, FINE_S):
                self._fine.append(point)
            if _due(self._coarse[-1] if self._coarse else None, point, self._every_s):
                self._coarse.append(point)
                if len(self._coarse) >= COARSE:
                    # The newest stays: what comes next is measured from it.
                    self._coarse = self._coarse[-1::-2][::-1]
                    span = self._coarse[-1][0] - self._coarse[0][0]
                    self._every_s = max(FINE_S, span / len(self._coarse))

    def points(self) -> list[Point]:
        """In order; no two of the same moment."""
        with self._lock:
            fine, coarse = list(self._fine), list(self._coarse)
        return [point for point in coarse if not fine or point[0] < fine[0][0]] + fine


def _due(last: Point | None, point: Point, every_s: float) -> bool:
    if last is None:
        return True
    wall, round, _ = last
    # A clock that was set back must not stop the record until it has caught up.
    return point[1] != round or not 0 <= point[0] - wall < every_s
