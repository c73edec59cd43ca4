"""A change of this node's health: a sentence for the daemon's log, a line for its event log. It decides nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from elasticd_agent.node.health.monitor import HealthChanged
from elasticd_agent.telemetry import events


class RecordEvent(Protocol):
    """`daemon.telling.Telling.happened`, safe from any thread."""

    def __call__(self, kind: Callable[..., events.LogEvent], sentence: str, **fields: object) -> None: ...


def report_change(changed: HealthChanged, happened: RecordEvent) -> None:
    if changed.state == "healthy":
        happened(events.NodeHealthyEvent, "nothing is held against this node's health")
    elif changed.state == "unhealthy":
        happened(events.NodeUnhealthyEvent, f"this node is not well, and is given no work: {changed.why}")
    else:
        sentence = f"this node is given no work for {changed.left_s:.0f} s: {changed.why}"
        happened(events.NodeQuarantinedEvent, sentence, seconds=round(changed.left_s, 1))
