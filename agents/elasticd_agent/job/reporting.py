"""Reports one job on one node: sentences for the user, lines in the event log, numbers for the metrics.

`JobReporter.on` handles rounds, and passes other events to one reporter a subject. `Reporting` builds it with its
sinks, the worker logs and the control socket, while the warm launcher imports torch: its imports do not delay the
start.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from elasticd.errors import UsageError
from elasticd_agent.job.listener import JobEvent, JobLeft, PhaseChanged, SparesChanged, StopStarted
from elasticd_agent.job.loop import JobLoop, Message
from elasticd_agent.job.subject_reporters import HangReporter, JobContext, ProgressReporter, WorkerReporter
from elasticd_agent.model import log_events as events
from elasticd_agent.model.job import JobSpec, Policy, RunnerSettings, Streams
from elasticd_agent.model.log_events import TimeSplit
from elasticd_agent.model.messages import (
    FaultDetected,
    LeadershipChanged,
    RoundPublished,
    StopForced,
    StoreAvailability,
    WaitingFor,
)
from elasticd_agent.model.phrases import count, listing, plural
from elasticd_agent.model.records import Failure, Round
from elasticd_agent.rendezvous import restart_budget as budget
from elasticd_agent.system.network.control_socket import SOCKET_NAME, ControlServer, VerbHandler
from elasticd_agent.system.nonblocking_writer import open_std_writers
from elasticd_agent.telemetry import event_log, metrics
from elasticd_agent.telemetry.console import Console, ConsoleLogHandler, PlainConsole, QuietConsole
from elasticd_agent.telemetry.goodput import follows_fault, lost_nodes
from elasticd_agent.telemetry.traces import with_traces
from elasticd_agent.workers.logs import PREFIX_VARIABLE, JobLogs, shows_all_ranks_apart


@dataclass(slots=True)
class JobReporter:
    """The listener of the job loop: rounds and the job's end are reported here, and every other event by its subject's
    reporter.

    It hears each event before its transition, in the deciding thread. It never waits: the console and the logs write
    through non-blocking writers that drop lines of a reader that does not read, and count them.
    """

    spec: JobSpec
    policy: Policy
    node: str
    events: event_log.EventSink
    metrics: metrics.Metrics
    console: Console
    on_group_ended: Callable[[int], None]
    hangs: HangReporter = field(init=False)
    _job: JobContext = field(init=False)
    _workers: WorkerReporter = field(init=False)
    _progress: ProgressReporter = field(init=False)
    _failure: Failure | None = None
    _stop_requested: bool = False

    def __post_init__(self) -> None:
        self._job = JobContext(self.spec, self.policy, self.node, self.events, self.metrics, self.console)
        self._workers = WorkerReporter(self._job, self.on_group_ended)
        self._progress = ProgressReporter(self._job)
        self.hangs = HangReporter(self._job)
        self.metrics.set_time_source(self.time_split)
        self.metrics.set_budget_source(self.restarts_left)
        self.metrics.phase("joining")

    def time_split(self) -> TimeSplit:
        """The split of this node's time so far. Safe from any thread."""
        return self._job.goodput.totals_at(time.monotonic())

    def restarts_left(self) -> int | None:
        """The restarts before the job fails if nothing makes progress; None before the first round. Safe from any
        thread.
        """
        running = self._job.running_round
        if running is None:
            return None
        round, at = running
        progress = budget.is_progress(round, self._progress.newest_checkpoint, self._job.goodput.ledger.high_water)
        return budget.restarts_left(round.budget, self.policy, progress=progress, elapsed_s=time.monotonic() - at)

    def log(self, sentence: str) -> None:
        self.console.log(sentence)

    def on(self, event: JobEvent, now: float) -> None:
        match event:
            case RoundPublished(round) if self._job.round is None or round.number > self._job.round.number:
                self._report_round(round, now)
            case StoreAvailability():
                self._report_store(event, now)
            case StopStarted():
                self._report_stop(event)
            case LeadershipChanged(on):
                self.metrics.leading(on)
            case FaultDetected(number, cause, culprit, reported_at):
                self.metrics.fault(cause, culprit)
                if reported_at is not None:
                    self._job.recovery.start(reported_at)
                self._job.goodput.on_fault(number, now)
            case WaitingFor(why, more_nodes):
                self._report_wait(why, more_nodes, now)
            case Failure():
                self._failure = event
                self.console.log(f"round {event.round}: {event.why}", "warning")
            case SparesChanged():
                self._report_spares(event, now)
            case PhaseChanged(name):
                self.metrics.phase(name)
            case JobLeft():
                self._report_end(event, now)
            case _:
                self._workers.on(event, now)
                self._progress.on(event, now)
                self.hangs.on(event, now)

    def _report_round(self, round: Round, now: float) -> None:
        """Report a new Round: its members and ranks, its cause, and what it follows.

        A recovery starts with the Round on nodes that have not seen the fault themselves, from the moment at which
        their ranks made no progress any more. A terminal Round has no group; the end of the job reports it.
        """
        job = self._job
        job.goodput.on_round(round, now)
        self.metrics.round_info(round.number, round.outcome or round.cause, round.reason, time.time())
        if round.terminal:
            job.round = round
            return
        cause = round.cause or "resize"
        idle_s = 0.0 if job.observation is None else job.observation.idle_s
        if follows_fault(round) and job.observation is not None:
            job.recovery.start(now - idle_s)  # unless this node has observed the fault itself
        job.recovery.end_part("agree", now)
        ranks, restart_cause = round.ranks(self.node), None if job.round is None else cause
        self.metrics.round_published(round.number, round.world_size, job.max_workers(round), ranks, restart_cause)
        job.running_round = round, now
        self.metrics.store_available(up=True)
        nodes, lost = tuple(member.node for member in round.members), lost_nodes(round)
        job.write(
            events.RoundPublishedEvent(
                round=round.number, mono=now, reason=round.reason, world_size=round.world_size, nodes=nodes,
                restarts=round.restarts, cause=cause, lost=lost, leader=round.leader, idle_seconds=idle_s,
            )
        )  # fmt: skip
        self.console.log(f"round {round.number}: {round.reason}")
        if not self._workers.launch_mode_known:
            self.console.starting("importing torch and the script's modules")
        job.round, self._failure = round, None

    def _report_store(self, store: StoreAvailability, now: float) -> None:
        """Report that the store is gone or back, as an event and a metric; the store client itself
        logs the sentence.
        """
        self.metrics.store_available(up=not store.unavailable)
        job, number = self._job, self._job.round_number
        if store.unavailable:
            job.write(events.StoreUnavailableEvent(round=number, mono=now, reason=store.why))
        else:
            reason = f"the store is available again after {store.seconds:.1f} s"
            job.write(events.StoreAvailableEvent(round=number, mono=now, reason=reason, seconds=store.seconds))

    def _report_wait(self, why: str, more_nodes: bool, now: float) -> None:
        """Report why no Round can be made now. Only the wait for nodes counts as time without enough nodes."""
        self.console.log(why)
        if more_nodes:
            self._job.goodput.on_waiting(now)
        self._job.write(events.WaitingEvent(round=self._job.round_number, mono=now, reason=why, nodes=more_nodes))

    def _report_spares(self, spares: SparesChanged, now: float) -> None:
        """This node, or slots of it, begin to stand by, or their workers have come to their entry."""
        self.metrics.spares(len(spares.slots))
        round, node = self._job.round, self.node
        if round is None or not spares.slots:
            return
        job, number = self.spec, len(spares.slots)
        who, one, has = node, True, count(job.rendezvous.max_nodes, "node")
        if round.member(node) is not None:
            who, one = f"{plural(number, 'slot')} {listing(spares.slots)} of {node}", number == 1
            has = count(job.max_workers, "worker")
        if spares.at_entry == spares.slots:
            verb, why = "stands by" if one else "stand by", f"{count(number, 'worker')} at session.run()"
        elif not spares.at_entry:
            verb, why = "waits" if one else "wait", f"the job has its {has}"
        else:
            return  # the others are about to follow
        self._report_wait(f"{who} {verb} as {'a spare' if one else 'spares'}: {why}", False, now)

    def _report_stop(self, stop: StopStarted) -> None:
        """Report a stop. Where other nodes may continue, this one leaves, within their limit or the checkpoint's."""
        request, grace_s = stop.request, stop.rules.stop_limit_s
        name = request.signal
        if isinstance(request, StopForced):
            reason, grace_s = f"{name} again: the workers are killed", 0.0
        elif stop.rules.leave_on_stop:
            reason = f"{self.node} leaves within {grace_s:g} s: {request.why or f'{name} received'}"
        else:
            reason = f"{name} received: workers have {grace_s:g} s to stop"
        self._stop_requested = True
        self._job.write(
            events.StopRequestedEvent(
                round=self._job.round_number, mono=request.at, reason=reason, by=name, grace_seconds=grace_s
            )
        )

    def _report_end(self, left: JobLeft, now: float) -> None:
        """Report the end of the job, with the traceback of a user error that ended it."""
        outcome = "stopped" if left.exit_code else "succeeded"
        if left.round is not None and left.round.outcome:
            outcome = left.round.outcome
        elif self.spec.rendezvous.max_nodes > 1:
            outcome = "left"  # without a terminal Round the job continues, here or elsewhere
        if self._failure is not None and self._failure.detail:
            text = "the traceback of the rank that failed first"
            shown = shows_all_ranks_apart(self.spec, Streams.ERR)
            self.console.log(f"{text} is above" if shown else f"{text}:\n{self._failure.detail.rstrip()}", "error")
        job = self.spec.job_id
        what = f"{self.node} has left job {job}" if outcome == "left" else f"job {job} has {outcome}"
        requested = self._stop_requested and outcome in ("stopped", "left")
        self.console.log(f"{what}: {left.why}", "info" if left.exit_code == 0 or requested else "error")
        number, restarts = (left.round.number, left.round.restarts) if left.round is not None else (0, 0)
        self._job.write(
            events.JobEndedEvent(
                round=number, mono=now, reason=left.why, outcome=outcome, exit_code=left.exit_code, restarts=restarts,
                step=self._job.step,
            )
        )  # fmt: skip


