"""The agent's main loop: one inbox, one thread. Every turn reads the whole state and makes the node match the store.

The agent can be killed, replaced or disconnected at any moment: its state is in the store, in the runners' folders and
in locks, and a turn needs no result of an earlier one. While the store is unavailable the last known state applies. The
scheduler decides where jobs run, `reconcile` what that means for this node, `executor` does it.

A turn
1. Runners that have ended are recorded, with how they ended.
2. Failures of jobs are weighed: a slot at which different jobs fail is suspected.
3. The store's records are read and this node's is written. The holder of the scheduler's key makes one decision.
4. `reconcile` compares the placements with the runners here. It is pure: placements, runners, outcomes and the time in;
   starts, stops and results out.
5. The executor starts and stops, and the node's status is written again if that has changed it.

A result is written to the store before the outcome is forgotten here, so a crash between the two writes it twice and
loses none.

An outage of the store stops nothing. Running jobs do not need it, placements that are known stay in force, and results
wait. What ends is decisions: no job is placed, and a node that others cannot see is not given work by them.

Signals are requests: SIGTERM drains (each job has `drain_timeout` to leave, a second signal ends that), SIGHUP reloads
the configuration, SIGUSR2 replaces the process by the installed version. A replacement keeps the pid, the sockets and
the runners; signals that arrived and were not handled wait for it in the inbox.

A preemption notice drains the node, too, but the agent stays: a service manager would start it again, the notice would
still be there, and until it is read the node would be given jobs.
"""

from __future__ import annotations

import contextlib
import queue
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

from elasticd.errors import StoreRefused, StoreUnavailable, UsageError, WireError
from elasticd_agent.model import log_events as events
from elasticd_agent.store import Store
from elasticd_agent.store.cache import StoreCache
from elasticd_daemon import keys, metrics
from elasticd_daemon.config.agent_settings import NodeSettings
from elasticd_daemon.executor import Executor
from elasticd_daemon.health.job_failures import JobFailures
from elasticd_daemon.health.monitor import HealthMonitor
from elasticd_daemon.health.policy import NOT_CHECKED_YET_REASON, HealthVerdict
from elasticd_daemon.journal import AgentJournal
from elasticd_daemon.metrics import NodeMetrics
from elasticd_daemon.records import ClusterView, NodeState, NodeStatus, RunnerStatus
from elasticd_daemon.registration import NodeNameConflict, NodeStatusPublisher
from elasticd_daemon.runners.manager import RunnerManager
from elasticd_daemon.runners.reconcile import REFUSAL_RETRY_S, NodePlan, RunOutcomes, reconcile
from elasticd_daemon.runners.spawn import SpecBuilder
from elasticd_daemon.scheduler import job_queue
from elasticd_daemon.scheduler.scheduler import Scheduler
from elasticd_daemon.sd_notify import Notifier

COALESCE_S = 0.02
NAME_CONFLICT_MARGIN_S = 2.0
"""A name in use at our start may be a dead agent's: it counts after two leases of a store that answers, and this."""

REREAD_S = 10.0
"""Everything is read again this often, in case a watch missed something."""


@dataclass(frozen=True, slots=True)
class Wakeup:
    """Something may have changed."""


@dataclass(frozen=True, slots=True)
class SignalRequest:
    action: Literal["drain", "notice", "reload", "replace", "ignore"]
    source: str


Message = Wakeup | SignalRequest
MustReplace = bool
"""True: the process must replace itself by the installed version now."""


@dataclass(frozen=True, slots=True)
class LoopDependencies:
    """The parts that the loop works with, built by `agent`."""

    store: Store
    cache: StoreCache
    status_publisher: NodeStatusPublisher
    runners: RunnerManager
    scheduler: Scheduler
    health: HealthMonitor
    notifier: Notifier
    journal: AgentJournal
    inbox: queue.SimpleQueue[Message]
    initial_status: NodeStatus
    metrics: NodeMetrics


