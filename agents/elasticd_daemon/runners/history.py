"""The history of a runner's job: its rounds for its exit, step rate and steps over time for status requests.

Recorded where events and metrics pass through, by the loop's thread; read by the control socket's thread. Bounded.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from elasticd_agent.model import log_events as events
from elasticd_agent.telemetry import metrics
from elasticd_agent.telemetry.event_log import EventSink
from elasticd_daemon.records import RoundSummary
from elasticd_daemon.runners.spec import MAX_EXIT_ROUNDS

FINE_INTERVAL_S = 2.0
MAX_FINE_POINTS = 300
"""The last ten minutes, a point every two seconds."""
MAX_COARSE_POINTS = 256
"""The points of the whole run, at most: at this number every second one is removed, and the interval is doubled."""

TimeRoundStep = tuple[float, int, int]
"""Unix seconds, round, step."""
_NumberedPoint = tuple[int, TimeRoundStep]
"""The position of a point among all ever recorded, and the point."""


@dataclass(slots=True)
class StepTrack:
    """The step at each time: the whole run coarsely, the last minutes finely. Written by one thread, read by others."""

    _fine: deque[_NumberedPoint] = field(default_factory=lambda: deque(maxlen=MAX_FINE_POINTS))
    _coarse: list[_NumberedPoint] = field(default_factory=list)
    _count: int = 0
    _coarse_interval_s: float = FINE_INTERVAL_S
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, wall: float, round: int, step: int) -> None:
        """Keeps the first point of every round, and others after the interval."""
        with self._lock:
            self._count += 1
            point = (self._count, (wall, round, step))
            if _is_due(self._fine, point, FINE_INTERVAL_S):
                self._fine.append(point)
            if _is_due(self._coarse, point, self._coarse_interval_s):
                self._coarse.append(point)
                if len(self._coarse) >= MAX_COARSE_POINTS:
                    # The newest point is kept: the next interval is measured from it.
                    self._coarse = self._coarse[-1::-2][::-1]
                    span = self._coarse[-1][1][0] - self._coarse[0][1][0]
                    self._coarse_interval_s = max(FINE_INTERVAL_S, span / len(self._coarse))

    def points(self) -> list[TimeRoundStep]:
        """The points in the order of recording, each once."""
        with self._lock:
            fine, coarse = list(self._fine), list(self._coarse)
        return [point for count, point in coarse if not fine or count < fine[0][0]] + [point for _, point in fine]


def _is_due(before: Sequence[_NumberedPoint], point: _NumberedPoint, every_s: float) -> bool:
    if not before:
        return True
    (then, last_round, _), (now, round, _) = before[-1][1], point[1]
    # A clock that was set back must not stop the recording until it has caught up.
    return round != last_round or not 0 <= now - then < every_s


class JobHistorySink:
    """An event sink that forwards everything to `log`."""

    def __init__(self) -> None:
        self.log: EventSink | None = None
        self.ended: events.JobEndedEvent | None = None
        self._rounds: deque[RoundSummary] = deque(maxlen=MAX_EXIT_ROUNDS)

    @property
    def lines_lost(self) -> int:
        return 0 if self.log is None else self.log.lines_lost

    @property
    def rounds(self) -> tuple[RoundSummary, ...]:
        return tuple(self._rounds)

    def write(self, record: events.LogEvent) -> None:
        match record:
            case events.RoundPublishedEvent(round=number, world_size=size, reason=reason):
                wall = time.time() - (time.monotonic() - record.mono)
                self._rounds.append(RoundSummary(number, size, reason, wall))
            case events.JobEndedEvent():
                self.ended = record
        if self.log is not None:
            self.log.write(record)

    def close(self) -> None:
        if self.log is not None:
            self.log.close()


class RunnerMetrics(metrics.Metrics):
    """The job's metrics, with its step rate and steps over time."""

    steps_per_second: float | None = None
    last_snapshot: dict[str, Any] | None = None  #: the last save that was whole in memory, as `CheckpointStatus` has it
    _last_round = 0

    def __init__(self, job: str, node: str, version: str) -> None:
        super().__init__(job, node, version)
        self.step_track = StepTrack()

    def status_fields(self) -> dict[str, Any]:
        """The job's course for an answer to `status`."""
        return {
            "steps_per_second": self.steps_per_second,
            "step_samples": [list(point) for point in self.step_track.points()],
            "snapshot": self.last_snapshot,
        }

    def round_published(self, number: int, *args: Any, **kwargs: Any) -> None:
        self._last_round = number
        super().round_published(number, *args, **kwargs)

    def progress(self, steps: Mapping[int, int], steps_per_second: float | None, wall: float) -> None:
        if steps_per_second is not None:
            self.steps_per_second = steps_per_second
        if step := max(steps.values(), default=0):
            self.step_track.add(wall, self._last_round, step)
        super().progress(steps, steps_per_second, wall)

    def snapshot(self, step: int, wall: float) -> None:
        self.last_snapshot = {"step": step, "round": self._last_round, "at": wall}
        super().snapshot(step, wall)

    def group_ended(self) -> None:
        self.steps_per_second = None
        super().group_ended()
