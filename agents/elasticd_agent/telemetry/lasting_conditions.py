"""What is told of trouble that lasts: ranks the others wait for, processes that do not die. Once of each, as it begins.

It exists so that the story need not remember who is slow and what is stuck. It decides nothing about either.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from elasticd_agent.model.notices import SlowSeen
from elasticd_agent.telemetry import events as happened
from elasticd_agent.telemetry.console import Console
from elasticd_agent.telemetry.event_log import Events
from elasticd_agent.telemetry.metrics import Measures
from elasticd_agent.workers.group import Freed, Stuck


@dataclass(slots=True)
class Lasting:
    """One job's on one node."""

    events: Events
    metrics: Measures
    console: Console
    _slow: set[int] = field(default_factory=set)
    _stuck: dict[int, int] = field(default_factory=dict)  # pid -> round

    def slow(self, seen: SlowSeen) -> None:
        """Ranks the others wait for: said once of each, and measured for as long as it lasts."""
        self.metrics.slowness(dict(seen.ranks))
        for rank, ratio in seen.ranks:
            if rank not in self._slow:
                reason = f"rank {rank} is slow: the others wait for it, its own work takes {ratio:.1f} times as long"
                self.events.write(
                    happened.SlowRank(round=seen.number, mono=time.monotonic(), reason=reason, rank=rank, ratio=ratio)
                )
                self.console.said(f"round {seen.number}: {reason}", "warning")
        self._slow = {rank for rank, _ in seen.ranks}

    def survivors(self, number: int) -> tuple[int, ...]:
        """Processes of round `number` that were sent SIGKILL and are still there."""
        return tuple(pid for pid, its in self._stuck.items() if its == number)

    def stuck(self, heard: Stuck | Freed, sentence: str, now: float, number: int) -> None:
        """A process does not die of SIGKILL, or has died of it at last, in round `number`."""
        self.console.said(sentence, "warning" if isinstance(heard, Stuck) else "info")
        if isinstance(heard, Freed):
            self._stuck.pop(heard.pid, None)
            self.events.write(happened.ProcessFreed(round=number, mono=now, reason=sentence, pid=heard.pid))
        else:
            self._stuck[heard.pid] = heard.number
            self.events.write(
                happened.ProcessStuck(
                    round=heard.number,
                    mono=now,
                    reason=sentence,
                    pid=heard.pid,
                    rank=heard.rank,
                    slot=heard.slot,
                    state=heard.state,
                    wchan=heard.wchan,
                )
            )
        self.metrics.stuck(len(self._stuck))
