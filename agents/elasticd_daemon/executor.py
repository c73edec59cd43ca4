"""Carries out a NodePlan: stops and starts runners, and reports how each of them ended.

A job that cannot be started is refused or retried, with the reason; a fault of one job never stops another. Belongs to
the main loop's thread.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from elasticd.errors import UsageError
from elasticd_agent.model import log_events as events
from elasticd_daemon.journal import AgentJournal
from elasticd_daemon.metrics import RUNNER_EXITS, RUNNER_STARTS, NodeMetrics
from elasticd_daemon.runners.manager import RunnerManager
from elasticd_daemon.runners.reconcile import NodePlan, RunnerEnd, RunnerStart, RunOutcomes
from elasticd_daemon.runners.spawn import NodeRefusesJob, SpecBuilder
from elasticd_daemon.runners.spec import RunnerSpec

START_RETRY_S = 10.0
"""Before a job whose folder could not be created is started again: a full disk stays full for a while."""


@dataclass(slots=True)
class Executor:
    """`now` is monotonic seconds; `specs` is replaced when the configuration changes."""

    runners: RunnerManager
    journal: AgentJournal
    metrics: NodeMetrics
    specs: SpecBuilder
    outcomes: RunOutcomes
    _started_at: dict[tuple[str, int], float] = field(default_factory=dict)

    def is_own_runner(self, key: tuple[str, int]) -> bool:
        """True if this process started the runner of (job, number), and it has not ended."""
        return key in self._started_at

    def execute(self, plan: NodePlan, now: float) -> None:
        for stop in plan.stop:
            spec = stop.spec
            grace_s = float(self.specs.settings.drain_timeout_s)
            if self.runners.request_stop(spec.job, spec.number, stop.why, grace_s):
                sentence = f"job {spec.job}: stopping its runner: {stop.why}"
                self.journal.event(events.RunnerStopRequestedEvent, sentence, name=spec.job, number=spec.number)
        for start in plan.start:
            self._start(start, now)

    def _start(self, start: RunnerStart, now: float) -> None:
        key = (start.submission.job, start.submission.number)
        spec = self.specs.build(start)
        try:
            pid = self._start_or_refuse(spec, now)
        except (OSError, UsageError) as error:
            where = f"{error.filename}: " if isinstance(error, OSError) and error.filename else ""
            why = f"{where}{error.strerror}" if isinstance(error, OSError) else str(error)
            self.outcomes.add_failed_start(key, why, now, START_RETRY_S)
            self.journal.warn(f"job {spec.job} cannot be started: {why}; retrying in {START_RETRY_S:g} s")
            return
        if pid is None:
            return
        self._started_at[key] = now
        self.metrics.count(RUNNER_STARTS)
        slots = ", ".join(map(str, spec.slots))
        sentence = f"job {spec.job}: runner started as pid {pid} on slots {slots}"
        self.journal.event(
            events.RunnerStartedEvent, sentence, name=spec.job, number=spec.number, slots=spec.slots, pid=pid
        )

    def _start_or_refuse(self, spec: RunnerSpec, now: float) -> int | None:
        """The runner's pid; None: this node cannot run the job. Others raise OSError, UsageError."""
        try:
            account = self.specs.account(spec)
        except UsageError as error:
            self.record_end(self.runners.refuse(spec, None, str(error)), now)
            return None
        try:
            return self.runners.start(spec, account, self.specs.secrets(), self.specs.cgroup_limits(spec))
        except NodeRefusesJob as error:
            self.record_end(self.runners.refuse(spec, account, str(error)), now)
            return None

    def record_end(self, end: RunnerEnd, now: float) -> None:
        spec = end.spec
        ran_s = now - self._started_at.pop(end.key, now)
        sentence = self.outcomes.add(end, ran_s, now)
        outcome = "lost" if end.exit is None else end.exit.outcome
        code = None if end.exit is None else end.exit.exit_code
        self.metrics.count(RUNNER_EXITS, outcome)
        self.journal.event(
            events.RunnerEndedEvent, sentence, name=spec.job, number=spec.number, outcome=outcome, exit_code=code
        )
