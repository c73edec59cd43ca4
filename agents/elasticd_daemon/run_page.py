"""`elasticd run --ui PORT`: the dashboard's page of this one job, served by the run itself on the loopback interface.

The page is that of an agent: behind it is a store in memory, in which this node and its job are. Nothing can be
changed there; Ctrl-C stops the job. The page ends with the run.
"""

from __future__ import annotations

import json
import os
import secrets
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from elasticd_agent.job.loop import JobLoop, Message
from elasticd_agent.job.reporting import Reporting
from elasticd_agent.job.run import RunContext, run_job
from elasticd_agent.model.job import AgentSettings, JobSpec, Policy
from elasticd_agent.model.version import version
from elasticd_agent.store.memory import MemoryStore
from elasticd_agent.system.network import control_socket
from elasticd_agent.system.network.addresses import format_endpoint
from elasticd_agent.system.network.http_auth import TokenAuth
from elasticd_agent.system.network.http_server import HttpServer, listen_tcp
from elasticd_agent.system.users import user_name
from elasticd_agent.telemetry import metrics
from elasticd_agent.telemetry.metrics_server import HealthProbeResult, MonitoringPages
from elasticd_daemon import keys as names
from elasticd_daemon.api.local import LocalJobs
from elasticd_daemon.api.peers import Peers
from elasticd_daemon.api.routes import ApiRoutes
from elasticd_daemon.api.service import JobService
from elasticd_daemon.dashboard.layout import LoginTexts
from elasticd_daemon.dashboard.login import LoginCookies, OneTimeCodes
from elasticd_daemon.dashboard.routes import DashboardRoutes
from elasticd_daemon.job_dir import JobFiles
from elasticd_daemon.records import NodeStatus, Placement, RunnerStatus, SlotAssignment, Submission
from elasticd_daemon.runners.history import RunnerMetrics

HOST = "127.0.0.1"
NUMBER = 1
CODE_LIFETIME_S = 30 * 86400.0
"""The URL is printed once, and may be opened hours later; like every code it is good for one browser."""
MAX_CONNECTIONS = 16
REQUEST_TIMEOUT_S, RESPONSE_TIMEOUT_S = 10.0, 60.0


def run_with_page(spec: JobSpec, policy: Policy, settings: AgentSettings) -> int:
    """`run_job` with the page. Returns the exit code; raises what `run_job` raises."""
    with tempfile.TemporaryDirectory(prefix="elasticd-page-") as made:
        root = Path(made)
        if spec.log_dir is None:  # it stays after the run: evidence of hangs goes there as well
            spec = replace(spec, log_dir=Path(tempfile.mkdtemp(prefix="elasticd_logs_")))
        settings = settings if settings.event_log is not None else replace(settings, event_log=root / "events.jsonl")
        return run_job(spec, policy, settings, RunContext(reporting=lambda *args: _PageReporting(*args, root=root)))


class _PageReporting(Reporting):
    """Adds the job's course to its status, and the server of the page."""

    def __init__(
        self, spec: JobSpec, policy: Policy, settings: AgentSettings, node: str, runtime: Path, *, root: Path
    ) -> None:
        self._spec, self._node, self._root = spec, node, root
        super().__init__(spec, policy, settings, node, runtime)

    def open_metrics(self, job: str, node: str) -> metrics.Metrics:
        self._metrics = RunnerMetrics(job, node, version())
        return self._metrics

    def serve(self, status: Callable[[], dict[str, Any]], loop: JobLoop, post: Callable[[Message], None]) -> None:
        super().serve(status, loop, post)
        assert self._settings.event_log is not None and self._settings.ui_port is not None
        files = JobFiles(self._root)
        files.events, files.logs = self._settings.event_log, self._spec.log_dir or files.logs

        def ask(_: JobFiles, request: Mapping[str, Any], within_s: float) -> dict[str, Any]:
            if request.get("do") == "status":
                return {**status(), **self._metrics.course()}
            return control_socket.send_request(self._socket, request, within_s, (os.getuid(),))

        local = _RunFiles(self._node, self._root, ask)
        local.of_run = files
        server, url = _listen(_page_routes(self._spec, local, self._root), self._settings.ui_port)
        self.callback(server.close, 2.0)
        self.reporter.log(f"logs go to {files.logs}; the job's page: {url}")


class _RunFiles(LocalJobs):
    of_run: JobFiles

    def files(self, job: str, number: int) -> JobFiles:
        return self.of_run


def _page_routes(spec: JobSpec, local: LocalJobs, root: Path) -> tuple[DashboardRoutes, TokenAuth]:
    token_file = root / "token"
    token_file.touch(0o600)
    token_file.write_text(secrets.token_hex(32), encoding="ascii")
    token = TokenAuth(token_file)
    well = HealthProbeResult(True, "ok")
    pages = MonitoringPages(bytes, dict, lambda: well, lambda: well)
    api = ApiRoutes(JobService(_store(spec, local.node), local, Peers(token.token)), pages)
    cookies, codes = LoginCookies(token, time.time, tls=False), OneTimeCodes(time.monotonic, CODE_LIFETIME_S)
    texts = LoginTexts(
        needed="The URL that `elasticd run` has printed logs one browser in. Others need the token.",
        used="This link logs one browser in, and was used. Other browsers need the token.",
        token_file=str(token_file),
        no_tls="the token would cross the network in plain text. Open this page as http://localhost, from another "
        "machine through a tunnel (ssh -L)",
    )
    routes = DashboardRoutes(api, token, cookies, version(), has_buttons=False, codes=codes, texts=texts)
    return routes, token


def _store(spec: JobSpec, node: str) -> MemoryStore:
    """One node that runs one job."""
    slots = tuple(range(spec.max_workers))
    limits = (spec.rendezvous.min_nodes, spec.rendezvous.max_nodes, spec.min_workers, spec.max_workers)
    file = {"command": [spec.entrypoint, *spec.args], "workdir": str(spec.cwd), "nodes": list(limits[:2])}
    submission = Submission(
        spec.job_id, NUMBER, json.dumps(file), *limits, submitted_by=user_name(), submitted_at=time.time()
    )
    placement = Placement(spec.job_id, NUMBER, (SlotAssignment(node, slots),), "elasticd run")
    status = NodeStatus(node, "run", len(slots), runners=(RunnerStatus(spec.job_id, NUMBER, slots, "running"),))
    store = MemoryStore()
    for key, value in (
        (names.SUBMISSIONS + spec.job_id, submission.to_json()),
        (names.PLACEMENTS + spec.job_id, placement.to_json()),
        (names.NODES + node, status.to_json()),
    ):
        store.compare_and_swap(key, None, value)
    return store


def _listen(made: tuple[DashboardRoutes, TokenAuth], port: int) -> tuple[HttpServer, str]:
    """The server, which runs, and a URL that logs a browser in. Raises UsageError."""
    routes, token = made
    server = listen_tcp(
        HOST,
        port,
        routes,
        option="--ui",
        advice="give another port, or 0",
        name="the job's page",
        max_connections=MAX_CONNECTIONS,
        request_timeout_s=REQUEST_TIMEOUT_S,
        response_timeout_s=RESPONSE_TIMEOUT_S,
        authenticator=token,
    )
    server.start()
    routes.base_url = f"http://{format_endpoint(*server.bound)}"
    return server, f"{routes.base_url}/login?code={routes.codes.issue('this user')}"