HEALTH_PORT_VARIABLE = "TORCHELASTIC_HEALTH_CHECK_PORT"
STUCK_AFTER_S = 30.0
"""A deciding thread without a turn for so long is stuck; its own timers are far shorter."""


class Reporting(contextlib.ExitStack):
    """The sinks of one job's reports, built while the warm launcher imports torch, and closed in reverse order.

    A subclass (the daemon's runner) replaces single sinks: where events go, whether metrics are served, which verbs the
    control socket knows.
    """

    def __init__(self, spec: JobSpec, policy: Policy, settings: RunnerSettings, node: str, runtime: Path) -> None:
        super().__init__()
        self._settings = settings
        self._socket = runtime / SOCKET_NAME
        self._health_port = spec.base_environment(os.environ).get(HEALTH_PORT_VARIABLE)
        self._about: dict[str, Any] = {"job": spec.job_id, "node": node}
        self.events = self.open_events(spec.job_id, node)
        self.callback(self.events.close)
        self.metrics = self.make_metrics(spec.job_id, node)
        out, err = open_std_writers()
        for outlet in {out, err}:
            self.callback(outlet.close)
        console: Console = PlainConsole(err, spec.job_id)
        if settings.quiet:
            console = QuietConsole(console)
        self.callback(console.close)
        handler = ConsoleLogHandler(console)
        logging.getLogger("elasticd").addHandler(handler)
        self.callback(logging.getLogger("elasticd").removeHandler, handler)
        self.logs = JobLogs(spec, runtime, out, err, console.log, os.environ.get(PREFIX_VARIABLE))
        self.callback(self.logs.close)
        self.reporter = JobReporter(spec, policy, node, self.events, self.metrics, console, self.logs.group_ended)

    def open_events(self, job: str, node: str) -> event_log.EventSink:
        """Open the event log. Raises UsageError for a file that cannot be opened."""
        return with_traces(event_log.open_event_log(self._settings.event_log, job, node), job, node, os.environ)

    def make_metrics(self, job: str, node: str) -> metrics.Metrics:
        """Make the metrics. They are counted also where no port serves them, since the summary at
        the end reads them.
        """
        if self._settings.metrics_port is None:
            return metrics.Metrics(job, served=False)
        from elasticd_agent.model.version import version

        return metrics.Metrics(job, node, version())

    def verbs(self, status: Callable[[], dict[str, Any]], post: Callable[[Message], None]) -> Mapping[str, VerbHandler]:
        """The control socket's verbs beside about and dump."""
        return {}

    def serve(self, status: Callable[[], dict[str, Any]], loop: JobLoop, post: Callable[[Message], None]) -> None:
        """Open the control socket, and the metrics port if requested."""
        try:
            self.callback(ControlServer(self._socket, post, self._about, verbs=self.verbs(status, post)).close)
        except OSError as error:  # the job also runs without one
            self.reporter.log(f"elasticd dump will not reach this agent: {self._socket}: {error.strerror or error}")
        if self._health_port is not None:
            self._serve_health(self._health_port, loop)
        if self._settings.metrics_port is None:
            return
        from elasticd_agent.telemetry.metrics_server import HealthProbeResult, MetricsServer, MonitoringPages

        pages = MonitoringPages(
            metrics=self.metrics.render,
            status=status,
            healthy=lambda: HealthProbeResult(*liveness(loop)),
            ready=lambda: HealthProbeResult(*readiness(loop)),
        )
        server = MetricsServer(self._settings.metrics_addr, self._settings.metrics_port, pages)
        self.callback(server.close)
        self.reporter.log(f"metrics at {server.url}/metrics")

    def _serve_health(self, port: str, loop: JobLoop) -> None:
        """Serve torchrun's health check, which its environment variable asks for.

        A port that cannot be served is a line in the log and ends no job, as under torchrun.
        """
        from elasticd_agent.telemetry.metrics_server import HealthPages, HealthProbeResult, MetricsServer

        try:
            number = int(port)
            pages = HealthPages(lambda: HealthProbeResult(*liveness(loop)))
            server = MetricsServer("0.0.0.0", number, pages, option=HEALTH_PORT_VARIABLE)
        except ValueError:
            self.reporter.log(f"{HEALTH_PORT_VARIABLE}={port!r} is not a port: no health check is served")
        except UsageError as error:
            self.reporter.log(f"no health check is served: {error}")
        else:
            self.callback(server.close)
            self.reporter.log(f"health check at {server.url}/healthz")


def readiness(loop: JobLoop) -> tuple[bool, str]:
    """True once this agent has joined a round, and the current state in words."""
    round = loop.round
    if round is None:
        return False, "no round yet"
    if round.terminal:
        return True, f"the job has {round.outcome}"
    here = round.member(loop.node) is not None
    return True, f"in round {round.number}" if here else f"round {round.number} runs without this node"


def liveness(loop: JobLoop) -> tuple[bool, str]:
    """Healthy while the deciding thread turns, whatever training does."""
    late = loop.overdue_s()
    return late < STUCK_AFTER_S, f"the deciding thread is {late:.0f} s late" if late > 1 else "ok"
