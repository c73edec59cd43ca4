"""The policy on hangs, one table: how long a group may make no progress, by the evidence against it.

Silence is weak evidence, proof is strong. The rules of `verdict` and `blame` name the evidence, a row of PATIENCE says
how long the group gets; `limit_s` adds what this job has shown (its learned deadline, its longest pause, earlier kills
for the same wait). A new kind of evidence is a new row.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from elasticd_agent.model.job import Policy

Evidence = Literal["proven", "gil", "alike", "device", "idle", "overdue", "working", "no_stack"]
"""Beside these: a stopped process (--stopped-after), a person at a debugger, and output that nobody reads.
Those two get all the time there is."""


@dataclass(frozen=True, slots=True)
class Patience:
    """One row. `seconds` None: until the slow ceiling."""

    seconds: float | None
    why: str
    floor: bool = True
    """--hang-floor replaces the seconds."""
    weak: bool = True
    """A healthy wait may look the same: a kill is remembered by what the ranks waited in."""


PATIENCE: Mapping[Evidence, Patience] = {
    "proven": Patience(5.0, "ranks wait for each other, or for one that has left: this never resolves", weak=False),
    "gil": Patience(15.0, "native code keeps the GIL without CPU or I/O: rarely legitimate"),
    "alike": Patience(60.0, "all wait alike: links flap, and a new communicator takes long"),
    "device": Patience(60.0, "a long kernel looks the same", floor=False),
    "idle": Patience(60.0, "a download, a lock or an evaluation looks the same"),
    "overdue": Patience(60.0, "it waits in a collective while other ranks make steps"),
    "working": Patience(None, "it is slow, not hung"),
    "no_stack": Patience(None, "a missing stack is no evidence"),
}

OVERDUE_DEADLINES = 5.0
"""A rank that waits in a collective for this many deadlines is not excused by another rank's progress."""
MOST_KILLS = 2
"""For one wait. After that only the ceiling, and the process group's own timeout, end it."""


@dataclass(frozen=True, slots=True)
class Shown:
    """What this job has shown of itself, in seconds."""

    deadline_s: float
    """The learned deadline of the phases its ranks are in."""
    pause_s: float = 0.0
    """The longest idle pause that it has survived."""
    ceiling_s: float = 1800.0
    """For how long a rank may be slow."""
    kills: int = 0
    """For the wait that its ranks are in now."""


def limit_s(evidence: Evidence, policy: Policy, shown: Shown) -> float:
    """The seconds without progress after which the group is hung on this evidence."""
    row = PATIENCE[evidence]
    if row.seconds is None:
        return max(shown.deadline_s, shown.ceiling_s)
    seconds = row.seconds
    if policy.hang_floor_s is not None and row.floor:
        seconds = policy.hang_floor_s
    elif evidence == "idle":
        seconds = max(seconds, policy.hang_factor * shown.pause_s)
    if evidence == "overdue":
        seconds = max(seconds, OVERDUE_DEADLINES * shown.deadline_s)
    if row.weak:
        seconds = shown.ceiling_s if shown.kills >= MOST_KILLS else min(seconds * 2.0**shown.kills, shown.ceiling_s)
    return max(shown.deadline_s, seconds)
