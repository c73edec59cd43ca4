"""The thread that looks after this node's health, and what the daemon asks of it. See `verdicts` for the rules.

Nothing here is ever waited for by the deciding loop: it reads `verdict()`, which is a value, says who was to blame, and
finds `HealthChanged` in its inbox. Every look is bounded; should one not end all the same, that itself is trouble.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal, Protocol

from elasticd_agent.node.health import metrics as measured
from elasticd_agent.node.health.checks import CheckTargets
from elasticd_agent.node.health.persistence import HealthFile
from elasticd_agent.node.health.policy import (
    HealthHistory,
    HealthRules,
    HealthVerdict,
    HealthyVerdict,
    QuarantinedVerdict,
    UnhealthyVerdict,
    after_checks,
    after_job_failure,
    after_reset,
    health_verdict,
)
from elasticd_agent.node.health.result import CheckResult, failed

RECHECK_S = 5.0
"""What is not believed yet is looked at again this soon, and what keeps a node from joining."""
OVERDUE_S = 300.0
"""Far beyond all the deadlines of one look together."""
ATTENTIVE_S = 10.0
"""It is asked every second; who has not asked for so long was stopped itself, and so was the thread that looks."""
CLOSE_S = 10.0

State = Literal["healthy", "unhealthy", "quarantined"]


@dataclass(frozen=True, slots=True)
class MonitorSettings:
    """What counts from now on."""

    targets: CheckTargets
    rules: HealthRules
    every_s: float
    all_reduce: bool


@dataclass(frozen=True, slots=True)
class HealthChanged:
    """`left_s`: how long the node is left out at least, as far as that is known."""

    state: State
    why: str
    left_s: float


class NodeHealth(Protocol):
    """This node's. Every method may be called from any thread, and returns at once but for `close`."""

    def start(self, post: Callable[[HealthChanged], None]) -> None: ...

    def verdict(self) -> tuple[bool, str]:
        """May it be given work, and if not, why not."""
        ...

    def current(self) -> HealthChanged: ...

    def readings(self) -> tuple[CheckResult, ...]:
        """Of the last look."""
        ...

    def record_job_failure(self, why: str) -> None:
        """A job failed or hung, and it was this node's doing rather than another's."""
        ...

    def metrics(self, node: str) -> bytes: ...

    def close(self) -> None: ...


class CheckSuite(Protocol):
    """`checks.Checks`."""

    def run(self, idle: bool, most_gpus: int) -> list[CheckResult]: ...
    def update(self, places: CheckTargets) -> None: ...
    def all_reduce(self) -> CheckResult: ...
    def stop(self) -> None: ...
    def close(self) -> None: ...


