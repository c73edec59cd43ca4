"""The daemon's deciding loop: one inbox, one thread. Every turn looks at everything anew and makes the node agree.

It exists so that the daemon can be killed, replaced or cut off at any moment: what it knows is in the store, in the
runners' folders and in locks, and a turn needs nothing that an earlier one remembered. A store that is away stops
nothing: the last that was known counts until it is back. Where a job runs is `placing`'s to decide, what that means
for this node `reconciling`'s, doing it `performing`'s.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal, Protocol

from elasticd.errors import StoreRefused, StoreUnavailable, UsageError, WireError
from elasticd_agent.config.agent_settings import NodeSettings
from elasticd_agent.node import keys as names
from elasticd_agent.node.configured_jobs import ConfiguredJobs
from elasticd_agent.node.executor import Executor
from elasticd_agent.node.health.job_failures import JobFailures
from elasticd_agent.node.health.policy import NOT_CHECKED_YET
from elasticd_agent.node.journal import AgentJournal
from elasticd_agent.node.metrics import NodeFacts, NodeMetrics
from elasticd_agent.node.reconcile import NodePlan, RunOutcomes, reconcile
from elasticd_agent.node.records import NodeState, NodeStatus, RunnerStatus
from elasticd_agent.node.registration import NameTaken, NodeStatusPublisher
from elasticd_agent.node.runners.manager import RunnerManager
from elasticd_agent.node.runners.spec_builder import SpecBuilder
from elasticd_agent.node.scheduler import job_queue as jobs
from elasticd_agent.node.scheduler.policy import ClusterView
from elasticd_agent.node.sd_notify import Notifier
from elasticd_agent.store import Store
from elasticd_agent.store.cache import StoreCache
from elasticd_agent.telemetry import events

COALESCE_S = 0.02
"""What is hinted at together is looked at together."""
NAME_CONFLICT_MARGIN_S = 2.0
"""A name that is taken when we start may be that of a daemon that is no more: two of its leases and this decide."""


@dataclass(frozen=True, slots=True)
class Wakeup:
    """Something may have changed: look."""


@dataclass(frozen=True, slots=True)
class SignalRequest:
    """A signal to the daemon: to drain and end, to read its configuration again, to replace itself."""

    action: Literal["drain", "reload", "replace"]
    signal_name: str


REREAD_S = 10.0
"""Everything is read again this often, in case a watch missed something."""
Message = Wakeup | SignalRequest


class HealthSource(Protocol):
    def verdict(self) -> tuple[bool, str]: ...
    def record_job_failure(self, why: str) -> None: ...


class SchedulerTurns(Protocol):
    @property
    def is_leader(self) -> bool: ...
    def turn(self, now: float) -> list[str]: ...
    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class LoopDependencies:
    """What the loop is made of."""

    store: Store
    cache: StoreCache
    registration: NodeStatusPublisher
    runners: RunnerManager
    scheduler: SchedulerTurns
    health: HealthSource
    notifier: Notifier
    journal: AgentJournal
    inbox: queue.SimpleQueue[Message]
    status: NodeStatus
    metrics: NodeMetrics


class NodeLoop:
    """`reload` reads the configuration again and says what came of it, or raises UsageError."""

    def __init__(
        self,
        parts: LoopDependencies,
        specs: SpecBuilder,
        reload: Callable[[NodeSettings], tuple[NodeSettings, list[str]]],
        replacement_error: Callable[[], str],
    ) -> None:
        """`replaceable`: why the daemon cannot replace itself by what is installed now, or ""."""
        self._parts = parts
        self._reload, self._replacement_error = reload, replacement_error
        settings = specs.settings
        self.status = parts.status
        self._registration = parts.registration
        self._cache = parts.cache
        self._configured_jobs = ConfiguredJobs(settings.state_dir)
        self._job_failures = JobFailures(parts.status.node)
        self._outcomes = RunOutcomes()
        self._cluster_view = ClusterView()
        self._draining = ""
        self._store_down_since: float | None = None
        self._registered = False
        self._reported_name_conflict = ""
        self._missing_since: float | None = None
        self._executor = Executor(parts.runners, parts.journal, parts.metrics, specs, self._outcomes)
        self._last_turn_at = time.monotonic()
        self._next_at = 0.0
        self._started_at = time.monotonic()

    # --- asked from other threads -----------------------------------------------------------------------------------

    @property
    def settings(self) -> NodeSettings:
        return self._executor.specs.settings

    @property
    def registered(self) -> bool:
        return self._registration.registered

    @property
    def store_down(self) -> bool:
        return self._store_down_since is not None

    def readiness(self) -> tuple[bool, str]:
        """What a readiness probe is told, and why. It does not follow the store: who has joined trains on without it,
        and a probe that fails would only take the node from whoever wants to look at it."""
        since = self._store_down_since
        if since is None:
            return self.registered, "joined" if self.registered else "not joined: the node's card is not in the store"
        without = f"the store has not answered for {time.monotonic() - since:.0f} s"
        if self._registered:
            return True, f"joined; {without}, and what runs here goes on without it"
        return False, f"not joined yet: {without}"

    def facts(self) -> NodeFacts:
        """How the node is now, for its metrics."""
        running, known = self.status.runners, self._cluster_view
        states = [one.state for one in running]
        over = {(e.job, e.number) for e in known.results}
        waiting = [p for p in known.placements if not p.assignments and (p.job, p.number) not in over]
        return NodeFacts(
            slots=self.status.slots,
            slots_used=sum(len(runs.spec.slots) for runs in self._parts.runners.alive()),
            state=self.status.state,
            registered=self.registered,
            is_scheduler=self._parts.scheduler.is_leader,
            runners={state: states.count(state) for state in states},
            jobs_waiting=len(waiting),
            store_up=not self.store_down,
            loop_lag_s=self.lag_s(),
            event_log_lines_lost=self._parts.journal.lost,
        )

    def jobs(self) -> tuple[tuple[str, int], ...]:
        """(job, number) of the runners here."""
        return tuple(runs.key for runs in self._parts.runners.alive())

    def jobs_with_files_in_use(self) -> set[tuple[str, int]]:
        """(job, number) whose files on this node are in use, or may be soon."""
        return {*self.jobs(), *((s.job, s.number) for s in self._cluster_view.unfinished())}

    def set_address(self, address: str) -> None:
        """Where the daemon is asked from other nodes; before `run`."""
        self.status = replace(self.status, address=address)

    def lag_s(self) -> float:
        """For how long the deciding thread should have turned and has not."""
        return max(0.0, time.monotonic() - max(self._next_at, self._last_turn_at))

    # --- the loop ---------------------------------------------------------------------------------------------------

    def adopt(self) -> int:
        """Find the runners that an earlier daemon has started, and how the others ended; how many live."""
        for over in self._parts.runners.adopt():
            if over.exit is not None and over.exit.outcome != "left":
                self._outcomes.add(over, 0.0, time.monotonic())
        return len(self._parts.runners.alive())

    def run(self) -> bool:
        """Until it is over. True: the process is to replace itself; False: it is to end."""
        parts = self._parts
        parts.notifier.ready(f"node {self.status.node}")
        while True:
            asked = self._receive()
            while asked:
                if self._handle(asked.pop(0)):
                    for later in asked:  # the next one's to hear
                        parts.inbox.put(later)
                    return True
            self._turn(time.monotonic())
            if self._draining and not parts.runners.alive():
                return False

    def _receive(self) -> list[SignalRequest]:
        """Wait until there is something to do; what people have asked for meanwhile."""
        asked = []
        timeout: float | None = max(0.0, self._next_at - time.monotonic())
        try:
            first = self._parts.inbox.get(timeout=timeout)
            if isinstance(first, Wakeup):
                time.sleep(COALESCE_S)
            else:
                asked.append(first)
            while True:
                more = self._parts.inbox.get_nowait()
                if isinstance(more, SignalRequest):
                    asked.append(more)
        except queue.Empty:
            return asked

    def _handle(self, request: SignalRequest) -> bool:
        """True if the process is to replace itself now."""
        telling = self._parts.journal
        match request.action:
            case "drain" if self._draining:
                telling.warn(f"{request.signal_name} again: what is left here is killed")
                self._parts.runners.expire_deadlines()
            case "drain":
                within_s = float(self.settings.drain_timeout_s)
                self._draining = f"the agent was stopped ({request.signal_name})"
                telling.event(
                    events.NodeStateEvent,
                    f"{request.signal_name}: jobs have {within_s:g} s to leave this node",
                    state="draining",
                )
                self._parts.notifier.stopping(within_s + 30.0, "draining")
            case "reload":
                self._parts.notifier.reloading()
                try:
                    settings, said = self._reload(self.settings)
                    self._executor.specs = replace(self._executor.specs, settings=settings)
                    self.status = replace(self.status, labels=settings.labels)
                    telling.event(
                        events.AgentReloadedEvent, f"{request.signal_name}: {'; '.join(said) or 'nothing has changed'}"
                    )
                except UsageError as error:
                    telling.warn(f"{request.signal_name}: nothing was reloaded: {error}")
                self._parts.notifier.ready(f"node {self.status.node}")
            case "replace":
                if why := self._replacement_error():
                    telling.warn(f"{request.signal_name}: this agent goes on as it is: {why}")
                elif self._draining:
                    telling.warn(f"{request.signal_name}: this agent is leaving already")
                else:
                    return True
        return False

    def _turn(self, now: float) -> None:
        self._last_turn_at = now
        parts, settings = self._parts, self.settings
        for over in parts.runners.poll(now):
            self._executor.record_end(over, now)
        heard = parts.runners.statuses()
        for blame in self._job_failures.update(heard, [key for key in heard if not self._executor.has_started(key)]):
            parts.health.record_job_failure(blame)
        self._update_status(self.status.runners)
        self._sync_with_store(now)
        plan = reconcile(
            self._cluster_view, self.status.node, parts.runners.alive(), self._outcomes, self._draining, now
        )
        self._executor.execute(plan, now)
        running = plan.runners if not plan.start else self._plan(now).runners
        changed = self._update_status(running)
        due = parts.runners.next_poll_at()
        times = [
            now + float(settings.renewal_s),
            plan.next_start_at,
            due,
            *([now] if changed and not self.store_down else []),
        ]
        self._next_at = min(at for at in times if at is not None)
        parts.notifier.feed()

    def _plan(self, now: float) -> NodePlan:
        runs = self._parts.runners.alive()
        return reconcile(self._cluster_view, self.status.node, runs, self._outcomes, self._draining, now)

    # --- the store --------------------------------------------------------------------------------------------------

    def _sync_with_store(self, now: float) -> None:
        """Hear what the store says, and say what there is to say. One that is away costs nothing but the news."""
        try:
            if self._registration.turn(self.status, now):
                self._cache.clear()
                if not self._registered:
                    self._registered = True
                    self._parts.journal.event(
                        events.NodeRegisteredEvent, f"node {self.status.node} takes part", slots=self.status.slots
                    )
            self._cache.watch(self, jobs.CACHED)
            if self._cache.refresh(now, REREAD_S):
                self._registration.check()
            self._cluster_view = jobs.cached_view(self._cache)
            self._publish_results()
            self._resubmit_missing(now)
            if not self._draining:
                for sentence in self._configured_jobs.submit_new(
                    self._parts.store, self.settings.jobs, self._cluster_view, self.status.node, time.time()
                ):
                    self._parts.journal.log(sentence)
            for sentence in self._parts.scheduler.turn(now):
                self._parts.journal.event(events.JobScheduledEvent, sentence)
            self._cluster_view = jobs.cached_view(self._cache)
            self._on_store_back(now)
        except StoreUnavailable as error:
            self._on_store_lost(str(error), now)
        except NameTaken as error:
            if (
                not self._registered
                and now >= self._started_at + 2 * float(self.settings.lease_s) + NAME_CONFLICT_MARGIN_S
            ):
                raise UsageError(str(error)) from None
            if self._registered and str(error) != self._reported_name_conflict:
                self._reported_name_conflict = str(error)
                self._parts.journal.warn(f"{error}; what runs here goes on")
        except (StoreRefused, WireError) as error:
            if not self._registered and isinstance(error, StoreRefused):
                raise
            self._on_store_lost(str(error), now)

    def _on_store_lost(self, why: str, now: float) -> None:
        self._cache.clear()
        if self._store_down_since is None:
            self._store_down_since = now
            self._parts.metrics.store_lost()
            self._parts.journal.event(events.StoreUnavailableEvent, f"what runs here goes on without the store: {why}")
        self._missing_since = None

    def _on_store_back(self, now: float) -> None:
        if self._store_down_since is not None:
            seconds, self._store_down_since = now - self._store_down_since, None
            sentence = f"the store answers again after {seconds:.1f} s"
            self._parts.journal.event(events.StoreAvailableEvent, sentence, seconds=seconds)

    def _publish_results(self) -> None:
        for ending in self._plan(time.monotonic()).results:
            jobs.record_result(self._parts.store, ending)
            self._cache.invalidate(names.RESULTS + ending.job)
        self._cluster_view = jobs.cached_view(self._cache)
        self._outcomes.forget_recorded(self._cluster_view, self.status.node)

    def _resubmit_missing(self, now: float) -> None:
        """A store that came back empty hears from us which jobs there are, once every node has had time to be back."""
        forgotten = self._plan(now).missing
        if not forgotten:
            self._missing_since = None
            return
        if self._missing_since is None:
            self._missing_since = now
            named = ", ".join(order.job for order in forgotten)
            self._parts.journal.warn(f"the store does not know {named}, which runs on here: it is told again")
        if now < self._missing_since + float(self.settings.lease_s) + float(self.settings.renewal_s):
            return
        for order in forgotten:
            if order.submission:
                self._parts.store.compare_and_swap(names.SUBMISSIONS + order.job, None, order.submission.encode())
                self._cache.invalidate(names.SUBMISSIONS + order.job)
        self._missing_since = None

    # --- the card -----------------------------------------------------------------------------------------------------

    def _update_status(self, running: tuple[RunnerStatus, ...]) -> bool:
        """Write the card anew. True if it says something else than before."""
        state, why = self._state()
        if state != self.status.state and state != "draining":
            self._parts.journal.event(
                events.NodeStateEvent, f"node {self.status.node} is {state}" + (f": {why}" if why else ""), state=state
            )
        card = replace(self.status, state=state, why=why, runners=running)
        changed, self.status = card != self.status, card
        return changed

    def _state(self) -> tuple[NodeState, str]:
        if self._draining:
            return "draining", self._draining
        cordon = next((c for c in self._cluster_view.cordons if c.node == self.status.node), None)
        well, why = self._parts.health.verdict()
        if not well:
            return "starting" if why == NOT_CHECKED_YET else "quarantined", why
        if cordon is not None:
            return "cordoned", cordon.reason
        return "ready", ""

    # --- the end ----------------------------------------------------------------------------------------------------

    def close(self, *, leaves: bool) -> None:
        """Let another daemon place; `leaves`: take the card away, too. Raises nothing."""
        self._cache.unwatch(self)
        for away in (self._parts.scheduler.close, *([self._registration.withdraw] if leaves else [])):
            try:
                away()
            except (StoreUnavailable, StoreRefused):
                pass  # it runs out by itself
