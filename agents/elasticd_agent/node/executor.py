"""Does what a Plan says: asks runners to leave, starts others, and tells how each of them ended.

It exists so that the deciding loop decides and this acts. A job that cannot be started is refused or tried again, in a
sentence; nothing that is wrong with one job stops another. Where jobs run, and when a crashed runner may start again,
is not decided here.
"""

from __future__ import annotations

from elasticd.errors import UsageError
from elasticd_agent.node.journal import AgentJournal
from elasticd_agent.node.metrics import NodeMetrics
from elasticd_agent.node.reconcile import NodePlan, RunnerEnd, RunnerStart, RunOutcomes
from elasticd_agent.node.runners.manager import RunnerManager
from elasticd_agent.node.runners.spawn import NotAllowed
from elasticd_agent.node.runners.spec import RunnerSpec
from elasticd_agent.node.runners.spec_builder import SpecBuilder
from elasticd_agent.telemetry import events

RETRY_S = 10.0
"""Before a job is tried again whose folder could not be made: a disk that is full is full for a while."""


class Executor:
    """Belongs to the deciding thread. `now` is monotonic seconds; `orders` is replaced when the configuration is."""

    def __init__(
        self,
        runners: RunnerManager,
        journal: AgentJournal,
        metrics: NodeMetrics,
        specs: SpecBuilder,
        outcomes: RunOutcomes,
    ) -> None:
        self._runners, self._journal, self._metrics = runners, journal, metrics
        self.specs = specs
        self._outcomes = outcomes
        self._retry_at: dict[tuple[str, int], float] = {}
        self._started_at: dict[tuple[str, int], float] = {}

    def has_started(self, key: tuple[str, int]) -> bool:
        """True if this very daemon has started the runner of (job, number), and it has not ended."""
        return key in self._started_at

    def execute(self, plan: NodePlan, now: float) -> None:
        runners, telling = self._runners, self._journal
        for stop in plan.stop:
            order = stop.spec
            if runners.request_stop(order.job, order.number, stop.why, float(self.specs.settings.drain_timeout_s)):
                sentence = f"job {order.job} leaves this node: {stop.why}"
                telling.event(events.RunnerStopRequestedEvent, sentence, name=order.job, number=order.number)
        for start in plan.start:
            key = (start.submission.job, start.submission.number)
            if now >= self._retry_at.get(key, now):
                self._retry_at.pop(key, None)
                self._start(start, now)

    def _start(self, start: RunnerStart, now: float) -> None:
        key = (start.submission.job, start.submission.number)
        order = self.specs.build(start)
        try:
            pid = self._start_or_refuse(order, now)
        except (OSError, UsageError) as error:
            why = f"{error.filename}: {error.strerror}" if isinstance(error, OSError) else str(error)
            self._retry_at[key] = now + RETRY_S
            self._journal.warn(f"job {order.job} cannot be started: {why}; it is tried again in {RETRY_S:g} s")
            return
        if pid is None:
            return
        self._started_at[key] = now
        self._metrics.runner_started()
        slots = ", ".join(map(str, order.slots))
        sentence = f"job {order.job}: its runner starts as pid {pid}, with slots {slots}"
        self._journal.event(
            events.RunnerStartedEvent, sentence, name=order.job, number=order.number, slots=order.slots, pid=pid
        )

    def _start_or_refuse(self, spec: RunnerSpec, now: float) -> int | None:
        """The runner's pid; None: this node cannot run the job. Raises OSError, UsageError: not now."""
        try:
            account = self.specs.account(spec)
        except UsageError as error:
            self.record_end(self._runners.refuse(spec, None, str(error)), now)
            return None
        try:
            return self._runners.start(spec, account, self.specs.secrets())
        except NotAllowed as error:
            self.record_end(self._runners.refuse(spec, account, str(error)), now)
            return None

    def record_end(self, end: RunnerEnd, now: float) -> None:
        order, last = end.spec, end.exit
        lived_s = now - self._started_at.pop(end.key, now)
        sentence = self._outcomes.add(end, lived_s, now)
        outcome = "lost" if last is None else last.outcome
        code = None if last is None else last.exit_code
        self._metrics.runner_ended(outcome)
        self._journal.event(
            events.RunnerEndedEvent, sentence, name=order.job, number=order.number, outcome=outcome, exit_code=code
        )
