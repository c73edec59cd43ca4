"""Facts that are missing, wrong or contradict each other never end a job sooner than silence alone does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from elasticd.heartbeat import record as beat
from elasticd_agent.hangs.observer import GroupObserver
from elasticd_agent.hangs.verdict import Hang, judge, reason_to_suspect
from elasticd_agent.model.job import Policy
from elasticd_agent.model.reports import DEFAULT_GROUP_NAME, GroupTail, HangReport, RankReport
from elasticd_agent.system.processes.process_usage import TreeUsage

NEVER_S = 1799.0
"""Until the slow ceiling."""
IDLE_S = 59.0
"""A healthy wait may look the same until then."""


def tail(last: int, pending: int = 0, kind: str = "all_reduce") -> tuple[GroupTail, ...]:
    return (GroupTail(DEFAULT_GROUP_NAME, last, pending, ((last, kind),), "gloo"),)


WAITS = RankReport(
    *(0, 0, "step", 117, 20),
    usual=4,
    alive_s=0.1,
    state="S",
    window_s=3.0,
    unsent=0,
    where="collective",
    function="all_reduce",
    place="train.py main",
    alone=True,
    evidence=True,
    groups=tail(20, 20),
)
BEHIND = replace(WAITS, collectives=19, groups=tail(19))
NO_STACK = {"where": "", "function": "", "place": "", "alone": False, "evidence": False}
OUTSIDE = replace(BEHIND, where="elsewhere", function="x.py:1 f")
CASES: dict[str, tuple[Sequence[RankReport], float]] = {
    "no stacks": ([replace(WAITS, **NO_STACK), replace(BEHIND, **NO_STACK)], NEVER_S),
    "no stack of the rank behind": ([WAITS, replace(BEHIND, **NO_STACK)], IDLE_S),
    "no stacks and no recordings": ([replace(one, **NO_STACK, groups=()) for one in (WAITS, BEHIND)], NEVER_S),
    "no stack of any, and no count": ([replace(WAITS, **NO_STACK, groups=(), collectives=-1)] * 2, NEVER_S),
    "an empty stack": ([WAITS, replace(BEHIND, where="elsewhere", function="", place="")], IDLE_S),
    "a stack of an earlier moment": ([WAITS, replace(OUTSIDE, waiting_s=90.0)], IDLE_S),
    "no recording of the rank behind": ([WAITS, replace(BEHIND, groups=())], IDLE_S),
    "a recording that was done long ago": ([WAITS, replace(BEHIND, groups=tail(3))], IDLE_S),
    "a recording beyond what the others wait for": ([WAITS, replace(WAITS, groups=tail(25))], IDLE_S),
    "a number with two kinds, and nothing unfinished": (
        [replace(WAITS, groups=tail(20)), replace(WAITS, groups=tail(20, 0, "broadcast"))],
        IDLE_S,
    ),
    "recordings of different groups": (
        [WAITS, replace(WAITS, groups=(GroupTail("group 7", 20, 20, ((20, "broadcast"),), "gloo"),))],
        IDLE_S,
    ),
    "a phase that never ends": ([WAITS, replace(OUTSIDE, phase="eval")], IDLE_S),
    "a phase unknown to this version": ([WAITS, replace(OUTSIDE, phase="dreaming")], IDLE_S),
    "a phase of the end, in the middle": ([WAITS, replace(OUTSIDE, phase="exit", alone=False)], IDLE_S),
    "steps that go back": ([WAITS, replace(OUTSIDE, step=-5)], IDLE_S),
    "counts beyond those of all others": ([WAITS, replace(WAITS, collectives=1 << 40)], IDLE_S),
    "a heartbeat thread that was never seen": ([replace(one, alive_s=-1.0) for one in (WAITS, OUTSIDE)], IDLE_S),
    "no state of any process": ([replace(one, state="", window_s=0.0) for one in (WAITS, OUTSIDE)], IDLE_S),
}


def report(ranks: Sequence[RankReport], idle_s: float) -> HangReport:
    aged = (replace(one, rank=number, slot=number, idle_s=idle_s) for number, one in enumerate(ranks))
    return HangReport(1, "a", tuple(aged), deadline_s=5.0, gathered=True)


@pytest.mark.parametrize("name", CASES)
def test_no_verdict_from_bad_facts(name: str) -> None:
    ranks, until_s = CASES[name]
    for idle_s in (0.1, 4.9, 5.1, 20.0, 59.0, 61.0, 600.0, 1799.0):
        verdict = judge([report(ranks, idle_s)], ["a"], Policy(), deadline_passed=True)
        assert idle_s > until_s or not isinstance(verdict, Hang), (idle_s, verdict)


@pytest.mark.parametrize("jump_s", [-1e6, 1e6, -4.0, 4.0], ids=["to 0", "10 d", "-4 s", "4 s"])
def test_clock_of_a_worker_that_jumps(jump_s: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its monotonic and its wall clock, as in a time namespace or a restored machine."""
    now = beat.time.monotonic_ns
    beat.create(tmp_path / "beat")
    writer = beat.HeartbeatWriter(tmp_path / "beat")
    observer = GroupObserver(
        1, [(0, 0)], [tmp_path / "beat"], [], lambda pid: "S", lambda pids, port: {7: TreeUsage(0.0, 0)}
    )
    observer.set_processes([7], 0)
    for look in range(40):
        if look % 4 == 0:
            writer.step(1 + look)
        if look == 20:
            monkeypatch.setattr(beat.time, "monotonic_ns", lambda: max(0, now() + int(jump_s * 1e9)))
            monkeypatch.setattr(beat.time, "time", lambda: 0.0)
        seen = observer.observe(100.0 + look / 4)
        assert 0 <= seen.idle_s <= 1.5
        assert reason_to_suspect(HangReport(1, "a", seen.ranks, deadline_s=5.0), Policy()) is None
    observer.close()
