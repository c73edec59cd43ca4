"""What is told of trouble that lasts: ranks the others wait for, processes that do not die. Once of each, as it begins.

It exists so that the story need not remember who is slow and what is stuck. It decides nothing about either.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from elasticd_agent.model.notices import StragglersFound
from elasticd_agent.telemetry import events as happened
from elasticd_agent.telemetry.console import Console
from elasticd_agent.telemetry.event_log import EventSink
from elasticd_agent.telemetry.metrics import MetricsRecorder
from elasticd_agent.workers.group import ProcessReaped, ProcessUnkillable


@dataclass(slots=True)
class ConditionLog:
    """One job's on one node."""

    events: EventSink
    metrics: MetricsRecorder
    console: Console
    _stragglers: set[int] = field(default_factory=set)
    _unkillable: dict[int, int] = field(default_factory=dict)  # pid -> round

    def on_stragglers(self, seen: StragglersFound) -> None:
        """Ranks the others wait for: said once of each, and measured for as long as it lasts."""
        self.metrics.stragglers(dict(seen.ranks))
        for rank, ratio in seen.ranks:
            if rank not in self._stragglers:
                reason = f"rank {rank} is slow: the others wait for it, its own work takes {ratio:.1f} times as long"
                self.events.write(
                    happened.StragglerEvent(
                        round=seen.number, mono=time.monotonic(), reason=reason, rank=rank, ratio=ratio
                    )
                )
                self.console.log(f"round {seen.number}: {reason}", "warning")
        self._stragglers = {rank for rank, _ in seen.ranks}

    def unkillable(self, number: int) -> tuple[int, ...]:
        """Processes of round `number` that were sent SIGKILL and are still there."""
        return tuple(pid for pid, its in self._unkillable.items() if its == number)

    def on_unkillable(self, heard: ProcessUnkillable | ProcessReaped, sentence: str, now: float, number: int) -> None:
        """A process does not die of SIGKILL, or has died of it at last, in round `number`."""
        self.console.log(sentence, "warning" if isinstance(heard, ProcessUnkillable) else "info")
        if isinstance(heard, ProcessReaped):
            self._unkillable.pop(heard.pid, None)
            self.events.write(happened.ProcessReapedEvent(round=number, mono=now, reason=sentence, pid=heard.pid))
        else:
            self._unkillable[heard.pid] = heard.number
            self.events.write(
                happened.ProcessUnkillableEvent(
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
        self.metrics.unkillable_processes(len(self._unkillable))
