"""Pure: what a worker's Session noted -> what the event log says of it.

It exists so that the story need not know how notes are spelled. A note of a newer elasticd, or one that the log does
not tell, is None.
"""

from __future__ import annotations

from typing import Any

from elasticd.heartbeat.worker_events import Note
from elasticd_agent.telemetry import events

QUIET = ("checkpoint_saved", "attached", "can_hold")
"""Happens so often, or says so little, that no person is told."""
TROUBLE = ("checkpoint_failed", "checkpoint_skipped")


def event(note: Note) -> events.Record | None:
    """The line the event log gets."""
    known: dict[str, Any] = {"round": note.round, "mono": note.mono, "reason": note.reason}
    path, seconds = str(note.more.get("path", "")), float(note.more.get("seconds", 0.0))
    match note.kind:
        case "checkpoint_saved" if note.step is not None:
            size = int(note.more.get("bytes", 0))
            return events.CheckpointSaved(**known, step=note.step, path=path, bytes=size, seconds=seconds)
        case "checkpoint_failed":
            return events.CheckpointFailed(**known, step=note.step, path=path)
        case "checkpoint_skipped":
            return events.CheckpointSkipped(**known, step=note.step, path=path)
        case "resumed" if note.step is not None:
            origin = int(note.more.get("from_round", 0))
            return events.Resumed(**known, step=note.step, from_round=origin, path=path)
        case "holding" if note.step is not None:
            return events.Holding(**known, step=note.step)
        case "hold_over" if note.step is not None:
            return events.HoldOver(**known, step=note.step, seconds=seconds)
    return None
