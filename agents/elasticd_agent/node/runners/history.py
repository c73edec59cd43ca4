"""What a runner remembers of its job, for whoever asks: its rounds, its last checkpoint, how fast it goes and went.

It sits where the event log and the metrics are written, so that nothing has to be told twice, and passes everything on.
It is written by the deciding thread, read by the control socket's, and bounded whatever happens.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from typing import Any

from elasticd_agent.node.records import RoundSummary
from elasticd_agent.node.runners.spec import MAX_EXIT_ROUNDS
from elasticd_agent.node.runners.step_rate import StepTrack
from elasticd_agent.telemetry import events, metrics
from elasticd_agent.telemetry.event_log import EventSink


class RoundHistory:
    """An event log in front of another one. `log` is the one that everything goes on to."""

    def __init__(self) -> None:
        self.log: EventSink | None = None
        self.ended: events.JobEndedEvent | None = None
        self._rounds: deque[RoundSummary] = deque(maxlen=MAX_EXIT_ROUNDS)
        self._started_at = time.monotonic()
        self._checkpoint: dict[str, Any] | None = None

    @property
    def lost(self) -> int:
        return 0 if self.log is None else self.log.lost

    @property
    def rounds(self) -> tuple[RoundSummary, ...]:
        return tuple(self._rounds)

    def write(self, record: events.LogEvent) -> None:
        wall = time.time() - (time.monotonic() - record.mono)
        match record:
            case events.RoundPublishedEvent(round=number, world_size=size, reason=reason):
                self._rounds.append(RoundSummary(number, size, reason, wall))
            case events.CheckpointSavedEvent(round=number, step=step):
                self._checkpoint = {"round": number, "step": step, "at": wall, "bytes": record.bytes}
            case events.JobEndedEvent():
                self.ended = record
        if self.log is not None:
            self.log.write(record)

    def close(self) -> None:
        if self.log is not None:
            self.log.close()

    def snapshot(self) -> dict[str, Any]:
        """Plain values, for /status."""
        return {
            "age_seconds": round(time.monotonic() - self._started_at, 3),
            "checkpoint": self._checkpoint,
            "rounds": [
                {"round": note.number, "world_size": note.world_size, "reason": note.reason, "at": note.at}
                for note in self.rounds
            ],
        }


class RunnerMetrics(metrics.Metrics):
    """The job's metrics, which also remember how fast it goes and went."""

    steps_per_second: float | None = None
    _last_round = 0

    def __init__(self, job: str, node: str, version: str) -> None:
        super().__init__(job, node, version)
        self.step_track = StepTrack()

    def round_published(self, number: int, *more: Any, **named: Any) -> None:
        self._last_round = number
        super().round_published(number, *more, **named)

    def progress(self, steps: Mapping[int, int], steps_per_second: float | None, wall: float) -> None:
        if steps_per_second is not None:
            self.steps_per_second = steps_per_second
        if reached := max(steps.values(), default=0):
            self.step_track.add(wall, self._last_round, reached)
        super().progress(steps, steps_per_second, wall)

    def group_ended(self) -> None:
        self.steps_per_second = None
        super().group_ended()
