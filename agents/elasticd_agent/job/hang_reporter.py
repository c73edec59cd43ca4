"""Reports suspected hangs, hang verdicts and stragglers."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from elasticd_agent.job.listener import JobEvent
from elasticd_agent.job.report_context import JobContext
from elasticd_agent.model.notices import StragglersFound
from elasticd_agent.model.reports import HangVerdict
from elasticd_agent.telemetry import events


@dataclass(slots=True)
class HangReporter:
    job: JobContext
    _suspected_at: float | None = None
    _stragglers: set[int] = field(default_factory=set)

    def on(self, event: JobEvent, now: float) -> None:
        match event:
            case HangVerdict():
                self._hang(event, now)
            case StragglersFound():
                self._found_stragglers(event, now)

    def hang_suspected(self, number: int, why: str) -> None:
        """This node suspects a hang. The console stays silent: most suspicions end by themselves."""
        now = self._suspected_at = time.monotonic()
        self.job.metrics.hang_suspected()
        self.job.events.write(events.HangSuspectedEvent(round=number, mono=now, reason=why))

    def hang_cleared(self, number: int, seconds: float) -> None:
        reason = f"the workers make progress again; a hang was suspected for {seconds:.1f} s"
        self._suspected_at = None
        now = time.monotonic()
        self.job.events.write(events.HangClearedEvent(round=number, mono=now, reason=reason, seconds=seconds))

    def _hang(self, verdict: HangVerdict, now: float) -> None:
        job, culprits = self.job, verdict.culprits
        job.metrics.hang_detected(verdict.cause, verdict.hung_s, culprits[0][0] if culprits else "")
        job.goodput.on_fault(verdict.round, now, ends=verdict.restarts)
        if verdict.restarts:
            job.recovery.start(now - verdict.hung_s)
            if self._suspected_at is not None:
                job.recovery.mark("detect", self._suspected_at)
            job.recovery.mark("evidence", now)
        job.events.write(
            events.HangDetectedEvent(
                round=verdict.round,
                mono=now,
                reason=verdict.why,
                cause=verdict.cause,
                nodes=tuple(node for node, _, _ in culprits),
                ranks=tuple(rank for _, rank, _ in culprits),
                slots=tuple(slot for _, _, slot in culprits),
                seconds=verdict.hung_s,
                action="restart" if verdict.restarts else "report",
            )
        )
        only = "" if verdict.restarts else " (only reported: --on-hang report)"
        job.console.log(f"round {verdict.round} hangs{only}: {verdict.why}", "warning")

    def _found_stragglers(self, found: StragglersFound, now: float) -> None:
        """Each is logged once, when it becomes one, and measured for as long as it stays one."""
        self.job.metrics.stragglers(dict(found.ranks))
        for rank, ratio in found.ranks:
            if rank not in self._stragglers:
                reason = f"rank {rank} is slow: the others wait for it, its own work takes {ratio:.1f} times as long"
                self.job.events.write(
                    events.StragglerEvent(round=found.number, mono=now, reason=reason, rank=rank, ratio=ratio)
                )
                self.job.console.log(f"round {found.number}: {reason}", "warning")
        self._stragglers = {rank for rank, _ in found.ranks}
