"""Pure: check results and history -> may this node be given work, and if not, why and for how long.

A check fails the node once it failed `strikes` times among its last runs, so that a hiccup costs nothing; before the
node has registered, once is enough. While a check fails the node is unhealthy, and afterwards quarantined for a
cool-off that doubles each time, so that a flapping node does not end a job each time; a long time without failures
resets that. A node that was the root cause of `strikes` job failures within an hour is quarantined likewise. A shared
directory that fails, and a full one, make no node unhealthy: jobs that use it are not started there. Times are seconds
on one monotonic clock.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from elasticd_agent.model.phrases import shortened
from elasticd_daemon.health.result import CheckResult

STREAK_RESET_S = 86400.0
"""After so long without failures the next cool-off is a short one again."""
JOB_FAILURE_WINDOW_S = 3600.0
NOT_CHECKED_YET_REASON = "its health has not been checked yet"
_MAX_REASON_CHARS = 300


@dataclass(frozen=True, slots=True)
class HealthRules:
    strikes: int = 2
    cooloff_s: float = 60.0
    cooloff_max_s: float = 3600.0
    streak_reset_s: float = STREAK_RESET_S
    job_failure_window_s: float = JOB_FAILURE_WINDOW_S

    def streak_cooloff_s(self, streak: int) -> float:
        """Seconds after the `streak`th failure in a row."""
        return min(self.cooloff_s * 2.0 ** min(max(streak, 1) - 1, 64), max(self.cooloff_max_s, self.cooloff_s))


@dataclass(frozen=True, slots=True)
class CheckHistory:
    check: str
    recent_failures: tuple[bool, ...]  #: newest last
    failing: bool
    why: str
    directory: str = ""


@dataclass(frozen=True, slots=True)
class HealthHistory:
    checks: tuple[CheckHistory, ...] = ()
    fit_since_boot: bool = False
    failure_streak: int = 0
    quarantined_until: float = float("-inf")
    last_failure_at: float = float("-inf")
    why: str = ""
    job_failure_times: tuple[float, ...] = ()

    @property
    def has_unconfirmed_failure(self) -> bool:
        """The newest run found a failure that does not count yet."""
        return any(check.recent_failures[-1] and not check.failing for check in self.checks)

    @property
    def failing_node_checks(self) -> tuple[CheckHistory, ...]:
        """Checks of the node itself."""
        return tuple(check for check in self.checks if check.failing and not check.directory)

    @property
    def failing_directory_checks(self) -> tuple[CheckHistory, ...]:
        return tuple(check for check in self.checks if check.failing and check.directory)


@dataclass(frozen=True, slots=True)
class HealthVerdict:
    state: Literal["healthy", "unhealthy", "quarantined"]
    why: str = ""
    quarantine_left_s: float = 0.0
    failing_checks: tuple[str, ...] = ()
    unusable_directories: tuple[str, ...] = ()  #: shared directories: jobs that use one are not started here


def health_verdict(history: HealthHistory, now: float) -> HealthVerdict:
    if history.failing_node_checks:
        return HealthVerdict(
            "unhealthy",
            _failures_sentence(history.failing_node_checks),
            0.0,
            tuple(check.check for check in history.failing_node_checks),
        )
    if now < history.quarantined_until:
        return HealthVerdict("quarantined", history.why, history.quarantined_until - now)
    if not history.fit_since_boot:
        return HealthVerdict("unhealthy", NOT_CHECKED_YET_REASON)
    shared = history.failing_directory_checks
    return HealthVerdict(
        "healthy", _failures_sentence(shared), unusable_directories=tuple(check.directory for check in shared)
    )


def after_checks(
    history: HealthHistory, results: Sequence[CheckResult], now: float, rules: HealthRules
) -> HealthHistory:
    """Skipped and missing checks are dropped."""
    before = {check.check: check for check in history.checks}
    checks = tuple(
        _check_history(before.get(result.check), result, history.fit_since_boot, rules)
        for result in results
        if result.outcome != "skipped"
    )
    was_failing = bool(history.failing_node_checks)
    history = replace(history, checks=checks)
    if not history.failing_node_checks:
        until = history.quarantined_until
        if history.fit_since_boot and was_failing:
            until = max(until, now + rules.streak_cooloff_s(history.failure_streak))
        return _reset_old_streak(replace(history, fit_since_boot=True, quarantined_until=until), now, rules)
    if not history.fit_since_boot:  # it has no jobs yet: fit as soon as every check passes
        return history
    if was_failing:
        return _quarantine(
            history,
            max(1, history.failure_streak),
            "after a failure",
            _failures_sentence(history.failing_node_checks),
            now,
            rules,
        )
    history = _reset_old_streak(history, now, rules)
    return _quarantine(
        history,
        history.failure_streak + 1,
        "after a failure",
        _failures_sentence(history.failing_node_checks),
        now,
        rules,
    )


def after_job_failure(history: HealthHistory, why: str, now: float, rules: HealthRules) -> HealthHistory:
    """A job failed or hung, and this node was among the root causes."""
    history = _reset_old_streak(history, now, rules)
    failures = (*(at for at in history.job_failure_times if now - at < rules.job_failure_window_s), now)
    if len(failures) < rules.strikes:
        return replace(history, job_failure_times=failures, last_failure_at=now)
    times = f"{len(failures)} times" if len(failures) > 1 else "once"
    cause = f"as root cause {times} within {rules.job_failure_window_s / 60:.0f} minutes"
    return _quarantine(
        replace(history, job_failure_times=()),
        history.failure_streak + 1,
        cause,
        f"last: {shortened(why, _MAX_REASON_CHARS)}",
        now,
        rules,
    )


def _quarantine(
    history: HealthHistory, streak: int, cause: str, details: str, now: float, rules: HealthRules
) -> HealthHistory:
    seconds = rules.streak_cooloff_s(streak)
    which = "the first time" if streak == 1 else f"time {streak} in a row"
    return replace(
        history,
        failure_streak=streak,
        quarantined_until=max(history.quarantined_until, now + seconds),
        last_failure_at=now,
        why=f"quarantined for {seconds:.0f} s {cause} ({which}): {details}",
    )


def after_reboot(history: HealthHistory) -> HealthHistory:
    """The streak stays; a cool-off ends, since a reboot repairs most faults."""
    return replace(
        history, checks=(), fit_since_boot=False, quarantined_until=float("-inf"), job_failure_times=(), why=""
    )


def _check_history(before: CheckHistory | None, result: CheckResult, fit: bool, rules: HealthRules) -> CheckHistory:
    is_failed = result.outcome == "failed"
    recent = (*(before.recent_failures if before is not None else ()), is_failed)[-2 * rules.strikes :]
    confirmed = not fit or result.certain or (before is not None and before.failing) or sum(recent) >= rules.strikes
    return CheckHistory(result.check, recent, is_failed and confirmed, result.why, result.directory)


def _reset_old_streak(history: HealthHistory, now: float, rules: HealthRules) -> HealthHistory:
    return (
        replace(history, failure_streak=0, job_failure_times=())
        if now - history.last_failure_at >= rules.streak_reset_s
        else history
    )


def _failures_sentence(checks: Sequence[CheckHistory]) -> str:
    return shortened("; ".join(f"{check.check}: {check.why}" for check in checks), _MAX_REASON_CHARS)
