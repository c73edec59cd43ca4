"""Pure: readings and what came before -> may this node be given work, and if not, why and for how long.

A check fails once it was bad `strikes` times among its last looks, so that a hiccup costs nothing; before the node has
joined there is nothing to lose, and once is enough. While a check fails the node is unhealthy. From when it is over,
the node stays quarantined for a cool-off that doubles each time, so that one that fails again and again does not take a
job down each time; a long good time forgives. A node that was to blame for `strikes` failures of jobs within an hour is
quarantined likewise, whatever its checks say. Times are seconds on one monotonic clock, given as arguments.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from elasticd_agent.node.health.result import CheckResult

STREAK_RESET_S = 86400.0
"""After so long without trouble the next cool-off is a short one again."""
JOB_FAILURE_WINDOW_S = 3600.0
NOT_CHECKED_YET = "its health has not been looked at yet"
_MAX_REASON_CHARS = 300


@dataclass(frozen=True, slots=True)
class HealthRules:
    strikes: int = 2
    cooloff_s: float = 60.0
    cooloff_max_s: float = 3600.0
    streak_reset_s: float = STREAK_RESET_S
    job_failure_window_s: float = JOB_FAILURE_WINDOW_S

    def cooloff(self, times: int) -> float:
        """How long after trouble for the `times`th time."""
        return min(self.cooloff_s * 2.0 ** min(max(times, 1) - 1, 64), max(self.cooloff_max_s, self.cooloff_s))


@dataclass(frozen=True, slots=True)
class CheckHistory:
    """The last looks at one check, newest last: True is bad. `why` is of the newest one."""

    check: str
    recent_failures: tuple[bool, ...]
    failing: bool
    why: str


@dataclass(frozen=True, slots=True)
class HealthHistory:
    """What a verdict needs to know. `times`: how often in a row there was trouble; `until`: when the cool-off ends.

    `joined`: it has been found fit since this machine was started.
    """

    checks: tuple[CheckHistory, ...] = ()
    fit_since_boot: bool = False
    streak: int = 0
    quarantined_until: float = float("-inf")
    last_failure_at: float = float("-inf")
    why: str = ""
    job_failures: tuple[float, ...] = ()

    @property
    def is_unconfirmed(self) -> bool:
        """The newest look found something that is not believed yet."""
        return any(row.recent_failures[-1] and not row.failing for row in self.checks)

    @property
    def failing(self) -> tuple[CheckHistory, ...]:
        return tuple(row for row in self.checks if row.failing)


@dataclass(frozen=True, slots=True)
class HealthyVerdict:
    why: str = ""


@dataclass(frozen=True, slots=True)
class UnhealthyVerdict:
    """Something is wrong now."""

    why: str


@dataclass(frozen=True, slots=True)
class QuarantinedVerdict:
    """Nothing is wrong now, but it was; `left_s` until the node is taken again if nothing else happens."""

    why: str
    left_s: float


HealthVerdict = HealthyVerdict | UnhealthyVerdict | QuarantinedVerdict


def health_verdict(past: HealthHistory, now: float) -> HealthVerdict:
    failing = past.failing
    if failing:
        return UnhealthyVerdict(_sentence(failing))
    if now < past.quarantined_until:
        return QuarantinedVerdict(past.why, past.quarantined_until - now)
    if not past.fit_since_boot:
        return UnhealthyVerdict(NOT_CHECKED_YET)
    return HealthyVerdict()


def after_checks(past: HealthHistory, readings: Sequence[CheckResult], now: float, rules: HealthRules) -> HealthHistory:
    """After a look. A check that was skipped, or is not there any more, is forgotten."""
    before = {row.check: row for row in past.checks}
    rows = tuple(
        _check_history(before.get(reading.check), reading, past.fit_since_boot, rules)
        for reading in readings
        if reading.outcome != "skipped"
    )
    failing = tuple(row for row in rows if row.failing)
    past = replace(past, checks=rows)
    if not failing:
        over = past.fit_since_boot and any(row.failing for row in before.values())
        until = max(past.quarantined_until, now + rules.cooloff(past.streak)) if over else past.quarantined_until
        return _reset_old_streak(replace(past, fit_since_boot=True, quarantined_until=until), now, rules)
    if not past.fit_since_boot:  # it has done no harm yet: fit as soon as nothing is wrong any more
        return past
    anew = not any(row.failing for row in before.values())
    past = _reset_old_streak(past, now, rules) if anew else past
    times = max(1, past.streak + anew)
    left_s = rules.cooloff(times)
    return replace(
        past,
        streak=times,
        quarantined_until=max(past.quarantined_until, now + left_s),
        last_failure_at=now,
        why=f"this is over, but leaves the node out for {left_s:.0f} s ({_ordinal(times)}): {_sentence(failing)}",
    )


def after_job_failure(past: HealthHistory, why: str, now: float, rules: HealthRules) -> HealthHistory:
    """A job failed or hung, and this node, among others, was the culprit."""
    past = _reset_old_streak(past, now, rules)
    blames = (*(at for at in past.job_failures if now - at < rules.job_failure_window_s), now)
    if len(blames) < rules.strikes:
        return replace(past, job_failures=blames, last_failure_at=now)
    times = past.streak + 1
    left_s = rules.cooloff(times)
    often = (
        f"{f'{len(blames)} times' if len(blames) > 1 else 'once'} within {rules.job_failure_window_s / 60:.0f} minutes"
    )
    return replace(
        past,
        job_failures=(),
        streak=times,
        quarantined_until=max(past.quarantined_until, now + left_s),
        last_failure_at=now,
        why=f"it was to blame {often} and is left out for {left_s:.0f} s ({_ordinal(times)}); last: {_cut(why)}",
    )


def after_reset(past: HealthHistory) -> HealthHistory:
    """A person says so: only what is wrong now counts."""
    return HealthHistory(checks=past.checks, fit_since_boot=past.fit_since_boot)


def after_reboot(past: HealthHistory) -> HealthHistory:
    """What still counts after the machine was started again: how often, but no cool-off, since that heals most."""
    return replace(past, checks=(), fit_since_boot=False, quarantined_until=float("-inf"), job_failures=(), why="")


def _check_history(before: CheckHistory | None, reading: CheckResult, joined: bool, rules: HealthRules) -> CheckHistory:
    is_bad = reading.outcome == "bad"
    looks = (*(before.recent_failures if before is not None else ()), is_bad)[-2 * rules.strikes :]
    failing = is_bad and (
        not joined or reading.certain or (before is not None and before.failing) or sum(looks) >= rules.strikes
    )
    return CheckHistory(reading.check, looks, failing, reading.why)


def _reset_old_streak(past: HealthHistory, now: float, rules: HealthRules) -> HealthHistory:
    return replace(past, streak=0, job_failures=()) if now - past.last_failure_at >= rules.streak_reset_s else past


def _sentence(rows: Sequence[CheckHistory]) -> str:
    return _cut("; ".join(f"{row.check}: {row.why}" for row in rows))


def _cut(text: str) -> str:
    return text if len(text) <= _MAX_REASON_CHARS else text[: _MAX_REASON_CHARS - 1] + "…"


def _ordinal(times: int) -> str:
    return "the first time" if times == 1 else f"time {times} in a row"
