"""What a runner remembers of its job, for whoever asks: its rounds, its last checkpoint, how fast it goes and went.

It sits where the event log and the metrics are written, so that nothing has to be told twice, and passes everything on.
It is written by the deciding thread, read by the control socket's, and bounded whatever happens.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from typing import Any

from elasticd_agent.node.records import RoundNote
from elasticd_agent.node.runners.spec import EXIT_ROUNDS
from elasticd_agent.node.runners.step_rate import Track
from elasticd_agent.telemetry import events, metrics
from elasticd_agent.telemetry.event_log import Events


class Book:
    """An event log in front of another one. `log` is the one that everything goes on to."""

    def __init__(self) -> None:
        self.log: Events | None = None
        self.ended: events.JobEnded | None = None
        self._rounds: deque[RoundNote] = deque(maxlen=EXIT_ROUNDS)
        self._began = time.monotonic()
        self._checkpoint: dict[str, Any] | None = None

    @property
    def lost(self) -> int:
        return 0 if self.log is None else self.log.lost

    @property
    def rounds(self) -> tuple[RoundNote, ...]:
        return tuple(self._rounds)

    def write(self, record: events.Record) -> None:
        wall = time.time() - (time.monotonic() - record.mono)
        match record:
            case events.RoundPublished(round=number, world_size=size, reason=reason):
                self._rounds.append(RoundNote(number, size, reason, wall))
            case events.CheckpointSaved(round=number, step=step):
                self._checkpoint = {"round": number, "step": step, "at": wall, "bytes": record.bytes}
            case events.JobEnded():
                self.ended = record
        if self.log is not None:
            self.log.write(record)

    def close(self) -> None:
        if self.log is not None:
            self.log.close()

    def told(self) -> dict[str, Any]:
        """Plain values, for /status."""
        return {
            "age_seconds": round(time.monotonic() - self._began, 3),
            "checkpoint": self._checkpoint,
            "rounds": [
                {"round": note.number, "world_size": note.world_size, "reason": note.reason, "at": note.at}
                for note in self.rounds
            ],
        }


class Rates(metrics.Metrics):
    """The job's metrics, which also remember how fast it goes and went."""

    steps_per_second: float | None = None
    _number = 0

    def __init__(self, job: str, node: str, version: str) -> None:
        super().__init__(job, node, version)
        self.track = Track()

    def round_published(self, number: int, *more: Any, **named: Any) -> None:
        self._number = number
        super().round_published(number, *more, **named)

    def progress(self, steps: Mapping[int, int], steps_per_second: float | None, wall: float) -> None:
        if steps_per_second is not None:
            self.steps_per_second = steps_per_second
        if reached := max(steps.values(), default=0):
            self.track.at(wall, self._number, reached)
        super().progress(steps, steps_per_second, wall)

    def group_gone(self) -> None:
        self.steps_per_second = None
        super().group_gone()
