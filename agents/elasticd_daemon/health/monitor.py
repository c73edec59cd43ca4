"""The thread that checks this node, and its interface to the agent. policy.py has the rules.

The node loop never waits for it: `current()` returns a value. A run of checks is bounded; a run that hangs all the same
makes the node unhealthy.

The history is in a file, so a restart of the agent forgets no strikes, and `elasticd doctor` shows the same state. A
deleted file is a request to begin anew. Two exceptions keep healthy jobs alive: a node that registered before and whose
history was lost counts as fit, and silence of the checking thread counts only while the agent itself was awake to hear
it.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from dataclasses import replace

from elasticd_agent.model import log_events as events
from elasticd_daemon.config.agent_settings import NodeSettings
from elasticd_daemon.health.checks import NodeChecks
from elasticd_daemon.health.persistence import HealthFile
from elasticd_daemon.health.policy import (
    HealthHistory,
    HealthRules,
    HealthVerdict,
    after_checks,
    after_job_failure,
    health_verdict,
)
from elasticd_daemon.health.result import CheckResult, GpuUsage, failed
from elasticd_daemon.runners.liveness import boot_id

RECHECK_S = 5.0
"""Until the next run while a failure is unconfirmed or the node has not registered."""
OVERDUE_S = 300.0
"""Beyond the time limit of directories and plugins: far more than all other deadlines of one run together."""
MAX_QUERY_GAP_S = 10.0
"""The agent asks every second; after a longer pause it was stopped itself, and so was the checking thread."""
CLOSE_S = 10.0
HISTORY_FILE = "health.json"


class HealthMonitor:
    """Checks the node every `every_s`, sooner while a failure is unconfirmed. Methods may be called from any thread."""

    def __init__(
        self,
        checks: Callable[[Callable[[], None]], NodeChecks],
        settings: NodeSettings,
        file: HealthFile,
        *,
        idle: Callable[[], bool],
    ) -> None:
        """`checks` is given a callback for new events; `idle`: no runner is alive here, called from this thread."""
        self._settings = settings
        self._file = file
        self._idle = idle
        self._inbox: queue.SimpleQueue[str | NodeSettings | None] = queue.SimpleQueue()
        self._checks = checks(lambda: self._inbox.put(""))
        self._post: Callable[[HealthVerdict], None] = lambda change: None
        self._history = file.load(time.monotonic())
        self._all_reduce_passed = self._history.fit_since_boot or not settings.health.all_reduce
        self.results: tuple[CheckResult, ...] = ()
        self.checked_at = time.monotonic()
        self._closing = False
        self._queried_at = self._queried_since = self.checked_at
        self._posted = HealthVerdict("unhealthy")
        self._thread = threading.Thread(target=self._run, name="health", daemon=True)

    def start(self, post: Callable[[HealthVerdict], None]) -> None:
        """`post` gets every change, on the checking thread."""
        self._post = post
        if not self._idle():  # an earlier agent registered the node: running jobs are never stopped by a lost history
            self._history = replace(self._history, fit_since_boot=True)
            self._all_reduce_passed = True
        self._thread.start()

    def update(self, settings: NodeSettings) -> None:
        """These settings count from the next run on, which is now."""
        self._inbox.put(settings)

    def current(self) -> HealthVerdict:
        """May the node be given work, and if not, why not."""
        now = time.monotonic()
        if now - self._queried_at > MAX_QUERY_GAP_S:
            self._queried_since = now
        self._queried_at = now
        overdue_s = now - max(self.checked_at, self._queried_since) - self._settings.health.every_s
        if overdue_s > (limit_s := OVERDUE_S + self._checks.time_limit_s):
            return HealthVerdict("unhealthy", f"the checks that were due more than {limit_s:.0f} s ago hang")
        return health_verdict(self._history, now)

    def record_job_failure(self, why: str) -> None:
        """A job failed or hung, and this node was the root cause."""
        self._inbox.put(why or "no reason was given")

    def gpu_usage(self) -> tuple[GpuUsage, ...]:
        """At the last check."""
        return self._checks.gpu_usage

    def failure_streak(self) -> int:
        """Failed checks in a row."""
        return self._history.failure_streak

    def close(self) -> None:
        """Stop checking. The wait for the thread is bounded."""
        self._closing = True
        self._inbox.put(None)
        self._checks.stop()
        if self._thread.is_alive():
            self._thread.join(CLOSE_S)
        if not self._thread.is_alive():
            self._checks.close()

    # The thread:

    def _run(self) -> None:
        """Check when a check is due, post every change, and handle messages in between."""
        check_at, self._posted = time.monotonic(), self.current()
        while True:
            if time.monotonic() >= check_at:
                self._check_once()
                check_at = time.monotonic() + self._next_check_in_s()
            self._report(self.current())
            try:
                message = self._inbox.get(timeout=max(0.0, self._next_wakeup(check_at) - time.monotonic()))
            except queue.Empty:
                continue
            if message is None:
                return
            if isinstance(message, str) and message:
                now = time.monotonic()
                self._save(after_job_failure(self._history, message, now, self._rules), now)
                continue
            if isinstance(message, NodeSettings):
                self._checks.update(message)
                self._settings = message
                self._all_reduce_passed = self._all_reduce_passed or not message.health.all_reduce
            check_at = time.monotonic()

    def _check_once(self) -> None:
        """Run the checks once and weigh the results. Results of a run that `close` interrupted mean nothing."""
        try:
            results = self._run_checks(self._idle())
        except Exception as error:  # noqa: BLE001 as a rule no process, pipe or file can be created
            why = (isinstance(error, OSError) and error.strerror) or error
            results = [failed("machine", f"no check can run: {why}")]
        if self._closing:
            return
        self.results = tuple(results)
        self.checked_at = time.monotonic()
        if self._file.was_deleted():
            self._history = HealthHistory(checks=self._history.checks, fit_since_boot=self._history.fit_since_boot)
        self._save(after_checks(self._history, results, self.checked_at, self._rules), self.checked_at)

    def _run_checks(self, idle: bool) -> list[CheckResult]:
        """Run the checks, and the all-reduce where it has to pass first and no other fault explains its failure."""
        results = self._checks.run(idle, self._file.max_gpus)
        if (
            not self._all_reduce_passed
            and idle
            and all(result.outcome != "failed" or result.directory for result in results)
        ):
            results.append(self._checks.all_reduce())
            self._all_reduce_passed = results[-1].outcome != "failed"
        return results

    def _save(self, history: HealthHistory, now: float) -> None:
        if history.failure_streak > self._history.failure_streak and self._settings.health.all_reduce:
            self._all_reduce_passed = False  # it has to pass once more before the node is given work
        self._history = history
        self._file.save(history, time.monotonic())
        self._report(health_verdict(history, now))  # as of then: a cool-off may be over when a busy thread gets here

    def _report(self, change: HealthVerdict) -> None:
        self._checks.report_to_kubernetes(change)
        if (change.state, change.why) != (self._posted.state, self._posted.why):
            self._post(change)
            self._posted = change

    def _next_check_in_s(self) -> float:
        soon = self._history.has_unconfirmed_failure or not self._history.fit_since_boot
        every_s = float(self._settings.health.every_s)
        return min(RECHECK_S, every_s) if soon else every_s

    @property
    def _rules(self) -> HealthRules:
        health = self._settings.health
        return HealthRules(health.strikes, float(health.cooloff_s), float(health.cooloff_max_s))

    def _next_wakeup(self, check_at: float) -> float:
        """The end of a quarantine is a change, too."""
        until = self._history.quarantined_until
        return min(check_at, until) if until > time.monotonic() else check_at


def report_change(now: HealthVerdict, record: Callable[..., None]) -> None:
    """Record the change as an event; `record` is the agent's journal's."""
    if now.state == "healthy":
        but = (
            f"; no job that uses one of these directories is started here: {now.why}"
            if now.unusable_directories
            else ""
        )
        record(events.NodeHealthyEvent, f"this node is healthy{but}")
    elif now.state == "unhealthy":
        record(events.NodeUnhealthyEvent, f"this node is unhealthy and gets no work: {now.why}")
    else:
        sentence = f"this node gets no work for {now.quarantine_left_s:.0f} s: {now.why}"
        record(events.NodeQuarantinedEvent, sentence, seconds=round(now.quarantine_left_s, 1))


def health_file(settings: NodeSettings) -> HealthFile:
    return HealthFile(settings.state_dir / HISTORY_FILE, boot_id())


def max_gpus_seen(settings: NodeSettings) -> int:
    """The most GPUs that an agent with this state directory has ever seen."""
    file = health_file(settings)
    file.load(time.monotonic())
    return file.max_gpus
