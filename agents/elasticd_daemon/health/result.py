"""The result of one check, as the policy and `elasticd doctor` use it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from elasticd_agent.model.codec import Record

EVERY_JOBS_DIRECTORY = "/"
"""The directory that every job's own are below."""
CheckOutcome = Literal["passed", "failed", "skipped"]


@dataclass(frozen=True, slots=True)
class GpuUsage(Record):
    """The use of one GPU at the last health check of its node; None: unknown."""

    gpu: int
    utilization_percent: int | None = None
    memory_used_bytes: int | None = None
    memory_total_bytes: int | None = None
    node: str = ""


@dataclass(frozen=True, slots=True)
class CheckResult:
    check: str
    outcome: CheckOutcome
    why: str
    seconds: float = 0.0
    certain: bool = False  #: it reports an event in the past: it counts at once, even if the next check passes
    directory: str = ""
    """A shared or a full directory: its failure concerns the jobs that would use it, and not the node."""


def failed(check: str, why: str, seconds: float = 0.0) -> CheckResult:
    return CheckResult(check, "failed", why, seconds)


def directory_full(check: str, why: str) -> CheckResult:
    """The failure of a full directory where the agent keeps files of every job: users can fill it, so no running job
    is moved.
    """
    return CheckResult(check, "failed", why, directory=EVERY_JOBS_DIRECTORY)


def passed(check: str, why: str, seconds: float = 0.0) -> CheckResult:
    return CheckResult(check, "passed", why, seconds)


def skipped(check: str, why: str, seconds: float = 0.0) -> CheckResult:
    return CheckResult(check, "skipped", why, seconds)