class HealthMonitor:
    """Looks every `every_s`, sooner where there is doubt. `idle()`: no job runs on this node; asked from its thread."""

    def __init__(
        self,
        checks: Callable[[Callable[[], None]], CheckSuite],
        rules: HealthRules,
        remembered: HealthFile,
        *,
        every_s: float,
        all_reduce: bool,
        idle: Callable[[], bool],
        count_gpus: int = 0,
    ) -> None:
        """`checks` is made with what to call when a look would find something."""
        self._rules, self._file, self._every_s, self._idle = rules, remembered, every_s, idle
        self._inbox: queue.SimpleQueue[str | MonitorSettings | None] = queue.SimpleQueue()
        self._checks = checks(lambda: self._inbox.put(""))
        self._post: Callable[[HealthChanged], None] = lambda change: None
        self._history = remembered.load(time.monotonic())
        remembered.max_gpus = max(remembered.max_gpus, count_gpus)
        self._all_reduce_passed = self._history.fit_since_boot or not all_reduce
        self._all_reduce = all_reduce
        self._readings: tuple[CheckResult, ...] = ()
        self._checked_at = time.monotonic()
        self._closing = False
        self._queried_at = self._queried_since = self._checked_at
        self._thread = threading.Thread(target=self._run, name="health", daemon=True)

    def start(self, post: Callable[[HealthChanged], None]) -> None:
        """`post` is called from the thread that looks."""
        self._post = post
        if not self._idle():  # an earlier daemon let it join, whatever is remembered: nobody is stopped for that
            self._history, self._all_reduce_passed = replace(self._history, fit_since_boot=True), True
        self._thread.start()

    def update(self, renewed: MonitorSettings) -> None:
        """From any thread: these settings count from the next look on, which is now."""
        self._inbox.put(renewed)

    def verdict(self) -> tuple[bool, str]:
        now = self.current()
        return now.state == "healthy", now.why

    def current(self) -> HealthChanged:
        now = time.monotonic()
        if now - self._queried_at > ATTENTIVE_S:
            self._queried_since = now
        self._queried_at = now
        overdue_s = now - max(self._checked_at, self._queried_since) - self._every_s
        if overdue_s > OVERDUE_S:
            return HealthChanged("unhealthy", f"the look that was due {overdue_s:.0f} s ago hangs", 0.0)
        return _change(health_verdict(self._history, now))

    def readings(self) -> tuple[CheckResult, ...]:
        return self._readings

    def record_job_failure(self, why: str) -> None:
        self._inbox.put(why or "no reason was given")

    def metrics(self, node: str) -> bytes:
        now = self.current()
        return measured.render_health(node, now.state, now.left_s, self._history.streak, self._readings)

    def close(self) -> None:
        """Bounded."""
        self._closing = True
        self._inbox.put(None)
        self._checks.stop()
        if self._thread.is_alive():
            self._thread.join(CLOSE_S)
        if not self._thread.is_alive():
            self._checks.close()

    # ---- the thread

    def _run(self) -> None:
        look_at, said = time.monotonic(), self.current()
        while True:
            now = time.monotonic()
            if now >= look_at:
                self._check()
                look_at = time.monotonic() + self._pause_s()
            said = self._post_change(said)
            try:
                word = self._inbox.get(timeout=max(0.0, self._next_wakeup(look_at) - time.monotonic()))
            except queue.Empty:
                continue
            if word is None:
                return
            if isinstance(word, MonitorSettings):
                self._apply(word)
                look_at = time.monotonic()
            elif word:
                self._save(after_job_failure(self._history, word, time.monotonic(), self._rules))
            else:
                look_at = time.monotonic()

    def _apply(self, renewed: MonitorSettings) -> None:
        self._checks.update(renewed.targets)
        self._rules, self._every_s, self._all_reduce = renewed.rules, renewed.every_s, renewed.all_reduce
        self._all_reduce_passed = self._all_reduce_passed or not renewed.all_reduce

    def _check(self) -> None:
        try:
            readings = self._run_checks(self._idle())
        except Exception as error:  # noqa: BLE001 no process, pipe or file can be made, as a rule; and nobody else looks
            why = (isinstance(error, OSError) and error.strerror) or error
            readings = [failed("machine", f"nothing can be looked at: {why}")]
        if self._closing:
            return  # what was cut short says nothing
        now = time.monotonic()
        self._readings, self._checked_at = tuple(readings), now
        if self._file.was_deleted():
            self._history = after_reset(self._history)
        self._save(after_checks(self._history, readings, now, self._rules))

    def _run_checks(self, idle: bool) -> list[CheckResult]:
        readings = self._checks.run(idle, self._file.max_gpus)
        if not self._all_reduce_passed and idle and all(reading.outcome != "bad" for reading in readings):
            readings.append(self._checks.all_reduce())
            self._all_reduce_passed = readings[-1].outcome != "bad"
        return readings

    def _save(self, past: HealthHistory) -> None:
        if past.streak > self._history.streak and self._all_reduce:
            self._all_reduce_passed = False  # it shows once more that it can before it is taken again
        self._history = past
        self._file.save(past, time.monotonic())

    def _post_change(self, said: HealthChanged) -> HealthChanged:
        change = self.current()
        if (change.state, change.why) == (said.state, said.why):
            return said
        self._post(change)
        return change

    def _pause_s(self) -> float:
        soon = self._history.is_unconfirmed or not self._history.fit_since_boot
        return min(RECHECK_S, self._every_s) if soon else self._every_s

    def _next_wakeup(self, look_at: float) -> float:
        """A cool-off that ends is news, too."""
        now = time.monotonic()
        return min(look_at, self._history.quarantined_until) if self._history.quarantined_until > now else look_at


def _change(found: HealthVerdict) -> HealthChanged:
    if isinstance(found, HealthyVerdict):
        return HealthChanged("healthy", found.why, 0.0)
    if isinstance(found, UnhealthyVerdict):
        return HealthChanged("unhealthy", found.why, 0.0)
    assert isinstance(found, QuarantinedVerdict)
    return HealthChanged("quarantined", found.why, found.left_s)
