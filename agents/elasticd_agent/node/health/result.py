"""What one check found: the word that passes from those who look to the verdict and to the table of `elasticd doctor`.

It reads nothing and judges nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Outcome = Literal["good", "bad", "skipped"]


@dataclass(frozen=True, slots=True)
class CheckResult:
    """One check, looked at once. `why`: a sentence for a person, for each outcome.

    `certain`: it reports something that has happened and is over, so it is believed though the next look finds nothing.
    """

    check: str
    outcome: Outcome
    why: str
    seconds: float = 0.0
    certain: bool = False


def failed(check: str, why: str, seconds: float = 0.0) -> CheckResult:
    return CheckResult(check, "bad", why, seconds)


def passed(check: str, why: str, seconds: float = 0.0) -> CheckResult:
    return CheckResult(check, "good", why, seconds)


def skipped(check: str, why: str, seconds: float = 0.0) -> CheckResult:
    return CheckResult(check, "skipped", why, seconds)
