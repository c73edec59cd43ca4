"""Does what a Plan says: asks runners to leave, starts others, and tells how each of them ended.

It exists so that the deciding loop decides and this acts. A job that cannot be started is refused or tried again, in a
sentence; nothing that is wrong with one job stops another. Where jobs run, and when a crashed runner may start again,
is not decided here.
"""

from __future__ import annotations

from elasticd.errors import UsageError
from elasticd_agent.node.journal import Telling
from elasticd_agent.node.metrics import NodeMetrics
from elasticd_agent.node.reconcile import Ended, Over, Plan, Start
from elasticd_agent.node.runners.manager import Runners
from elasticd_agent.node.runners.spawn import NotAllowed
from elasticd_agent.node.runners.spec import Order
from elasticd_agent.node.runners.spec_builder import Orders
from elasticd_agent.telemetry import events

FOLDER_S = 10.0
"""Before a job is tried again whose folder could not be made: a disk that is full is full for a while."""


class Performing:
    """Belongs to the deciding thread. `now` is monotonic seconds; `orders` is replaced when the configuration is."""

    def __init__(self, runners: Runners, telling: Telling, metrics: NodeMetrics, orders: Orders, ended: Ended) -> None:
        self._runners, self._telling, self._metrics = runners, telling, metrics
        self.orders = orders
        self._ended = ended
        self._not_before: dict[tuple[str, int], float] = {}
        self._started_at: dict[tuple[str, int], float] = {}

    def started(self, key: tuple[str, int]) -> bool:
        """True if this very daemon has started the runner of (job, number), and it has not ended."""
        return key in self._started_at

    def perform(self, plan: Plan, now: float) -> None:
        runners, telling = self._runners, self._telling
        for stop in plan.stop:
            order = stop.order
            if runners.ask_to_leave(order.job, order.number, stop.why, float(self.orders.settings.drain_timeout_s)):
                sentence = f"job {order.job} leaves this node: {stop.why}"
                telling.happened(events.RunnerAsked, sentence, name=order.job, number=order.number)
        for start in plan.start:
            key = (start.wants.job, start.wants.number)
            if now >= self._not_before.get(key, now):
                self._not_before.pop(key, None)
                self._start(start, now)

    def _start(self, start: Start, now: float) -> None:
        key = (start.wants.job, start.wants.number)
        order = self.orders.order(start)
        try:
            pid = self._started_or_refused(order, now)
        except (OSError, UsageError) as error:
            why = f"{error.filename}: {error.strerror}" if isinstance(error, OSError) else str(error)
            self._not_before[key] = now + FOLDER_S
            self._telling.warned(f"job {order.job} cannot be started: {why}; it is tried again in {FOLDER_S:g} s")
            return
        if pid is None:
            return
        self._started_at[key] = now
        self._metrics.runner_started()
        slots = ", ".join(map(str, order.slots))
        sentence = f"job {order.job}: its runner starts as pid {pid}, with slots {slots}"
        self._telling.happened(
            events.RunnerStarted, sentence, name=order.job, number=order.number, slots=order.slots, pid=pid
        )

    def _started_or_refused(self, order: Order, now: float) -> int | None:
        """The runner's pid; None: this node cannot run the job. Raises OSError, UsageError: not now."""
        try:
            account = self.orders.account(order)
        except UsageError as error:
            self.over(self._runners.refuse(order, None, str(error)), now)
            return None
        try:
            return self._runners.start(order, account, self.orders.secrets())
        except NotAllowed as error:
            self.over(self._runners.refuse(order, account, str(error)), now)
            return None

    def over(self, over: Over, now: float) -> None:
        order, last = over.order, over.last
        lived_s = now - self._started_at.pop(over.key, now)
        sentence = self._ended.add(over, lived_s, now)
        outcome = "lost" if last is None else last.outcome
        code = None if last is None else last.exit_code
        self._metrics.runner_ended(outcome)
        self._telling.happened(
            events.RunnerEnded, sentence, name=order.job, number=order.number, outcome=outcome, exit_code=code
        )
