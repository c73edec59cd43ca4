"""The policy on hangs, one table: for how long a group may make no progress, by the evidence against it, and what then.

What a kill may cost decides how sure the verdict must be. The rules of `verdict` and `blame` name the evidence, a row
of LIMIT_RULES says after how long it is reported and what it takes to end the group; `report_and_kill_limits` adds what
this job has shown (its learned deadline, its longest pause, earlier kills for the same wait, what a restart costs). A
new kind of evidence is a new row.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from elasticd_agent.model.job import Policy

HangEvidence = Literal[
    "proven",
    "gil",
    "loading",
    "alike",
    "device",
    "unrecorded",
    "idle",
    "overdue",
    "left",
    "outside",
    "working",
    "no_stack",
]
"""Beside these: a stopped process (--stopped-after) and a zombie."""
KillWhen = Literal["at once", "if cheap", "at ceiling", "never"]
"""When the group is ended on this evidence: when it is reported; the same, but only where a restart costs less than the
wait; when torch would end it, or at --hang-floor; never."""


@dataclass(frozen=True, slots=True)
class LimitRule:
    """One row. `seconds` None: it is not reported before the slow ceiling."""

    report_s: float | None
    kill_when: KillWhen
    why: str
    floor_applies: bool = True  #: --hang-floor replaces the seconds, and allows the kill


LIMIT_RULES: Mapping[HangEvidence, LimitRule] = {
    "proven": LimitRule(5.0, "at once", "ranks wait for each other, or for one that has left: this never resolves"),
    "gil": LimitRule(15.0, "at once", "native code keeps the GIL without CPU or I/O: rarely legitimate"),
    "loading": LimitRule(60.0, "if cheap", "an import, a read or a page fault keeps it: a file server may be away"),
    "alike": LimitRule(60.0, "at once", "all wait alike, and no byte moves: links flap, a new communicator takes long"),
    "device": LimitRule(60.0, "at once", "a long kernel looks the same", floor_applies=False),
    "unrecorded": LimitRule(60.0, "at ceiling", "another thread or program, or an unrecorded group, may end it"),
    "idle": LimitRule(60.0, "if cheap", "a download, a lock or an evaluation looks the same"),
    "overdue": LimitRule(60.0, "at ceiling", "a rank waits in a collective, but others train"),
    "left": LimitRule(60.0, "at ceiling", "others have ended with code 0: an export looks the same"),
    "outside": LimitRule(
        60.0, "never", "it waits for a person, a scheduler, a reader of its output", floor_applies=False
    ),
    "working": LimitRule(None, "at ceiling", "it is slow, not hung", floor_applies=False),
    "no_stack": LimitRule(None, "at ceiling", "a missing stack is no evidence", floor_applies=False),
}

OVERDUE_AFTER_DEADLINES = 5.0
"""A rank that waits in a collective for this many deadlines while others make progress is reported."""


IB_GRACE_S = 30.0
"""InfiniBand sends again for this long less than all ranks may wait alike."""
_IB_RETRIES, _IB_TIMEOUT = 7, 20
"""NCCL's defaults: https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html"""


def retransmission_s(environment: Mapping[str, str]) -> float:
    """The time for which InfiniBand sends again before NCCL fails, where the job has changed it; else 0."""
    timeout, retries = environment.get("NCCL_IB_TIMEOUT", ""), environment.get("NCCL_IB_RETRY_CNT", "")
    if not (timeout.isdecimal() or retries.isdecimal()):
        return 0.0
    exponent = min(int(timeout) if timeout.isdecimal() else _IB_TIMEOUT, 31)
    tries = min(int(retries) if retries.isdecimal() else _IB_RETRIES, _IB_RETRIES) + 1
    return float(4.096e-6 * 2**exponent * tries)


@dataclass(frozen=True, slots=True)
class LimitFacts:
    """Facts that this job has shown of itself and of the wait that its ranks are in; times in seconds."""

    deadline_s: float  #: the learned deadline of the phases its ranks are in
    pause_s: float = 0.0  #: the longest idle pause that it has survived
    ceiling_s: float = 1800.0  #: a rank may be slow for this long
    ends_at_ceiling: bool = True  #: the group is ended then; else it is only reported
    restart_is_cheap: bool = False  #: a restart costs less than this wait has lasted
    kills_for_wait: int = 0  #: kills so far for the wait that its ranks are in now
    retransmission_s: float = 0.0  #: the job's links send again for this long before they fail
    repeats_after_kill: bool = False  #: the last kill changed nothing: its ranks wait there again without a step


@dataclass(frozen=True, slots=True)
class ReportAndKillLimits:
    """Seconds without progress after which the group is reported, and ended."""

    report_s: float
    kill_s: float


def report_and_kill_limits(evidence: HangEvidence, policy: Policy, facts: LimitFacts) -> ReportAndKillLimits:
    """A verdict that repeats is doubted: whatever its evidence was, it is weak from then on."""
    row = LIMIT_RULES[evidence]
    if facts.repeats_after_kill and row.kill_when == "at once":
        row = LIMIT_RULES["idle"]
    if row.report_s is None:
        ceiling_s = max(facts.deadline_s, facts.ceiling_s)
        return ReportAndKillLimits(ceiling_s, ceiling_s if facts.ends_at_ceiling else math.inf)
    seconds, by_floor = row.report_s, policy.hang_floor_s is not None and row.floor_applies
    if policy.hang_floor_s is not None and row.floor_applies:
        seconds = policy.hang_floor_s
    elif row.kill_when == "if cheap":
        seconds = max(seconds, min(policy.hang_factor * facts.pause_s, facts.ceiling_s))
    if facts.retransmission_s and not by_floor and evidence in ("alike", "device"):
        seconds = max(seconds, facts.retransmission_s + IB_GRACE_S)
    if evidence == "overdue":
        seconds = max(seconds, OVERDUE_AFTER_DEADLINES * facts.deadline_s)
    kill_s = seconds = max(facts.deadline_s, seconds)
    if row.kill_when == "never":
        kill_s = math.inf
    elif row.kill_when != "at once":
        soon = by_floor or (row.kill_when == "if cheap" and facts.restart_is_cheap)
        ceiling_s = facts.ceiling_s if soon or facts.ends_at_ceiling else math.inf
        kill_s = max(seconds, min(seconds * 2.0**facts.kills_for_wait, ceiling_s) if soon else ceiling_s)
    return ReportAndKillLimits(seconds, kill_s)
