"""The heartbeat records of workers, as the agent uses them. A missing or damaged record is no error."""

from __future__ import annotations

from elasticd.errors import WireError
from elasticd.heartbeat.exit_report import ExitReport
from elasticd.heartbeat.record import HeartbeatReader


def write_request(path: str, request: int) -> None:
    """Write STOP, PAUSE or 0."""
    try:
        with HeartbeatReader(path) as reader:
            reader.request(request)
    except (OSError, WireError):
        pass  # the signal that follows STOP is enough


def read_exit_report(path: str) -> ExitReport | None:
    try:
        with HeartbeatReader(path) as reader:
            return reader.read().exit_report
    except (OSError, WireError):
        return None