class NodeLoop:
    """The loop of one node's agent.

    `reload` returns the new configuration and its changes, or raises UsageError. `replacement_error` returns why the
    installed version cannot replace the agent, or "".
    """

    def __init__(
        self,
        parts: LoopDependencies,
        specs: SpecBuilder,
        reload: Callable[[NodeSettings], tuple[NodeSettings, list[str]]],
        replacement_error: Callable[[], str],
    ) -> None:
        self.status = parts.initial_status
        self._parts = parts
        self._reload = reload
        self._replacement_error = replacement_error
        self._status_publisher = parts.status_publisher
        self._cache = parts.cache
        self._job_failures = JobFailures(parts.initial_status.node)
        self._outcomes = RunOutcomes()
        self._cluster_view = ClusterView()
        self._address = ""
        self._adopted = 0
        self._draining = ""
        self._signalled_to_drain = False
        self._store_unavailable_since: float | None = None
        self._registered = False
        self._reported_name_conflict = ""
        self._name_taken_since: float | None = None
        self._missing_since: float | None = None
        self._executor = Executor(parts.runners, parts.journal, parts.metrics, specs, self._outcomes)
        self._last_turn_at = time.monotonic()
        self._next_at = 0.0

    # For other threads:

    @property
    def settings(self) -> NodeSettings:
        return self._executor.specs.settings

    @property
    def registered(self) -> bool:
        return self._status_publisher.registered

    @property
    def store_unavailable(self) -> bool:
        return self._store_unavailable_since is not None

    def readiness(self) -> tuple[bool, str]:
        """The answer of a readiness probe, with its reason.

        A registered node stays ready without the store: its jobs continue, and a failing probe would only hide the node
        from people who examine it.
        """
        since = self._store_unavailable_since
        if since is None:
            return self.registered, "registered" if self.registered else "not registered: no node status in the store"
        outage = f"the store has been unavailable for {time.monotonic() - since:.0f} s"
        if self._registered:
            return True, f"registered; {outage}, and running jobs continue without it"
        return False, f"not registered yet: {outage}"

    def gauges(self) -> metrics.Samples:
        """The node's metrics at this moment, without its health."""
        view = self._cluster_view
        states = [runner.state for runner in self.status.runners]
        ended = {(result.job, result.number) for result in view.results}
        pending = [p for p in view.placements if not p.assignments and (p.job, p.number) not in ended]
        cordoned = any(cordon.node == self.status.node for cordon in view.cordons)
        node_state = "cordoned" if cordoned else self.status.state
        return {
            (metrics.SLOTS, ()): self.status.slots,
            (metrics.SLOTS_USED, ()): sum(len(runner.spec.slots) for runner in self._parts.runners.alive()),
            **{(metrics.NODE_STATE, (state,)): state == node_state for state in metrics.NODE_STATES},
            (metrics.REGISTERED, ()): self.registered,
            (metrics.IS_SCHEDULER, ()): self._parts.scheduler.holds_key,
            **{(metrics.RUNNERS, (state,)): states.count(state) for state in metrics.RUNNER_STATES},
            (metrics.JOBS_WAITING, ()): len(pending),
            (metrics.STORE_UP, ()): not self.store_unavailable,
            (metrics.LOOP_LAG, ()): self.lag_s(),
            (metrics.EVENT_LOG_LINES_LOST, ()): self._parts.journal.lines_lost,
            **metrics.failed_job_samples(
                (*view.results, *list(self._outcomes.exits.values())),
                self.status.node,
                is_scheduler=self._parts.scheduler.holds_key,
                now=time.time(),
            ),
        }

    def jobs(self) -> tuple[tuple[str, int], ...]:
        """(job, number) of the runners here."""
        return tuple(runner.key for runner in self._parts.runners.alive())

    def jobs_with_files_in_use(self) -> set[tuple[str, int]]:
        """(job, number) of running jobs, and of all that may start here."""
        return {*self.jobs(), *((s.job, s.number) for s in self._cluster_view.unfinished())}

    def set_address(self, address: str) -> None:
        """HOST:PORT of the agent's HTTP server; it counts from the next turn on."""
        self._address = address

    def lag_s(self) -> float:
        """The delay of the next turn."""
        return max(0.0, time.monotonic() - max(self._next_at, self._last_turn_at))

    def adopt_runners(self) -> int:
        """Take over the runners of an earlier agent. Returns how many are alive."""
        for end in self._parts.runners.adopt():
            if end.exit is not None and end.exit.outcome != "left":
                self._outcomes.add(end, 0.0, time.monotonic())
        self._adopted = len(self._parts.runners.alive())
        return self._adopted

    def run(self) -> MustReplace:
        """Take turns until the process must end or replace itself."""
        parts = self._parts
        parts.notifier.ready(f"node {self.status.node}")
        while True:
            requests = self._wait_for_turn()
            while requests:
                if self._handle(requests.pop(0)):
                    for unhandled in requests:  # for the replacement
                        parts.inbox.put(unhandled)
                    return True
            self._turn(time.monotonic())
            if self._signalled_to_drain and not parts.runners.alive():
                return False

    def _wait_for_turn(self) -> list[SignalRequest]:
        """Wait until the next turn is due. Returns the signals that arrived meanwhile."""
        requests = []
        timeout: float | None = max(0.0, self._next_at - time.monotonic())
        try:
            first = self._parts.inbox.get(timeout=timeout)
            if isinstance(first, Wakeup):
                time.sleep(COALESCE_S)
            else:
                requests.append(first)
            while True:
                more = self._parts.inbox.get_nowait()
                if isinstance(more, SignalRequest):
                    requests.append(more)
        except queue.Empty:
            return requests

    def _handle(self, request: SignalRequest) -> MustReplace:
        journal = self._parts.journal
        match request.action:
            case "drain" if self._signalled_to_drain:
                journal.warn(f"{request.source} again: remaining jobs are killed")
                self._parts.runners.expire_deadlines()
            case "notice" if not request.source:
                if not self._signalled_to_drain:
                    self._draining = ""
                    journal.log("the notice was withdrawn: this node takes work again")
            case "drain" | "notice":  # a notice and the signal that comes with it are one request
                within_s, is_signal = float(self.settings.drain_timeout_s), request.action == "drain"
                self._signalled_to_drain |= is_signal
                if self._draining:
                    journal.log(f"{request.source}: this node is draining already")
                else:
                    self._draining = f"the agent was stopped ({request.source})" if is_signal else request.source
                    sentence = f"{request.source}: jobs have {within_s:g} s to leave this node"
                    journal.event(events.NodeStateEvent, sentence, state="draining")
                if is_signal:
                    self._parts.notifier.stopping(within_s + 40.0, "draining")
            case "reload":
                self._parts.notifier.reloading()
                try:
                    settings, changes = self._reload(self.settings)
                    self._executor.specs = replace(self._executor.specs, settings=settings)
                    self.status = replace(self.status, labels=settings.labels)
                    journal.event(events.AgentReloadedEvent, f"{request.source}: {'; '.join(changes) or 'no changes'}")
                except UsageError as error:
                    journal.warn(f"{request.source}: the configuration was not reloaded: {error}")
                self._parts.notifier.ready(f"node {self.status.node}")
            case "ignore":
                journal.warn(f"{request.source} is ignored: SIGTERM drains, SIGHUP reloads, SIGUSR2 replaces the agent")
            case "replace":
                if why := self._replacement_error():
                    journal.warn(f"{request.source}: this agent keeps running: {why}")
                elif self._signalled_to_drain:
                    journal.warn(f"{request.source}: this agent is leaving already")
                else:
                    return True
        return False

    def _turn(self, now: float) -> None:
        """Make one turn, as the module describes it, and set when the next one is due."""
        self._last_turn_at = now
        parts = self._parts
        for end in parts.runners.poll(now):
            self._executor.record_end(end, now)
        statuses = parts.runners.statuses()
        adopted = [key for key in statuses if not self._executor.is_own_runner(key)]
        for failure in self._job_failures.update(statuses, adopted, parts.runners.job_uids()):
            parts.health.record_job_failure(failure)
        self._update_status(self.status.runners)
        self._sync_with_store(now)
        plan = self._plan(now)
        self._executor.execute(plan, now)
        changed = self._update_status(self._plan(now).runner_statuses if plan.start else plan.runner_statuses)
        times = [now + float(self.settings.renewal_s), plan.next_start_at, parts.runners.next_poll_at()]
        if changed and not self.store_unavailable:
            times.append(now)
        self._next_at = min(at for at in times if at is not None)
        parts.notifier.feed()

    def _plan(self, now: float) -> NodePlan:
        """Return what this node has to start, to stop and to report, by the last known records."""
        runners = self._parts.runners.alive()
        return reconcile(self._cluster_view, self.status.node, runners, self._outcomes, self._draining, now)

    def _sync_with_store(self, now: float) -> None:
        """Read the store's records and write this node's. Without the store the last known records apply."""
        try:
            if self._status_publisher.publish(self.status, now):
                self._cache.clear()
                if not self._registered:
                    self._registered = True
                    self._parts.journal.event(
                        events.NodeRegisteredEvent, f"node {self.status.node} is registered", slots=self.status.slots
                    )
            self._cache.watch(self, job_queue.CACHED_PREFIXES)
            if self._cache.clear_if_due(now, REREAD_S):
                self._status_publisher.key.withdraw_if_lost()
            self._cluster_view = job_queue.cached_view(self._cache)
            self._publish_results(now)
            self._resubmit_missing(now)
            for sentence in self._parts.scheduler.turn(now) if self.settings.scheduler else ():
                self._parts.journal.event(events.JobScheduledEvent, sentence)
            self._cluster_view = job_queue.cached_view(self._cache)
            self._on_store_available(now)
        except StoreUnavailable as error:
            self._on_store_unavailable(str(error), now)
        except NodeNameConflict as error:
            wait_s = 2 * float(self.settings.lease_s) + NAME_CONFLICT_MARGIN_S
            self._name_taken_since = now if self._name_taken_since is None else self._name_taken_since
            if not self._registered and now >= self._name_taken_since + wait_s:
                raise
            if self._registered and str(error) != self._reported_name_conflict:
                self._reported_name_conflict = str(error)
                self._parts.journal.warn(f"{error}; running jobs continue")
        except (StoreRefused, WireError) as error:
            # An agent that has come back to its jobs stays: without it they would leave. Others begin again, with
            # the certificate and the password that are on the disk then.
            if isinstance(error, StoreRefused) and not self._registered and not self._adopted:
                raise
            self._on_store_unavailable(str(error), now)

    def _on_store_unavailable(self, why: str, now: float) -> None:
        """Note an outage, once. What was cached is dropped, as it may be old when the store answers again."""
        self._cache.clear()
        self._name_taken_since = None
        if self._store_unavailable_since is None:
            self._store_unavailable_since = now
            self._parts.metrics.count(metrics.STORE_OUTAGES)
            self._parts.journal.event(events.StoreUnavailableEvent, f"running jobs continue without the store: {why}")
        self._missing_since = None

    def _on_store_available(self, now: float) -> None:
        if self._store_unavailable_since is not None:
            seconds = now - self._store_unavailable_since
            self._store_unavailable_since = None
            sentence = f"the store is available again after {seconds:.1f} s"
            self._parts.journal.event(events.StoreAvailableEvent, sentence, seconds=seconds)

    def _publish_results(self, now: float) -> None:
        # A job that every node refuses has failed by then, unless it has trained.
        retry_s = max(REFUSAL_RETRY_S, 2 * float(self.settings.refuse_timeout_s))
        self._outcomes.forget_recorded(self._cluster_view, self.status.node, now - retry_s)
        for result in self._plan(now).results:
            job_queue.record_result(self._parts.store, result)
            self._cache.invalidate(keys.RESULTS + result.job)
        self._cluster_view = job_queue.cached_view(self._cache)

    def _resubmit_missing(self, now: float) -> None:
        """Register running jobs in a store that came back empty, after all nodes had time to reconnect."""
        missing = self._plan(now).missing_from_store
        if not missing:
            self._missing_since = None
            return
        if self._missing_since is None:
            self._missing_since = now
            jobs = ", ".join(spec.job for spec in missing)
            self._parts.journal.warn(f"missing from the store, but running here: {jobs}; registering again")
        if now < self._missing_since + float(self.settings.lease_s) + float(self.settings.renewal_s):
            return
        for spec in missing:
            if spec.submission:
                with contextlib.suppress(WireError, StoreRefused):
                    job_queue.submit_again(self._parts.store, spec.job, spec.number, spec.submission.encode())
                self._cache.invalidate(keys.SUBMISSIONS + spec.job)
        self._missing_since = None

    def _update_status(self, runners: tuple[RunnerStatus, ...]) -> bool:
        health = self._parts.health.current()
        state, why = self._node_state(health)
        if state != self.status.state and state != "draining":
            self._parts.journal.event(
                events.NodeStateEvent, f"node {self.status.node} is {state}" + (f": {why}" if why else ""), state=state
            )
        before = self.status
        self.status = replace(
            before,
            address=self._address,
            state=state,
            why=why,
            runners=runners,
            failing=health.failing_checks,
            unusable=health.unusable_directories,
        )
        return self.status != before

    def _node_state(self, health: HealthVerdict) -> tuple[NodeState, str]:
        if self._draining:
            return "draining", self._draining
        cordon = next((c for c in self._cluster_view.cordons if c.node == self.status.node), None)
        if health.state != "healthy":
            return "starting" if health.why == NOT_CHECKED_YET_REASON else "quarantined", health.why
        if cordon is not None:
            return "cordoned", cordon.reason
        return "ready", health.why

    def close(self, *, leaves: bool) -> None:
        """Give up the scheduler's role; `leaves`: also delete the node's status. Raises nothing."""
        self._cache.unwatch(self)
        for release in (self._parts.scheduler.close, *([self._status_publisher.leave] if leaves else [])):
            try:
                release()
            except (StoreUnavailable, StoreRefused):
                pass  # its lease expires
