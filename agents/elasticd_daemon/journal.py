"""The agent's own log, its event log, `<logs>/events.jsonl`, and its audit log, `audit.jsonl`. Any thread may write."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from elasticd_agent.model.log_events import LogEvent
from elasticd_agent.telemetry import event_log
from elasticd_agent.telemetry.console import Console

MAX_LOG_BYTES = 64 << 20
"""About 200,000 lines; the previous file of the same size is kept, too."""


class AgentJournal:
    """`logs` None: neither event log nor audit log."""

    def __init__(self, console: Console, logs: Path | None, node: str) -> None:
        self._console = console
        self._events = self._open(logs, "events.jsonl", node)
        self.audit = self._open(logs, "audit.jsonl", node)

    def _open(self, logs: Path | None, name: str, node: str) -> event_log.EventSink:
        if logs is None:
            return event_log.NullEventLog()
        with contextlib.suppress(OSError):  # it may be made, or mounted, while the agent runs
            logs.mkdir(mode=0o700, parents=True, exist_ok=True)
        return event_log.EventLog(logs / name, "", node, MAX_LOG_BYTES, must_open=False)

    def log(self, sentence: str) -> None:
        self._console.log(_one_line(sentence))

    def warn(self, sentence: str) -> None:
        self._console.log(_one_line(sentence), "warning")

    def event(self, kind: Callable[..., LogEvent], sentence: str, **fields: Any) -> None:
        """Log the sentence, and write it as an event of this kind."""
        self.log(sentence)
        self._events.write(kind(round=0, mono=time.monotonic(), reason=sentence, **fields))

    @property
    def lines_lost(self) -> int:
        return self._events.lines_lost + self.audit.lines_lost

    def close(self) -> None:
        self._events.close()
        self.audit.close()


def _one_line(sentence: str) -> str:
    """A reason may be a job's: it must not write further lines of this log."""
    return "\\n".join(sentence.splitlines())
