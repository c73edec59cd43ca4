"""Pure: what a worker's Session noted -> what the event log says of it.

It exists so that the story need not know how notes are spelled. A note of a newer elasticd, or one that the log does
not tell, is None.
"""

from __future__ import annotations

from typing import Any

from elasticd.heartbeat.worker_events import WorkerEvent
from elasticd_agent.telemetry import events

QUIET_KINDS = ("checkpoint_saved", "attached", "can_pause")
"""Happens so often, or says so little, that no person is told."""
WARNING_KINDS = ("checkpoint_failed", "checkpoint_skipped")


def log_event(note: WorkerEvent) -> events.LogEvent | None:
    """The line the event log gets."""
    known: dict[str, Any] = {"round": note.round, "mono": note.mono, "reason": note.reason}
    path, seconds = str(note.extra.get("path", "")), float(note.extra.get("seconds", 0.0))
    match note.kind:
        case "checkpoint_saved" if note.step is not None:
            size = int(note.extra.get("bytes", 0))
            return events.CheckpointSavedEvent(**known, step=note.step, path=path, bytes=size, seconds=seconds)
        case "checkpoint_failed":
            return events.CheckpointFailedEvent(**known, step=note.step, path=path)
        case "checkpoint_skipped":
            return events.CheckpointSkippedEvent(**known, step=note.step, path=path)
        case "resumed" if note.step is not None:
            origin = int(note.extra.get("from_round", 0))
            return events.ResumedEvent(**known, step=note.step, from_round=origin, path=path)
        case "paused" if note.step is not None:
            return events.PausedEvent(**known, step=note.step)
        case "pause_ended" if note.step is not None:
            return events.PauseEndedEvent(**known, step=note.step, seconds=seconds)
    return None
