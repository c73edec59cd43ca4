"""The agent's own log and event log, `<logs>/events.jsonl`. Any thread may write."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from elasticd.errors import UsageError
from elasticd_agent.telemetry import event_log
from elasticd_agent.telemetry.console import Console
from elasticd_agent.telemetry.events import LogEvent

MAX_BYTES = 64 << 20
"""About 200,000 lines; the previous file of the same size is kept, too."""


class AgentJournal:
    """`log` None: no event log."""

    def __init__(self, console: Console, log: Path | None, node: str) -> None:
        self._console = console
        self._events: event_log.EventSink = event_log.NullEventLog()
        if log is not None:
            try:
                log.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                self._events = event_log.open_event_log(log, "", node, MAX_BYTES)
            except (OSError, UsageError) as error:
                self.log(f"this agent writes no event log: {error}")

    def log(self, sentence: str) -> None:
        self._console.log(sentence)

    def warn(self, sentence: str) -> None:
        self._console.log(sentence, "warning")

    def event(self, kind: Callable[..., LogEvent], sentence: str, **fields: Any) -> None:
        """Log the sentence, and write it as an event of this kind."""
        self._console.log(sentence)
        self._events.write(kind(round=0, mono=time.monotonic(), reason=sentence, **fields))

    @property
    def lost(self) -> int:
        return self._events.lost

    def close(self) -> None:
        self._events.close()
