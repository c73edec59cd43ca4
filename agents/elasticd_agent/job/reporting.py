"""Builds everything the agent reports through: event log, metrics and their port, console, worker logs, control socket.

It is built while the warm launcher imports torch, so its imports do not delay the start.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from elasticd_agent.job.loop import JobLoop, Message
from elasticd_agent.job.reporter import JobReporter
from elasticd_agent.model.job import AgentSettings, JobSpec, Policy
from elasticd_agent.system.control_socket import SOCKET_NAME, Verb, open_control
from elasticd_agent.system.nonblocking_writer import open_std_writers
from elasticd_agent.telemetry import event_log as eventlog
from elasticd_agent.telemetry import metrics
from elasticd_agent.telemetry.console import ConsoleLogHandler, PlainConsole, open_console
from elasticd_agent.workers.logs import PREFIX_VARIABLE, JobLogs

STDERR = 2
HEALTHY_TURN_S = 30.0
"""A deciding thread without a turn for so long is stuck; its own timers are far shorter."""


class Reporting(contextlib.ExitStack):
    """Closed in reverse order."""

    def __init__(self, spec: JobSpec, policy: Policy, settings: AgentSettings, node: str, runtime: Path) -> None:
        super().__init__()
        self._settings, self._socket = settings, runtime / SOCKET_NAME
        self._about: dict[str, Any] = {"job": spec.job_id, "node": node}
        self.events = self.open_events(spec.job_id, node)
        self.callback(self.events.close)
        self.metrics = self.open_metrics(spec.job_id, node)
        out, err = open_std_writers()
        for outlet in {out, err}:
            self.callback(outlet.close)
        console = open_console(err, STDERR, spec.job_id) if settings.live else PlainConsole(err, spec.job_id)
        self.callback(console.close)
        handler = ConsoleLogHandler(console)
        logging.getLogger("elasticd").addHandler(handler)
        self.callback(logging.getLogger("elasticd").removeHandler, handler)
        self.logs = JobLogs(spec, runtime, out, err, console.log, os.environ.get(PREFIX_VARIABLE))
        self.callback(self.logs.close)
        self.reporter = JobReporter(spec, policy, node, self.events, self.metrics, console, self.logs.group_ended)

    def open_events(self, job: str, node: str) -> eventlog.EventSink:
        """Raises UsageError."""
        return eventlog.open_event_log(self._settings.event_log, job, node)

    def open_metrics(self, job: str, node: str) -> metrics.MetricsRecorder:
        if self._settings.metrics_port is None:
            return metrics.NullMetrics()
        from elasticd_agent.model.version import version

        return metrics.Metrics(job, node, version())

    def verbs(self, status: Callable[[], dict[str, Any]], post: Callable[[Message], None]) -> Mapping[str, Verb]:
        """The control socket's verbs beside about and dump."""
        return {}

    def serve(self, status: Callable[[], dict[str, Any]], loop: JobLoop, post: Callable[[Message], None]) -> None:
        """Open the control socket, and the metrics port if requested."""
        verbs = self.verbs(status, post)
        self.callback(open_control(self._socket, post, self._about, self.reporter.log, verbs).close)
        if self._settings.metrics_port is None:
            return
        from elasticd_agent.telemetry.metrics_server import HealthProbeResult, MonitoringPages, open_metrics_server

        pages = MonitoringPages(
            metrics=self.metrics.render,
            status=status,
            healthy=lambda: HealthProbeResult(*liveness(loop)),
            ready=lambda: HealthProbeResult(*readiness(loop)),
        )
        server = open_metrics_server(self._settings.metrics_addr, self._settings.metrics_port, pages)
        self.callback(server.close)
        if server.url:
            self.reporter.log(f"metrics at {server.url}/metrics")


def readiness(loop: JobLoop) -> tuple[bool, str]:
    """Whether this agent has joined a round, and the current state."""
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
    return late < HEALTHY_TURN_S, f"the deciding thread is {late:.0f} s late" if late > 1 else "ok"
